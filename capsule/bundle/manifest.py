"""The manifest: every file of a bundle with its size, digest and role.

``manifest.json`` is the root of a bundle. The signature covers its digest, and it has the digests
of all other files. ``SHA256SUMS`` says the same in the form that coreutils' ``sha256sum`` reads,
and follows from the manifest byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from capsule import __version__
from capsule.bundle.archive import MAX_NAME, MAX_SIZE, NAME_PATTERN, tampered
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.fields import Model, added
from capsule.experiment.lock import Sha256
from capsule.host.errors import CapsuleError

ENVELOPE = "signatures/run.sigstore.json"
SSHSIG = "signatures/manifest.json.sshsig"
MANIFEST = "manifest.json"
CHECKSUMS = "SHA256SUMS"

Role = Literal[
    "claims",  # facts that a re-execution must give again; its SHA-256 is the claim id
    "observations",  # facts that need not recur
    "guide",  # how to re-execute by hand, and what a catalogue wants to know
    "lock",
    "job",
    "image",
    "data",
    "sbom",
    "profile",  # of random streams, or of the operating system's entropy
    "run",  # documents of the run directory
    "checkpoint",
    "state",  # what a run resumes from at a checkpoint
    "output",  # what a user program wrote
    "log",
]
BundleKind = Literal["run", "study"]
# The envelope is always there, because open_bundle() begins with it.
SignatureKinds = tuple[Literal["dsse"]] | tuple[Literal["dsse"], Literal["sshsig"]]
MediaType = Annotated[str, Field(pattern=r"^[a-z]+/[a-z0-9][a-z0-9.+-]*$", max_length=100)]
_M = TypeVar("_M", bound=Model)


class BundleFile(Model):
    """One file of a bundle."""

    path: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME)]
    size: Annotated[int, Field(ge=0, le=MAX_SIZE, description="Size in bytes.")]
    sha256: Sha256
    role: Role
    media_type: MediaType = Field(alias="mediaType")


class Manifest(Model):
    """The files of a bundle in ascending order of their paths."""

    schema_id: Literal["capsule/bundle/v1"] = Field("capsule/bundle/v1", alias="schema")
    claim_id: Sha256 = Field(alias="claimId", description="SHA-256 of the claims file.")
    files: tuple[BundleFile, ...]
    signatures: SignatureKinds = Field(
        ("dsse",),
        description="Kinds of signature over this manifest. A missing signature of one of these "
        "kinds is detected.",
    )
    kind: BundleKind = added(
        absent="run",
        description="Whether the bundle is that of one run, or the results of a study.",
    )

    @model_validator(mode="after")
    def _unambiguous(self) -> Self:
        paths = [file.path for file in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("paths must be unique and in ascending order")
        _check_names(paths)
        return self

    @model_validator(mode="after")
    def _one_claims_file(self) -> Self:
        claims = [file.sha256 for file in self.files if file.role == "claims"]
        if claims != [self.claim_id]:
            raise ValueError("claimId must be the SHA-256 of the one file with role claims")
        return self

    @cached_property
    def checksums(self) -> bytes:
        """The bytes of ``SHA256SUMS``: the manifest itself, then every file of it."""
        # The line of the manifest comes first: the scripts in docs/bundle-format.md and
        # docs/trust.md rely on that.
        digests = {MANIFEST: sha256_hex(self.document())}
        digests |= {file.path: file.sha256 for file in self.files}
        return "".join(f"{digest}  {path}\n" for path, digest in digests.items()).encode()


def _check_names(paths: Iterable[str]) -> None:
    """Reject names that a file system or a reader could take for one another."""
    taken = {MANIFEST.lower(), CHECKSUMS.lower(), ENVELOPE.lower()}
    folders = {"signatures"}
    for path in paths:
        # The file systems of macOS and Windows would unpack two names that differ in case into one
        # file. Names are ASCII here, so lower() is all there is to it.
        name = path.lower()
        if name in taken or name.startswith("signatures/"):
            raise ValueError(
                f"{path}: the path is reserved, or differs from another path only in case"
            )
        taken.add(name)
        parts = name.split("/")
        folders |= {"/".join(parts[:depth]) for depth in range(1, len(parts))}
    if clashes := sorted(taken & folders):
        raise ValueError(f"{clashes[0]}: both a file and a folder")


def parse_document(
    data: bytes, model: type[_M], name: str, code: str, *, grows: bool = False
) -> _M:
    """Parse a signed JSON document: canonical bytes (RFC 8785) that fit a closed model.

    Args:
        data: The document.
        model: What it must fit.
        name: What to call it in an error.
        code: Code of the error.
        grows: Whether later versions of Capsule may add fields.

    Raises:
        CapsuleError: ``code``: not canonical JSON, or not a document of this model; CAP-B145: one
            that may grow, and has fields that this Capsule does not know.
    """
    try:
        return model.parse(data)
    except ValidationError as error:
        findings = error.errors(include_url=False, include_input=False)
        first = findings[0]
        where = ".".join(str(part) for part in first["loc"])
        # Only unknown fields can come from a later version. Any other finding is wrong in all of
        # them.
        if grows and all(finding["type"] == "extra_forbidden" for finding in findings):
            raise CapsuleError(
                "CAP-B145",
                f"{name} has the field {where!a}, which is unknown to Capsule {__version__}",
                fix="Use the version of Capsule that wrote the bundle, or a later one.",
            ) from error
        detail = f"{where!a}: {first['msg']}" if where else first["msg"]
        raise tampered(code, f"{name} is not valid: {detail}") from error
    except ValueError as error:
        raise tampered(code, f"{name} is not in canonical form: {str(error)!a}") from error
