"""The signature: an in-toto Statement in a DSSE envelope in a Sigstore bundle.

* in-toto Statement v1: what is signed, namely the digests of ``manifest.json`` and ``SHA256SUMS``;
* DSSE 1.0.2: the signature covers the payload and its type (pre-authentication encoding);
* Sigstore bundle v0.3: the file format of tools that are not ours, with the hint of a key that
  the reader must already have.

An envelope has one signature, by the algorithm of its key's type. The key is never taken from the
envelope itself.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from capsule.bundle.archive import tampered
from capsule.bundle.keys import PrivateKey, PublicKey
from capsule.bundle.manifest import CHECKSUMS, MANIFEST, Manifest, parse_document
from capsule.bundle.trust import KeySignature
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.fields import Model
from capsule.experiment.lock import Sha256

PAYLOAD_TYPE = "application/vnd.in-toto+json"

Fingerprint = Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]


class Digest(Model):
    """A digest set with the one algorithm in use."""

    sha256: Sha256


class RunSubject(Model):
    """One artifact that a statement is about."""

    name: Literal["manifest.json", "SHA256SUMS"]
    digest: Digest


class Predicate(Model):
    """The statement about the artifacts: they describe the run, or the study, of these claims."""

    schema_id: Literal["capsule/run/v1", "capsule/study-results/v1"] = Field(
        "capsule/run/v1", alias="schema"
    )
    claim_id: Sha256 = Field(alias="claimId")


class BundleStatement(Model):
    """An in-toto Statement v1."""

    type_id: Literal["https://in-toto.io/Statement/v1"] = Field(
        "https://in-toto.io/Statement/v1", alias="_type"
    )
    subject: tuple[RunSubject, RunSubject]
    predicate_type: Literal[
        "https://capsule-rl.dev/run/v1", "https://capsule-rl.dev/study-results/v1"
    ] = Field("https://capsule-rl.dev/run/v1", alias="predicateType")
    predicate: Predicate

    @model_validator(mode="after")
    def _both_subjects(self) -> Self:
        if [subject.name for subject in self.subject] != [MANIFEST, CHECKSUMS]:
            raise ValueError(f"subjects must be {MANIFEST} and {CHECKSUMS}")
        return self

    @classmethod
    def about(cls, manifest: Manifest) -> BundleStatement:
        """Return the only statement that fits ``manifest``."""
        document = Digest(sha256=sha256_hex(manifest.document()))
        checksums = Digest(sha256=sha256_hex(manifest.checksums))
        subject = (
            RunSubject(name="manifest.json", digest=document),
            RunSubject(name="SHA256SUMS", digest=checksums),
        )
        if manifest.kind == "run":
            return cls(subject=subject, predicate=Predicate(claimId=manifest.claim_id))
        return cls(
            subject=subject,
            predicateType="https://capsule-rl.dev/study-results/v1",
            predicate=Predicate(schema="capsule/study-results/v1", claimId=manifest.claim_id),
        )


class KeyHint(Model):
    """The fingerprint of the signing key, by which a reader finds the key."""

    hint: Fingerprint


class VerificationMaterial(Model):
    """The means of verification: a key that the reader has. Certificates and logs are rejected."""

    public_key: KeyHint = Field(alias="publicKey")


class EnvelopeSignature(Model):
    """A DSSE signature."""

    keyid: Fingerprint
    sig: str


class DsseEnvelope(Model):
    """A DSSE envelope with exactly one signature."""

    payload: str
    payload_type: Literal["application/vnd.in-toto+json"] = Field(
        "application/vnd.in-toto+json", alias="payloadType"
    )
    # DSSE allows several, of which a verifier may accept any. With exactly one there is no question
    # which of them counts.
    signatures: tuple[EnvelopeSignature]


class SigstoreBundle(Model):
    """A Sigstore bundle v0.3, as far as Capsule uses it."""

    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"] = Field(
        "application/vnd.dev.sigstore.bundle.v0.3+json", alias="mediaType"
    )
    verification_material: VerificationMaterial = Field(alias="verificationMaterial")
    dsse_envelope: DsseEnvelope = Field(alias="dsseEnvelope")


def pre_authentication_encoding(payload: bytes) -> bytes:
    """Return the bytes that are signed (DSSE 1.0.2, PAE)."""
    kind = PAYLOAD_TYPE.encode()
    # The lengths, in bytes, keep the fields apart: no other pair of type and payload gives these
    # bytes.
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(statement: BundleStatement, key: PrivateKey) -> bytes:
    """Return the signed envelope; equal input gives equal bytes."""
    hint = KeyHint(hint=key.public.fingerprint)
    bundle = SigstoreBundle(
        verificationMaterial=VerificationMaterial(publicKey=hint),
        dsseEnvelope=seal(statement.document(), key),
    )
    return bundle.document()


def seal(payload: bytes, key: PrivateKey) -> DsseEnvelope:
    """Return the signed DSSE envelope of an in-toto payload."""
    signature = key.sign(pre_authentication_encoding(payload))
    return DsseEnvelope(
        payload=_encode(payload),
        signatures=(EnvelopeSignature(keyid=key.public.fingerprint, sig=_encode(signature)),),
    )


def examine(data: bytes, keys: Sequence[PublicKey]) -> tuple[BundleStatement, KeySignature]:
    """Check an envelope against the trusted keys, then read its statement.

    Every trusted key is tried, whatever the envelope says of its key; the statement is parsed from
    the very bytes that were verified. An unknown signer is not an error here, since integrity can
    still be established: the signature has no key then, and its fingerprint is only stated.

    Args:
        data: The Sigstore bundle, already bounded in size.
        keys: The keys to trust.

    Raises:
        CapsuleError: CAP-B121 (malformed), B122 (a trusted key is named but did not sign this, or
            its signature was respelt), B123 (a trusted key signed but another is named), B124
            (statement malformed).
    """
    bundle = parse_document(data, SigstoreBundle, "the signature envelope", "CAP-B121")
    (signature,) = bundle.dsse_envelope.signatures
    claimed = bundle.verification_material.public_key.hint
    if signature.keyid != claimed:
        raise tampered(
            "CAP-B121", f"the envelope names two different keys: {claimed}, {signature.keyid}"
        )
    payload, key = unseal(bundle.dsse_envelope, keys)
    # Even if no known key signed it: integrity alone is measured by its digests.
    statement = parse_document(payload, BundleStatement, "the signed statement", "CAP-B124")
    return statement, KeySignature("dsse", claimed, key)


def unseal(envelope: DsseEnvelope, keys: Sequence[PublicKey]) -> tuple[bytes, PublicKey | None]:
    """Return the payload of a DSSE envelope, and which trusted key signed exactly it, if any did.

    Raises:
        CapsuleError: CAP-B121, B122, B123, as :func:`examine` does.
    """
    (signature,) = envelope.signatures
    payload = _decode(envelope.payload)
    message, raw = pre_authentication_encoding(payload), _decode(signature.sig)
    # DSSE does not sign ``keyid``, so it may not choose the key. It only has to agree in the end.
    signer = next((key for key in keys if key.verify(raw, message)), None)
    claimed = signature.keyid
    if signer is None and claimed in {key.fingerprint for key in keys}:
        raise tampered("CAP-B122", f"the signature of this statement was not made by {claimed}")
    if signer is not None and signer.fingerprint != claimed:
        raise tampered("CAP-B123", f"{signer.fingerprint} signed, but {claimed} is named as signer")
    # Anyone can negate the s of an ECDSA signature without having the key, and would get another
    # bundle, with another SHA-256, that says and proves the same.
    if signer is not None and not signer.algorithm.is_canonical(raw):
        raise tampered("CAP-B122", f"the signature of {claimed} is not in canonical form (low s)")
    return payload, signer


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    """Decode base64 of which no other spelling is accepted (RFC 4648 section 3.5)."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise tampered("CAP-B121", "the signature envelope contains malformed base64") from error
    # Python ignores bits that are set behind the last whole byte, so several texts decode alike.
    if _encode(data) != text:
        raise tampered("CAP-B121", "the signature envelope contains non-canonical base64")
    return data
