"""Receipts: signed statements by those who re-executed a run, of what they found.

A receipt is an in-toto Statement about a claim id, with SLSA's Verification Summary as predicate
(https://slsa.dev/spec/v1.2/verification_summary), in a DSSE envelope: the form that ``slsa-verifier
verify-vsa`` reads. What the summary has no field for is in one extension field of ours, whose name
is a URI as its parsing rules ask. The rules are those of a bundle's envelope: canonical JSON, one
signature, an exact payload type, and never a key from the receipt itself.

A receipt says who vouches for a re-execution. Machine and time are the signer's own account.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from capsule import __version__
from capsule.bundle.archive import tampered
from capsule.bundle.envelope import (
    Digest,
    DsseEnvelope,
    Fingerprint,
    document_of,
    parse_exact,
    seal,
    unseal,
)
from capsule.bundle.keys import PrivateKey, PublicKey
from capsule.bundle.trust import Policy as TrustPolicy
from capsule.bundle.trust import Signature
from capsule.experiment.canonical import open_regular, sha256_hex, write_output
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.fields import Model
from capsule.experiment.lock import Sha256
from capsule.experiment.spec import ToleranceSpec
from capsule.machine.kind import MachineKind

MAX_RECEIPT = 1 << 16  # bytes; a receipt has about two thousand
MAX_DIFFERENCE = 400  # characters
SUFFIX = ".receipt.json"

Verdict = Literal[
    "reproduced-bitwise",
    "reproduced-segments",
    "reproduced-prefix",
    "reproduced-statistical",
    "not-reproduced",
]
Level = Literal[
    "CAPSULE_REPRODUCED_BITWISE",
    "CAPSULE_REPRODUCED_SEGMENTS",
    "CAPSULE_REPRODUCED_PREFIX",
    "CAPSULE_REPRODUCED_STATISTICAL",
    "FAILED",
]
# The strongest first. Only a verdict that says something of the run has a level.
LEVELS: dict[Verdict, Level] = {
    "reproduced-bitwise": "CAPSULE_REPRODUCED_BITWISE",
    "reproduced-segments": "CAPSULE_REPRODUCED_SEGMENTS",
    "reproduced-prefix": "CAPSULE_REPRODUCED_PREFIX",
    "reproduced-statistical": "CAPSULE_REPRODUCED_STATISTICAL",
    "not-reproduced": "FAILED",
}


# --- the document ---------------------------------------------------------------------------------


class Subject(Model):
    """What a receipt is about: the claims, whose SHA-256 is the claim id."""

    name: Literal["claims.json"] = "claims.json"
    digest: Digest


class Version(Model):
    """Versions of what verified."""

    capsule: Annotated[str, Field(max_length=100)]


class Verifier(Model):
    """What verified; who did is said by the signature."""

    id: Literal["https://capsule-rl.dev/verify/v1"] = "https://capsule-rl.dev/verify/v1"
    version: Version


class PolicyReference(Model):
    """The policy by its digest, that of :class:`Policy` in canonical form."""

    uri: Literal["https://capsule-rl.dev/policy/v1"] = "https://capsule-rl.dev/policy/v1"
    digest: Digest


class InputAttestation(Model):
    """The bundle, by the document that stands for all of it."""

    name: Literal["manifest.json"] = "manifest.json"
    digest: Digest


class Policy(Model):
    """How far the verification went, and what it accepted."""

    mode: Annotated[str, Field(pattern=r"^[a-z-]+(:[a-z0-9]+)?$", max_length=40)]
    image: Literal["rebuilt", "embedded"] | None = Field(
        None,
        description="Whose image ran: the verifier's own from the lock, or the signer's; or none.",
    )
    tolerance: ToleranceSpec | None


class Detail(Model):
    """What a Verification Summary has no field for."""

    verdict: Verdict
    expected: Literal["bitwise", "statistical"]
    policy: Policy
    machine: MachineKind
    difference: Annotated[str, Field(max_length=MAX_DIFFERENCE)] | None = Field(
        description="What the verifier found to differ; null if reproduced bit for bit."
    )


class Summary(Model):
    """SLSA's Verification Summary, version 1."""

    verifier: Verifier
    time_verified: Annotated[
        str,
        Field(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}Z$", alias="timeVerified"),
    ]
    resource_uri: Annotated[str, Field(max_length=200, alias="resourceUri")]
    policy: PolicyReference
    input_attestations: Annotated[tuple[InputAttestation], Field(alias="inputAttestations")]
    verification_result: Literal["PASSED", "FAILED"] = Field(alias="verificationResult")
    verified_levels: Annotated[tuple[Level], Field(alias="verifiedLevels")]
    detail: Detail = Field(alias="https://capsule-rl.dev/receipt/v1")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        (level,) = self.verified_levels
        if level != LEVELS[self.detail.verdict]:
            raise ValueError(f"verdict {self.detail.verdict} has not the level {level}")
        if (level == "FAILED") != (self.verification_result == "FAILED"):
            raise ValueError(f"level {level} is not {self.verification_result}")
        if self.policy.digest.sha256 != sha256_hex(document_of(self.detail.policy)):
            raise ValueError("policy.digest is not that of the policy")
        return self


class Statement(Model):
    """An in-toto Statement v1 with a Verification Summary."""

    type_id: Literal["https://in-toto.io/Statement/v1"] = Field(
        "https://in-toto.io/Statement/v1", alias="_type"
    )
    subject: tuple[Subject]
    predicate_type: Literal["https://slsa.dev/verification_summary/v1"] = Field(
        "https://slsa.dev/verification_summary/v1", alias="predicateType"
    )
    predicate: Summary

    @model_validator(mode="after")
    def _one_claim(self) -> Self:
        if self.predicate.resource_uri != resource_uri(self.claim_id):
            raise ValueError("resourceUri does not name the subject")
        return self

    @property
    def claim_id(self) -> str:
        """The claim id that the statement is about."""
        return self.subject[0].digest.sha256


def resource_uri(claim_id: str) -> str:
    """Return what a receipt about ``claim_id`` gives as ``resourceUri``."""
    return f"https://capsule-rl.dev/claims/{claim_id}"


def make_statement(claim_id: str, manifest: str, time: str, detail: Detail) -> Statement:
    """Build the statement of a receipt.

    Args:
        claim_id: What was verified.
        manifest: SHA-256 of the bundle's ``manifest.json``.
        time: When it was, ``YYYY-MM-DDThh:mm:ssZ``.
        detail: What was found.
    """
    level = LEVELS[detail.verdict]
    policy = Digest(sha256=sha256_hex(document_of(detail.policy)))
    summary = {
        "verifier": Verifier(version=Version(capsule=__version__)),
        "timeVerified": time,
        "resourceUri": resource_uri(claim_id),
        "policy": PolicyReference(digest=policy),
        "inputAttestations": (InputAttestation(digest=Digest(sha256=manifest)),),
        "verificationResult": "FAILED" if level == "FAILED" else "PASSED",
        "verifiedLevels": (level,),
        "https://capsule-rl.dev/receipt/v1": detail,
    }
    return Statement(
        subject=(Subject(digest=Digest(sha256=claim_id)),),
        predicate=Summary.model_validate(summary),
    )


# --- writing and reading --------------------------------------------------------------------------


def write_receipt(statement: Statement, key: PrivateKey, bundle: Path, path: Path | None) -> Path:
    """Sign a statement and write it; equal input gives equal bytes.

    Args:
        statement: What is said.
        key: Who says it.
        bundle: Beside it goes the receipt, called ``BUNDLE.DIGEST.receipt.json``, if ``path`` is
            None.
        path: Where it goes instead.

    Returns:
        Where it went.

    Raises:
        CapsuleError: CAP-B173, the file cannot be written.
    """
    data = document_of(seal(document_of(statement), key))
    path = path or bundle.with_name(f"{bundle.name}.{sha256_hex(data)[:8]}{SUFFIX}")
    try:
        write_output(path, data)
    except OSError as error:
        raise CapsuleError(
            "CAP-B173",
            f"cannot write the receipt {path}: {error.strerror}",
            fix="Name a file in a folder you may write to with --receipt.",
            exit_code=ExitCode.USAGE,
        ) from error
    return path


def receipts_beside(bundle: Path) -> tuple[Path, ...]:
    """Return the receipts that lie beside a bundle under its name, in order of their names."""
    names = (path for path in bundle.parent.iterdir() if path.name.endswith(SUFFIX))
    return tuple(sorted(path for path in names if path.name.startswith(f"{bundle.name}.")))


class Receipt(Model):
    """A receipt that is well-formed and about the claim id in question."""

    file: str
    signer: Fingerprint = Field(description="By its own account; a fact only if trusted.")
    trusted: bool
    identity: str | None = Field(None, description="Whom the reader's trust file has for it.")
    objection: str | None = Field(None, description="Why it is not trusted, or null.")
    own: bool = Field(description="Its signer signed the bundle, too: not an independent voice.")
    verdict: Verdict
    mode: str
    image: Literal["rebuilt", "embedded"] | None
    expected: Literal["bitwise", "statistical"]
    machine: MachineKind
    time: str
    capsule: str = Field(description="Version that verified.")
    difference: str | None

    @property
    def counts(self) -> bool:
        """Whether it is a voice: of somebody trusted who did not sign the bundle."""
        return self.trusted and not self.own


class Refusal(Model):
    """A file that is no receipt for the claim id in question, and why."""

    file: str
    code: str
    message: str


class Tally(Model):
    """How many vouch for one verdict."""

    signers: int = Field(description="Distinct trusted keys.")
    machines: int = Field(description="Distinct kinds of machine: processor and GPU.")


class Receipts(Model):
    """What all receipts of a claim id come to."""

    schema_id: Literal["capsule/receipts/v1"] = Field("capsule/receipts/v1", alias="schema")
    claim_id: Sha256
    summary: str = Field(description="The tallies in one sentence.")
    tallies: dict[Verdict, Tally] = Field(description="Of what counts, the strongest first.")
    receipts: tuple[Receipt, ...]
    refused: tuple[Refusal, ...]

    @property
    def exit_code(self) -> ExitCode:
        """0 reproduced by somebody trusted; 1 not, by somebody; 3 refused files, or nobody."""
        if self.refused or not self.tallies:
            return ExitCode.TAMPERED
        return ExitCode.DIFFERS if "not-reproduced" in self.tallies else ExitCode.OK


def read_receipts(
    claim_id: str,
    paths: Iterable[Path],
    trust: TrustPolicy | Iterable[PublicKey],
    authors: Collection[str] = (),
) -> Receipts:
    """Check receipts and count those that are a trusted, independent voice.

    Args:
        claim_id: What they must be about.
        paths: The files; anybody's.
        trust: Whose receipts count.
        authors: Fingerprints of the keys that signed the bundle, whose own receipts do not.
    """
    policy = TrustPolicy.of(trust)
    receipts, refused = [], []
    for path in paths:
        try:
            receipts.append(_read(path, claim_id, policy, authors))
        except CapsuleError as error:
            refused.append(Refusal(file=path.name, code=error.code, message=error.message))
    tallies = _tallies(receipts)
    return Receipts(
        claim_id=claim_id,
        summary=_sentence(tallies),
        tallies=tallies,
        receipts=tuple(receipts),
        refused=tuple(refused),
    )


def _read(path: Path, claim_id: str, policy: TrustPolicy, authors: Collection[str]) -> Receipt:
    """Read one receipt.

    Raises:
        CapsuleError: CAP-B170 (cannot be read), B171 (not a receipt), B172 (of another run), or
            B121, B122, B123 of its envelope.
    """
    envelope = parse_exact(_bytes(path), DsseEnvelope, "the receipt", "CAP-B171")
    payload, key = unseal(envelope, policy.candidates)
    statement = parse_exact(payload, Statement, "the receipt's statement", "CAP-B171")
    if statement.claim_id != claim_id:
        raise tampered("CAP-B172", f"the receipt is about another run: {statement.claim_id}")
    fingerprint = envelope.signatures[0].keyid
    (signer,) = policy.judge([Signature("dsse", fingerprint, key)], b"")
    summary, detail = statement.predicate, statement.predicate.detail
    return Receipt(
        file=path.name,
        signer=fingerprint,
        trusted=signer.objection is None,
        identity=signer.identity,
        objection=signer.objection,
        own=fingerprint in authors,
        verdict=detail.verdict,
        mode=detail.policy.mode,
        image=detail.policy.image,
        expected=detail.expected,
        machine=detail.machine,
        time=summary.time_verified,
        capsule=summary.verifier.version.capsule,
        difference=detail.difference,
    )


def _bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_RECEIPT + 1)
    except OSError as error:
        raise tampered("CAP-B170", f"cannot read the receipt: {error.strerror}") from error
    if len(data) > MAX_RECEIPT:
        raise tampered("CAP-B171", f"the receipt is larger than {MAX_RECEIPT} bytes")
    return data


def _tallies(receipts: Sequence[Receipt]) -> dict[Verdict, Tally]:
    tallies = {}
    for verdict in LEVELS:
        voices = [receipt for receipt in receipts if receipt.counts and receipt.verdict == verdict]
        if voices:
            signers = {receipt.signer for receipt in voices}
            machines = {receipt.machine.key for receipt in voices}
            tallies[verdict] = Tally(signers=len(signers), machines=len(machines))
    return tallies


_PHRASES: dict[Verdict, str] = {
    "reproduced-bitwise": "reproduced bitwise",
    "reproduced-segments": "reproduced in segments",
    "reproduced-prefix": "reproduced in a prefix",
    "reproduced-statistical": "reproduced statistically",
    "not-reproduced": "not reproduced",
}


def _sentence(tallies: dict[Verdict, Tally]) -> str:
    parts = [
        f"{_PHRASES[verdict]} by {_number(tally.signers, 'signer')} on "
        f"{_number(tally.machines, 'kind')} of machine"
        for verdict, tally in tallies.items()
    ]
    return "; ".join(parts) or "no receipt by anybody you trust"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
