"""The signature algorithms: points that cannot be trusted, and signatures that are not right."""

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle.algorithms import ALGORITHMS, ECDSA_P256, ED25519, KEY_TYPES, P256_ORDER
from capsule.bundle.keys import PublicKey
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.bundle.points import (
    ORDER,
    ORDER_EIGHT,
    P256_POINT,
    P256_ROOT_OF_B,
    P256_WEAK,
    PRIME,
    RFC8032,
    WEAK,
    encoding,
    p256_encoding,
)

OPENSSH = Path(__file__).parent / "vectors" / "openssh"


def affine_sum(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Add points by the affine law of RFC 8032 section 5.1, one inversion each: the oracle."""
    d = -121665 * pow(121666, -1, PRIME) % PRIME
    (x1, y1), (x2, y2) = first, second
    k = d * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + k, -1, PRIME) % PRIME
    y = (y1 * y2 + x1 * x2) * pow(1 - k, -1, PRIME) % PRIME
    return x, y


def point(data: bytes) -> tuple[int, int]:
    """Decode a point by trying both square roots."""
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number % 2**255
    d = -121665 * pow(121666, -1, PRIME) % PRIME
    square = (y * y - 1) * pow(d * y * y + 1, -1, PRIME) % PRIME
    root = pow(square, (PRIME + 3) // 8, PRIME)
    unit = pow(2, (PRIME - 1) // 4, PRIME)
    roots = [r for r in (root, root * unit % PRIME) if r * r % PRIME == square]
    x = roots[0]
    return (x if x & 1 == sign else PRIME - x), y


def test_malleable_and_misshapen_signatures_are_refused():
    _, public, message, good = (bytes.fromhex(part) for part in RFC8032[1])
    key = PublicKey(public)
    plus_order = int.from_bytes(good[32:], "little") + ORDER
    assert key.verify(good, message)
    for bad in (
        good[:32] + plus_order.to_bytes(32, "little"),
        good[:-1],
        good + b"\0",
        b"",
        bytes(64),
        good[32:] + good[:32],
    ):
        assert not key.verify(bad, message)


@pytest.mark.parametrize("name", WEAK)
def test_weak_ed25519_keys_are_refused(name):
    with pytest.raises(CapsuleError) as caught:
        PublicKey(WEAK[name])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B134", ExitCode.USAGE)


def test_why_the_identity_is_refused():
    # Its signature with R = identity and S = 0 holds for every message.
    universal = encoding(1) + bytes(32)
    key = ed25519.Ed25519PublicKey.from_public_bytes(WEAK["identity"])
    for message in (b"yes", b"no"):
        key.verify(universal, message)


@pytest.mark.parametrize("number", range(8))
def test_mixed_order_keys_are_refused(number):
    small = [WEAK[name] for name in WEAK if name.startswith(("identity", "order"))][:8][number]
    x, y = affine_sum(point(bytes.fromhex(RFC8032[0][1])), point(small))
    mixed = encoding(y, x & 1)
    if number == 0:  # the identity adds nothing: the passing twin
        assert PublicKey(mixed).raw.hex() == RFC8032[0][1]
        return
    with pytest.raises(CapsuleError, match="outside the subgroup of prime order"):
        PublicKey(mixed)


def test_the_p256_point_with_x_zero_passes():
    # The twin of "x plus p": the same point in its canonical encoding.
    assert (
        PublicKey(p256_encoding(0, P256_ROOT_OF_B), algorithm=ECDSA_P256).verify(b"", b"") is False
    )


@pytest.mark.parametrize("name", P256_WEAK)
def test_bad_p256_points_are_refused(name):
    with pytest.raises(CapsuleError) as caught:
        PublicKey(P256_WEAK[name], algorithm=ECDSA_P256)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B134", ExitCode.USAGE)


def multiple(number: int, of: tuple[int, int]) -> tuple[int, int]:
    """Multiply a point by addition and doubling, by the affine law."""
    product = (0, 1)
    for bit in f"{number:b}":
        product = affine_sum(product, product)
        product = affine_sum(product, of) if bit == "1" else product
    return product


@settings(max_examples=4)
@given(st.binary(min_size=32, max_size=32))
def test_the_order_of_a_point_decides(seed):
    honest = ed25519.Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    assert multiple(ORDER, point(honest)) == (0, 1)
    assert ED25519.weakness(honest) is None
    x, y = affine_sum(point(honest), point(encoding(ORDER_EIGHT)))
    assert multiple(ORDER, (x, y)) != (0, 1)
    assert ED25519.weakness(encoding(y, x & 1)) == "a point outside the subgroup of prime order"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("identity", "a point outside the subgroup of prime order"),
        ("order 4", "a point outside the subgroup of prime order"),
        ("identity, negative zero", "not the canonical encoding of a point of the curve"),
        ("identity plus p", "not the canonical encoding of a point of the curve"),
        ("not on the curve", "not the canonical encoding of a point of the curve"),
        ("long", "not the canonical encoding of a point of the curve"),
    ],
)
def test_the_weakness_of_an_ed25519_point_is_named(name, reason):
    assert ED25519.weakness(WEAK[name]) == reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("identity, padded", "not an uncompressed point"),
        ("compressed", "not an uncompressed point"),
        ("hybrid", "not an uncompressed point"),
        ("x plus p", "not the canonical encoding of a point of the curve"),
        ("not on the curve", "not a point of the curve"),
    ],
)
def test_the_weakness_of_a_p256_point_is_named(name, reason):
    assert ECDSA_P256.weakness(P256_WEAK[name]) == reason


@settings(max_examples=20)
@given(st.integers(1, P256_ORDER - 1), st.integers(8, 519))
def test_p256_points_are_those_that_openssl_takes(secret, bit):
    """A changed bit of x or y leads off the curve, but for the y of the negative point."""
    key = ec.derive_private_key(secret, ec.SECP256R1()).public_key()
    honest = key.public_bytes(pem.Encoding.X962, pem.PublicFormat.UncompressedPoint)
    changed = (int.from_bytes(honest) ^ 1 << 519 - bit).to_bytes(65)
    for encoded in (honest, changed):
        try:
            ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), encoded)
        except ValueError:
            assert ECDSA_P256.weakness(encoded) is not None
        else:
            assert ECDSA_P256.weakness(encoded) is None


HONEST = {
    ED25519: bytes.fromhex(RFC8032[0][1]),
    ECDSA_P256: P256_POINT,
}


@pytest.mark.parametrize("algorithm", HONEST, ids=lambda each: each.name)
@given(signature=st.binary(max_size=80), message=st.binary(max_size=8))
def test_noise_is_a_wrong_signature_and_no_error(algorithm, signature, message):
    assert algorithm.verify(HONEST[algorithm], signature, message) is False


@pytest.mark.parametrize(
    ("s", "canonical"),
    [(1, True), (P256_ORDER // 2, True), (P256_ORDER // 2 + 1, False), (P256_ORDER - 1, False)],
)
def test_the_smaller_of_two_numbers_is_canonical(s, canonical):
    assert ECDSA_P256.is_canonical(encode_dss_signature(1, s)) is canonical


@pytest.mark.parametrize("algorithm", HONEST, ids=lambda each: each.name)
def test_keys_are_encoded_as_by_the_library(algorithm):
    point = HONEST[algorithm]
    key = (
        ed25519.Ed25519PublicKey.from_public_bytes(point)
        if algorithm is ED25519
        else ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
    )
    line = key.public_bytes(pem.Encoding.OpenSSH, pem.PublicFormat.OpenSSH).decode()
    kind, blob = line.split()
    assert kind == algorithm.key_type
    assert base64.b64decode(blob) == algorithm.blob_prefix + point
    assert len(point) == algorithm.point_size


@pytest.mark.parametrize("path", sorted(OPENSSH.glob("*.pub")), ids=lambda path: path.name)
def test_keys_are_encoded_as_by_openssh(path):
    kind, blob = path.read_text().split()[:2]
    (algorithm,) = (each for each in ALGORITHMS if each.key_type == kind)
    data = base64.b64decode(blob)
    assert data.startswith(algorithm.blob_prefix)
    rest = data.removeprefix(algorithm.blob_prefix)
    assert algorithm.weakness(rest[: algorithm.point_size]) is None
    # Only the keys of tokens have something after the point: the name of an application.
    assert (len(rest) > algorithm.point_size) is algorithm.of_token is path.stem.endswith("_sk")
    assert algorithm.is_ecdsa is ("ecdsa" in path.stem)


def test_a_type_of_keys_has_one_algorithm():
    assert len(set(KEY_TYPES)) == len(KEY_TYPES) == len({each.name for each in ALGORITHMS}) == 4
