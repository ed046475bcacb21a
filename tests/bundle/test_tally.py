"""Receipts that are counted, those that are only listed, and those that are refused."""

import base64
import hashlib
import itertools
import json
import tarfile
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capsule.bundle.keys import generate, load_private
from capsule.bundle.receipts import MAX_RECEIPT
from capsule.bundle.tally import Original, read_original, read_receipts
from capsule.bundle.trust import TrustPolicy, load_policy
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.bundle.receipts import (
    ALICE,
    AMD,
    BOB,
    BUNDLE,
    CAROL,
    CLAIM,
    INTEL,
    MALLORY,
    TRUSTED,
    original,
    payload_of,
    receipt,
    signed,
)

# --- counting -------------------------------------------------------------------------------------


def test_signers_and_kinds_of_machine_are_counted(tmp_path):
    paths = [
        receipt(tmp_path, BOB),
        receipt(tmp_path, BOB, machine=AMD),
        receipt(tmp_path, CAROL),
        receipt(tmp_path, CAROL, machine=INTEL.model_copy(update={"system": "ubuntu 24.04"})),
    ]
    found = read_receipts(BUNDLE, [*paths, paths[0]], TRUSTED)
    assert found.summary == "reproduced bitwise by 2 signers on 2 kinds of machine"
    assert found.exit_code() == ExitCode.OK


def test_strangers_and_the_author_are_listed_and_never_counted(tmp_path):
    paths = [receipt(tmp_path, MALLORY), receipt(tmp_path, CAROL), receipt(tmp_path, BOB)]
    found = read_receipts(original(ALICE, CAROL), paths, TRUSTED)
    assert found.summary == "reproduced bitwise by 1 signer on 1 kind of machine"
    assert [(item.trusted, item.own, item.counts) for item in found.receipts] == [
        (False, False, False),
        (True, True, False),
        (True, False, True),
    ]
    alone = read_receipts(original(ALICE, CAROL), paths[:2], TRUSTED)
    assert alone.summary == "no independent receipt by a trusted verifier"
    assert alone.exit_code() == ExitCode.TAMPERED


def test_nothing_counts_while_the_author_is_unknown(tmp_path):
    found = read_receipts(original(MALLORY, authentic=False), [receipt(tmp_path, BOB)], TRUSTED)
    assert [item.standing for item in found.receipts] == ["independence not shown"]
    assert "independence is not shown" in found.summary
    assert found.exit_code() == ExitCode.TAMPERED


def test_whoever_verified_a_bundle_of_his_own_is_its_author(tmp_path):
    path = receipt(tmp_path, BOB, signer=BOB)
    found = read_receipts(original(MALLORY), [path], TRUSTED)
    assert [item.standing for item in found.receipts] == ["the author's"]
    assert found.tallies == {}


def test_a_receipt_on_another_bundle_of_the_same_claims_does_not_count(tmp_path):
    found = read_receipts(BUNDLE, [receipt(tmp_path, BOB, manifest="e" * 64)], TRUSTED)
    assert [item.standing for item in found.receipts] == ["of another bundle"]
    assert found.tallies == {}


def test_returns_alone_do_not_make_the_exit_status_that_of_equal_bits(tmp_path):
    path = receipt(tmp_path, BOB, verdict="reproduced-statistical")
    assert read_receipts(BUNDLE, [path], TRUSTED).exit_code() == ExitCode.DIFFERS
    both = [path, receipt(tmp_path, CAROL)]
    assert read_receipts(BUNDLE, both, TRUSTED).exit_code() == ExitCode.OK


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [
        ("reproduced-content", "full"),
        ("reproduced-segments", "segments:all"),
        ("reproduced-prefix", "prefix:1"),
    ],
)
def test_less_than_equal_bits_of_the_whole_run_does_not_either(tmp_path, verdict, mode):
    path = receipt(tmp_path, BOB, verdict=verdict, mode=mode)
    found = read_receipts(BUNDLE, [path], TRUSTED)
    assert (list(found.tallies), found.exit_code()) == ([verdict], ExitCode.DIFFERS)


@pytest.mark.parametrize(
    "policy",
    [{"image": "embedded"}, {"image": "registry"}, {"image": "supplied-base"}, {"own_code": False}],
)
def test_who_ran_the_code_of_the_author_does_not_count_for_the_lock(tmp_path, policy):
    path = receipt(tmp_path, BOB, policy=policy)
    found = read_receipts(BUNDLE, [path], TRUSTED)
    assert [item.standing for item in found.receipts] == ["by the author's code"]
    assert (found.tallies, found.exit_code()) == ({}, ExitCode.TAMPERED)
    assert "the author's own image" in found.summary
    failed = receipt(tmp_path, CAROL, verdict="not-reproduced", difference="x", policy=policy)
    assert list(read_receipts(BUNDLE, [failed], TRUSTED).tallies) == ["not-reproduced"]


def test_a_time_to_come_is_refused(tmp_path):
    (refusal,) = read_receipts(
        BUNDLE, [receipt(tmp_path, BOB, time="9999-12-31T23:59:59Z")], TRUSTED
    ).refused
    assert refusal.code == "CAP-B175"


def test_a_trust_file_names_verifiers_and_revocation_ends_them(tmp_path):
    trusted = tmp_path / "allowed_signers"
    trusted.write_text(
        f"bob@example.org {BOB.public.openssh()}"
        f'carol@example.org valid-before="20200101" {CAROL.public.openssh()}'
    )
    paths = [receipt(tmp_path, BOB), receipt(tmp_path, CAROL)]
    found = read_receipts(BUNDLE, paths, load_policy(allowed_signers=[trusted]))
    bob, carol = found.receipts
    assert (bob.counts, bob.identity, bob.rejection_reason) == (True, "bob@example.org", None)
    assert not carol.counts
    assert "expired" in carol.rejection_reason
    revoked = tmp_path / "revoked"
    revoked.write_text(BOB.public.fingerprint + "\n")
    policy = load_policy(allowed_signers=[trusted], revoked=[revoked])
    assert read_receipts(BUNDLE, paths, policy).tallies == {}


def test_a_p256_key_vouches_too(tmp_path):
    generate(tmp_path / "dora", algorithm="ecdsa-p256")
    dora = load_private(tmp_path / "dora")
    found = read_receipts(BUNDLE, [receipt(tmp_path, dora)], [dora.public])
    assert found.summary == "reproduced bitwise by 1 signer on 1 kind of machine"


def test_a_contradiction_is_not_outvoted(tmp_path):
    paths = [
        receipt(tmp_path, BOB),
        receipt(tmp_path, CAROL, verdict="not-reproduced", machine=AMD, difference="step 8"),
        receipt(tmp_path, BOB, verdict="reproduced-prefix", mode="prefix:8"),
    ]
    found = read_receipts(BUNDLE, paths, TRUSTED)
    assert found.summary == (
        "reproduced bitwise by 1 signer on 1 kind of machine; "
        "reproduced in a prefix by 1 signer on 1 kind of machine; "
        "not reproduced by 1 signer on 1 kind of machine"
    )
    assert found.exit_code() == ExitCode.DIFFERS


# --- hostile receipts -----------------------------------------------------------------------------


def edited(path, *where, value):
    """Change a field of the statement and sign it again: a lie with a valid signature."""
    statement = json.loads(payload_of(path))
    node = statement
    for step in where[:-1]:
        node = node[step]
    node[where[-1]] = value
    return signed(canonical_json(statement), BOB)


EXTENSION = ("predicate", "https://capsule-rl.dev/receipt/v1")
LIES = {
    "another claim": (("subject", 0, "digest", "sha256"), "e" * 64),
    "another resource": (("predicate", "resourceUri"), "https://capsule-rl.dev/claims/" + "e" * 64),
    "failed and passed": (("predicate", "verificationResult"), "FAILED"),
    "another level": (("predicate", "verifiedLevels"), ["CAPSULE_REPRODUCED_PREFIX"]),
    "an SLSA level": (("predicate", "verifiedLevels"), ["SLSA_BUILD_LEVEL_3"]),
    "two levels": (("predicate", "verifiedLevels"), ["CAPSULE_REPRODUCED_BITWISE"] * 2),
    "another verdict": ((*EXTENSION, "verdict"), "reproduced-prefix"),
    "an undecided verdict": ((*EXTENSION, "verdict"), "inconclusive"),
    "another policy": ((*EXTENSION, "policy", "mode"), "prefix:8"),
    "other training code": ((*EXTENSION, "policy", "own_code"), False),
    "another image": ((*EXTENSION, "policy", "image"), "embedded"),
    "no version": (("predicate", "verifier", "version"), {}),
    "another verifier": (("predicate", "verifier", "id"), "https://example.org"),
    "a time that is none": (("predicate", "timeVerified"), "yesterday"),
    "a date that is none": (("predicate", "timeVerified"), "2026-02-30T12:00:00Z"),
    "a time of many digits": (("predicate", "timeVerified"), "9999-99-99T99:99:99Z"),
    "a time before receipts": (("predicate", "timeVerified"), "1970-01-01T00:00:00Z"),
    "a time in another form": (("predicate", "timeVerified"), "2026-1-1T12:00:00Z"),
    "no signers": ((*EXTENSION, "signers"), []),
    "an unknown field": (("predicate", "note"), "trust me"),
    "another predicate": (("predicateType",), "https://slsa.dev/provenance/v1"),
    "another statement": (("_type",), "https://in-toto.io/Statement/v0.1"),
    "two subjects": (("subject",), [{"name": "claims.json", "digest": {"sha256": CLAIM}}] * 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_signed_lie_is_refused(genuine, lie):
    where, value = LIES[lie]
    genuine.write_bytes(edited(genuine, *where, value=value))
    found = read_receipts(BUNDLE, [genuine], TRUSTED)
    (refusal,) = found.refused
    assert refusal.code == "CAP-B171"
    assert (found.receipts, found.exit_code()) == ((), ExitCode.TAMPERED)


def test_the_twin_of_the_lies_is_accepted(genuine):
    genuine.write_bytes(signed(payload_of(genuine), BOB))
    assert read_receipts(BUNDLE, [genuine], TRUSTED).exit_code() == ExitCode.OK


def test_a_receipt_of_another_run_is_refused(tmp_path):
    other = receipt(tmp_path, BOB, claim="e" * 64)
    (refusal,) = read_receipts(BUNDLE, [other], TRUSTED).refused
    assert refusal.code == "CAP-B172"


def envelopes(path):
    """Yield envelopes that somebody without the key can make from a genuine receipt."""
    document = json.loads(path.read_bytes())
    (signature,) = document["signatures"]
    payload = payload_of(path)
    yield (
        "CAP-B122",
        document | {"payload": base64.b64encode(payload.replace(b"PASSED", b"FAILED")).decode()},
    )
    yield "CAP-B122", document | {"signatures": [signature | {"sig": "A" * 86 + "=="}]}
    yield "CAP-B123", document | {"signatures": [signature | {"keyid": CAROL.public.fingerprint}]}
    yield "CAP-B171", document | {"signatures": [signature, signature]}
    yield "CAP-B171", document | {"signatures": []}
    yield "CAP-B171", document | {"payloadType": "text/plain"}
    yield "CAP-B171", document | {"publicKey": "mine"}
    yield "CAP-B121", document | {"payload": document["payload"] + "!"}


def test_a_receipt_that_was_changed_is_refused(genuine):
    for code, document in list(envelopes(genuine)):
        genuine.write_bytes(canonical_json(document))
        (refusal,) = read_receipts(BUNDLE, [genuine], TRUSTED).refused
        assert refusal.code == code, document


def test_a_signature_under_another_type_is_refused(genuine):
    genuine.write_bytes(
        signed(payload_of(genuine), BOB, "text/plain").replace(
            b"text/plain", b"application/vnd.in-toto+json"
        )
    )
    (refusal,) = read_receipts(BUNDLE, [genuine], TRUSTED).refused
    assert refusal.code == "CAP-B122"


def test_what_is_no_small_file_is_refused(tmp_path, genuine):
    large = tmp_path / "large.receipt.json"
    large.write_bytes(genuine.read_bytes() + b" " * MAX_RECEIPT)
    found = read_receipts(BUNDLE, [large, tmp_path, tmp_path / "none", genuine], TRUSTED)
    assert [refusal.code for refusal in found.refused] == ["CAP-B171", "CAP-B170", "CAP-B170"]
    assert len(found.receipts) == 1
    assert found.exit_code() == ExitCode.TAMPERED


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_changed_byte_is_accepted(genuine, data):
    original = genuine.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    changed = bytes([original[position] ^ data.draw(st.integers(1, 255))])
    path = genuine.with_name("changed.receipt.json")
    path.write_bytes(original[:position] + changed + original[position + 1 :])
    found = read_receipts(BUNDLE, [path], TRUSTED)
    assert found.tallies == {}
    assert found.exit_code() == ExitCode.TAMPERED


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_no_noise_is_a_receipt(tmp_path, noise):
    path = tmp_path / "noise.receipt.json"
    path.write_bytes(noise)
    assert len(read_receipts(BUNDLE, [path], TRUSTED).refused) == 1


# --- the original ---------------------------------------------------------------------------------


@pytest.mark.parametrize("authentic", [True, False])
def test_the_original_has_its_authors_whether_they_are_trusted_or_not(
    bundle, claim_id, alice, mallory, authentic
):
    with tarfile.open(bundle) as archive:
        manifest = archive.extractfile("manifest.json").read()
    policy = TrustPolicy.of([alice.public if authentic else mallory.public])
    assert read_original(bundle, policy) == Original(
        claim_id=claim_id,
        manifest=hashlib.sha256(manifest).hexdigest(),
        authors=frozenset({alice.public.fingerprint}),
        authentic=authentic,
        objections="" if authentic else f"{alice.public.fingerprint} is not a trusted key",
    )


def test_a_bundle_that_was_changed_is_no_original(bundle, alice, tmp_path):
    data = bundle.read_bytes()
    changed = tmp_path / "changed.capsule.tar"
    changed.write_bytes(data.replace(b"returns", b"return5"))
    with pytest.raises(CapsuleError) as caught:
        read_original(changed, TrustPolicy.of([alice.public]))
    assert caught.value.exit_code == ExitCode.TAMPERED


# --- what counts ----------------------------------------------------------------------------------


FACTS = ("trusted", "own", "of_this_bundle", "author_known", "own_code")


def test_a_receipt_counts_only_if_nothing_is_against_it(genuine):
    (honest,) = read_receipts(BUNDLE, [genuine], TRUSTED).receipts
    for facts in itertools.product([False, True], repeat=len(FACTS)):
        found = honest.model_copy(update=dict(zip(FACTS, facts, strict=True)))
        assert found.counts == (facts == (True, False, True, True, True))
        assert (found.standing == "counts") == found.counts


@pytest.mark.parametrize(
    ("facts", "standing"),
    [
        ({"trusted": False, "own": True}, "not trusted"),
        ({"own": True, "of_this_bundle": False}, "the author's"),
        ({"of_this_bundle": False, "author_known": False}, "of another bundle"),
        ({"author_known": False, "own_code": False}, "independence not shown"),
        ({"image": None}, "counts"),
        ({"image": "embedded", "verdict": "not-reproduced"}, "counts"),
    ],
)
def test_the_first_reason_against_a_receipt_is_its_standing(genuine, facts, standing):
    (honest,) = read_receipts(BUNDLE, [genuine], TRUSTED).receipts
    assert honest.model_copy(update=facts).standing == standing


def test_the_threshold_is_a_number_of_distinct_signers(tmp_path):
    one = [receipt(tmp_path, BOB), receipt(tmp_path, BOB, machine=AMD)]
    found = read_receipts(BUNDLE, one, TRUSTED)
    assert found.bitwise == 1
    assert (found.exit_code(1), found.exit_code(2)) == (ExitCode.OK, ExitCode.DIFFERS)
    both = read_receipts(BUNDLE, [*one, receipt(tmp_path, CAROL)], TRUSTED)
    assert (both.bitwise, both.exit_code(2)) == (2, ExitCode.OK)


def test_without_receipts_nothing_counts():
    found = read_receipts(BUNDLE, [], TRUSTED)
    assert (found.bitwise, found.tallies, found.receipts, found.refused) == (0, {}, (), ())
    assert found.exit_code() == ExitCode.TAMPERED
    assert found.claim_id == CLAIM


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(4)))
def test_the_order_of_the_files_changes_no_tally(tmp_path, order):
    paths = [
        receipt(tmp_path, BOB),
        receipt(tmp_path, CAROL, verdict="reproduced-prefix", mode="prefix:8"),
        receipt(tmp_path, BOB, verdict="not-reproduced", difference="x"),
        receipt(tmp_path, MALLORY),
    ]
    found = read_receipts(BUNDLE, [paths[number] for number in order], TRUSTED)
    assert list(found.tallies) == ["reproduced-bitwise", "reproduced-prefix", "not-reproduced"]
    assert {(tally.signers, tally.machines) for tally in found.tallies.values()} == {(1, 1)}
    assert [each.file for each in found.receipts] == [paths[number].name for number in order]


@pytest.mark.parametrize(("seconds", "refused"), [(0, False), (1, True)])
def test_the_clock_of_a_verifier_may_be_a_day_ahead(tmp_path, seconds, refused):
    now = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC) - timedelta(seconds=seconds)
    policy = TrustPolicy(keys=TRUSTED, now=now)
    found = read_receipts(BUNDLE, [receipt(tmp_path, BOB, time="2026-11-21T12:00:00Z")], policy)
    assert [each.code for each in found.refused] == ["CAP-B175"] * refused
    assert len(found.receipts) == (not refused)


@pytest.mark.parametrize(
    ("claim", "time", "value"),
    [
        ("e" * 64, "2026-11-21T12:00:00Z", "e" * 64),
        (CLAIM, "9999-12-31T23:59:59Z", "9999-12-31T23:59:59Z"),
    ],
)
def test_a_refusal_names_the_file_and_the_value(tmp_path, claim, time, value):
    path = receipt(tmp_path, BOB, claim=claim, time=time)
    (refusal,) = read_receipts(BUNDLE, [path], TRUSTED).refused
    assert refusal.file == path.name
    assert value in refusal.message


def test_the_report_is_read_back_as_it_was_written(tmp_path):
    paths = [receipt(tmp_path, BOB), receipt(tmp_path, MALLORY), tmp_path / "none"]
    found = read_receipts(BUNDLE, paths, TRUSTED)
    assert len(found.receipts) == 2
    assert len(found.refused) == 1
    assert type(found).parse(found.document()) == found
    assert json.loads(found.document())["schema"] == "capsule/receipts/v1"
