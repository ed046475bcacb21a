"""Keys, signatures and trust files that must not count (cases 5 and 7 to 13)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA1, SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from capsule.bundle import sshsig
from capsule.bundle.algorithms import P256_ORDER
from capsule.bundle.envelope import pre_authentication_encoding
from capsule.bundle.keys import PrivateKey
from capsule.bundle.manifest import CHECKSUMS, ENVELOPE, MANIFEST, SSHSIG
from capsule.bundle.sshsig import NAMESPACE as SPACE
from tests.hostile.case import Case, Presented
from tests.hostile.genuine import (
    SIGNER,
    STRANGER,
    documents,
    edit_json,
    manifest_of,
    training,
    write_members,
)

P256 = ec.derive_private_key(7, ec.SECP256R1())
SECOND = PrivateKey(P256)  # the other algorithm
PAST, FUTURE = "20200101000000Z", "29990101000000Z"
SSH_ED25519 = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"

Members = dict[str, bytes]


def sealed(key: PrivateKey = SIGNER, kinds: tuple[str, ...] = ("dsse",)) -> Members:
    """Return the members of the small training run's bundle, but for a declared SSH signature."""
    run = training()
    manifest = manifest_of(run) | {"signatures": list(kinds)}
    return documents(manifest, key) | dict(run.files)


def with_sshsig(members: Members, signature: bytes) -> Members:
    """Put an SSH signature where the archive has it: after the manifest."""
    head = {name: members[name] for name in (ENVELOPE, MANIFEST)}
    return head | {SSHSIG: signature} | members


def bundle(folder: Path, members: Mapping[str, bytes], *options: object) -> Presented:
    path = write_members(folder / "bundle.capsule.tar", members)
    return Presented(path, tuple(map(str, options)))


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def trusting(folder: Path, *keys: PrivateKey) -> list[object]:
    """Return the options that name some keys."""
    files = [write(folder, f"key-{n}.pub", key.public.openssh()) for n, key in enumerate(keys)]
    return [word for file in files for word in ("--key", file)]


# Trust files and revocation (case 7)


def line(number: int, name: str, code: str, flawed: str, sound: str) -> Case:
    """Return a case of what stands in front of the signer's key in a trust file."""

    def present(folder: Path, hostile: bool) -> Presented:
        text = f"{flawed if hostile else sound} {SIGNER.public.openssh()}"
        file = write(folder, "allowed_signers", text)
        options = ("--allowed-signers", file, "--identity", "alice@lab")
        return bundle(folder, sealed(), *options)

    return Case(number, name, code, present)


def revoked(name: str, entry: Callable[[PrivateKey], str]) -> Case:
    def present(folder: Path, hostile: bool) -> Presented:
        file = write(folder, "revoked", entry(SIGNER if hostile else STRANGER))
        return bundle(folder, sealed(), *trusting(folder, SIGNER), "--revoked", file)

    return Case(7, name, "CAP-B154", present)


TRUST_FILES = [
    line(7, "expired-key", "CAP-B154", f'alice@lab valid-before="{PAST}"',
         f'alice@lab valid-before="{FUTURE}"'),
    line(7, "key-not-yet-valid", "CAP-B154", f'alice@lab valid-after="{FUTURE}"',
         f'alice@lab valid-after="{PAST}"'),
    line(7, "key-of-another-principal", "CAP-B154", "bob@lab", "bob@lab,alice@lab"),
    line(7, "principal-excluded", "CAP-B154", "*@lab,!alice@lab", "*@lab,!bob@lab"),
    line(7, "key-for-another-namespace", "CAP-B154", 'alice@lab namespaces="git"',
         'alice@lab namespaces="git,capsule-*"'),
    line(7, "certificate-authority", "CAP-B151", "alice@lab cert-authority", "alice@lab"),
    line(7, "option-that-nobody-knows", "CAP-B151", "alice@lab no-touch-required", "alice@lab"),
    revoked("revoked-by-fingerprint", lambda key: key.public.fingerprint + "\n"),
    revoked("revoked-by-key", lambda key: key.public.openssh()),
]  # fmt: skip


# Keys that must not be enrolled (cases 8 and 10)


def enrolled(number: int, name: str, code: str, flawed: str) -> Case:
    """Return a case of a public key that the reader was given beside the signer's."""

    def present(folder: Path, hostile: bool) -> Presented:
        key = write(folder, "second.pub", flawed if hostile else STRANGER.public.openssh())
        return bundle(folder, sealed(), *trusting(folder, SIGNER), "--key", key)

    return Case(number, name, code, present)


def openssh(kind: str, blob: bytes) -> str:
    return f"{kind} {base64.b64encode(blob).decode()}\n"


def ed25519(point: bytes) -> str:
    return openssh("ssh-ed25519", SSH_ED25519 + point)


def p256(point: bytes) -> str:
    prefix = SECOND.public.blob[: -len(SECOND.public.raw)]
    return openssh("ecdsa-sha2-nistp256", prefix + point)


# A point of order 8; and the signer's key plus the point of order 2, which is (0, -1): both
# coordinates change their signs.
ORDER_EIGHT = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")
PRIME = 2**255 - 19


def mixed_order() -> bytes:
    number = int.from_bytes(SIGNER.public.raw, "little")
    sign, y = number >> 255, number & (2**255 - 1)
    return (PRIME - y | (1 - sign) << 255).to_bytes(32, "little")


POINT = SECOND.public.raw
ENROLMENT = [
    enrolled(8, "low-order-key", "CAP-B134", ed25519(ORDER_EIGHT)),
    enrolled(8, "identity-as-key", "CAP-B134", ed25519(bytes([1]) + bytes(31))),
    enrolled(8, "non-canonical-key", "CAP-B134", ed25519((PRIME + 1).to_bytes(32, "little"))),
    enrolled(8, "mixed-order-key", "CAP-B134", ed25519(mixed_order())),
    enrolled(8, "point-off-the-curve", "CAP-B134", p256(POINT[:-1] + bytes([POINT[-1] ^ 1]))),
    enrolled(8, "point-at-infinity", "CAP-B134", p256(bytes(65))),
    enrolled(
        10,
        "key-on-p-384",
        "CAP-B133",
        ec.derive_private_key(7, ec.SECP384R1())
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        .decode(),
    ),
    enrolled(
        10,
        "rsa-key",
        "CAP-B133",
        rsa.RSAPublicNumbers(65537, (1 << 2047) + 1)
        .public_key()
        .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        .decode(),
    ),
]


# Signatures in the envelope (cases 9 and 10)


def signed_as(number: int, name: str, forge: Callable[[bytes], bytes]) -> Case:
    """Return a case of an envelope by the P-256 key, whose signature is made in another way."""

    def present(folder: Path, hostile: bool) -> Presented:
        members = sealed(SECOND)

        def replace(document: dict) -> None:
            envelope = document["dsseEnvelope"]
            message = pre_authentication_encoding(base64.b64decode(envelope["payload"]))
            envelope["signatures"][0]["sig"] = base64.b64encode(forge(message)).decode()

        if hostile:
            edit_json(members, ENVELOPE, replace)
        return bundle(folder, members, *trusting(folder, SECOND))

    return Case(number, name, "CAP-B122", present)


def other_spelling(message: bytes) -> bytes:
    r, s = decode_dss_signature(SECOND.sign(message))
    return encode_dss_signature(r, P256_ORDER - s)


def long_form(message: bytes) -> bytes:
    """Return the signature with a length of two bytes where DER has one."""
    signature = SECOND.sign(message)
    return signature[:1] + b"\x81" + signature[1:]


ENVELOPES = [
    signed_as(9, "ecdsa-signature-respelt", other_spelling),
    signed_as(9, "ecdsa-signature-in-ber", long_form),
    signed_as(9, "ecdsa-signature-with-trailing-garbage", lambda m: SECOND.sign(m) + b"\0"),
    signed_as(9, "ecdsa-signature-of-zeros", lambda _: encode_dss_signature(0, 0)),
    signed_as(10, "ecdsa-with-sha-1", lambda m: P256.sign(m, ec.ECDSA(SHA1()))),  # noqa: S303
    signed_as(10, "ecdsa-with-sha-384", lambda m: P256.sign(m, ec.ECDSA(SHA384()))),
    signed_as(10, "ed25519-under-an-ecdsa-name", SIGNER.sign),
]


# Thresholds (case 11)


def counted(name: str, names: Callable[[bool], list[tuple[str, PrivateKey]]]) -> Case:
    """Return a case of two signatures where two keys must have signed."""

    def present(folder: Path, hostile: bool) -> Presented:
        second = SIGNER if hostile else SECOND
        members = sealed(kinds=("dsse", "sshsig"))
        signature = sshsig.sign(members[MANIFEST], second)
        text = "".join(f"{who} {key.public.openssh()}" for who, key in names(hostile))
        file = write(folder, "allowed_signers", text)
        options = ("--allowed-signers", file, "--threshold", 2)
        return bundle(folder, with_sshsig(members, signature), *options)

    return Case(11, name, "CAP-B155", present)


def beside(number: int, name: str, code: str, sign: Callable[[bytes, bool], bytes]) -> Case:
    """Return a case of a signature beside the bundle, where two keys must have signed."""

    def present(folder: Path, hostile: bool) -> Presented:
        members = sealed()
        (folder / "second.sshsig").write_bytes(sign(members[MANIFEST], hostile))
        options = (*trusting(folder, SIGNER, SECOND), "--signature", folder / "second.sshsig")
        return bundle(folder, members, *options, "--threshold", 2)

    return Case(number, name, code, present)


THRESHOLDS = [
    counted("one-key-signs-twice", lambda _: [("alice@lab", SIGNER), ("bob@lab", SECOND)]),
    counted(
        "one-key-under-two-names",
        lambda hostile: [("alice@lab", SIGNER), ("bob@lab", SIGNER if hostile else SECOND)],
    ),
    beside(11, "one-key-signs-again-beside", "CAP-B155",
           lambda manifest, hostile: sshsig.sign(manifest, SIGNER if hostile else SECOND)),
    beside(11, "a-stranger-signs-beside", "CAP-B155",
           lambda manifest, hostile: sshsig.sign(manifest, STRANGER if hostile else SECOND)),
    beside(12, "signature-beside-over-another-manifest", "CAP-B157",
           lambda manifest, hostile: sshsig.sign(manifest + b" " * hostile, SECOND)),
    beside(12, "signature-beside-for-git", "CAP-B157",
           lambda manifest, hostile: sshsig.sign(manifest, SECOND, "git" if hostile else SPACE)),
]  # fmt: skip


# SSH signatures in the bundle (cases 5, 12 and 13)


def string(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def ssh_signature(
    message: bytes,
    *,
    version: int = 1,
    namespace: bytes = SPACE.encode(),
    reserved: bytes = b"",
    hash_name: str = "sha512",
    key: bytes = SIGNER.public.blob,
    columns: int = 70,
) -> bytes:
    """Sign in OpenSSH's way, with whatever fields, so that the signature itself is right."""
    digest = hashlib.new(hash_name, message).digest()
    common = [string(namespace), string(reserved), string(hash_name.encode())]
    signature = SIGNER.sign(b"SSHSIG" + b"".join([*common, string(digest)]))
    typed = string(string(b"ssh-ed25519") + string(signature))
    return armor(b"SSHSIG" + version.to_bytes(4) + string(key) + b"".join(common) + typed, columns)


def armor(blob: bytes, columns: int = 70) -> bytes:
    text = base64.b64encode(blob).decode()
    lines = [text[start : start + columns] for start in range(0, len(text), columns)]
    begin, end = (f"-----{word} SSH SIGNATURE-----" for word in ("BEGIN", "END"))
    return "\n".join([begin, *lines, end, ""]).encode()


def carried(number: int, name: str, code: str, forge: Callable[[bytes], bytes]) -> Case:
    """Return a case of a bundle with a declared SSH signature, made in another way."""

    def present(folder: Path, hostile: bool) -> Presented:
        members = sealed(kinds=("dsse", "sshsig"))
        make = forge if hostile else ssh_signature
        signature = make(members[MANIFEST])
        return bundle(folder, with_sshsig(members, signature), *trusting(folder, SIGNER))

    return Case(number, name, code, present)


def key_in_the_signature(folder: Path, hostile: bool) -> Presented:
    """Have a stranger sign in both ways, and trust another: the carried key is no trusted one."""
    members = sealed(STRANGER, kinds=("dsse", "sshsig"))
    signature = sshsig.sign(members[MANIFEST], STRANGER if hostile else SIGNER)
    return bundle(folder, with_sshsig(members, signature), *trusting(folder, SIGNER))


def untouched(folder: Path, hostile: bool) -> Presented:
    """Have a token sign (PROTOCOL.u2f) without anybody touching it."""
    members = sealed(kinds=("dsse", "sshsig"))
    kind, state = b"sk-ssh-ed25519@openssh.com", bytes([0 if hostile else 1]) + (7).to_bytes(4)
    key = string(kind) + string(SIGNER.public.raw) + string(b"ssh:")
    common = string(SPACE.encode()) + string(b"") + string(b"sha512")
    message = b"SSHSIG" + common + string(hashlib.sha512(members[MANIFEST]).digest())
    digests = (hashlib.sha256(data).digest() for data in (b"ssh:", message))
    signature = string(kind) + string(SIGNER.sign(state.join(digests))) + state
    blob = b"SSHSIG" + (1).to_bytes(4) + string(key) + common + string(signature)
    options = ("--key", write(folder, "token.pub", openssh(kind.decode(), key)), "--threshold", 2)
    return bundle(folder, with_sshsig(members, armor(blob)), *trusting(folder, SIGNER), *options)


def stripped(folder: Path, hostile: bool) -> Presented:
    members = sealed(kinds=("dsse", "sshsig"))
    whole = with_sshsig(members, ssh_signature(members[MANIFEST]))
    return bundle(folder, members if hostile else whole, *trusting(folder, SIGNER))


def added(folder: Path, hostile: bool) -> Presented:
    members = sealed()
    more = with_sshsig(members, ssh_signature(members[MANIFEST]))
    return bundle(folder, more if hostile else members, *trusting(folder, SIGNER))


def undeclared(folder: Path, hostile: bool) -> Presented:
    """Strip the signature, and its declaration from the manifest as well."""
    members = sealed(kinds=("dsse", "sshsig"))
    if not hostile:
        members = with_sshsig(members, ssh_signature(members[MANIFEST]))
        return bundle(folder, members, *trusting(folder, SIGNER))
    manifest = json.loads(members[MANIFEST]) | {"signatures": ["dsse"]}
    forged = documents(manifest)  # a valid envelope, which the forger does not have
    members |= {MANIFEST: forged[MANIFEST], CHECKSUMS: forged[CHECKSUMS]}
    return bundle(folder, members, *trusting(folder, SIGNER))


SSH_SIGNATURES = [
    Case(5, "key-carried-by-an-ssh-signature", "CAP-B125", key_in_the_signature),
    carried(12, "ssh-signature-for-git", "CAP-B152", lambda m: ssh_signature(m, namespace=b"git")),
    carried(12, "ssh-signature-without-namespace", "CAP-B152",
            lambda m: ssh_signature(m, namespace=b"")),
    carried(12, "ssh-signature-of-version-2", "CAP-B152", lambda m: ssh_signature(m, version=2)),
    carried(12, "ssh-signature-with-sha-1", "CAP-B152",
            lambda m: ssh_signature(m, hash_name="sha1")),
    carried(12, "ssh-signature-with-a-reserved-field", "CAP-B152",
            lambda m: ssh_signature(m, reserved=b"x")),
    carried(12, "ssh-signature-in-another-armor", "CAP-B152",
            lambda m: ssh_signature(m, columns=76)),
    carried(12, "ssh-signature-by-a-weak-key", "CAP-B152",
            lambda m: ssh_signature(m, key=SSH_ED25519 + ORDER_EIGHT)),
    carried(12, "ssh-signature-by-another-type-of-key", "CAP-B152",
            lambda m: ssh_signature(m, key=string(b"ssh-rsa") + bytes(36))),
    Case(12, "token-not-touched", "CAP-B152", untouched),
    carried(12, "ssh-signature-under-another-key", "CAP-B153",
            lambda m: ssh_signature(m, key=STRANGER.public.blob)),
    carried(12, "ssh-signature-over-another-file", "CAP-B153", lambda m: ssh_signature(m + b"\n")),
    carried(12, "ssh-signature-twice", "CAP-B152", lambda m: ssh_signature(m) * 2),
    carried(12, "ssh-signature-of-megabytes", "CAP-B105", lambda _: b"-" * (1 << 20)),
    carried(13, "declared-ssh-signature-emptied", "CAP-B152", lambda _: b""),
    Case(13, "declared-ssh-signature-stripped", "CAP-B107", stripped),
    Case(13, "undeclared-ssh-signature-added", "CAP-B107", added),
    Case(13, "ssh-signature-and-its-declaration-stripped", "CAP-B112", undeclared),
]  # fmt: skip


CASES: list[Case] = [*TRUST_FILES, *ENROLMENT, *ENVELOPES, *THRESHOLDS, *SSH_SIGNATURES]
