"""Receipts: what they say, and who can check them."""

import base64
import json
import re
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from capsule.bundle.receipts import receipts_beside
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.bundle.receipts import BOB, CAROL, CLAIM, MANIFEST, TIME, payload_of, receipt

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
