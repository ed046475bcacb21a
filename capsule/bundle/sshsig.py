"""OpenSSH signatures over a manifest (PROTOCOL.sshsig), as ``ssh-keygen -Y sign`` makes them.

So a key that people already have, in a file, an agent or a FIDO token, signs a bundle, and
``ssh-keygen -Y verify`` checks it. Parsing is strict: a signature is decoded, encoded again and
compared, so version, namespace, armor and numbers have one spelling each.

An SSH signature carries its key. That key is never trusted for being there: the caller asks whose
it is.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from capsule.bundle.archive import tampered
from capsule.bundle.keys import PrivateKey, PublicKey
from capsule.host.errors import CapsuleError

NAMESPACE = "capsule-manifest@capsule-rl.dev"
PROBE = "capsule-probe@capsule-rl.dev"  # a signature in this namespace counts nowhere
MAX_SIZE = 1 << 14  # bytes of a whole signature; those in use have less than one thousand

_MAGIC = b"SSHSIG"
_VERSION = 1
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_COLUMNS = 70  # of the armor's base64
# ssh-keygen uses the first one unless it is told otherwise, and so does sign().
_HASHES = ("sha512", "sha256")
_STATE = 5  # bytes of a token's flags and counter
_TOUCHED = 1  # FIDO's flag "user present"


@dataclass(frozen=True)
class SshSignature:
    """The fields of an SSH signature.

    Attributes:
        key: The key that it says made it.
        hash_name: Digest of the message that was signed: ``sha512`` or ``sha256``.
        signature: As :class:`~capsule.bundle.algorithms.Algorithm` verifies it.
        state: State of a token when it signed: one byte of flags and four of a counter; else empty.
    """

    key: PublicKey
    hash_name: str
    signature: bytes
    state: bytes = b""


def verify(data: bytes, message: bytes, namespace: str = NAMESPACE) -> PublicKey:
    """Return the key whose signature over ``message`` this is; whether it counts is not asked.

    Args:
        data: The armored signature, already bounded in size.
        message: What must have been signed.
        namespace: What it must have been signed for.

    Raises:
        CapsuleError: CAP-B152 (malformed, of another version, namespace or hash, by a weak key or
            one of another type),
            B153 (not a signature over this message).
    """
    try:
        found = _parse(data, namespace)
    except ValueError as error:
        raise tampered("CAP-B152", f"the SSH signature is not acceptable: {error}") from error
    key, signed = found.key, _signed_bytes(message, namespace, found.hash_name)
    if key.algorithm.of_token:
        signed = _signed_by_token(key.application, found.state, signed)
    # Not key.verify(): that one is for envelopes, which the key of a token cannot sign.
    if not key.algorithm.verify(key.raw, found.signature, signed):
        raise tampered(
            "CAP-B153", f"the SSH signature of this file was not made by {key.fingerprint}"
        )
    return key


def sign(message: bytes, key: PrivateKey, namespace: str = NAMESPACE) -> bytes:
    """Return the armored signature over ``message``; equal input gives equal bytes."""
    signature = key.sign(_signed_bytes(message, namespace, _HASHES[0]))
    return _armor(_blob(SshSignature(key.public, _HASHES[0], signature), namespace))


def sign_by_ssh_keygen(message: bytes, key: Path, namespace: str = NAMESPACE) -> bytes:
    """Have ``ssh-keygen`` sign with a key of its own: a file, or the public half of an agent's key.

    It may ask for a passphrase, or for a token to be touched, on the terminal.

    Raises:
        CapsuleError: CAP-B156: it is not there, did not sign, or signed with a key that verifiers
            of bundles do not take.
    """
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", str(key)]
    try:
        # Standard error is not captured: ssh-keygen asks there for a touch and says what went
        # wrong.
        done = subprocess.run(command, input=message, stdout=subprocess.PIPE, check=False)
    except FileNotFoundError as error:
        raise _not_signed("ssh-keygen is not installed", "Install OpenSSH's client.") from error
    if done.returncode != 0:
        raise _not_signed(
            f"ssh-keygen did not sign with {str(key)!a}, for the reason above",
            "Give a private key, or the public key of a private key in your ssh-agent.",
        )
    try:
        # ssh-keygen also signs with keys that no reader of bundles accepts, such as RSA.
        verify(done.stdout, message, namespace)
    except CapsuleError as error:
        raise _not_signed(
            f"{str(key)!a} makes signatures that bundles do not support: {error.message}",
            "Give an Ed25519 or ECDSA P-256 key.",
        ) from error
    return done.stdout


def _parse(data: bytes, namespace: str) -> SshSignature:
    """Read a signature, or raise ValueError with the reason."""
    blob = _dearmor(data)
    version, rest = blob[len(_MAGIC) : len(_MAGIC) + 4], blob[len(_MAGIC) + 4 :]
    if not blob.startswith(_MAGIC) or len(version) != 4:
        raise ValueError("it does not begin with SSHSIG")
    if int.from_bytes(version) != _VERSION:
        raise ValueError(f"version {int.from_bytes(version)}, not {_VERSION}")
    # The third string is reserved, and readers are to ignore it. The comparison at the end of this
    # function still requires that it is empty.
    key_blob, space, _, hash_name, signature = _strings(rest, 5)
    # Without this, an attacker who gets a person to sign a chosen file, for Git or for mail, would
    # have a signed bundle.
    if space != namespace.encode():
        raise ValueError(f"made for {_show(space)}, not for {namespace!a}")
    if hash_name not in {name.encode() for name in _HASHES}:
        raise ValueError(f"hash {_show(hash_name)}, not sha512 or sha256")
    key = _key(key_blob)
    # A token's flags and counter follow the signature without a length of their own (PROTOCOL.u2f).
    end = len(signature) - (_STATE if key.algorithm.of_token else 0)
    kind, value = _strings(signature[:end], 2)
    # A signature names a type of its own, which must not select another algorithm than the
    # key's.
    if kind != key.algorithm.key_type.encode():
        raise ValueError(f"a signature of type {_show(kind)} by a {key.algorithm.key_type} key")
    # Either s is accepted here, unlike in an envelope, because OpenSSH writes both.
    if key.algorithm.is_ecdsa:
        value = _der(value)
    found = SshSignature(key, hash_name.decode(), value, signature[end:])
    if key.algorithm.of_token and not found.state[0] & _TOUCHED:
        raise ValueError("the security token was not touched for it")
    # Numbers with needless leading zeros, among others, are rejected here.
    if _blob(found, namespace) != blob:
        raise ValueError("not in the one canonical encoding")
    return found


def _key(blob: bytes) -> PublicKey:
    try:
        return PublicKey.from_blob(blob)
    except CapsuleError as error:
        raise ValueError(error.message) from error
    except ValueError as error:
        size = int.from_bytes(blob[:4])
        kind = _show(blob[4 : 4 + min(size, 60)])
        raise ValueError(
            f"a key of type {kind}; only Ed25519 and ECDSA P-256 are supported"
        ) from error


def _blob(found: SshSignature, namespace: str) -> bytes:
    """Encode a signature (PROTOCOL.sshsig section 2)."""
    value = _mpints(found.signature) if found.key.algorithm.is_ecdsa else found.signature
    signature = _string(found.key.algorithm.key_type.encode()) + _string(value) + found.state
    fields = (found.key.blob, namespace.encode(), b"", found.hash_name.encode(), signature)
    return _MAGIC + _VERSION.to_bytes(4) + b"".join(map(_string, fields))


def _signed_bytes(message: bytes, namespace: str, hash_name: str) -> bytes:
    """Return what the key signs (PROTOCOL.sshsig section 3)."""
    digest = hashlib.new(hash_name, message).digest()
    return _MAGIC + b"".join(map(_string, (namespace.encode(), b"", hash_name.encode(), digest)))


def _signed_by_token(application: bytes, state: bytes, message: bytes) -> bytes:
    """Return what a FIDO token signs for a message (PROTOCOL.u2f, "SSH U2F signatures")."""
    return hashlib.sha256(application).digest() + state + hashlib.sha256(message).digest()


def _armor(blob: bytes) -> bytes:
    text = base64.b64encode(blob).decode()
    lines = [text[start : start + _COLUMNS] for start in range(0, len(text), _COLUMNS)]
    return "\n".join([_BEGIN, *lines, _END, ""]).encode()


def _dearmor(data: bytes) -> bytes:
    first, *lines, last, end = data.decode("ascii").split("\n")
    if (first, last, end) != (_BEGIN, _END, ""):
        raise ValueError("the armor is malformed")
    blob = base64.b64decode("".join(lines), validate=True)
    if _armor(blob) != data:
        raise ValueError("the armor is not the one that ssh-keygen writes")
    return blob


def _string(data: bytes) -> bytes:
    """Encode a string of the SSH protocol (RFC 4251 section 5)."""
    return len(data).to_bytes(4) + data


def _strings(data: bytes, count: int) -> list[bytes]:
    """Decode ``count`` strings that fill ``data``."""
    found = []
    for _ in range(count):
        size = int.from_bytes(data[:4])
        if len(data) < 4 + size:
            raise ValueError("it is cut off")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    if data:
        raise ValueError("data follows its last field")
    return found


def _der(value: bytes) -> bytes:
    """Turn the two numbers of an SSH ECDSA signature (RFC 5656 section 3.1.2) into DER."""
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    r, s = (int.from_bytes(number) for number in _strings(value, 2))
    return encode_dss_signature(r, s)


def _mpints(signature: bytes) -> bytes:
    """Turn DER into the two numbers of an SSH ECDSA signature, as short as they can be."""
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    numbers = decode_dss_signature(signature)
    # An mpint has a sign. A number whose top bit is set needs a zero byte in front, hence the extra
    # byte.
    return b"".join(_string(number.to_bytes(number.bit_length() // 8 + 1)) for number in numbers)


def _show(data: bytes) -> str:
    return ascii(data[:80].decode("latin-1"))


def _not_signed(message: str, fix: str) -> CapsuleError:
    return CapsuleError("CAP-B156", message, fix=fix)
