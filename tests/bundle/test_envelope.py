import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256

from capsule.bundle.algorithms import P256_ORDER
from capsule.bundle.envelope import (
    PAYLOAD_TYPE,
    BundleStatement,
    examine,
    pre_authentication_encoding,
    sign,
)
from capsule.bundle.keys import PrivateKey
from capsule.bundle.manifest import Manifest, parse_document
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode

ZERO = "0" * 64
FILE = {
    "path": "claims.json",
    "size": 1,
    "sha256": ZERO,
    "role": "claims",
    "mediaType": "application/json",
}
MANIFEST = parse_document(
    canonical_json(
        {
            "schema": "capsule/bundle/v1",
            "claimId": ZERO,
            "files": [FILE],
            "signatures": ["dsse"],
        }
    ),
    Manifest,
    "manifest.json",
    "CAP-B111",
)
STATEMENT = BundleStatement.about(MANIFEST)


@pytest.fixture
def signed(alice) -> bytes:
    return sign(STATEMENT, alice)


def edited(data: bytes, *path: Any, value: Any) -> bytes:
    """Set a field of an envelope, leaving its signature as it was."""
    document = json.loads(data)
    node = document
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return canonical_json(document)


def signing(payload: bytes, key, kind: str = PAYLOAD_TYPE) -> bytes:
    """Sign any payload under any type: what a careless or hostile holder of the key may do."""
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    return enveloped(payload, key.sign(message), key.public.fingerprint, kind)


def enveloped(payload: bytes, signature: bytes, hint: str, kind: str = PAYLOAD_TYPE) -> bytes:
    encode = lambda data: base64.b64encode(data).decode()  # noqa: E731
    return canonical_json(
        {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {"publicKey": {"hint": hint}},
            "dsseEnvelope": {
                "payload": encode(payload),
                "payloadType": kind,
                "signatures": [{"keyid": hint, "sig": encode(signature)}],
            },
        }
    )


def payload_of(data: bytes) -> bytes:
    return base64.b64decode(json.loads(data)["dsseEnvelope"]["payload"])


def refused(data: bytes, keys, code: str) -> CapsuleError:
    with pytest.raises(CapsuleError) as caught:
        examine(data, keys)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.TAMPERED)
    assert caught.value.message.isprintable()
    return caught.value


def test_what_was_signed_is_read(signed, alice, mallory):
    for keys in ([alice.public], [mallory.public, alice.public]):
        found = examine(signed, keys)
        assert found == (STATEMENT, ("dsse", alice.public.fingerprint, alice.public))


def test_equal_statements_give_equal_bytes(alice):
    assert sign(STATEMENT, alice) == sign(STATEMENT, alice)


def test_the_forging_helpers_make_what_sign_makes(signed, alice):
    assert signing(payload_of(signed), alice) == signed
    assert edited(signed, "dsseEnvelope", "payloadType", value=PAYLOAD_TYPE) == signed


def test_the_encoding_of_the_specification():
    assert pre_authentication_encoding(b"hello") == (
        b"DSSEv1 28 application/vnd.in-toto+json 5 hello"
    )


@pytest.mark.parametrize("given", [0, 1])
def test_an_unknown_signer_is_no_signer(signed, mallory, alice, given):
    _, signature = examine(signed, [mallory.public][:given])
    assert signature.key is None
    assert signature.fingerprint == alice.public.fingerprint


SHAPES = {
    # case 1
    "no signature": lambda e: edited(e, "dsseEnvelope", "signatures", value=[]),
    "two signatures": lambda e: edited(
        e, "dsseEnvelope", "signatures", value=json.loads(e)["dsseEnvelope"]["signatures"] * 2
    ),
    # case 2
    "other payload type": lambda e: edited(e, "dsseEnvelope", "payloadType", value="text/plain"),
    "payload type left out": lambda e: dropped(e, "dsseEnvelope", "payloadType"),
    # cases 5 and 6
    "certificate": lambda e: edited(
        e, "verificationMaterial", value={"certificate": {"rawBytes": "AAAA"}}
    ),
    "certificate beside the key": lambda e: edited(
        e, "verificationMaterial", "certificate", value={"rawBytes": "AAAA"}
    ),
    "raw key": lambda e: edited(e, "verificationMaterial", "publicKey", "rawBytes", value="AA"),
    "log entries": lambda e: edited(e, "verificationMaterial", "tlogEntries", value=[]),
    "no hint": lambda e: edited(e, "verificationMaterial", "publicKey", value={}),
    "null hint": lambda e: edited(e, "verificationMaterial", "publicKey", "hint", value=None),
    "missing keyid": lambda e: dropped(e, "dsseEnvelope", "signatures", 0, "keyid"),
    "null keyid": lambda e: edited(e, "dsseEnvelope", "signatures", 0, "keyid", value=None),
    "empty keyid": lambda e: edited(e, "dsseEnvelope", "signatures", 0, "keyid", value=""),
    "other keyid": lambda e: edited(
        e, "dsseEnvelope", "signatures", 0, "keyid", value="SHA256:" + "A" * 43
    ),
    "other hint": lambda e: edited(
        e, "verificationMaterial", "publicKey", "hint", value="SHA256:" + "A" * 43
    ),
    # case 9
    "padding left out": lambda e: resigned(e, lambda text: text.rstrip("=")),
    "more padding": lambda e: resigned(e, lambda text: text + "===="),
    "line break": lambda e: resigned(e, lambda text: text[:8] + "\n" + text[8:]),
    "white space": lambda e: resigned(e, lambda text: text + " "),
    "trailing bits": lambda e: resigned(e, lambda text: text[:-3] + chr(ord(text[-3]) + 1) + "=="),
    "URL alphabet": lambda e: resigned(e, lambda text: "-" + text[1:]),
    "not ASCII": lambda e: resigned(e, lambda text: "é" + text[1:]),
    # versions and closed fields
    "other bundle version": lambda e: edited(
        e, "mediaType", value="application/vnd.dev.sigstore.bundle.v0.2+json"
    ),
    "no bundle version": lambda e: dropped(e, "mediaType"),
    "message signature": lambda e: edited(e, "messageSignature", value={}),
    "unknown field": lambda e: edited(e, "note", value=1),
    # case 15
    "duplicate key": lambda e: e.replace(b'"mediaType"', b'"mediaType":"x","mediaType"', 1),
    "white space in JSON": lambda e: e + b"\n",
    "depth bomb": lambda _: b"[" * 100_000,
    "digit bomb": lambda _: b"1" * 100_000,
    "nothing": lambda _: b"",
    "null": lambda _: b"null",
}


def dropped(data: bytes, *path: Any) -> bytes:
    document = json.loads(data)
    node = document
    for step in path[:-1]:
        node = node[step]
    del node[path[-1]]
    return canonical_json(document)


def resigned(data: bytes, spell) -> bytes:
    text = json.loads(data)["dsseEnvelope"]["signatures"][0]["sig"]
    return edited(data, "dsseEnvelope", "signatures", 0, "sig", value=spell(text))


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_envelopes_of_another_shape_are_refused(name, trusted, signed, alice):
    evil = SHAPES[name](signed)
    assert evil != signed
    refused(evil, [alice.public] if trusted else [], "CAP-B121")


def test_a_changed_payload_is_refused(signed, alice):
    payload = payload_of(signed)
    changed = base64.b64encode(payload.replace(b"0000", b"0001", 1)).decode()
    refused(edited(signed, "dsseEnvelope", "payload", value=changed), [alice.public], "CAP-B122")


def test_a_signature_by_another_key_under_a_trusted_name_is_refused(signed, alice, mallory):
    message = pre_authentication_encoding(payload_of(signed))
    forged = enveloped(payload_of(signed), mallory.sign(message), alice.public.fingerprint)
    refused(forged, [alice.public], "CAP-B122")


def test_a_trusted_signature_under_another_name_is_refused(signed, alice, mallory):
    message = pre_authentication_encoding(payload_of(signed))
    signature = alice.sign(message)
    forged = enveloped(payload_of(signed), signature, mallory.public.fingerprint)
    refused(forged, [alice.public], "CAP-B123")
    refused(forged, [alice.public, mallory.public], "CAP-B123")
    assert enveloped(payload_of(signed), signature, alice.public.fingerprint) == signed


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "plus order"])
def test_signatures_of_another_length_or_value_are_refused(change, signed, alice):
    raw = alice.sign(pre_authentication_encoding(payload_of(signed)))
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = int.from_bytes(raw[32:], "little") + order
    bad = {
        "cut": raw[:-1],
        "longer": raw + b"\0",
        "empty": b"",
        "plus order": raw[:32] + scalar.to_bytes(32, "little"),
    }[change]
    forged = enveloped(payload_of(signed), bad, alice.public.fingerprint)
    refused(forged, [alice.public], "CAP-B122")


def test_other_algorithms_under_an_ed25519_name_are_refused(signed, alice):
    message = pre_authentication_encoding(payload_of(signed))
    ecdsa = ec.generate_private_key(ec.SECP256R1()).sign(message, ec.ECDSA(SHA256()))
    forged = enveloped(payload_of(signed), ecdsa, alice.public.fingerprint)
    refused(forged, [alice.public], "CAP-B122")


def test_a_signature_over_the_bare_payload_is_refused(signed, alice):
    payload = payload_of(signed)
    forged = enveloped(payload, alice.sign(payload), alice.public.fingerprint)
    refused(forged, [alice.public], "CAP-B122")


def test_a_signature_over_another_type_is_refused(signed, alice):
    payload = payload_of(signed)
    plain = signing(payload, alice, "text/plain")
    refused(plain, [alice.public], "CAP-B121")
    relabelled = edited(plain, "dsseEnvelope", "payloadType", value=PAYLOAD_TYPE)
    refused(relabelled, [alice.public], "CAP-B122")


def statement(**changes: Any) -> bytes:
    document = STATEMENT.model_dump(mode="json", by_alias=True)
    return canonical_json({**document, **changes})


SUBJECTS = STATEMENT.model_dump(mode="json", by_alias=True)["subject"]
STATEMENTS = {
    # CVE-2026-39395: the signature is right, and the payload still no statement of this kind.
    "other statement type": statement(_type="https://in-toto.io/Statement/v0.1"),
    "other predicate type": statement(predicateType="https://slsa.dev/provenance/v1"),
    "predicate type with a slash": statement(predicateType="https://capsule-rl.dev/run/v1/"),
    "other predicate schema": statement(predicate={"schema": "capsule/run/v2", "claimId": ZERO}),
    "no claim id": statement(predicate={"schema": "capsule/run/v1"}),
    "predicate without schema": statement(predicate={"claimId": ZERO}),
    "null predicate": statement(predicate=None),
    "no subject": statement(subject=[]),
    "one subject": statement(subject=SUBJECTS[:1]),
    "one subject twice": statement(subject=SUBJECTS[:1] * 2),
    "other order": statement(subject=SUBJECTS[::-1]),
    "three subjects": statement(subject=[*SUBJECTS, SUBJECTS[0]]),
    "other digest algorithm": statement(
        subject=[{**SUBJECTS[0], "digest": {"sha1": "0" * 40}}, SUBJECTS[1]]
    ),
    "more digests": statement(
        subject=[{**SUBJECTS[0], "digest": {"sha256": ZERO, "md5": "0"}}, SUBJECTS[1]]
    ),
    "upper-case digest": statement(
        subject=[{**SUBJECTS[0], "digest": {"sha256": "A" * 64}}, SUBJECTS[1]]
    ),
    "unknown field": statement(note=1),
    "type left out": canonical_json(
        {key: value for key, value in json.loads(statement()).items() if key != "_type"}
    ),
    "white space": statement() + b" ",
    "duplicate key": statement().replace(b'"_type"', b'"_type":"x","_type"', 1),
    "not JSON": b"hello",
    "nothing": b"",
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_signed_payloads_that_are_no_statement_of_ours_are_refused(name, alice):
    assert examine(signing(statement(), alice), [alice.public])[0] == STATEMENT
    refused(signing(STATEMENTS[name], alice), [alice.public], "CAP-B124")


# The second algorithm (cases 9 and 10)


@pytest.fixture(scope="module")
def p256() -> PrivateKey:
    return PrivateKey(ec.derive_private_key(7, ec.SECP256R1()))


def test_a_p256_key_signs_as_well_and_always_the_same(p256, alice):
    signed = sign(STATEMENT, p256)
    assert sign(STATEMENT, p256) == signed
    found, signature = examine(signed, [alice.public, p256.public])
    assert (signature.key, found) == (p256.public, STATEMENT)
    refused(edited(signed, "dsseEnvelope", "payload", value="AAAA"), [p256.public], "CAP-B122")


def test_the_other_spelling_of_an_ecdsa_signature_is_refused(p256):
    payload = payload_of(sign(STATEMENT, p256))
    message = pre_authentication_encoding(payload)
    r, s = decode_dss_signature(p256.sign(message))
    low, high = (encode_dss_signature(r, number) for number in (s, P256_ORDER - s))
    fingerprint = p256.public.fingerprint
    assert p256.public.verify(low, message)
    assert p256.public.verify(high, message)
    _, signature = examine(enveloped(payload, low, fingerprint), [p256.public])
    assert signature.key == p256.public
    for evil in (high, low + b"\0", b"\x30\x81" + low[1:]):
        refused(enveloped(payload, evil, fingerprint), [p256.public], "CAP-B122")


def test_no_signature_is_read_by_the_algorithm_of_another_key(p256, alice):
    payload = payload_of(sign(STATEMENT, p256))
    message = pre_authentication_encoding(payload)
    keys = [alice.public, p256.public]
    for signer, named in ((alice, p256), (p256, alice)):
        forged = enveloped(payload, signer.sign(message), named.public.fingerprint)
        refused(forged, keys, "CAP-B123")
        refused(forged, [named.public], "CAP-B122")


def test_only_pure_ed25519(alice, signed):
    # The very bytes that other tools must verify: no context, no prehash.
    raw = base64.b64decode(json.loads(signed)["dsseEnvelope"]["signatures"][0]["sig"])
    key = ed25519.Ed25519PublicKey.from_public_bytes(alice.public.raw)
    key.verify(raw, b"DSSEv1 28 application/vnd.in-toto+json %d " % len(payload_of(signed))
               + payload_of(signed))  # fmt: skip
