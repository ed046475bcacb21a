"""``capsule sign``: an additional signature in a file beside a bundle."""

import json
import shlex
import shutil
import subprocess

import pytest

from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import generate, load_public
from capsule.bundle.sshsig import NAMESPACE
from tests.cli.conftest import capsule
from tests.hostile import genuine


@pytest.fixture
def dan(tmp_path):
    generate(tmp_path / "dan")
    return tmp_path / "dan"


@pytest.fixture
def claim_id():
    return genuine.manifest_of(genuine.training())["claimId"]


def test_the_sign_command(bundle, dan, tmp_path, claim_id):
    before = bundle.read_bytes()
    done = capsule("sign", bundle, "--key", dan, "--json")
    assert done.exit_code == 0, done.output
    public = load_public(tmp_path / "dan.pub")
    signature = tmp_path / "run.capsule.tar.dan.sshsig"
    assert json.loads(done.stdout) == {
        "schema": "capsule/signed/v1",
        "signature": str(signature),
        "fingerprint": public.fingerprint,
        "claim_id": claim_id,
    }
    done = capsule("sign", bundle, "--key", dan, "-o", tmp_path / "other")
    assert public.fingerprint in done.stdout
    assert f"claim id     {claim_id}\n" in done.stdout
    assert (tmp_path / "other").read_bytes() == signature.read_bytes()
    assert bundle.read_bytes() == before


def test_two_kinds_of_keys_at_once_are_refused(bundle, dan, tmp_path):
    done = capsule("sign", bundle, "--key", dan, "--ssh-key", dan, "--json")
    assert done.exit_code == 2
    document = json.loads(done.stdout)
    assert document["code"] == "CAP-B156"
    assert "--key contradicts --ssh-key" in document["message"]
    assert document["fix"] == "Use either --key or --ssh-key."
    assert not list(tmp_path.glob("*.sshsig"))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_openssh_accepts_the_signature_of_the_manifest(bundle, dan, tmp_path):
    assert capsule("sign", bundle, "--key", dan).exit_code == 0
    with open_bundle(bundle, ()) as opened:
        manifest = opened.manifest.document()
    (tmp_path / "allowed").write_text(f"dan {(tmp_path / 'dan.pub').read_text()}")
    words = ["-Y", "verify", "-f", tmp_path / "allowed", "-I", "dan", "-n", NAMESPACE]
    words += ["-s", tmp_path / "run.capsule.tar.dan.sshsig"]
    done = subprocess.run(["ssh-keygen", *words], input=manifest, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_the_public_half_names_a_key_and_its_signature(bundle, tmp_path):
    """An agent's key has no private file to name; here, the private half is beside it."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "eve"]
    subprocess.run(words, check=True)
    assert capsule("sign", bundle, "--ssh-key", tmp_path / "eve.pub").exit_code == 0
    assert capsule("sign", bundle, "--key", tmp_path / "eve", "-o", tmp_path / "own").exit_code == 0
    made = (tmp_path / "run.capsule.tar.eve.sshsig").read_bytes()
    assert made == (tmp_path / "own").read_bytes()


def test_the_next_command_accepts_the_signature(bundle, dan, tmp_path):
    done = capsule("sign", bundle, "--key", dan)
    signature = tmp_path / "run.capsule.tar.dan.sshsig"
    assert done.stderr == f"next: capsule verify {bundle} --key … --signature {signature}\n"
    (tmp_path / "signer.pub").write_text(genuine.SIGNER.public.openssh())
    words = ["--key", tmp_path / "signer.pub", "--key", tmp_path / "dan.pub", "--threshold", 2]
    words += ["--mode", "integrity", "--report", "/dev/null", "--quiet"]
    assert capsule("verify", bundle, *words).exit_code == 3
    assert capsule("verify", bundle, *words, "--signature", signature).exit_code == 0


def test_an_earlier_signature_is_not_overwritten(bundle, dan, tmp_path):
    (tmp_path / "kept").write_text("earlier")
    done = capsule("sign", bundle, "--key", dan, "-o", tmp_path / "kept")
    assert (done.exit_code, "CAP-B143" in done.stderr) == (2, True)
    assert (tmp_path / "kept").read_text() == "earlier"


def test_a_missing_folder_is_made(bundle, dan, tmp_path):
    path = tmp_path / "new" / "folder" / "signature"
    assert capsule("sign", bundle, "--key", dan, "-o", path).exit_code == 0
    assert path.is_file()


def test_a_changed_bundle_is_not_signed(bundle, dan, tmp_path):
    bundle.write_bytes(bundle.read_bytes()[:-1])
    done = capsule("sign", bundle, "--key", dan)
    assert (done.exit_code, "CAP-B104" in done.stderr) == (3, True)
    assert not list(tmp_path.glob("*.sshsig"))


def test_the_next_command_takes_each_path_as_one_word(bundle, dan, tmp_path):
    (tmp_path / "a b").mkdir()
    moved = bundle.rename(tmp_path / "a b" / bundle.name)
    done = capsule("sign", moved, "--key", dan)
    words = shlex.split(done.stderr.strip().removeprefix("next: "))
    signature = f"{moved}.dan.sshsig"
    assert words == ["capsule", "verify", str(moved), "--key", "…", "--signature", signature]
