"""SSH signatures: strict, and the ones that ssh-keygen makes and verifies."""

import base64
import hashlib
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle import sshsig
from capsule.bundle.algorithms import P256_ORDER
from capsule.bundle.keys import PrivateKey, load_private, parse_openssh
from capsule.bundle.sshsig import NAMESPACE, PROBE
from capsule.experiment.errors import CapsuleError, ExitCode

VECTORS = Path(__file__).parent / "vectors" / "openssh"
MESSAGE = b'{"schema":"capsule/bundle/v1"}'


def ssh_keygen(*arguments, **options):
    return subprocess.run(["ssh-keygen", *map(str, arguments)], capture_output=True, **options)


@pytest.fixture(scope="module")
def ssh_keys(tmp_path_factory) -> dict[str, Path]:
    """Keys that ssh-keygen made, by type."""
    folder = tmp_path_factory.mktemp("keys")
    sizes = {"ed25519": (), "ecdsa": ("-b", "256"), "rsa": ("-b", "2048")}
    for kind, size in sizes.items():
        made = ssh_keygen("-q", "-t", kind, *size, "-N", "", "-C", kind, "-f", folder / kind)
        assert made.returncode == 0
    return {kind: folder / kind for kind in sizes}


@pytest.fixture(scope="module")
def p256() -> PrivateKey:
    return PrivateKey(ec.derive_private_key(7, ec.SECP256R1()))


def refused(data: bytes, code: str, namespace: str = NAMESPACE, message: bytes = MESSAGE) -> str:
    with pytest.raises(CapsuleError) as caught:
        sshsig.verify(data, message, namespace)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.TAMPERED)
    assert caught.value.message.isprintable()
    return caught.value.message


# Both ways with ssh-keygen


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_what_ssh_keygen_signs_we_verify(kind, ssh_keys):
    signature = sshsig.sign_by_ssh_keygen(MESSAGE, ssh_keys[kind])
    public = parse_openssh(ssh_keys[kind].with_suffix(".pub").read_text())
    assert sshsig.verify(signature, MESSAGE) == public
    refused(signature, "CAP-B153", message=MESSAGE + b" ")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_what_we_sign_ssh_keygen_verifies(kind, ssh_keys, tmp_path):
    key = load_private(ssh_keys[kind])
    (tmp_path / "s").write_bytes(sshsig.sign(MESSAGE, key))
    check = ("-Y", "check-novalidate", "-n", NAMESPACE, "-s", tmp_path / "s")
    found = ssh_keygen(*check, input=MESSAGE)
    assert key.public.fingerprint.encode() in found.stdout
    assert found.returncode == 0
    assert ssh_keygen(*check, input=MESSAGE + b" ").returncode != 0


def test_our_ed25519_signature_is_ssh_keygens_byte_for_byte(ssh_keys):
    ours = sshsig.sign(MESSAGE, load_private(ssh_keys["ed25519"]))
    assert ours == sshsig.sign_by_ssh_keygen(MESSAGE, ssh_keys["ed25519"])


def test_a_key_that_only_an_agent_holds_signs(tmp_path, monkeypatch):
    assert ssh_keygen("-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "k").returncode == 0
    socket = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.PIPE) as agent:
        agent.stdout.readline()  # it says where it listens once it does
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        try:
            subprocess.run(["ssh-add", "-q", tmp_path / "k"], check=True)
            (tmp_path / "k").unlink()
            signature = sshsig.sign_by_ssh_keygen(MESSAGE, tmp_path / "k.pub")
        finally:
            agent.terminate()
    assert sshsig.verify(signature, MESSAGE) == parse_openssh((tmp_path / "k.pub").read_text())


def test_ssh_keygen_hashes_with_sha256_when_told_to(ssh_keys):
    command = ("-q", "-Y", "sign", "-n", NAMESPACE, "-O", "hashalg=sha256", "-f", ssh_keys["ecdsa"])
    found = ssh_keygen(*command, input=MESSAGE)
    assert sshsig.verify(found.stdout, MESSAGE).algorithm.name == "ecdsa-p256"


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "ed25519_sk", "ecdsa_sk"])
def test_openssh_vectors(kind):
    message = (VECTORS / "signed-data").read_bytes()
    namespace = (VECTORS / "namespace").read_text()
    signature = (VECTORS / f"{kind}.sig").read_bytes()
    public = parse_openssh((VECTORS / f"{kind}.pub").read_text())
    assert sshsig.verify(signature, message, namespace) == public
    refused(signature, "CAP-B153", namespace, message[:-1])
    assert "not for" in refused(signature, "CAP-B152", NAMESPACE, message)


def test_keys_of_other_types_are_named_and_refused():
    message = (VECTORS / "signed-data").read_bytes()
    said = refused((VECTORS / "rsa.sig").read_bytes(), "CAP-B152", "unittest", message)
    assert "ssh-rsa" in said


@pytest.mark.parametrize("kind", ["ed25519_sk", "ecdsa_sk"])
def test_every_byte_of_a_tokens_signature_counts(kind):
    message = (VECTORS / "signed-data").read_bytes()
    blob = sshsig._dearmor((VECTORS / f"{kind}.sig").read_bytes())
    sshsig.verify(armored(blob), message, "unittest")
    for position in range(len(blob)):
        evil = blob[:position] + bytes([blob[position] ^ 1]) + blob[position + 1 :]
        with pytest.raises(CapsuleError, match=r"CAP-B15[23]"):
            sshsig.verify(armored(evil), message, "unittest")


def test_a_token_signs_in_openssh_s_way_only():
    public = parse_openssh((VECTORS / "ed25519_sk.pub").read_text())
    assert public.application == b"ssh:"
    found = ssh_keygen("-lf", VECTORS / "ed25519_sk.pub")
    assert public.fingerprint.encode() in found.stdout
    assert not public.verify(bytes(64), MESSAGE)


def test_a_key_that_bundles_cannot_carry_is_refused_when_signing(ssh_keys):
    with pytest.raises(CapsuleError) as caught:
        sshsig.sign_by_ssh_keygen(MESSAGE, ssh_keys["rsa"])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B156", ExitCode.USAGE)
    assert "ssh-rsa" in caught.value.message


def test_a_key_that_is_not_there_and_no_ssh_keygen(tmp_path, monkeypatch):
    with pytest.raises(CapsuleError, match="CAP-B156"):
        sshsig.sign_by_ssh_keygen(MESSAGE, tmp_path / "missing")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapsuleError, match="is not installed"):
        sshsig.sign_by_ssh_keygen(MESSAGE, tmp_path / "missing")


def test_a_signature_of_the_probe_counts_nowhere(alice):
    refused(sshsig.sign(MESSAGE, alice, PROBE), "CAP-B152")


# What is refused (case 12)


def string(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def mpint(number: int) -> bytes:
    return string(number.to_bytes(number.bit_length() // 8 + 1))


def armored(blob: bytes, width: int = 70) -> bytes:
    text = base64.b64encode(blob).decode()
    lines = [text[start : start + width] for start in range(0, len(text), width)]
    begin, end = (f"-----{word} SSH SIGNATURE-----" for word in ("BEGIN", "END"))
    return "\n".join([begin, *lines, end, ""]).encode()


def made(signer: PrivateKey, **changes) -> bytes:
    """Make a signature by hand, right but for the changes; every other field follows them."""
    field = {
        "magic": b"SSHSIG",
        "version": (1).to_bytes(4),
        "key": signer.public.blob,
        "namespace": NAMESPACE.encode(),
        "reserved": b"",
        "hash": b"sha512",
        "kind": signer.public.algorithm.key_type.encode(),
        "after": b"",
        "width": 70,
    } | changes
    digest = hashlib.new(field["hash"].decode(), MESSAGE).digest()
    parts = (field["namespace"], field["reserved"], field["hash"], digest)
    value = field.get("value", signer.sign(b"SSHSIG" + b"".join(map(string, parts))))
    signature = string(field["kind"]) + string(value)
    head = field["magic"] + field["version"] + string(field["key"])
    body = b"".join(string(field[name]) for name in ("namespace", "reserved", "hash"))
    return armored(head + body + string(signature) + field["after"], field["width"])


def test_the_forging_helper_makes_what_sign_makes(alice):
    assert made(alice) == sshsig.sign(MESSAGE, alice)
    assert sshsig.verify(made(alice, hash=b"sha256"), MESSAGE) == alice.public


FLAWS = {
    "version 2": {"version": (2).to_bytes(4)},
    "version 0": {"version": (0).to_bytes(4)},
    "other magic": {"magic": b"SSHSIH"},
    "namespace of git": {"namespace": b"git"},
    "no namespace": {"namespace": b""},
    "namespace with a NUL": {"namespace": NAMESPACE.encode() + b"\0"},
    "reserved field": {"reserved": b"x"},
    "sha1": {"hash": b"sha1"},
    "sha384": {"hash": b"sha384"},
    "signature of another type": {"kind": b"ecdsa-sha2-nistp256"},
    "unknown signature type": {"kind": b"ssh-ed25519-cert-v01@openssh.com"},
    "identity as key": {"key": b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes([1]) + bytes(31)},
    "no key": {"key": b""},
    "more after the end": {"after": b"\0"},
    "other line width": {"width": 76},
}


@pytest.mark.parametrize("name", FLAWS)
def test_signatures_of_another_shape_are_refused(name, alice):
    evil = made(alice, **FLAWS[name])
    assert evil != made(alice)
    refused(evil, "CAP-B152")


def test_the_key_in_the_signature_is_what_verifies(alice, mallory):
    refused(made(alice, key=mallory.public.blob), "CAP-B153")


@pytest.mark.parametrize("value", [b"", bytes(63), bytes(64), bytes(65)])
def test_ed25519_signatures_of_another_value(value, alice):
    refused(made(alice, value=value), "CAP-B153")


def test_ecdsa_numbers_have_one_spelling(p256):
    good = made(p256, value=sshsig._mpints(p256.sign(signed_bytes())))
    assert sshsig.verify(good, MESSAGE) == p256.public
    assert sshsig._blob(sshsig._parse(good, NAMESPACE), NAMESPACE) == sshsig._dearmor(good)
    r, s = sshsig_numbers(p256)
    # The other s is as right, and OpenSSH writes either.
    assert sshsig.verify(made(p256, value=mpint(r) + mpint(P256_ORDER - s)), MESSAGE) == p256.public
    padded = string(b"\0" + r.to_bytes(r.bit_length() // 8 + 1)) + mpint(s)
    negative = string((r | 1 << 255).to_bytes(32)) + mpint(s)
    for value in (
        padded,
        negative,
        mpint(r),
        mpint(r) + mpint(s) + b"\0",
        encode_dss_signature(r, s),
    ):
        refused(made(p256, value=value), "CAP-B152")
    for value in (mpint(r) + mpint(s + P256_ORDER), mpint(0) + mpint(0), mpint(s) + mpint(r)):
        refused(made(p256, value=value), "CAP-B153")


def signed_bytes() -> bytes:
    return sshsig._signed_bytes(MESSAGE, NAMESPACE, "sha512")


def sshsig_numbers(key: PrivateKey) -> tuple[int, int]:
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    return decode_dss_signature(key.sign(signed_bytes()))


@pytest.mark.parametrize(
    "respell",
    [
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: b"\n" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.replace(b"BEGIN SSH", b"BEGIN PGP"),
        lambda data: data.replace(b"\n-----END", b"=\n-----END"),
        lambda data: data[:40] + b" " + data[40:],
        lambda data: data * 2,
        lambda data: data[:60] + b"\xff" + data[61:],
        lambda _: b"",
        lambda _: b"-----BEGIN SSH SIGNATURE-----\n-----END SSH SIGNATURE-----\n",
    ],
)
def test_one_armor(respell, alice):
    refused(respell(made(alice)), "CAP-B152")


@settings(max_examples=150)
@given(data=st.data())
def test_no_mutation_is_accepted(alice, data):
    good = made(alice)
    start = data.draw(st.integers(0, len(good) - 1))
    piece = data.draw(st.binary(max_size=8))
    evil = good[:start] + piece + good[start + data.draw(st.integers(0, 8)) :]
    if evil != good:
        with pytest.raises(CapsuleError, match=r"CAP-B15[23]"):
            sshsig.verify(evil, MESSAGE)


@settings(max_examples=150)
@given(st.binary(max_size=120), st.booleans())
def test_noise_is_refused_in_order(noise, framed):
    blob = b"SSHSIG\0\0\0\1" + noise if framed else noise
    for data in (noise, armored(blob)):
        with pytest.raises(CapsuleError, match="CAP-B152"):
            sshsig.verify(data, MESSAGE)
