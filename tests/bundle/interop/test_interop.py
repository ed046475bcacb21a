"""A bundle is verified by tools that are not ours, and they refuse what was altered."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from capsule.bundle.keys import PublicKey, generate, load_private, load_public

HERE = Path(__file__).parent
FORMAT = HERE.parents[2] / "docs" / "bundle-format.md"


def run(*command: object, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, **options)


def write_pem(key: PublicKey, path: Path) -> Path:
    public = Ed25519PublicKey.from_public_bytes(key.raw)
    form = pem.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(public.public_bytes(pem.Encoding.PEM, form))
    return path


@pytest.fixture
def unpacked(bundle, tmp_path) -> Path:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    assert run("tar", "-xf", bundle, cwd=folder).returncode == 0
    return folder


def flip(path: Path, text: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(text)] ^= 1
    path.write_bytes(data)


def test_plain_tar_and_sha256sum(unpacked):
    check = ("sha256sum", "--strict", "-c", "SHA256SUMS")
    found = run(*check, cwd=unpacked)
    assert found.returncode == 0
    listed = {line.removesuffix(": OK") for line in found.stdout.splitlines()}
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert there - listed == {"SHA256SUMS", "signatures/run.sigstore.json"}
    flip(unpacked / "REPRODUCING.md", b"How")
    assert "REPRODUCING.md: FAILED" in run(*check, cwd=unpacked).stdout


# The recipe of the documentation, run as it is printed there.


@pytest.fixture
def recipe(tmp_path) -> Path:
    (script,) = re.findall(r"```sh\n(# verify\.sh\n.*?)```", FORMAT.read_text(), re.DOTALL)
    path = tmp_path / "verify.sh"
    path.write_text(script)
    return path


def follow(recipe: Path, bundle: Path, key: PublicKey) -> subprocess.CompletedProcess[str]:
    (recipe.parent / "key.pub").write_text(key.openssh())
    scratch = recipe.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return run("sh", recipe, bundle, recipe.parent / "key.pub", cwd=scratch)


def test_the_documented_recipe_accepts_a_bundle(recipe, bundle, alice):
    found = follow(recipe, bundle, alice.public)
    assert found.returncode == 0, found.stderr
    assert alice.public.fingerprint in found.stdout
    assert found.stdout.endswith("VERIFIED\n")


def test_the_documented_recipe_refuses_another_key(recipe, bundle, mallory):
    found = follow(recipe, bundle, mallory.public)
    assert found.returncode != 0
    assert "VERIFIED" not in found.stdout


@pytest.mark.parametrize(
    "text", [b"# How", b'"claimId"', b'"payload":"', b'"sig":"', b"  claims.json\n"]
)
def test_the_documented_recipe_refuses_a_flipped_byte(text, recipe, bundle, alice, tmp_path):
    evil = tmp_path / "evil.capsule.tar"
    data = bytearray(bundle.read_bytes())
    data[data.index(text) + len(text) + 3 if b':"' in text else data.index(text)] ^= 1
    evil.write_bytes(data)
    found = follow(recipe, evil, alice.public)
    assert found.returncode != 0
    assert "VERIFIED" not in found.stdout


def test_the_documented_recipe_refuses_an_extra_file(recipe, bundle, alice, tmp_path):
    evil = tmp_path / "evil.capsule.tar"
    shutil.copy(bundle, evil)
    (tmp_path / "extra").write_text("x")
    assert run("tar", "-rf", evil, "extra", cwd=tmp_path).returncode == 0
    found = follow(recipe, evil, alice.public)
    assert found.returncode != 0
    assert "VERIFIED" not in found.stdout


# Keys, both ways


def test_openssh_prints_our_fingerprint(tmp_path):
    public = generate(tmp_path / "key", comment="alice")
    found = run("ssh-keygen", "-lf", "key.pub", cwd=tmp_path)
    assert found.stdout == f"256 {public.fingerprint} alice (ED25519)\n"


def test_openssl_reads_our_private_key(tmp_path):
    public = generate(tmp_path / "key")
    found = run("openssl", "pkey", "-in", "key", "-pubout", cwd=tmp_path)
    (tmp_path / "spki.pem").write_text(found.stdout)
    assert load_public(tmp_path / "spki.pem") == public
    generate(tmp_path / "locked", passphrase="correct horse")
    arguments = ("openssl", "pkey", "-in", "locked", "-noout", "-passin")
    assert run(*arguments, "pass:correct horse", cwd=tmp_path).returncode == 0
    assert run(*arguments, "pass:wrong", cwd=tmp_path).returncode != 0


def test_we_read_the_keys_of_openssl_and_openssh(tmp_path):
    command = ("openssl", "genpkey", "-algorithm", "ed25519", "-out", "key")
    assert run(*command, cwd=tmp_path).returncode == 0
    run("openssl", "pkey", "-in", "key", "-pubout", "-out", "key.pem", cwd=tmp_path)
    assert load_private(tmp_path / "key").public == load_public(tmp_path / "key.pem")
    command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bob", "-f", "bob")
    assert run(*command, cwd=tmp_path).returncode == 0
    found = run("ssh-keygen", "-lf", "bob.pub", cwd=tmp_path)
    assert load_public(tmp_path / "bob.pub").fingerprint in found.stdout


# DSSE by securesystemslib


def test_securesystemslib_verifies_the_envelope(unpacked, alice, mallory):
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    def key(public: PublicKey) -> SSlibKey:
        crypto = Ed25519PublicKey.from_public_bytes(public.raw)
        return SSlibKey.from_crypto(crypto, keyid=alice.public.fingerprint)

    document = json.loads((unpacked / "signatures/run.sigstore.json").read_bytes())
    envelope = Envelope.from_dict(document["dsseEnvelope"])
    assert len(envelope.verify([key(alice.public)], 1)) == 1
    with pytest.raises(VerificationError):
        envelope.verify([key(mallory.public)], 1)


# The Sigstore project's own libraries


@pytest.fixture(scope="session")
def sigstore(tmp_path_factory) -> Path:
    """Install the locked verifier; without npm or a registry this fails, it is never skipped."""
    folder = tmp_path_factory.mktemp("sigstore")
    for name in ("package.json", "package-lock.json", "verify.mjs"):
        shutil.copy(HERE / name, folder)
    options = ("--ignore-scripts", "--no-audit", "--no-fund")
    found = run("npm", "ci", *options, cwd=folder)
    assert found.returncode == 0, found.stderr
    return folder


@pytest.mark.network
def test_sigstore_verifies_the_bundle(sigstore, unpacked, alice, mallory, tmp_path):
    path = unpacked / "signatures" / "run.sigstore.json"
    good = write_pem(alice.public, tmp_path / "alice.pem")
    other = write_pem(mallory.public, tmp_path / "mallory.pem")
    fingerprint = alice.public.fingerprint

    found = run("node", "verify.mjs", path, good, fingerprint, cwd=sigstore)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "https://capsule-rl.dev/run/v1\n"

    found = run("node", "verify.mjs", path, other, fingerprint, cwd=sigstore)
    assert found.returncode != 0
    assert "signature verification failed" in found.stderr

    document = json.loads(path.read_bytes())
    payload = base64.b64decode(document["dsseEnvelope"]["payload"])
    evil = base64.b64encode(payload.replace(b"run/v1", b"run/v2")).decode()
    document["dsseEnvelope"]["payload"] = evil
    path.write_text(json.dumps(document))
    found = run("node", "verify.mjs", path, good, fingerprint, cwd=sigstore)
    assert found.returncode != 0
    assert "signature verification failed" in found.stderr


def test_the_lock_of_the_verifier_names_no_host():
    text = (HERE / "package-lock.json").read_text()
    assert "resolved" not in text
    assert "://" not in text
    packages = {name: fact for name, fact in json.loads(text)["packages"].items() if name}
    assert all(fact["integrity"].startswith("sha512-") for fact in packages.values())
