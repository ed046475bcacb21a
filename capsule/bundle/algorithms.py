"""The two signature algorithms: Ed25519, and ECDSA on P-256 with SHA-256.

Which of the two is used follows from the type of the key, and from nothing that a signature or an
envelope says. Encoded points are checked before they are trusted: the libraries accept more than
can be relied on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Name = Literal["ed25519", "ecdsa-p256", "ed25519-token", "ecdsa-p256-token"]


@dataclass(frozen=True)
class Algorithm:
    """A signature algorithm.

    Attributes:
        name: What people call it.
        key_type: Type of its keys in OpenSSH's files.
        blob_prefix: What precedes the encoded point in an OpenSSH key blob.
        point_size: Bytes of an encoded point.
        weakness: Says why an encoded point cannot be trusted as a public key, or returns None.
        verify: Tells whether a signature is right, given encoded point, signature and message.
        is_canonical: Tells whether a right signature is the one spelling that Capsule writes.
        of_token: Whether its keys are in FIDO tokens, which sign in OpenSSH's way only.
    """

    name: Name
    key_type: str
    blob_prefix: bytes
    point_size: int
    weakness: Callable[[bytes], str | None]
    verify: Callable[[bytes, bytes, bytes], bool]
    is_canonical: Callable[[bytes], bool]
    of_token: bool = False

    @property
    def is_ecdsa(self) -> bool:
        """Whether signatures are two numbers, which OpenSSH encodes in a way of its own."""
        return self.verify is _verify_p256


# Ed25519 (RFC 8032): 32-byte points, 64-byte signatures, no prehash and no context.

_PRIME = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME

_Point = tuple[int, int, int, int]  # extended homogeneous coordinates (X, Y, Z, T)
_IDENTITY: _Point = (0, 1, 1, 0)


def _verify_ed25519(raw: bytes, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _ed25519_weakness(raw: bytes) -> str | None:
    """Return why an encoded point cannot be trusted as a public key, or None.

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
    # -1 is a square modulo p and d is not, so the denominator is never 0 and pow() finds its
    # inverse.
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
    # The time this takes depends on the scalar, which does no harm: nothing secret is multiplied.
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


# ECDSA on P-256 with SHA-256 (FIPS 186-5): uncompressed points of 65 bytes (SEC 1 section 2.3.3),
# signatures as DER of two integers (RFC 3279 section 2.2.3), which is what DSSE and OpenSSL use.

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_P256_PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
_P256_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B


def _verify_p256(raw: bytes, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    # This raises nothing: PublicKey has rejected every point that is not on the curve.
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), raw)
    try:
        key.verify(signature, message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def _p256_weakness(raw: bytes) -> str | None:
    """Return why an encoded point cannot be trusted as a public key, or None.

    The group has prime order, so every point of the curve but the identity is sound; the identity
    has no uncompressed encoding.
    """
    if len(raw) != 65 or raw[0] != 4:
        return "not an uncompressed point"
    x, y = int.from_bytes(raw[1:33]), int.from_bytes(raw[33:])
    if x >= _P256_PRIME or y >= _P256_PRIME:
        return "not the canonical encoding of a point of the curve"
    if (y * y - (x * x * x - 3 * x + _P256_B)) % _P256_PRIME:
        return "not a point of the curve"
    return None


def _is_low(signature: bytes) -> bool:
    """Tell whether a signature (r, s) has the smaller s: (r, n - s) is valid for the message, too.

    Anyone can turn one into the other. Capsule writes the one with the smaller s.
    """
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    return decode_dss_signature(signature)[1] <= P256_ORDER // 2


ED25519 = Algorithm(
    name="ed25519",
    key_type="ssh-ed25519",
    blob_prefix=b"\0\0\0\x0bssh-ed25519\0\0\0\x20",
    point_size=32,
    weakness=_ed25519_weakness,
    verify=_verify_ed25519,
    is_canonical=lambda _: True,  # verification rejects an s that is not reduced
)
ECDSA_P256 = Algorithm(
    name="ecdsa-p256",
    key_type="ecdsa-sha2-nistp256",
    blob_prefix=b"\0\0\0\x13ecdsa-sha2-nistp256\0\0\0\x08nistp256\0\0\0\x41",
    point_size=65,
    weakness=_p256_weakness,
    verify=_verify_p256,
    is_canonical=_is_low,
)
# The same with keys in FIDO tokens (PROTOCOL.u2f). In their blobs the name of an application
# follows the point.
ED25519_TOKEN = replace(
    ED25519,
    name="ed25519-token",
    key_type="sk-ssh-ed25519@openssh.com",
    blob_prefix=b"\0\0\0\x1ask-ssh-ed25519@openssh.com\0\0\0\x20",
    of_token=True,
)
ECDSA_P256_TOKEN = replace(
    ECDSA_P256,
    name="ecdsa-p256-token",
    key_type="sk-ecdsa-sha2-nistp256@openssh.com",
    blob_prefix=b"\0\0\0\x22sk-ecdsa-sha2-nistp256@openssh.com\0\0\0\x08nistp256\0\0\0\x41",
    of_token=True,
)
ALGORITHMS = (ED25519, ECDSA_P256, ED25519_TOKEN, ECDSA_P256_TOKEN)
KEY_TYPES = tuple(algorithm.key_type for algorithm in ALGORITHMS)
