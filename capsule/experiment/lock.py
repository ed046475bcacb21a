"""The lock: what every pin of a spec resolved to. Its digest is the identity of an experiment.

A lock holds file names, pool paths and digests, never a host, a local path or a date.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from capsule.experiment.fields import (
    DebianName,
    DigestedModel,
    Model,
    Name,
    NonNegativeInt,
    added,
)
from capsule.experiment.spec import CodeSpec, DataSpec, ImageSpec, SourcesSpec, Spec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LockedWheel(Model):
    """One wheel."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")] = Field(
        description="Normalised distribution name (PEP 503)."
    )
    version: Annotated[str, Field(pattern=r"^[a-z0-9.!+]+$")] = Field(
        description="Version (PEP 440)."
    )
    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+!-]+\.whl$")]
    sha256: Sha256
    requested: str | None = Field(
        None, description="Requirement of the spec that names the package, if any."
    )


class LockedDebianPackage(Model):
    """One Debian binary package."""

    name: DebianName
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+~:-]+$")]
    architecture: Literal["amd64", "all"]
    # This path is only appended to the address of a mirror; files are named by digests.
    pool: Annotated[str, Field(pattern=r"^pool/[A-Za-z0-9._+~%/-]+\.deb$")]
    size: int
    sha256: Sha256
    requested: bool = Field(
        description="Whether the spec or the base recipe names the package, rather than a "
        "dependency."
    )


class LockedCode(Model):
    """Capsule's own training code, as it goes into the image."""

    version: str
    sha256: Sha256 = Field(
        description="Digest of the canonical listing of paths and their SHA-256."
    )


class LockedImage(Model):
    """Everything the image is assembled from."""

    assembler: int = Field(description="Version of the assembly rules.")
    recipe: Literal["cpu", "cuda"]
    recipe_sha256: Sha256 = Field(description="Digest of the recipe in canonical form.")
    debian: tuple[LockedDebianPackage, ...]
    base: Sha256 = Field(description="Digest of the layer that is made of the Debian packages.")
    wheels: tuple[LockedWheel, ...]
    code: LockedCode


class LockedGit(Model):
    """The state of a source tree's git work tree. The tree itself is executed, not the commit."""

    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")] = Field(
        description="Last commit that changed the tree."
    )
    dirty: bool = Field(description="Whether the tree differs from that commit.")
    diff: Sha256 | None = Field(
        description="SHA-256 of the output of 'git diff HEAD' for tracked files; null if they do "
        "not differ."
    )
    untracked: tuple[str, ...] = Field(description="Files of the tree that git does not track.")


class LockedProject(Model):
    """The source tree of a program, as it goes into the image."""

    sha256: Sha256 = Field(description="Digest of the tree as a layer archive.")
    size: int = Field(description="Size of that archive in bytes.")
    files: dict[str, str] = Field(
        description="'file MODE SHA256' or 'symlink TARGET', by path, so that a difference can be "
        "named."
    )
    git: LockedGit | None = Field(description="State of the git work tree; null outside of one.")


class LockedData(Model):
    """A data set, by the digest of its listing (docs/data.md)."""

    sha256: Sha256 = Field(
        description="SHA-256 of the listing: canonical JSON of path to 'file SIZE SHA256', "
        "'folder' or 'symlink TARGET'."
    )
    files: NonNegativeInt = Field(description="Number of files of the data set.")
    size: NonNegativeInt = Field(description="Total size of the files in bytes.")


class Lock(DigestedModel):
    """A locked experiment."""

    schema_id: Literal["capsule/lock/v1"] = Field("capsule/lock/v1", alias="schema")
    spec: Spec = Field(description="The spec with every default written out, without its sources.")
    image: LockedImage
    project: LockedProject | None = Field(
        None, description="The source tree; present if the spec has the section code."
    )
    data: dict[Name, LockedData] | None = added(
        absent=None, description="The data sets of the spec, if any, by name."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.project is None) != (self.spec.code is None):
            raise ValueError("project must be there if spec.code is, and only then")
        if (self.data or {}).keys() != (self.spec.data or {}).keys():
            raise ValueError("data must have the names of spec.data, and no others")
        return self


def without_sources(spec: Spec) -> Spec:
    """Return ``spec`` as a lock holds it: the places that things came from are left out."""
    image = ImageSpec(**{**dict(spec.image), "sources": SourcesSpec()})
    code = None if spec.code is None else CodeSpec()
    data = None if spec.data is None else dict.fromkeys(spec.data, DataSpec())
    return spec.model_copy(update={"image": image, "code": code, "data": data})
