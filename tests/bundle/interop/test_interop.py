"""A bundle is verified by tools that are not ours, and they refuse what was altered."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec

from capsule.bundle import sshsig
from capsule.bundle.allowed_signers import parse_allowed_signers
from capsule.bundle.bundle import pack
from capsule.bundle.keys import PrivateKey, PublicKey, generate, load_private, load_public
from capsule.experiment.errors import CapsuleError

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"


def run(*command: object, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, **options)


def crypto(key: PublicKey):
    return pem.load_ssh_public_key(key.openssh().encode())


def write_pem(key: PublicKey, path: Path) -> Path:
    form = pem.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(crypto(key).public_bytes(pem.Encoding.PEM, form))
    return path


@pytest.fixture(scope="session")
def carol() -> PrivateKey:
    return PrivateKey(ec.derive_private_key(3, ec.SECP256R1()))


@pytest.fixture(scope="session", params=["ed25519", "ecdsa-p256"])
def signer(request, alice, carol) -> PrivateKey:
    """The key that signed the envelope; the other one signs in OpenSSH's way."""
    return alice if request.param == "ed25519" else carol


@pytest.fixture(scope="session")
def bundle(tmp_path_factory, contents, claim_id, signer, alice, carol) -> Path:
    other = carol if signer is alice else alice
    path = tmp_path_factory.mktemp("interop") / "run.capsule.tar"
    return pack(contents, claim_id, signer, path, lambda manifest: sshsig.sign(manifest, other))


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
    signatures = {"signatures/run.sigstore.json", "signatures/manifest.json.sshsig"}
    assert there - listed == {"SHA256SUMS", *signatures}
    flip(unpacked / "REPRODUCING.md", b"How")
    assert "REPRODUCING.md: FAILED" in run(*check, cwd=unpacked).stdout


# The recipe of the documentation, run as it is printed there.


@pytest.fixture
def recipe(tmp_path) -> Path:
    text = (DOCS / "bundle-format.md").read_text()
    (script,) = re.findall(r"```sh\n(# verify\.sh\n.*?)```", text, re.DOTALL)
    path = tmp_path / "verify.sh"
    path.write_text(script)
    return path


def follow(recipe: Path, bundle: Path, key: PublicKey) -> subprocess.CompletedProcess[str]:
    (recipe.parent / "key.pub").write_text(key.openssh())
    scratch = recipe.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return run("sh", recipe, bundle, recipe.parent / "key.pub", cwd=scratch)


def test_the_documented_recipe_accepts_a_bundle(recipe, bundle, signer):
    found = follow(recipe, bundle, signer.public)
    assert found.returncode == 0, found.stderr
    assert signer.public.fingerprint in found.stdout
    assert found.stdout.endswith("VERIFIED\n")


def test_the_documented_recipe_refuses_another_key(recipe, bundle, mallory, alice, carol, signer):
    for other in (mallory, carol if signer is alice else alice):
        found = follow(recipe, bundle, other.public)
        assert found.returncode != 0
        assert "VERIFIED" not in found.stdout


@pytest.mark.parametrize(
    "text", [b"# How", b'"claimId"', b'"payload":"', b'"sig":"', b"  claims.json\n"]
)
def test_the_documented_recipe_refuses_a_flipped_byte(text, recipe, bundle, signer, tmp_path):
    evil = tmp_path / "evil.capsule.tar"
    data = bytearray(bundle.read_bytes())
    data[data.index(text) + len(text) + 3 if b':"' in text else data.index(text)] ^= 1
    evil.write_bytes(data)
    found = follow(recipe, evil, signer.public)
    assert found.returncode != 0
    assert "VERIFIED" not in found.stdout


def test_the_documented_recipe_refuses_an_extra_file(recipe, bundle, signer, tmp_path):
    evil = tmp_path / "evil.capsule.tar"
    shutil.copy(bundle, evil)
    (tmp_path / "extra").write_text("x")
    assert run("tar", "-rf", evil, "extra", cwd=tmp_path).returncode == 0
    found = follow(recipe, evil, signer.public)
    assert found.returncode != 0
    assert "VERIFIED" not in found.stdout


# Keys, both ways


@pytest.mark.parametrize(("algorithm", "name"), [("ed25519", "ED25519"), ("ecdsa-p256", "ECDSA")])
def test_openssh_prints_our_fingerprint(algorithm, name, tmp_path):
    public = generate(tmp_path / "key", comment="alice", algorithm=algorithm)
    found = run("ssh-keygen", "-lf", "key.pub", cwd=tmp_path)
    assert found.stdout == f"256 {public.fingerprint} alice ({name})\n"


@pytest.mark.parametrize("algorithm", ["ed25519", "ecdsa-p256"])
def test_openssl_reads_our_private_key(algorithm, tmp_path):
    public = generate(tmp_path / "key", algorithm=algorithm)
    found = run("openssl", "pkey", "-in", "key", "-pubout", cwd=tmp_path)
    (tmp_path / "spki.pem").write_text(found.stdout)
    assert load_public(tmp_path / "spki.pem") == public
    generate(tmp_path / "locked", passphrase="correct horse")
    arguments = ("openssl", "pkey", "-in", "locked", "-noout", "-passin")
    assert run(*arguments, "pass:correct horse", cwd=tmp_path).returncode == 0
    assert run(*arguments, "pass:wrong", cwd=tmp_path).returncode != 0


OPENSSL = {
    "ed25519": ("-algorithm", "ed25519"),
    "ecdsa": ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"),
}


@pytest.mark.parametrize("kind", OPENSSL)
def test_we_read_the_keys_of_openssl_and_openssh(kind, tmp_path):
    command = ("openssl", "genpkey", *OPENSSL[kind], "-out", "key")
    assert run(*command, cwd=tmp_path).returncode == 0
    run("openssl", "pkey", "-in", "key", "-pubout", "-out", "key.pem", cwd=tmp_path)
    assert load_private(tmp_path / "key").public == load_public(tmp_path / "key.pem")
    command = ("ssh-keygen", "-q", "-t", kind, "-b", "256", "-N", "", "-C", "bob", "-f", "bob")
    assert run(*command, cwd=tmp_path).returncode == 0
    found = run("ssh-keygen", "-lf", "bob.pub", cwd=tmp_path)
    assert load_public(tmp_path / "bob.pub").fingerprint in found.stdout
    assert load_private(tmp_path / "bob").public == load_public(tmp_path / "bob.pub")


def test_an_encrypted_openssh_key_is_left_to_ssh_keygen(tmp_path):
    command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", "bob")
    assert run(*command, cwd=tmp_path).returncode == 0
    for passphrase in (None, "secret"):
        with pytest.raises(CapsuleError, match="CAP-B136") as caught:
            load_private(tmp_path / "bob", passphrase)
        assert "--ssh-key" in caught.value.fix


# The SSH signature, by the recipes of docs/trust.md


SSHSIG = "signatures/manifest.json.sshsig"


def ssh_verify(unpacked: Path, allowed: str, *options: str, identity: str = "alice@lab") -> bool:
    """Follow the recipe of the documentation as it is printed there."""
    text = (DOCS / "trust.md").read_text()
    (script,) = re.findall(r"```sh\n(# verify-ssh\.sh\n.*?)```", text, re.DOTALL)
    (unpacked.parent / "verify.sh").write_text(script)
    (unpacked.parent / "allowed").write_text(allowed)
    found = run("sh", "../verify.sh", "../allowed", identity, SSHSIG, *options, cwd=unpacked)
    assert found.stdout.endswith("VERIFIED\n") == (found.returncode == 0)
    return found.returncode == 0


def test_ssh_keygen_verifies_the_manifest(unpacked, signer, alice, carol, mallory):
    key = (carol if signer is alice else alice).public
    line = f"alice@lab {key.openssh()}"
    assert ssh_verify(unpacked, line)
    (unpacked.parent / "revoked").write_text(key.openssh())
    (unpacked.parent / "others").write_text(mallory.public.openssh())
    for allowed, options, identity in (
        (f"alice@lab {mallory.public.openssh()}", (), "alice@lab"),
        (line, (), "bob@lab"),
        (line, ("-r", "../revoked"), "alice@lab"),
        (f'alice@lab valid-before="20200101" {key.openssh()}', (), "alice@lab"),
        (f'alice@lab namespaces="git" {key.openssh()}', (), "alice@lab"),
    ):
        assert not ssh_verify(unpacked, allowed, *options, identity=identity)
    assert ssh_verify(unpacked, line, "-r", "../others")


@pytest.mark.parametrize("name", ["manifest.json", "SHA256SUMS", "claims.json", SSHSIG])
def test_ssh_keygen_and_sha256sum_refuse_what_was_altered(name, unpacked, signer, alice, carol):
    line = f"alice@lab {(carol if signer is alice else alice).public.openssh()}"
    assert ssh_verify(unpacked, line)
    data = bytearray((unpacked / name).read_bytes())
    data[len(data) // 2] ^= 1
    (unpacked / name).write_bytes(data)
    assert not ssh_verify(unpacked, line)


def test_a_file_that_is_missing_from_the_checksums_is_noticed(unpacked, signer, alice, carol):
    line = f"alice@lab {(carol if signer is alice else alice).public.openssh()}"
    sums = (unpacked / "SHA256SUMS").read_text().splitlines(keepends=True)
    (unpacked / "SHA256SUMS").write_text("".join(sums[:-1]))
    assert not ssh_verify(unpacked, line)


def test_the_documented_trust_file_is_read(alice, carol):
    text = (DOCS / "trust.md").read_text()
    (block,) = re.findall(r"(    # principals .*\n(?:    .+\n)+)", text)
    for key in (alice, carol):
        kind, blob = key.public.openssh().split()
        block = block.replace(f"{kind} AAAA…", f"{kind} {blob}")
    assert [line.key for line in parse_allowed_signers(block)] == [alice.public, carol.public]


# DSSE by securesystemslib


def test_securesystemslib_verifies_the_envelope(unpacked, signer, mallory):
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    def key(public: PublicKey) -> SSlibKey:
        return SSlibKey.from_crypto(crypto(public), keyid=signer.public.fingerprint)

    document = json.loads((unpacked / "signatures/run.sigstore.json").read_bytes())
    envelope = Envelope.from_dict(document["dsseEnvelope"])
    assert len(envelope.verify([key(signer.public)], 1)) == 1
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
def test_sigstore_verifies_the_bundle(sigstore, unpacked, signer, mallory, tmp_path):
    path = unpacked / "signatures" / "run.sigstore.json"
    good = write_pem(signer.public, tmp_path / "alice.pem")
    other = write_pem(mallory.public, tmp_path / "mallory.pem")
    fingerprint = signer.public.fingerprint

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
