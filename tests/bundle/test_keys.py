import base64
import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle import keys
from capsule.bundle.algorithms import ECDSA_P256, P256_ORDER
from capsule.bundle.keys import (
    PrivateKey,
    PublicKey,
    generate,
    load_private,
    load_public,
    read_passphrase,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.host.outputs import write_new
from tests.bundle.points import P256_POINT, P256_SECRET, RFC6979, RFC8032, WEAK

OPENSSH = Path(__file__).parent / "vectors" / "openssh"


@pytest.mark.parametrize(("secret", "public", "message", "signature"), RFC8032)
def test_rfc_8032_vectors(secret, public, message, signature):
    key = PrivateKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))
    assert key.public.raw.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert key.public.verify(bytes.fromhex(signature), bytes.fromhex(message))
    assert not key.public.verify(bytes.fromhex(signature), bytes.fromhex(message) + b"\0")


@settings(deadline=None, max_examples=20)
@given(st.binary(min_size=32, max_size=32))
def test_honest_keys_pass(seed):
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    assert PublicKey(key.public_key().public_bytes_raw()) == PrivateKey(key).public


def p256_key() -> PrivateKey:
    return PrivateKey(ec.derive_private_key(P256_SECRET, ec.SECP256R1()))


@pytest.mark.parametrize(("message", "r", "s"), RFC6979)
def test_rfc_6979_vectors_with_the_smaller_s(message, r, s):
    key = p256_key()
    assert key.public == PublicKey(P256_POINT, algorithm=ECDSA_P256)
    assert decode_dss_signature(key.sign(message)) == (r, min(s, P256_ORDER - s))
    # Both signatures are right, as FIPS 186-5 has it; one of them is the one we write.
    for other in (s, P256_ORDER - s):
        signature = encode_dss_signature(r, other)
        assert key.public.verify(signature, message)
        assert not key.public.verify(signature, message + b"\0")
        assert key.public.algorithm.is_canonical(signature) == (other <= P256_ORDER // 2)


@settings(max_examples=20)
@given(st.integers(1, P256_ORDER - 1), st.binary(max_size=40))
def test_honest_p256_keys_pass_and_sign_in_one_way(secret, message):
    key = PrivateKey(ec.derive_private_key(secret, ec.SECP256R1()))
    signature = key.sign(message)
    assert key.sign(message) == signature
    assert key.public.algorithm.is_canonical(signature)
    assert key.public.verify(signature, message)


def test_an_algorithm_follows_from_the_key_alone():
    message = b"message"
    ours = PrivateKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)))
    for signer, other in ((ours, p256_key()), (p256_key(), ours)):
        assert signer.public.verify(signer.sign(message), message)
        assert not other.public.verify(signer.sign(message), message)


@pytest.mark.parametrize("algorithm", ["ed25519", "ecdsa-p256"])
def test_generate_writes_a_private_and_a_public_file(algorithm, tmp_path):
    public = generate(tmp_path / "new" / "alice", algorithm=algorithm)
    assert public.algorithm.name == algorithm
    private_file, public_file = tmp_path / "new" / "alice", tmp_path / "new" / "alice.pub"
    assert stat.S_IMODE(private_file.stat().st_mode) == 0o600
    assert private_file.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert public_file.read_text() == public.openssh()
    assert len(public.openssh().split()) == 2  # no comment: no user or host name gets out
    assert load_private(private_file).public == load_public(public_file) == public
    assert sorted(path.name for path in private_file.parent.iterdir()) == ["alice", "alice.pub"]


def test_two_keys_differ(tmp_path):
    assert generate(tmp_path / "a") != generate(tmp_path / "b")


def test_a_comment_survives_but_is_no_part_of_the_key(tmp_path):
    public = generate(tmp_path / "a", comment="Alice\nof the lab")
    assert public.openssh().endswith(" Alice of the lab\n")
    assert load_public(tmp_path / "a.pub").comment == "Alice of the lab"
    assert load_public(tmp_path / "a.pub") == PublicKey(public.raw)


@pytest.mark.parametrize("taken", ["alice", "alice.pub"])
def test_generate_overwrites_nothing(taken, tmp_path):
    (tmp_path / taken).write_text("mine")
    with pytest.raises(CapsuleError) as caught:
        generate(tmp_path / "alice")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B135", ExitCode.USAGE)
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "mine"


def test_generate_follows_no_dangling_link(tmp_path):
    (tmp_path / "alice").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CapsuleError, match="CAP-B135"):
        generate(tmp_path / "alice")
    assert not (tmp_path / "elsewhere").exists()


def test_generate_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapsuleError, match="CAP-B135"):
        generate(tmp_path / "file" / "alice")


def test_a_full_disk_is_said_to_be_full(tmp_path):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))  # as on a disk with three bytes left
    try:
        with pytest.raises(CapsuleError, match=": File too large") as caught:
            generate(tmp_path / "alice")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.code, caught.value.fix[:15]) == ("CAP-B135", "Free disk space")
    assert list(tmp_path.iterdir()) == []


def test_no_private_key_stays_without_its_public_half(tmp_path, monkeypatch):
    def full(path, data, **mode):
        if path.suffix == ".pub":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_new(path, data, **mode)

    monkeypatch.setattr("capsule.bundle.keys.write_new", full)
    with pytest.raises(CapsuleError, match="No space left"):
        generate(tmp_path / "alice")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["fsync", "link"])
def test_a_kill_leaves_no_key_file_that_is_not_whole(tmp_path, moment):
    """The first such call is of the private half, before it has its name."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from capsule.bundle.keys import generate\n"
        f"os.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "generate(Path(sys.argv[1]))\n"
    )
    path = tmp_path / "alice"
    subprocess.run([sys.executable, "-c", code, path], check=False)
    assert not path.exists()
    public = generate(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["alice", "alice.pub"]
    assert load_private(path).public == load_public(tmp_path / "alice.pub") == public


@pytest.mark.parametrize("algorithm", ["ed25519", "ecdsa-p256"])
def test_a_missing_public_half_is_written_by_the_command_that_the_error_names(tmp_path, algorithm):
    path = tmp_path / "my key"
    public = generate(path, algorithm=algorithm)
    (tmp_path / "my key.pub").unlink()
    with pytest.raises(CapsuleError, match=r"CAP-B135 .*my key exists already") as caught:
        generate(path)
    _, _, command = caught.value.fix.partition(" is missing: ")
    subprocess.run(["bash", "-c", command], check=True)
    assert load_public(tmp_path / "my key.pub") == public


def test_an_empty_key_file_is_named_with_its_remedy(tmp_path):
    """Earlier versions left one when they were killed."""
    path = tmp_path / "alice"
    path.touch(mode=0o600)
    with pytest.raises(CapsuleError, match=r"CAP-B132 the key .*alice is empty") as caught:
        load_private(path)
    assert caught.value.fix == f"Delete it, and make a key: capsule keygen {path}"


def test_a_passphrase_protects_the_private_key(tmp_path):
    public = generate(tmp_path / "a", passphrase="correct horse")
    assert b"ENCRYPTED" in (tmp_path / "a").read_bytes()
    assert load_private(tmp_path / "a", "correct horse").public == public
    for wrong, code in (("battery staple", "CAP-B136"), (None, "CAP-B138"), ("", "CAP-B138")):
        with pytest.raises(CapsuleError, match=code):
            load_private(tmp_path / "a", wrong)
    generate(tmp_path / "b")
    with pytest.raises(CapsuleError, match="CAP-B136"):
        load_private(tmp_path / "b", "needless")


def test_a_passphrase_that_is_too_long_is_rejected_by_name(tmp_path):
    longest = "\u00e8" * 511 + "x"
    public = generate(tmp_path / "a", passphrase=longest)
    assert load_private(tmp_path / "a", longest).public == public
    with pytest.raises(CapsuleError, match=r"CAP-B139 the passphrase has 1,024 bytes") as caught:
        generate(tmp_path / "b", passphrase=longest + "x")
    assert "1,023 bytes" in caught.value.fix
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_private_key_that_others_may_read_is_refused(mode, tmp_path):
    generate(tmp_path / "a")
    (tmp_path / "a").chmod(mode)
    with pytest.raises(CapsuleError, match="CAP-B137"):
        load_private(tmp_path / "a")
    (tmp_path / "a").chmod(0o400)
    load_private(tmp_path / "a")


PUBLIC = base64.b64encode(
    b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes.fromhex(RFC8032[0][1])
).decode()
SPKI = (
    ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(RFC8032[0][1]))
    .public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    .decode()
)


@pytest.mark.parametrize(
    "text",
    [
        f"ssh-ed25519 {PUBLIC}",
        f"ssh-ed25519 {PUBLIC}\n",
        f"ssh-ed25519 {PUBLIC} alice@lab with spaces\r\n",
        f"\n  ssh-ed25519\t{PUBLIC}  \n\n",
        SPKI,
        SPKI.replace("\n", "\r\n"),
    ],
)
def test_public_keys_are_read_in_both_forms(text, tmp_path):
    (tmp_path / "k.pub").write_bytes(text.encode())
    assert load_public(tmp_path / "k.pub").raw.hex() == RFC8032[0][1]


def ssh_blob(kind: bytes, raw: bytes) -> str:
    parts = b"".join(len(part).to_bytes(4, "big") + part for part in (kind, raw))
    return base64.b64encode(parts).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "ssh-ed25519",
        "ssh-ed25519 !!!!",
        f"ssh-ed25519 {PUBLIC[:-1]}",
        f"ssh-ed25519 {PUBLIC[:20]}",
        f"ssh-ed25519 {PUBLIC}\nssh-ed25519 {PUBLIC}",
        f"no-pty ssh-ed25519 {PUBLIC}",
        f"ssh-ed25519 {ssh_blob(b'ssh-ed25519', bytes(31))}",
        f"ssh-ed25519 {ssh_blob(b'ssh-ed25519', bytes(33))}",
        f"ssh-ed25519 {ssh_blob(b'ssh-ed25518', bytes.fromhex(RFC8032[0][1]))}",
        "ssh-ed25519 é",
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "x" * 70_000,
    ],
)
def test_other_texts_are_no_public_keys(text, tmp_path):
    (tmp_path / "k.pub").write_text(text)
    with pytest.raises(CapsuleError) as caught:
        load_public(tmp_path / "k.pub")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B132", ExitCode.USAGE)


def test_bytes_that_are_no_text_are_no_public_key(tmp_path):
    (tmp_path / "k.pub").write_bytes(b"ssh-ed25519 \xff\xfe")
    with pytest.raises(CapsuleError, match="CAP-B132"):
        load_public(tmp_path / "k.pub")


def test_a_private_key_is_not_accepted_as_public(tmp_path):
    generate(tmp_path / "k")
    with pytest.raises(CapsuleError, match="is a private key") as caught:
        load_public(tmp_path / "k")
    assert ".pub" in caught.value.fix


def test_a_public_key_is_not_accepted_as_private(tmp_path):
    generate(tmp_path / "k")
    (tmp_path / "k.pub").chmod(0o600)
    with pytest.raises(CapsuleError, match="CAP-B132"):
        load_private(tmp_path / "k.pub")


@pytest.mark.parametrize("algorithm", ["ed25519", "ecdsa-p256"])
def test_private_keys_are_read_in_every_form(algorithm, tmp_path):
    public = generate(tmp_path / "k", algorithm=algorithm)
    key = pem.load_pem_private_key((tmp_path / "k").read_bytes(), None)
    forms = [pem.PrivateFormat.PKCS8, pem.PrivateFormat.OpenSSH]
    forms += [pem.PrivateFormat.TraditionalOpenSSL] if algorithm == "ecdsa-p256" else []
    for form in forms:
        (tmp_path / "k").write_bytes(key.private_bytes(pem.Encoding.PEM, form, pem.NoEncryption()))
        assert load_private(tmp_path / "k").public == public


def test_a_p256_key_with_another_generator_is_refused(tmp_path):
    # CVE-2020-0601: who may choose the generator can sign for any public key.
    command = ("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    options = ("-pkeyopt", "ec_param_enc:explicit")
    text = subprocess.run((*command, *options), check=True, capture_output=True, text=True).stdout
    der = base64.b64decode("".join(text.splitlines()[1:-1]))
    generator = der.index(bytes.fromhex("046b17d1f2e12c4247"))
    other = der[: generator + 40] + bytes([der[generator + 40] ^ 1]) + der[generator + 41 :]
    for data, code in ((der, None), (other, "CAP-B132")):
        text = base64.encodebytes(data).decode()
        path = tmp_path / "key"
        path.write_text(f"-----BEGIN PRIVATE KEY-----\n{text}-----END PRIVATE KEY-----\n")
        path.chmod(0o600)
        if code is None:
            load_private(path)
            continue
        with pytest.raises(CapsuleError, match=code):
            load_private(path)


OTHER_TYPES = {
    "RSA": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ECDSA on secp384r1": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ECDSA on secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "Ed448": ed448.Ed448PrivateKey.generate,
    "X25519": x25519.X25519PrivateKey.generate,
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_other_key_types_are_named_and_refused(kind, tmp_path):
    key = OTHER_TYPES[kind]()
    secret = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    for path, data, load in (
        (tmp_path / "k", secret, load_private),
        (tmp_path / "k.pub", public, load_public),
    ):
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(CapsuleError, match=f"type '{kind}'") as caught:
            load(path)
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B133", ExitCode.USAGE)


@pytest.mark.parametrize("kind", ["ssh-rsa", "ecdsa-sha2-nistp384", "sk-unheard-of@example.org"])
def test_other_openssh_types_are_named_and_refused(kind, tmp_path):
    (tmp_path / "k.pub").write_text(f"{kind} AAAA someone\n")
    with pytest.raises(CapsuleError, match=f"type '{kind}'"):
        load_public(tmp_path / "k.pub")


@pytest.mark.parametrize("cipher", ["none", "aes256-ctr"])
def test_a_private_key_of_a_token_is_left_to_openssh(cipher, tmp_path):
    """PROTOCOL.key of OpenSSH; the part that only a token's key has is not read."""
    path, kdf = tmp_path / "id_ed25519_sk", "none" if cipher == "none" else "bcrypt"
    blob = load_public(OPENSSH / "ed25519_sk.pub").blob
    strings = [cipher.encode(), kdf.encode(), b"", None, blob, bytes(64)]
    fields = [b"\0\0\0\1" if s is None else len(s).to_bytes(4) + s for s in strings]
    text = base64.encodebytes(b"openssh-key-v1\0" + b"".join(fields)).decode()
    armor = "-----{} OPENSSH PRIVATE KEY-----\n"
    path.write_text(armor.format("BEGIN") + text + armor.format("END"))
    path.chmod(0o600)
    with pytest.raises(CapsuleError) as caught:
        load_private(path)
    assert "--ssh-key" in caught.value.fix
    assert caught.value.code == ("CAP-B133" if cipher == "none" else "CAP-B136")
    assert ("passphrase" in caught.value.message) == (cipher != "none")


@pytest.mark.parametrize(("load", "kind"), [(load_private, "private"), (load_public, "public")])
def test_a_file_that_is_too_large_is_no_key(load, kind, tmp_path):
    (tmp_path / "k").write_bytes(bytes(1 << 17))
    (tmp_path / "k").chmod(0o600)
    with pytest.raises(CapsuleError, match=f"is not a {kind} key") as caught:
        load(tmp_path / "k")
    assert caught.value.code == "CAP-B132"


def test_a_weak_point_is_refused_in_both_forms(tmp_path):
    weak = WEAK["identity"]
    key = ed25519.Ed25519PublicKey.from_public_bytes(weak)
    spki = key.public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    for data in (spki, f"ssh-ed25519 {ssh_blob(b'ssh-ed25519', weak)}".encode()):
        (tmp_path / "k.pub").write_bytes(data)
        with pytest.raises(CapsuleError, match="CAP-B134"):
            load_public(tmp_path / "k.pub")


@pytest.mark.parametrize("load", [load_private, load_public])
def test_unreadable_key_files(load, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(CapsuleError) as caught:
            load(path)
        assert (caught.value.code, caught.value.exit_code) == ("CAP-B131", ExitCode.USAGE)


def test_folders_of_a_new_key_are_the_owners_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        generate(tmp_path / "keys" / "of" / "alice")
    finally:
        os.umask(before)
    for path, mode in (("keys", 0o700), ("keys/of", 0o700), ("keys/of/alice", 0o600)):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode


def test_a_passphrase_is_the_first_line_of_a_file_that_only_its_owner_reads(tmp_path, monkeypatch):
    path = tmp_path / "passphrase"
    path.write_bytes("corr\u00e8ct horse\r\nmore".encode())
    path.chmod(0o600)
    assert read_passphrase(path) == "corr\u00e8ct horse"
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(CapsuleError, match="CAP-B137"):
            read_passphrase(path)
    monkeypatch.setattr(keys, "HAVE_OWNERS", False)  # as on Windows, where every file has 0666
    assert read_passphrase(path) == "corr\u00e8ct horse"
    for content in (b"", b"\n", b"\xff\n"):
        path.write_bytes(content)
        with pytest.raises(CapsuleError, match="CAP-B139"):
            read_passphrase(path)
    for unreadable in (tmp_path, tmp_path / "none"):
        with pytest.raises(CapsuleError, match="CAP-B131"):
            read_passphrase(unreadable)
