"""Verifying a study by its members: their bundles, a sample of them, a challenge."""

import errno
import json
import shutil
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from capsule.bundle.keys import load_public
from capsule.bundle.trust import TrustPolicy
from capsule.host.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache
from capsule.report.progress import open_reporter
from capsule.study import verification
from capsule.study.member_bundles import MemberVerifier
from capsule.study.sampling import VerifiedMember
from capsule.study.verification import CheckedStudy, StudyChallenge, check_study, reservations
from tests.refusals import refusal
from tests.study.corpus import CORPUS, KEY, MEMBERS, refused, results_of
from tests.study.studies import ZERO, make_lock
from tests.study.test_program_scores import PROGRAM, SCORES, make_program_results


def check(results, folder, key=KEY, **options):
    trust = TrustPolicy.of([load_public(key)])
    with open_reporter(quiet=True) as reporter:
        verifier = MemberVerifier(trust, False, "process", Cache(), reporter)
        chosen = {"sample": None, "challenge": None, **options}
        return check_study(results, folder, verifier=verifier, **chosen)


def check_challenge(results, folder):
    return check(results, folder, challenge=1)


def test_members_without_a_bundle_are_left_out(results, folder):
    shutil.rmtree(folder / "deterministic.1")
    checked = check(results, folder)
    assert [member.name for member in checked.bundles] == MEMBERS[1:]
    assert [member.agreement for member in checked.bundles] == ["intact"] * 3
    assert (checked.size, checked.exit_code) == (4, 0)


def test_a_bundle_of_another_signer_is_untrusted(results, folder):
    checked = check(results, folder, CORPUS / "verifier.pub")
    assert {member.agreement for member in checked.bundles} == {"untrusted"}
    assert all("--key" in member.fix for member in checked.bundles)
    assert checked.exit_code == 3


def test_programs_cannot_be_challenged():
    results = results_of("study-program")
    said = refused("CAP-V062", check_challenge, results, CORPUS / "study-program.members")
    assert said.startswith("member ")
    assert "it is the run of a user program" in said
    assert said.endswith("Use --sample, which runs whole members again.")


def test_a_challenge_needs_bundles(results):
    assert "--members" in refused("CAP-Y033", check_challenge, results, None)


# --- what is verified in which way --------------------------------------------------------------


class Verifier:
    """Answers by the mode of a verification, and lists what was verified."""

    engine = cache = None

    def __init__(self, **answers):
        self.answers, self.verified, self.notes = answers, [], []
        self.reporter = SimpleNamespace(note=self.notes.append)

    def verify(self, member, path, mode):
        self.verified.append((member.name, path.parent.name, mode.name, mode.segments))
        return VerifiedMember(member.name, self.answers.get(mode.name, "intact"), mode.name)


def test_nothing_is_verified_that_was_not_asked_for(results):
    verifier = Verifier()
    checked = check_study(results, None, None, None, verifier)
    assert verifier.verified == []
    assert checked == CheckedStudy(4, None, (), None)
    assert checked.exit_code == ExitCode.OK


def test_bundles_are_checked_and_the_members_of_a_sample_are_executed_with_them(results, folder):
    verifier = Verifier(full="reproduced-bitwise")
    checked = check_study(results, folder, 4, None, verifier)
    assert verifier.verified == [
        *((name, name, "integrity", None) for name in MEMBERS),
        *((name, name, "full", None) for name in MEMBERS),
    ]
    assert [each.agreement for each in checked.sample] == ["reproduced-bitwise"] * 4
    assert checked.challenge is None


def test_a_member_of_a_sample_without_a_bundle_is_run_from_its_lock(results, folder, monkeypatch):
    shutil.rmtree(folder / "exploration.2")
    locks = {}

    def rerun(member, lock, *_surroundings):
        name = member.identity.name
        locks[name] = lock.digest()
        return VerifiedMember(name, "not-reproduced", "run again")

    monkeypatch.setattr(verification, "rerun", rerun)
    checked = check_study(results, folder, 4, None, Verifier(full="reproduced-bitwise"))
    assert locks == {"exploration.2": results.members[3].claims.lock}
    assert [each.agreement for each in checked.sample][3] == "not-reproduced"
    assert checked.exit_code == ExitCode.DIFFERS


@pytest.mark.parametrize(
    "error",
    [
        CapsuleError("CAP-E001", "no engine answers\nof two", fix="Start Docker or Podman."),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
    ],
)
def test_what_this_machine_lacks_decides_nothing_and_stops_no_sample(results, monkeypatch, error):
    def rerun(member, *_surroundings):
        if member.identity.name == MEMBERS[0]:
            raise error
        return VerifiedMember(member.identity.name, "reproduced-bitwise", "")

    monkeypatch.setattr(verification, "rerun", rerun)
    verifier = Verifier()
    checked = check_study(results, None, 4, None, verifier)
    undecided, *others = checked.sample
    assert verifier.notes[:2] == [
        f"{MEMBERS[0]}: inconclusive",
        f"{MEMBERS[1]}: reproduced-bitwise",
    ]
    assert (undecided.agreement, checked.exit_code) == ("inconclusive", ExitCode.INCONCLUSIVE)
    known = ("Start Docker or Podman.", "Free disk space, or set TMPDIR", "Free memory")
    assert undecided.fix.startswith(known)
    assert [each.agreement for each in others] == ["reproduced-bitwise"] * 3


@pytest.mark.parametrize(("raised", "code"), [("CAP-X005", "CAP-X005"), ("CAP-E012", "CAP-V007")])
def test_a_wrong_or_interrupted_command_ends_a_sample(results, monkeypatch, raised, code):
    error = Mock(side_effect=CapsuleError(raised, "", fix=""))
    monkeypatch.setattr(verification, "rerun", error)
    refusal(code, check_study, results, None, 4, None, Verifier())
    assert error.call_count == 1


@pytest.mark.parametrize(("given", "undecidable"), [(None, 2), ("exploration.2", 1)])
def test_members_that_only_their_own_bundles_decide_are_counted(
    results, folder, monkeypatch, given, undecidable
):
    recorded = [
        replace(member, claims=member.claims.model_copy(update={"schedule": "0" * 64}))
        if member.identity.name.startswith("exploration")
        else member
        for member in results.members
    ]
    found = {} if given is None else {given: folder / given / "x.capsule.tar"}
    monkeypatch.setattr(verification, "find_bundles", lambda *_: found)
    checked = check_study(replace(results, members=tuple(recorded)), folder, None, None, Verifier())
    assert (checked.undecidable, checked.document()["undecidable"]) == (undecidable,) * 2
    whole = check_study(results, None, None, None, Verifier())
    assert whole.undecidable == 0


@pytest.mark.parametrize("agreement", ["reproduced-content", "reproduced-statistical"])
def test_a_member_without_equal_bits_has_the_status_that_verify_gives_it(agreement):
    sample = (VerifiedMember("a.1", agreement, ""), VerifiedMember("a.2", "reproduced-bitwise", ""))
    assert CheckedStudy(2, None, sample, None).exit_code == ExitCode.DIFFERS


def test_as_many_segments_are_executed_as_are_asked_for(results, folder):
    verifier = Verifier(segments="reproduced-segments")
    checked = check_study(results, folder, None, 5, verifier)
    challenge = checked.challenge
    assert challenge.of == 8  # two in each of four members
    assert sum(challenge.chosen.values()) == 5
    executed = {name: number for name, _, mode, number in verifier.verified if mode == "segments"}
    assert executed == challenge.chosen
    assert [each.name for each in challenge.members] == list(challenge.chosen)


@pytest.mark.parametrize(
    ("sample", "challenge", "code", "limit"), [(5, None, "CAP-Y019", "4"), (4, 9, "CAP-Y032", "8")]
)
def test_too_large_a_drawing_is_refused_before_anything_is_verified(
    results, folder, sample, challenge, code, limit
):
    verifier = Verifier()
    with pytest.raises(CapsuleError) as caught:
        check_study(results, folder, sample, challenge, verifier)
    assert caught.value.code == code
    assert caught.value.fix == f"Give a number from 1 to {limit}."
    assert str(challenge or sample) in caught.value.message
    assert verifier.verified == []


# --- the result ---------------------------------------------------------------------------------


def members(*agreements):
    return tuple(
        VerifiedMember(f"m.{number}", agreement, "a reason")
        for number, agreement in enumerate(agreements)
    )


def challenged(*agreements, of=8):
    found = members(*agreements)
    return StudyChallenge(found, {each.name: 1 + n for n, each in enumerate(found)}, of)


@pytest.mark.parametrize(
    ("bundles", "sample", "challenge", "expected"),
    [
        (["intact"], ["reproduced-bitwise"], ["reproduced-segments"], ExitCode.OK),
        (["intact"], ["inconclusive"], ["reproduced-segments"], ExitCode.INCONCLUSIVE),
        (["intact"], ["inconclusive"], ["not-reproduced"], ExitCode.DIFFERS),
        (["untrusted"], ["not-reproduced"], ["inconclusive"], ExitCode.TAMPERED),
        (["intact"], ["not-reproduced"], ["tampered"], ExitCode.TAMPERED),
        ([], [], [], ExitCode.OK),
    ],
)
def test_the_status_is_that_of_the_gravest_finding(bundles, sample, challenge, expected):
    checked = CheckedStudy(4, members(*bundles), members(*sample), challenged(*challenge))
    assert checked.exit_code == expected


def missed(total, forged, drawn):
    """Return the probability that a drawing misses all that was forged, one draw at a time."""
    probability = Fraction(1)
    for draw in range(drawn):
        probability *= Fraction(max(0, total - forged - draw), total - draw)
    return probability


def chances(total, drawn, *forged):
    return [
        {"forged": number, "probability": pytest.approx(float(1 - missed(total, number, drawn)))}
        for number in forged
    ]


def test_the_document_has_the_members_and_the_chances_to_notice_what_was_forged():
    sample = members("reproduced-bitwise", "not-reproduced")
    checked = CheckedStudy(40, members("intact"), sample, challenged("reproduced-segments", of=20))
    document = json.loads(json.dumps(checked.document()))
    assert document["members"] == 40
    assert document["bundles"] == [
        {"name": "m.0", "agreement": "intact", "reason": "a reason", "fix": None}
    ]
    assert [each["agreement"] for each in document["sample"]] == [
        "reproduced-bitwise",
        "not-reproduced",
    ]
    # 5, 10, 20 and 50 per cent of 40 members, and of 20 segments.
    assert document["chance_to_notice"] == chances(40, 2, 2, 4, 8, 20)
    assert document["challenge"]["of"] == 20
    assert document["challenge"]["chance_to_notice"] == chances(20, 1, 1, 2, 4, 10)
    (member,) = document["challenge"]["members"]
    assert (member["name"], member["segments"]) == ("m.0", 1)


def test_what_was_not_decided_raises_no_chance():
    sample = members("reproduced-bitwise", "inconclusive")
    document = CheckedStudy(4, None, sample, challenged("inconclusive")).document()
    # At least one member is forged, and equal numbers are listed once.
    assert document["chance_to_notice"] == chances(4, 1, 1, 2)
    assert document["challenge"]["chance_to_notice"] == []
    assert document["bundles"] is None


def test_segments_of_decided_members_count_towards_the_chance():
    document = CheckedStudy(4, None, (), challenged("reproduced-segments", "intact")).document()
    assert document["challenge"]["chance_to_notice"] == chances(8, 1 + 2, 1, 2, 4)
    assert document["chance_to_notice"] == []


def test_a_relaxation_of_the_lock_is_named_although_no_member_claims_it():
    base = PROGRAM | {"entropy": {"mode": "recorded", "on_exhaustion": "virtual"}}
    results = make_program_results(make_lock({"a": {"runs": 3}}, base=base, scores=SCORES))
    first, *others = results.members
    first = replace(first, claims=first.claims.model_copy(update={"entropy_profile": ZERO}))
    assert reservations(replace(results, members=(first, *others))) == {
        "relaxations": ["engine=process", "entropy.on_exhaustion=virtual"],
        "records": ["the system's randomness"],
        "source_trees": [ZERO],
    }


def test_without_a_challenge_the_document_has_none():
    assert CheckedStudy(4, None, (), None).document()["challenge"] is None
