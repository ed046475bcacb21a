"""The lock: what every pin of a spec resolved to. Its digest is the identity of an experiment.

A lock holds file names, pool paths and digests, never a host, a local path or a date.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.spec import DebianName, ImageSpec, Model, SourcesSpec, Spec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LockedWheel(Model):
    """One wheel."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")] = Field(
        description="Normalised distribution name (PEP 503)."
    )
    version: Annotated[str, Field(pattern=r"^[a-z0-9.!+]+$")] = Field(description="PEP 440.")
    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+!-]+\.whl$")]
    sha256: Sha256
    requested: str | None = Field(None, description="The spec's own requirement, if it named one.")


class LockedDebianPackage(Model):
    """One Debian binary package."""

    name: DebianName
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+~:-]+$")]
    architecture: Literal["amd64", "all"]
    pool: Annotated[str, Field(pattern=r"^pool/[A-Za-z0-9._+~%/-]+\.deb$")]
    size: int
    sha256: Sha256
    requested: bool = Field(description="Named by the spec or the base recipe, not a dependency.")


class LockedCode(Model):
    """Capsule's own training code, as it goes into the image."""

    version: str
    sha256: Sha256 = Field(description="Digest of the canonical {path: sha256} listing.")


class LockedImage(Model):
    """Everything the image is assembled from."""

    assembler: int = Field(description="Version of the assembly rules.")
    recipe: Literal["cpu", "cuda"]
    recipe_sha256: Sha256 = Field(description="Digest of the recipe in canonical form.")
    debian: tuple[LockedDebianPackage, ...]
    wheels: tuple[LockedWheel, ...]
    code: LockedCode


class Lock(Model):
    """A locked experiment."""

    schema_id: Literal["capsule/lock/v1"] = Field("capsule/lock/v1", alias="schema")
    spec: Spec = Field(description="The spec with every default written out, without its sources.")
    image: LockedImage

    def document(self) -> bytes:
        """Return the canonical JSON bytes of the lock."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of :meth:`document`."""
        return sha256_hex(self.document())


def without_sources(spec: Spec) -> Spec:
    """Return ``spec`` with the package sources at their defaults, as a lock holds it."""
    image = ImageSpec(**{**dict(spec.image), "sources": SourcesSpec()})
    return spec.model_copy(update={"image": image})
