"""Signing keys of two types, Ed25519 and ECDSA P-256, in files that OpenSSH and OpenSSL read.

A private key is PKCS#8 in PEM (RFC 5958), or in OpenSSH's own format (PROTOCOL.key); a public key
is one line in OpenSSH's form (RFC 8709 section 4, RFC 5656 section 3.1). Keys are known by their
OpenSSH fingerprint, the one that ``ssh-keygen -lf`` prints.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from capsule.bundle.algorithms import (
    ALGORITHMS,
    ECDSA_P256,
    ED25519,
    KEY_TYPES,
    P256_ORDER,
    Algorithm,
)
from capsule.experiment.files import HAVE_OWNERS, open_regular
from capsule.host.errors import CapsuleError, coded
from capsule.host.outputs import write_new

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ENCRYPTED = "CAP-B138"  # a passphrase is needed, and none was given
_MAX_FILE = 1 << 16  # bytes; a key file has some hundreds
_MAX_PASSPHRASE = 1023  # bytes; OpenSSL reads no longer one


@dataclass(frozen=True)
class PublicKey:
    """A public key that passed the enrolment checks.

    Attributes:
        raw: The encoded point: 32 bytes (RFC 8032 section 5.1.2), or 65 (SEC 1 section 2.3.3).
        comment: The unsigned comment of the key's file.
        algorithm: The only algorithm with which this key verifies anything.
        application: What a FIDO token made the key for, ``ssh:`` as a rule; else empty.
    """

    raw: bytes
    comment: str = field(default="", compare=False)
    algorithm: Algorithm = ED25519
    application: bytes = b""

    def __post_init__(self) -> None:
        """Reject a point with which signatures prove nothing.

        Raises:
            CapsuleError: CAP-B134.
        """
        if (problem := self.algorithm.weakness(self.raw)) is not None:
            name = self.algorithm.name
            raise CapsuleError(
                "CAP-B134", f"the {name} public key is not acceptable: {problem}", fix=_NEW_KEY
            )

    @classmethod
    def from_blob(cls, blob: bytes, comment: str = "") -> PublicKey:
        """Read an OpenSSH key blob (RFC 4253 section 6.6).

        Raises:
            ValueError: Not a key of a type in use.
            CapsuleError: CAP-B134, a point that must not be trusted.
        """
        for algorithm in ALGORITHMS:
            start = len(algorithm.blob_prefix)
            end = start + algorithm.point_size
            if blob.startswith(algorithm.blob_prefix) and len(blob) >= end:
                # Encoded again and compared: behind the point there may be nothing, or a token's
                # application with its true length.
                key = cls(blob[start:end], comment, algorithm, blob[end + 4 :])
                if key.blob == blob:
                    return key
        raise ValueError("not an Ed25519 or ECDSA P-256 key")

    @property
    def blob(self) -> bytes:
        """The OpenSSH key blob."""
        blob = self.algorithm.blob_prefix + self.raw
        if self.algorithm.of_token:
            blob += len(self.application).to_bytes(4) + self.application
        return blob

    @property
    def fingerprint(self) -> str:
        """``SHA256:`` and the unpadded base64 SHA-256 of the OpenSSH key blob."""
        return fingerprint(self.blob)

    def openssh(self) -> str:
        """Return the line of an OpenSSH ``.pub`` file, with its newline."""
        blob = base64.b64encode(self.blob).decode()
        return f"{self.algorithm.key_type} {blob} {self.comment}".rstrip() + "\n"

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Tell whether ``signature`` is this key's over ``message``.

        Pure Ed25519 in 64 bytes, or ECDSA with SHA-256 in DER; of the latter there are always two.
        A token signs no message as it is: see :mod:`sshsig`.
        """
        return not self.algorithm.of_token and self.algorithm.verify(self.raw, signature, message)


class PrivateKey:
    """A private key: it signs, and knows its public half."""

    def __init__(self, key: Ed25519PrivateKey | EllipticCurvePrivateKey) -> None:
        """Take a key of the ``cryptography`` package.

        Raises:
            TypeError: A key of another type, which it names.
        """
        self._key = key
        self.public = _public_half(key.public_key())

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``; always the same one.

        64 bytes of pure Ed25519, or ECDSA in DER with the nonce of RFC 6979 and the smaller s.
        """
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.asymmetric.utils import (
            decode_dss_signature,
            encode_dss_signature,
        )
        from cryptography.hazmat.primitives.hashes import SHA256

        if not isinstance(self._key, ec.EllipticCurvePrivateKey):
            return self._key.sign(message)
        signature = self._key.sign(message, ec.ECDSA(SHA256(), deterministic_signing=True))
        r, s = decode_dss_signature(signature)
        # OpenSSL gives either s, but an envelope is accepted with the smaller one only.
        return encode_dss_signature(r, min(s, P256_ORDER - s))


def fingerprint(blob: bytes) -> str:
    """Return OpenSSH's name for a key: ``SHA256:`` and the unpadded base64 SHA-256 of its blob."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def generate(
    path: Path,
    passphrase: str | None = None,
    comment: str = "",
    algorithm: Literal["ed25519", "ecdsa-p256"] = "ed25519",
) -> PublicKey:
    """Make a new key: ``path`` (private, mode 0600) and ``path.pub`` (public).

    Args:
        path: Where the private key goes.
        passphrase: Encrypts the private key if given.
        comment: Goes into the public file as it is; empty by default, so no name gets out.
        algorithm: What the key signs with.

    Raises:
        CapsuleError: CAP-B135: one of the files exists, or cannot be written, or the name is empty;
            CAP-B139: the passphrase is too long.
    """
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if not path.name:
        fix = "Give the name of a file."
        raise CapsuleError("CAP-B135", f"{str(path)!r} is not the name of a file", fix=fix)
    if passphrase is not None and len(passphrase.encode()) > _MAX_PASSPHRASE:
        raise CapsuleError(
            "CAP-B139",
            f"the passphrase has {len(passphrase.encode()):,} bytes",
            fix=f"Choose one of at most {_MAX_PASSPHRASE:,} bytes.",
        )
    key = (
        ed25519.Ed25519PrivateKey.generate()
        if algorithm == "ed25519"
        else ec.generate_private_key(ec.SECP256R1())
    )
    cipher: pem.KeySerializationEncryption = (
        pem.BestAvailableEncryption(passphrase.encode()) if passphrase else pem.NoEncryption()
    )
    secret = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, cipher)
    # A line break in the comment would end the one line of the public file.
    public = replace(_public_half(key.public_key()), comment=" ".join(comment.split()))
    beside = path.with_name(path.name + ".pub")
    _require_free(path, beside)
    fix = "Free disk space, or choose another name, in a folder that you may write to."
    with coded("CAP-B135", f"cannot write the key {path}", fix=fix):
        _write_secret(path, secret)
        _write_beside(path, beside, public)
    return public


def _require_free(path: Path, beside: Path) -> None:
    """Reject a new key whose files exist, if only one of them.

    Raises:
        CapsuleError: CAP-B135.
    """
    # lexists, because a dangling link takes the name, too.
    for target in (path, beside):
        if os.path.lexists(target):
            fix = "Choose another name, or move the old pair of keys to another folder."
            if target == path and path.is_file() and not os.path.lexists(beside):
                fix += (
                    f" If {path} is your key and only {beside} is missing: "
                    f"{shlex.join(['openssl', 'pkey', '-in', str(path), '-pubout'])} "
                    f"> {shlex.quote(str(beside))}"
                )
            raise CapsuleError("CAP-B135", f"{target} exists already", fix=fix)


def load_private(path: Path, passphrase: str | None = None) -> PrivateKey:
    """Read a private key made by :func:`generate`, ``openssl genpkey`` or ``ssh-keygen``.

    Raises:
        CapsuleError: CAP-B131 (cannot be read), B132 (not such a key), B133 (another type),
            B136 (passphrase needless or wrong), B137 (others may read the file), B138 (passphrase
            missing).
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as pem

    data = _read(path, private=True)
    openssh = b"-----BEGIN OPENSSH PRIVATE KEY-----" in data
    load = pem.load_ssh_private_key if openssh else pem.load_pem_private_key
    try:
        key = load(data, passphrase.encode() if passphrase else None)
    except TypeError as error:  # the passphrase is missing, or needless
        if openssh and not passphrase:
            raise _in_openssh_format(path) from error
        if passphrase:
            raise _undecipherable(path) from error
        raise CapsuleError(ENCRYPTED, f"the key {path} has a passphrase", fix=_UNLOCK) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        if openssh and isinstance(error, UnsupportedAlgorithm):
            if _OPENSSH_UNENCRYPTED in data:
                raise _of_openssh_alone(path) from error
            # To decrypt OpenSSH's format, cryptography needs the package bcrypt, on which Capsule
            # does not depend.
            raise _in_openssh_format(path) from error
        if passphrase:
            raise _undecipherable(path) from error
        raise _not_private(path) from error
    try:
        return PrivateKey(key)  # type: ignore[arg-type]  # the constructor looks at the type
    except TypeError as error:
        raise _wrong_type(path, str(error)) from error


def _in_openssh_format(path: Path) -> CapsuleError:
    """Return the error of a key that needs a key derivation which Capsule does not have."""
    return CapsuleError(
        "CAP-B136",
        f"the key {path} has a passphrase and OpenSSH's format, which is not supported",
        fix="Let ssh-keygen sign with it (--ssh-key), or convert a copy: ssh-keygen -p -m PKCS8.",
    )


def _of_openssh_alone(path: Path) -> CapsuleError:
    """Return the error of a key with which only OpenSSH can sign."""
    return CapsuleError(
        "CAP-B133",
        f"the key {path} is of a type that only OpenSSH can use, such as that of a FIDO token",
        fix="Let ssh-keygen sign with it (--ssh-key).",
    )


def read_passphrase(path: Path) -> str:
    """Return the first line of a file, a pipe included, without its newline.

    Raises:
        CapsuleError: CAP-B131 (cannot be read), B137 (others may read the file), B139 (it holds no
            passphrase).
    """
    what, fix = f"cannot read the passphrase in {path}", "Give the path of a readable file."
    # Not open_regular: a pipe is of use here, as in ``--passphrase-file <(pass show key)``.
    with coded("CAP-B131", what, fix=fix), path.open("rb") as stream:
        facts = os.fstat(stream.fileno())
        line = stream.readline(_MAX_FILE)
    mode = stat.S_IMODE(facts.st_mode)
    # The descriptor's mode, since the path may lead elsewhere by now. A pipe's mode says nothing,
    # nor does any on Windows.
    if HAVE_OWNERS and stat.S_ISREG(facts.st_mode) and mode & 0o077:
        message = f"other users may read the passphrase in {path} (mode {mode:04o})"
        raise CapsuleError("CAP-B137", message, fix=f"Run: chmod 600 {path}")
    try:
        passphrase = line.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as error:
        raise _no_passphrase(path) from error
    if not passphrase:
        raise _no_passphrase(path)
    return passphrase


def load_public(path: Path) -> PublicKey:
    """Read a public key: an OpenSSH ``.pub`` line, or SubjectPublicKeyInfo in PEM.

    Raises:
        CapsuleError: CAP-B131 (cannot be read), B132 (not a public key), B133 (another type),
            B134 (a point that must not be trusted).
    """
    data = _read(path, private=False)
    if b"PRIVATE KEY-----" in data:
        fix = "Give the public key, whose file name ends in .pub. Never give a private key away."
        raise CapsuleError("CAP-B132", f"{path} is a private key", fix=fix)
    if data.lstrip().startswith(b"-----BEGIN"):
        return _from_pem(data, path)
    return _from_openssh(data, path)


def _from_pem(data: bytes, path: Path) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _not_public(path) from error
    try:
        return _public_half(key)
    except TypeError as error:
        raise _wrong_type(path, str(error)) from error


def _from_openssh(data: bytes, path: Path) -> PublicKey:
    try:
        (line,) = data.decode().strip().splitlines()
        kind = line.split()[0]
        if kind not in KEY_TYPES and kind.startswith(("ssh-", "ecdsa-", "sk-")):
            raise _wrong_type(path, kind)
        return parse_openssh(line)
    except ValueError as error:
        raise _not_public(path) from error


def parse_openssh(line: str) -> PublicKey:
    """Read the line of an OpenSSH ``.pub`` file: type, base64 blob, and perhaps a comment.

    Raises:
        ValueError: Not such a line, or a key of another type.
        CapsuleError: CAP-B134, a point that must not be trusted.
    """
    comment = line.split(maxsplit=2)[2:]
    return PublicKey.from_blob(openssh_blob(line), " ".join(comment).strip())


def openssh_blob(line: str) -> bytes:
    """Return the key blob of a line of OpenSSH's, whatever the type of the key.

    Raises:
        ValueError: Not such a line.
    """
    kind, text, *_ = line.split(maxsplit=2)
    blob = base64.b64decode(text, validate=True)
    if base64.b64encode(blob).decode() != text:
        raise ValueError("not the canonical base64 form of a key")
    # The type stands there twice. A fingerprint is of the blob alone, so the word in front could
    # lie.
    if blob[4 : 4 + int.from_bytes(blob[:4])] != kind.encode():
        raise ValueError("the key is not of the type in front of it")
    return blob


def _public_half(key: object) -> PublicKey:
    """Enrol a public key of the ``cryptography`` package; TypeError names any other type."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if isinstance(key, ed25519.Ed25519PublicKey):
        return PublicKey(key.public_bytes_raw())
    if isinstance(key, ec.EllipticCurvePublicKey):
        if not isinstance(key.curve, ec.SECP256R1):
            raise TypeError(f"ECDSA on {key.curve.name}")
        point = key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        return PublicKey(point, algorithm=ECDSA_P256)
    # RSA, DSA, Ed448, X25519: the class is called after the algorithm.
    raise TypeError(type(key).__name__.removesuffix("PublicKey"))


def _read(path: Path, *, private: bool) -> bytes:
    """Read a small regular file; a private one must be closed to everybody else.

    Modes do not say that on Windows, where the file has the access control list of its folder.
    """
    fix = "Give the path of a readable key file, or make a key: capsule keygen FILE"
    with coded("CAP-B131", f"cannot read the key {path}", fix=fix), open_regular(path) as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        data = stream.read(_MAX_FILE + 1)
    if private and not data:
        fix = f"Delete it, and make a key: {shlex.join(['capsule', 'keygen', str(path)])}"
        raise CapsuleError("CAP-B132", f"the key {path} is empty", fix=fix)
    # This comes before the mode, because chmod would not make a public key one that can sign.
    if private and (b"PUBLIC KEY-----" in data or data.startswith(_OPENSSH_PUBLIC)):
        likely = f"; its file is probably {path.with_suffix('')}" if path.suffix == ".pub" else ""
        fix = f"Give the private key{likely}."
        raise CapsuleError("CAP-B132", f"{path} is a public key, which cannot sign", fix=fix)
    if private and HAVE_OWNERS and mode & 0o077:
        message = f"other users may read the private key {path} (mode {mode:04o})"
        raise CapsuleError("CAP-B137", message, fix=f"Run: chmod 600 {path}")
    if len(data) > _MAX_FILE:
        raise _not_private(path) if private else _not_public(path)
    return data


_OPENSSH_PUBLIC = tuple(f"{kind} ".encode() for kind in KEY_TYPES)
# The beginning of a private key in OpenSSH's format: a magic, and the cipher "none".
_OPENSSH_UNENCRYPTED = base64.b64encode(b"openssh-key-v1\0" + b"\0\0\0\4no")


def _write_secret(path: Path, secret: bytes) -> None:
    """Write a new file that only its owner may read.

    Folders that are missing are made for the owner alone, whatever the umask.
    """
    # mkdir(parents=True) would give all folders but the last the default mode.
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    # The file has its mode from the start. With a chmod afterwards, others could open it before.
    write_new(path, secret, mode=0o600)


def _write_beside(path: Path, beside: Path, public: PublicKey) -> None:
    """Write the public half, or take the private half back."""
    line = public.openssh().encode()
    try:
        write_new(beside, line)
    except BaseException as error:
        # A command that already signs with the new key may have written its public half.
        if isinstance(error, FileExistsError) and beside.read_bytes() == line:
            return
        path.unlink()
        raise


_NEW_KEY = "Make a key with `capsule keygen`, or give another file."
_UNLOCK = (
    "Run the command on a terminal, which asks for the passphrase, or pass --passphrase-file FILE."
)


def _no_passphrase(path: Path) -> CapsuleError:
    fix = "Write the passphrase into the first line of the file, in UTF-8."
    return CapsuleError("CAP-B139", f"{path} contains no passphrase", fix=fix)


def _undecipherable(path: Path) -> CapsuleError:
    fix = "Give the passphrase of the key, or none if the key has none."
    return CapsuleError("CAP-B136", f"cannot decrypt the key {path}", fix=fix)


def _not_private(path: Path) -> CapsuleError:
    return CapsuleError("CAP-B132", f"{path} is not a private key", fix=_NEW_KEY)


def _not_public(path: Path) -> CapsuleError:
    fix = "Give one key: a line `ssh-ed25519 AAAA…`, or a PEM file with BEGIN PUBLIC KEY."
    return CapsuleError("CAP-B132", f"{path} is not a public key", fix=fix)


def _wrong_type(path: Path, kind: str) -> CapsuleError:
    message = f"{path} contains a key of type {kind!a}; only Ed25519 and ECDSA P-256 are supported"
    return CapsuleError("CAP-B133", message, fix=_NEW_KEY)
