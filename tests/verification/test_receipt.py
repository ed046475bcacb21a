"""A receipt states what a report says, and is refused where there is nothing to state."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from capsule.bundle.keys import load_public
from capsule.bundle.receipts import Detail
from capsule.bundle.trust import Signer, TrustPolicy
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.evaluation import ToleranceSpec
from capsule.image.cache import Cache
from capsule.machine.kind import MachineKind
from capsule.report.progress import SilentReporter
from capsule.verification import verify as verification
from capsule.verification.equivalence.returns import ReturnStatistics
from capsule.verification.receipt import (
    check_clock,
    check_receipt,
    require_execution,
    sign_report,
    signers_of,
    statement_of,
)
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.verdict import Report
from tests.bundle.conftest import private_key

KEY, RECEIPT = Path("alice"), Path("run.receipt.json")
ALICE, BOB = private_key(1), private_key(2)
MACHINE = MachineKind(
    processor="GenuineIntel 6/85",
    processor_name="Intel",
    instructions=("avx2",),
    gpu=None,
    system="debian 12",
    engine="docker",
)


def report(**changes):
    facts = {
        "bundle": "run.capsule.tar",
        "mode": "full",
        "verdict": "reproduced-bitwise",
        "summary": "equal",
        "claim_id": "c" * 64,
        "manifest": "d" * 64,
        "signer": ALICE.public.fingerprint,
        "expected_grade": "bitwise",
        "machine": MACHINE,
        "image_source": "rebuilt",
        "own_code": True,
    }
    return Report(**facts | changes)


def detail(**changes):
    return statement_of(report(**changes)).predicate.detail


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sign", "receipt", "vary", "code"),
    [(None, RECEIPT, None, "CAP-V081"), (KEY, None, "all", "CAP-V065")],
)
def test_options_that_no_receipt_can_come_of_are_rejected(sign, receipt, vary, code):
    with pytest.raises(CapsuleError, match=code):
        check_receipt(sign, receipt, vary)


@pytest.mark.parametrize(
    "options", [(None, None, None), (KEY, RECEIPT, None), (KEY, None, None), (None, None, "all")]
)
def test_other_options_for_receipts_are_accepted(options):
    check_receipt(*options)


def test_more_signatures_than_a_receipt_can_name_are_rejected_before_anything_runs():
    files = [Path(f"{number}.sshsig") for number in range(19)]
    check_receipt(None, None, None, files)
    check_receipt(KEY, None, None, files[:18])
    with pytest.raises(CapsuleError, match="--sign with 19 signature files") as caught:
        check_receipt(KEY, None, None, files)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B151", ExitCode.USAGE)


def test_a_receipt_names_the_keys_of_as_many_signatures_as_are_accepted():
    keys = [private_key(number).public.fingerprint for number in range(1, 21)]
    kinds = ["dsse", "sshsig", *(["detached"] * 18)]
    signers = tuple(Signer(kind=kind, key=key) for kind, key in zip(kinds, keys, strict=True))
    assert detail(signers=signers).signers == tuple(sorted(keys))


def test_the_rejection_of_an_option_names_it_and_the_remedy():
    with pytest.raises(
        CapsuleError, match=r"--receipt run\.receipt\.json requires --sign"
    ) as caught:
        check_receipt(None, RECEIPT, None)
    assert (caught.value.exit_code, "--sign KEY" in caught.value.fix) == (ExitCode.USAGE, True)
    with pytest.raises(CapsuleError, match="--vary all contradicts --sign") as caught:
        check_receipt(KEY, RECEIPT, "all")
    assert (caught.value.exit_code, "Remove --sign" in caught.value.fix) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("mode", ["integrity", "environment", "fresh-seed"])
def test_a_mode_that_repeats_nothing_of_the_run_has_no_receipt(mode):
    with pytest.raises(CapsuleError, match=f"--sign with --mode {mode}") as caught:
        require_execution(Mode.parse(mode))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V080", ExitCode.USAGE)
    assert "--mode full" in caught.value.fix


@pytest.mark.parametrize("mode", ["full", "prefix:8", "segments:2", "segments:all"])
def test_a_mode_that_executes_the_run_may_have_a_receipt(mode):
    require_execution(Mode.parse(mode))


# --- the clock ------------------------------------------------------------------------------------

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize("finished", ["2026-11-29T11:00:00+00:00", "2026-11-30T12:00:00Z", "now"])
def test_a_clock_that_is_at_most_a_day_behind_may_date_a_receipt(finished):
    check_clock(finished, NOW)


@pytest.mark.parametrize(
    ("finished", "now", "message"),
    [
        ("2026-11-30T12:00:01Z", NOW, "at 2026-11-29T12:00:00Z, which is before the end of"),
        ("now", datetime(1970, 1, 1, tzinfo=UTC), "no receipt has a time before 2026"),
    ],
)
def test_a_clock_that_is_wrong_dates_no_receipt(finished, now, message):
    with pytest.raises(CapsuleError, match=message) as caught:
        check_clock(finished, now)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B176", ExitCode.USAGE)
    assert "Correct this machine's clock" in caught.value.fix


def test_the_clock_is_checked_before_anything_runs(tmp_path, monkeypatch):
    corpus = Path(__file__).parents[1] / "corpus"
    trust = TrustPolicy.of([load_public(corpus / "author.pub")])
    request = VerifyRequest(corpus / "program.capsule.tar", trust, Mode.parse("integrity"))
    before = Mock(wraps=datetime, now=lambda _zone: datetime(2026, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(verification, "datetime", before)
    cache, reporter = Cache(tmp_path), SilentReporter()
    assert verification.verify(request, cache, reporter).verdict == "intact"
    with pytest.raises(CapsuleError, match="CAP-B176"):
        verification.verify(replace(request, signs=True), cache, reporter)


# --- statements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verdict",
    ["tampered", "untrusted", "intact", "environment-matches", "answers-fresh-seed",
     "inconclusive"],
)  # fmt: skip
def test_a_verdict_that_decides_nothing_of_the_run_has_no_statement(verdict, tmp_path):
    undecided = report(verdict=verdict)
    assert statement_of(undecided) is None
    line = sign_report(undecided, BOB, tmp_path / "b", None)
    assert line == f"no receipt: {verdict} decides nothing about the run"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verdict", "mode", "difference"),
    [
        ("reproduced-bitwise", "full", None),
        ("reproduced-prefix", "prefix:8", None),
        ("reproduced-segments", "segments:2", None),
        ("reproduced-content", "full", "why"),
        ("reproduced-statistical", "full", "why"),
        ("not-reproduced", "full", "why"),
    ],
)
def test_a_statement_has_the_verdict_and_the_difference_if_there_is_one(verdict, mode, difference):
    found = detail(verdict=verdict, mode=mode, summary="why")
    assert (found.verdict, found.policy.mode, found.difference) == (verdict, mode, difference)


def test_a_statement_is_about_the_claims_and_the_bundle_and_has_the_time():
    before = datetime.now(UTC) - timedelta(seconds=1)  # times are in whole seconds
    statement = statement_of(report())
    assert [subject.digest.sha256 for subject in statement.subject] == ["c" * 64]
    summary = statement.predicate
    assert summary.input_attestations[0].digest.sha256 == "d" * 64
    time = datetime.strptime(summary.time_verified, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert before <= time <= datetime.now(UTC)


def test_a_statement_has_what_was_accepted_from_the_signer():
    found = detail(image_source="embedded", own_code=False, expected_grade="statistical")
    assert (found.policy.image, found.policy.own_code) == ("embedded", False)
    assert (found.expected, found.machine) == ("statistical", MACHINE)
    assert not detail(own_code=None).policy.own_code  # unknown is not the own code
    assert detail(image_source=None).policy.image is None


def test_a_statement_has_the_tolerance_by_which_returns_were_judged():
    statistics = ReturnStatistics(
        step=8,
        tolerance=ToleranceSpec(relative=0.1),
        metric="iqm",
        alpha=0.05,
        confidence=0.9,
        tasks=(),
        shown="",
        not_shown="",
    )
    found = detail(verdict="reproduced-statistical", statistics=statistics)
    assert found.policy.tolerance == ToleranceSpec(relative=0.1)
    assert detail().policy.tolerance is None


@pytest.mark.parametrize(
    ("summary", "difference"),
    [
        ("x" * 400, "x" * 400),
        ("x" * 401, "x" * 400),
        ("a\ud800b", "a?b"),  # half of a surrogate pair is not in UTF-8
    ],
)
def test_the_difference_is_bounded_and_can_be_encoded(summary, difference):
    statement = statement_of(report(verdict="not-reproduced", summary=summary))
    assert statement.predicate.detail.difference == difference
    statement.document()


def test_every_key_that_signed_is_a_signer_once():
    alice, bob = ALICE.public.fingerprint, BOB.public.fingerprint
    signers = (
        Signer(kind="dsse", key=alice),
        Signer(kind="sshsig", key=bob),
        Signer(kind="keyless", key=None, identity="carol@example.org"),
    )
    assert signers_of(report(signers=signers)) == tuple(sorted((alice, bob)))
    assert signers_of(report(signer=None)) == ()
    assert detail(signers=signers).signers == tuple(sorted((alice, bob)))


# --- files ----------------------------------------------------------------------------------------


def test_a_receipt_is_written_where_the_user_names_it(tmp_path):
    path = tmp_path / "mine.json"
    assert sign_report(report(), BOB, tmp_path / "run.capsule.tar", path) == f"receipt: {path}"
    payload = json.loads(base64.b64decode(json.loads(path.read_bytes())["payload"]))
    written = Detail.model_validate_json(
        json.dumps(payload["predicate"]["https://capsule-rl.dev/receipt/v1"])
    )
    assert written == detail()


def test_a_receipt_lies_beside_its_bundle_unless_the_user_names_a_file(tmp_path):
    line = sign_report(report(), BOB, tmp_path / "run.capsule.tar", None)
    (path,) = tmp_path.iterdir()
    assert line == f"receipt: {path}"
    assert path.name.startswith("run.capsule.tar.")


def test_the_receipt_of_a_signer_of_the_bundle_says_that_it_does_not_count(tmp_path):
    line = sign_report(report(), ALICE, tmp_path / "run.capsule.tar", None)
    assert line.endswith(
        "; it will not count as independent, since the bundle names the same signer"
    )


def test_a_receipt_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapsuleError) as caught:
        sign_report(report(), BOB, tmp_path / "b", tmp_path / "file" / "receipt.json")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B173", ExitCode.USAGE)
