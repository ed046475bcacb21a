"""Receipts: what they say, who can check them, whom they count, and what is refused."""

import base64
import json
import re
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from capsule.bundle.keys import generate, load_private
from capsule.bundle.receipts import (
    MAX_RECEIPT,
    Detail,
    VerificationPolicy,
    make_statement,
    receipts_beside,
    write_receipt,
)
from capsule.bundle.tally import Original, read_receipts
from capsule.bundle.trust import load_policy
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.machine.kind import MachineKind
from tests.bundle.conftest import private_key

CLAIM, MANIFEST = "c" * 64, "d" * 64
TIME = "2026-11-21T12:00:00Z"
INTEL = MachineKind(
    processor="GenuineIntel 6/85",
    processor_name="Intel(R) Xeon(R)",
    instructions=("avx2", "fma"),
    gpu=None,
    system="debian 12",
    engine="docker",
)
AMD = INTEL.model_copy(update={"processor": "AuthenticAMD 25/1", "processor_name": "AMD EPYC"})
ALICE, BOB, CAROL, MALLORY = (private_key(number) for number in (10, 11, 12, 13))
TRUSTED = (BOB.public, CAROL.public)


def original(*authors, authentic=True):
    """Return Alice's bundle, or one that others signed."""
    names = frozenset(key.public.fingerprint for key in authors or (ALICE,))
    return Original(CLAIM, MANIFEST, names, authentic)


BUNDLE = original()


def detail(
    verdict="reproduced-bitwise",
    machine=INTEL,
    mode="full",
    difference=None,
    signer=ALICE,
    policy=None,
):
    accepted = {"image": "rebuilt", "own_code": True, **(policy or {})}
    return Detail(
        verdict=verdict,
        expected="bitwise",
        policy=VerificationPolicy(mode=mode, tolerance=None, **accepted),
        signers=(signer.public.fingerprint,),
        machine=machine,
        difference=difference,
    )


def receipt(folder, key, claim=CLAIM, manifest=MANIFEST, time=TIME, **facts):
    statement = make_statement(claim, manifest, time, detail(**facts))
    return write_receipt(statement, key, folder / "run.capsule.tar", None)


@pytest.fixture
def genuine(tmp_path):
    return receipt(tmp_path, BOB)


def payload_of(path):
    return base64.b64decode(json.loads(path.read_bytes())["payload"])


def signed(payload, key, kind="application/vnd.in-toto+json"):
    """Sign any bytes under any type: what a careless or hostile holder of the key may do."""
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    encode = lambda data: base64.b64encode(data).decode()  # noqa: E731
    signature = {"keyid": key.public.fingerprint, "sig": encode(key.sign(message))}
    return canonical_json(
        {"payload": encode(payload), "payloadType": kind, "signatures": [signature]}
    )


# --- what it says ---------------------------------------------------------------------------------


def test_a_receipt_is_a_verification_summary_as_slsa_verifier_reads_it(genuine):
    """The fields that verify-vsa checks, each by the rule of slsa.dev/spec/v1.2."""
    statement = json.loads(payload_of(genuine))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/verification_summary/v1"
    assert [subject["digest"] for subject in statement["subject"]] == [{"sha256": CLAIM}]
    summary = statement["predicate"]
    assert summary["verifier"]["id"].startswith("https://")
    assert {type(value) for value in summary["verifier"]["version"].values()} == {str}
    assert summary["resourceUri"] == f"https://capsule-rl.dev/claims/{CLAIM}"
    assert summary["verificationResult"] == "PASSED"
    assert summary["verifiedLevels"] == ["CAPSULE_REPRODUCED_BITWISE"]
    assert not any(level.startswith("SLSA_") for level in summary["verifiedLevels"])
    assert summary["timeVerified"] == TIME
    extension = summary["https://capsule-rl.dev/receipt/v1"]
    assert summary["policy"]["digest"]["sha256"] == sha256_hex(canonical_json(extension["policy"]))
    assert summary["inputAttestations"][0]["digest"]["sha256"] == MANIFEST
    standard = {"verifier", "timeVerified", "resourceUri", "policy", "inputAttestations"}
    standard |= {"verificationResult", "verifiedLevels", "dependencyLevels", "slsaVersion"}
    assert all("://" in name for name in {*summary} - standard)


def test_a_failure_is_a_failure(tmp_path):
    path = receipt(tmp_path, BOB, verdict="not-reproduced", difference="step 8, loss")
    summary = json.loads(payload_of(path))["predicate"]
    assert (summary["verificationResult"], summary["verifiedLevels"]) == ("FAILED", ["FAILED"])


def test_equal_input_gives_equal_bytes_and_one_file(tmp_path):
    first = receipt(tmp_path, BOB)
    data = first.read_bytes()
    assert receipt(tmp_path, BOB) == first
    assert first.read_bytes() == data
    assert first.name == f"run.capsule.tar.{sha256_hex(data)[:8]}.receipt.json"
    other = receipt(tmp_path, CAROL)
    (tmp_path / "other.capsule.tar.00000000.receipt.json").write_bytes(data)
    (tmp_path / "run.capsule.tar").touch()
    assert receipts_beside(tmp_path / "run.capsule.tar") == tuple(sorted((first, other)))


def test_a_receipt_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapsuleError) as caught:
        receipt(tmp_path / "file", BOB)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B173", ExitCode.USAGE)


# --- independent verifiers ------------------------------------------------------------------------


def test_securesystemslib_verifies_a_receipt(genuine):
    envelope = Envelope.from_dict(json.loads(genuine.read_bytes()))
    public = Ed25519PublicKey.from_public_bytes(BOB.public.raw)
    key = SSlibKey.from_crypto(public, keyid=BOB.public.fingerprint)
    assert envelope.verify([key], threshold=1) == {BOB.public.fingerprint: key}
    envelope.payload = envelope.payload.replace(b"PASSED", b"FAILED")
    with pytest.raises(Exception, match="Accepted signatures do not match threshold"):
        envelope.verify([key], threshold=1)


def test_the_documented_recipe_verifies_a_receipt(genuine, tmp_path):
    """With openssl and nothing of ours, as docs/receipts.md prints it."""
    text = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text()
    (script,) = re.findall(r"```sh\n(# check\.sh.*?)```", text, re.DOTALL)
    key = tmp_path / "bob.pub"

    def check(signer=BOB, claim=CLAIM, level="CAPSULE_REPRODUCED_BITWISE"):
        key.write_text(signer.public.openssh())
        command = ["sh", "-c", script, "sh", genuine, key, claim, level]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    found = check()
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("CAPSULE_REPRODUCED_BITWISE\n")
    for lie in ({"signer": CAROL}, {"claim": "e" * 64}, {"level": "CAPSULE_REPRODUCED_PREFIX"}):
        assert check(**lie).returncode != 0
    document = json.loads(genuine.read_bytes())
    failed = base64.b64encode(payload_of(genuine).replace(b"PASSED", b"FAILED")).decode()
    genuine.write_bytes(canonical_json(document | {"payload": failed}))
    assert check().returncode != 0


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


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [
        ("reproduced-bitwise", "integrity"),
        ("reproduced-bitwise", "prefix:8"),
        ("reproduced-prefix", "full"),
        ("reproduced-prefix", "prefix:0"),
        ("reproduced-segments", "fresh-seed"),
        ("not-reproduced", "environment"),
    ],
)
def test_a_mode_that_cannot_give_the_verdict_is_refused(tmp_path, verdict, mode):
    with pytest.raises(ValidationError, match="cannot result in"):
        receipt(tmp_path, BOB, verdict=verdict, mode=mode)


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
