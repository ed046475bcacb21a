"""Ed25519 keys (RFC 8032), in files that OpenSSH and OpenSSL read.

A private key is PKCS#8 in PEM (RFC 5958); a public key is one line in OpenSSH's form (RFC 8709
section 4). Keys are known by their OpenSSH fingerprint, the one that ``ssh-keygen -lf`` prints.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from capsule.experiment.canonical import open_regular, write_atomic
from capsule.experiment.errors import CapsuleError, ExitCode

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAX_FILE = 1 << 16  # bytes; a key file has some hundreds
_SSH_PREFIX = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"  # length-prefixed type, length of the key
_PRIME = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME

_Point = tuple[int, int, int, int]  # extended homogeneous coordinates (X, Y, Z, T)
_IDENTITY: _Point = (0, 1, 1, 0)


@dataclass(frozen=True)
class PublicKey:
    """A public key that passed the enrolment checks.

    Attributes:
        raw: The encoded point, 32 bytes (RFC 8032 section 5.1.2).
        comment: What the key's file says of its owner; signed by nobody.
    """

    raw: bytes
    comment: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Refuse a point with which signatures prove nothing.

        Raises:
            CapsuleError: CAP-B134.
        """
        if (problem := _weakness(self.raw)) is not None:
            raise _key_error(
                "CAP-B134", f"the Ed25519 public key is not acceptable: {problem}", _NEW_KEY
            )

    @property
    def fingerprint(self) -> str:
        """``SHA256:`` and the unpadded base64 SHA-256 of the OpenSSH key blob."""
        digest = hashlib.sha256(_SSH_PREFIX + self.raw).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    def openssh(self) -> str:
        """Return the line of an OpenSSH ``.pub`` file, with its newline."""
        blob = base64.b64encode(_SSH_PREFIX + self.raw).decode()
        return f"ssh-ed25519 {blob} {self.comment}".rstrip() + "\n"

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Tell whether ``signature`` is this key's pure Ed25519 signature over ``message``."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True


class PrivateKey:
    """A private key: it signs, and knows its public half."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte pure Ed25519 signature over ``message``; always the same one."""
        return self._key.sign(message)


def generate(path: Path, passphrase: str | None = None, comment: str = "") -> PublicKey:
    """Make a new key: ``path`` (private, mode 0600) and ``path.pub`` (public).

    Args:
        path: Where the private key goes.
        passphrase: Encrypts the private key if given.
        comment: Goes into the public file as it is; empty by default, so no name gets out.

    Raises:
        CapsuleError: CAP-B135: one of the files exists, or cannot be written.
    """
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    cipher: pem.KeySerializationEncryption = (
        pem.BestAvailableEncryption(passphrase.encode()) if passphrase else pem.NoEncryption()
    )
    secret = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, cipher)
    public = PublicKey(key.public_key().public_bytes_raw(), " ".join(comment.split()))
    beside = path.with_name(path.name + ".pub")
    for target in (path, beside):
        if os.path.lexists(target):
            raise _key_error("CAP-B135", f"{target} exists already", "Choose another name.")
    try:
        _write_secret(path, secret)
        _write_beside(path, beside, public)
    except OSError as error:
        message = f"cannot write the key {path}: {error.strerror}"
        raise _key_error("CAP-B135", message, "Choose a folder you may write to.") from error
    return public


def load_private(path: Path, passphrase: str | None = None) -> PrivateKey:
    """Read a private key made by :func:`generate` or by ``openssl genpkey``.

    Raises:
        CapsuleError: CAP-B131 (cannot be read), B132 (not such a key), B133 (another type),
            B136 (passphrase missing, needless or wrong), B137 (others may read the file).
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, private=True)
    if b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in data and not passphrase:
        raise _key_error("CAP-B136", f"{path} is encrypted", "Give its passphrase.")
    try:
        key = load_pem_private_key(data, passphrase.encode() if passphrase else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if passphrase:
            fix = "Give the passphrase the key was made with, or none if it has none."
            raise _key_error("CAP-B136", f"cannot decrypt the key {path}", fix) from error
        raise _key_error("CAP-B132", f"{path} is not a PEM private key", _NEW_KEY) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _wrong_type(path, _algorithm(key))
    return PrivateKey(key)


def load_public(path: Path) -> PublicKey:
    """Read a public key: an OpenSSH ``.pub`` line, or SubjectPublicKeyInfo in PEM.

    Raises:
        CapsuleError: CAP-B131 (cannot be read), B132 (not a public key), B133 (another type),
            B134 (a point that must not be trusted).
    """
    data = _read(path, private=False)
    if b"PRIVATE KEY-----" in data:
        fix = "Give the public key, the file that ends in .pub; never pass a private key on."
        raise _key_error("CAP-B132", f"{path} is a private key", fix)
    if data.lstrip().startswith(b"-----BEGIN"):
        return _from_pem(data, path)
    return _from_openssh(data, path)


def _from_pem(data: bytes, path: Path) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _not_public(path) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _wrong_type(path, _algorithm(key))
    return PublicKey(key.public_bytes_raw())


def _from_openssh(data: bytes, path: Path) -> PublicKey:
    try:
        lines = data.decode().strip().splitlines()
        kind, blob, *comment = lines[0].split(maxsplit=2)
    except (ValueError, IndexError) as error:
        raise _not_public(path) from error
    if kind != "ssh-ed25519" and kind.startswith(("ssh-", "ecdsa-", "sk-")):
        raise _wrong_type(path, kind)
    try:
        raw = base64.b64decode(blob, validate=True)
    except ValueError as error:
        raise _not_public(path) from error
    if kind != "ssh-ed25519" or len(lines) != 1 or raw[:-32] != _SSH_PREFIX:
        raise _not_public(path)
    return PublicKey(raw[-32:], comment[0] if comment else "")


def _read(path: Path, *, private: bool) -> bytes:
    """Read a small regular file; a private one must be closed to everybody else."""
    try:
        with open_regular(path) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            data = stream.read(_MAX_FILE + 1)
    except OSError as error:
        message = f"cannot read the key {path}: {error.strerror}"
        raise _key_error("CAP-B131", message, "Give the path of a readable key file.") from error
    if private and mode & 0o077:
        message = f"others may read the private key {path} (mode {mode:04o})"
        raise _key_error("CAP-B137", message, f"chmod 600 {path}")
    if len(data) > _MAX_FILE:
        raise _not_public(path)
    return data


def _write_secret(path: Path, secret: bytes) -> None:
    """Write a file that nobody else may read, and that must be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
        try:
            stream.write(secret)
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            path.unlink()
            raise


def _write_beside(path: Path, beside: Path, public: PublicKey) -> None:
    """Write the public half, or take the private half back."""
    try:
        write_atomic(beside, public.openssh().encode())
    except BaseException:
        path.unlink()
        raise


def _weakness(raw: bytes) -> str | None:
    """Say why an encoded point cannot be trusted as a public key, or return None.

    Signature libraries accept points outside the subgroup of prime order. With one of small order
    a single signature verifies every message; one of mixed order lets verifiers disagree.
    """
    point = _decode(raw)
    if point is None:
        return "not the canonical encoding of a point of the curve"
    if _is_identity(point) or not _is_identity(_multiply(_ORDER, point)):
        return "a point outside the subgroup of prime order"
    return None


def _decode(raw: bytes) -> _Point | None:
    """Decode a point (RFC 8032 section 5.1.3), or return None for a non-canonical encoding."""
    if len(raw) != 32:
        return None
    y = int.from_bytes(raw, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= _PRIME:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _PRIME) % _PRIME
    x = pow(square, (_PRIME + 3) // 8, _PRIME)
    if x * x % _PRIME != square:
        x = x * pow(2, (_PRIME - 1) // 4, _PRIME) % _PRIME
    if x * x % _PRIME != square or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = _PRIME - x
    return x, y, 1, x * y % _PRIME


def _add(first: _Point, second: _Point) -> _Point:
    """Add two points (RFC 8032 section 5.1.4)."""
    x1, y1, z1, t1 = first
    x2, y2, z2, t2 = second
    a = (y1 - x1) * (y2 - x2) % _PRIME
    b = (y1 + x1) * (y2 + x2) % _PRIME
    c = 2 * t1 * t2 * _D % _PRIME
    d = 2 * z1 * z2 % _PRIME
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _PRIME, g * h % _PRIME, f * g % _PRIME, e * h % _PRIME


def _multiply(scalar: int, point: _Point) -> _Point:
    product = _IDENTITY
    while scalar:
        if scalar & 1:
            product = _add(product, point)
        point = _add(point, point)
        scalar >>= 1
    return product


def _is_identity(point: _Point) -> bool:
    x, y, z, _ = point
    return x == 0 and y == z


_NEW_KEY = "Make a key with `capsule keygen`, or give another file."


def _key_error(code: str, message: str, fix: str) -> CapsuleError:
    return CapsuleError(code, message, fix=fix, exit_code=ExitCode.USAGE)


def _not_public(path: Path) -> CapsuleError:
    fix = "Give one key: a line `ssh-ed25519 AAAA…`, or a PEM file with BEGIN PUBLIC KEY."
    return _key_error("CAP-B132", f"{path} is not a public key", fix)


def _algorithm(key: object) -> str:
    """Name a key's algorithm from the name of its class: RSA, DSA, ECDSA, Ed448, X25519."""
    name = type(key).__name__.removesuffix("PrivateKey").removesuffix("PublicKey")
    return "ECDSA" if name == "EC" else name


def _wrong_type(path: Path, kind: str) -> CapsuleError:
    message = f"{path} holds a key of type {kind!a}; bundles are signed with Ed25519 only"
    return _key_error("CAP-B133", message, _NEW_KEY)
