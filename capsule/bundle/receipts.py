"""Receipts: signed statements by those who re-executed a run, of what they found.

A receipt is an in-toto Statement about a claim id, with SLSA's Verification Summary as predicate
(https://slsa.dev/spec/v1.2/verification_summary), in a DSSE envelope: the form that ``slsa-verifier
verify-vsa`` reads. What the summary has no field for is in one extension field of ours, whose name
is a URI as its parsing rules ask. The rules are those of a bundle's envelope: canonical JSON, one
signature, an exact payload type, and never a key from the receipt itself.

A receipt is the signer's attestation of a re-execution, including its machine and time.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from capsule import __version__
from capsule.bundle.envelope import (
    Digest,
    Fingerprint,
    seal,
)
from capsule.bundle.keys import PrivateKey
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.evaluation import ToleranceSpec
from capsule.experiment.fields import Model
from capsule.host.errors import coded
from capsule.host.folders import files_beside
from capsule.host.outputs import check_output, write_output
from capsule.machine.kind import MachineKind

MAX_RECEIPT = 1 << 16  # bytes; a receipt has about two thousand
MAX_DIFFERENCE = 400  # characters
MAX_SIGNERS = 20
SUFFIX = ".receipt.json"

Verdict = Literal[
    "reproduced-bitwise",
    "reproduced-content",
    "reproduced-segments",
    "reproduced-prefix",
    "reproduced-statistical",
    "not-reproduced",
]
Level = Literal[
    "CAPSULE_REPRODUCED_BITWISE",
    "CAPSULE_REPRODUCED_CONTENT",
    "CAPSULE_REPRODUCED_SEGMENTS",
    "CAPSULE_REPRODUCED_PREFIX",
    "CAPSULE_REPRODUCED_STATISTICAL",
    "FAILED",
]
# The strongest first. Only a verdict that says something of the run has a level.
LEVELS: dict[Verdict, Level] = {
    "reproduced-bitwise": "CAPSULE_REPRODUCED_BITWISE",
    "reproduced-content": "CAPSULE_REPRODUCED_CONTENT",
    "reproduced-segments": "CAPSULE_REPRODUCED_SEGMENTS",
    "reproduced-prefix": "CAPSULE_REPRODUCED_PREFIX",
    "reproduced-statistical": "CAPSULE_REPRODUCED_STATISTICAL",
    "not-reproduced": "FAILED",
}

# What a re-execution must have covered to have given each verdict.
MODES: dict[Verdict, re.Pattern[str]] = {
    "reproduced-bitwise": re.compile(r"full"),
    "reproduced-content": re.compile(r"full"),
    "reproduced-segments": re.compile(r"segments:(all|[1-9][0-9]{0,8})"),
    "reproduced-prefix": re.compile(r"prefix:[1-9][0-9]{0,15}"),
    "reproduced-statistical": re.compile(r"full"),
    # Any mode that executes something may have found a difference.
    "not-reproduced": re.compile(r"full|(segments|prefix):(all|[1-9][0-9]{0,15})"),
}
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
FIRST_YEAR = 2026  # there were no receipts before


# --- the document ---------------------------------------------------------------------------------


class ReceiptSubject(Model):
    """The subject of a receipt: the claims, whose SHA-256 is the claim id."""

    name: Literal["claims.json"] = "claims.json"
    digest: Digest


class Version(Model):
    """Versions of the software that verified."""

    capsule: Annotated[str, Field(max_length=100)]


class Verifier(Model):
    """The program that verified. The signature identifies its user."""

    id: Literal["https://capsule-rl.dev/verify/v1"] = "https://capsule-rl.dev/verify/v1"
    version: Version


class PolicyReference(Model):
    """The verification policy, by the digest of its canonical form."""

    uri: Literal["https://capsule-rl.dev/policy/v1"] = "https://capsule-rl.dev/policy/v1"
    digest: Digest


class InputAttestation(Model):
    """The bundle, by the document that covers all its files."""

    name: Literal["manifest.json"] = "manifest.json"
    digest: Digest


class VerificationPolicy(Model):
    """The extent of a verification, and what it accepted from the signer."""

    mode: Annotated[str, Field(pattern=r"^[a-z-]+(:[a-z0-9]+)?$", max_length=40)]
    image: Literal["rebuilt", "supplied-base", "embedded", "registry"] | None = Field(
        None,
        description="Origin of the image that ran. 'rebuilt': the verifier built it from the lock; "
        "'supplied-base': the same, with the base layer of the signer; 'embedded' or 'registry': "
        "the image of the signer; null: no image.",
    )
    own_code: bool = Field(
        description="Whether the training code was Capsule's own, of the verifier's version or of "
        "a release whose digest it knows, rather than code supplied by the signer."
    )
    tolerance: ToleranceSpec | None


class Detail(Model):
    """Facts for which a Verification Summary has no field."""

    verdict: Verdict
    expected: Literal["bitwise", "statistical"]
    policy: VerificationPolicy
    signers: tuple[Fingerprint, ...] = Field(
        min_length=1,
        max_length=MAX_SIGNERS,
        description="Keys that signed the bundle that was verified, and the key that its envelope "
        "names.",
    )
    machine: MachineKind
    difference: Annotated[str, Field(max_length=MAX_DIFFERENCE)] | None = Field(
        description="The difference that the verifier found; null if the run was reproduced bit "
        "for bit."
    )


def _instant(text: str) -> str:
    """Accept a time in UTC to the second, of a year in which there were receipts."""
    # strptime takes single digits as well; the comparison leaves a time one spelling.
    if datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC).strftime(TIME_FORMAT) != text:
        raise ValueError("not a time in the form YYYY-MM-DDThh:mm:ssZ")
    if int(text[:4]) < FIRST_YEAR:
        raise ValueError(f"a time before {FIRST_YEAR}")
    return text


Instant = Annotated[str, Field(max_length=20), AfterValidator(_instant)]


class VerificationSummary(Model):
    """SLSA's Verification Summary, version 1."""

    verifier: Verifier
    time_verified: Annotated[Instant, Field(alias="timeVerified")]
    resource_uri: Annotated[str, Field(max_length=200, alias="resourceUri")]
    policy: PolicyReference
    input_attestations: Annotated[tuple[InputAttestation], Field(alias="inputAttestations")]
    verification_result: Literal["PASSED", "FAILED"] = Field(alias="verificationResult")
    verified_levels: Annotated[tuple[Level], Field(alias="verifiedLevels")]
    detail: Detail = Field(alias="https://capsule-rl.dev/receipt/v1")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # Tools for SLSA read the standard fields, and people ours. The two must not tell different
        # stories.
        (level,) = self.verified_levels
        if level != LEVELS[self.detail.verdict]:
            raise ValueError(f"verdict {self.detail.verdict} does not match the level {level}")
        if (level == "FAILED") != (self.verification_result == "FAILED"):
            raise ValueError(f"level {level} is not {self.verification_result}")
        if self.policy.digest.sha256 != sha256_hex(self.detail.policy.document()):
            raise ValueError("policy.digest is not that of the policy")
        if not MODES[self.detail.verdict].fullmatch(self.detail.policy.mode):
            raise ValueError(
                f"mode {self.detail.policy.mode} cannot result in {self.detail.verdict}"
            )
        return self


class ReceiptStatement(Model):
    """An in-toto Statement v1 with a Verification Summary."""

    type_id: Literal["https://in-toto.io/Statement/v1"] = Field(
        "https://in-toto.io/Statement/v1", alias="_type"
    )
    subject: tuple[ReceiptSubject]
    predicate_type: Literal["https://slsa.dev/verification_summary/v1"] = Field(
        "https://slsa.dev/verification_summary/v1", alias="predicateType"
    )
    predicate: VerificationSummary

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


def make_statement(claim_id: str, manifest: str, time: str, detail: Detail) -> ReceiptStatement:
    """Build the statement of a receipt.

    Args:
        claim_id: What was verified.
        manifest: SHA-256 of the bundle's ``manifest.json``.
        time: When it was, ``YYYY-MM-DDThh:mm:ssZ``.
        detail: What was found.
    """
    level = LEVELS[detail.verdict]
    policy = Digest(sha256=sha256_hex(detail.policy.document()))
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
    return ReceiptStatement(
        subject=(ReceiptSubject(digest=Digest(sha256=claim_id)),),
        predicate=VerificationSummary.model_validate(summary),
    )


# --- writing and reading --------------------------------------------------------------------------


def write_receipt(
    statement: ReceiptStatement, key: PrivateKey, bundle: Path, path: Path | None
) -> Path:
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
    data = seal(statement.document(), key).document()
    # The digest in the name lets the receipts of several verifiers lie beside one bundle.
    path = path or bundle.with_name(f"{bundle.name}.{sha256_hex(data)[:8]}{SUFFIX}")
    with _writing(path):
        write_output(path, data)
    return path


def check_writable(bundle: Path, path: Path | None) -> None:
    """Check before anything runs that :func:`write_receipt` can write afterwards; write nothing.

    Raises:
        CapsuleError: CAP-B173, the file cannot be written.
    """
    if path is None and not bundle.exists():
        return  # reading the bundle says so
    # The name beside the bundle depends on the receipt, so the check uses another such name.
    path = path or bundle.with_name(f"{bundle.name}.{'0' * 8}{SUFFIX}")
    with _writing(path):
        check_output(path)


def _writing(path: Path) -> AbstractContextManager[None]:
    fix = "Name a file in a folder you may write to with --receipt."
    return coded("CAP-B173", f"cannot write the receipt {path}", fix=fix)


def receipts_beside(bundle: Path) -> tuple[Path, ...]:
    """Return the receipts that lie beside a bundle under its name, in order of their names."""
    return files_beside(bundle, SUFFIX)
