"""The lock: everything that a spec resolves to. Its digest is the identity of an experiment.

A lock contains file names, pool paths and digests, but never a host, a local path or a date.
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
    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+!-]+\.whl$")] = Field(
        description="File name of the wheel."
    )
    sha256: Sha256 = Field(description="SHA-256 of the wheel.")
    requested: str | None = Field(
        None,
        description="Requirement of the spec that names the package; null if none does.",
    )


class LockedDebianPackage(Model):
    """One Debian binary package."""

    name: DebianName
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+~:-]+$")]
    architecture: Literal["amd64", "all"]
    # This path is only appended to the address of a mirror; the cache names files by their digests.
    pool: Annotated[str, Field(pattern=r"^pool/[A-Za-z0-9._+~%/-]+\.deb$")] = Field(
        description="Path of the package in the archive of the distribution."
    )
    size: int = Field(description="Size of the package in bytes.")
    sha256: Sha256 = Field(description="SHA-256 of the package.")
    requested: bool = Field(
        description="Whether the spec or the base recipe names the package; false: another package "
        "depends on it."
    )


class LockedCode(Model):
    """Capsule's own training code, as the image contains it."""

    version: str = Field(description="Version of Capsule.")
    sha256: Sha256 = Field(
        description="Digest of the canonical listing of paths and their SHA-256."
    )


class LockedImage(Model):
    """Everything from which the image is assembled."""

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
    """The source tree of a program, as the image contains it."""

    sha256: Sha256 = Field(description="Digest of the tree as a layer archive.")
    size: int = Field(description="Size of that archive in bytes.")
    files: dict[str, str] = Field(
        description="'file MODE SHA256' or 'symlink TARGET' by path, so that differences can be "
        "listed."
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
        None, description="The source tree; null if the spec has no section 'code'."
    )
    data: dict[Name, LockedData] | None = added(
        absent=None, description="The data sets of the spec, by name; null: none."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.project is None) != (self.spec.code is None):
            raise ValueError("project must be given if and only if spec.code is given")
        if (self.data or {}).keys() != (self.spec.data or {}).keys():
            raise ValueError("data must have exactly the names of spec.data")
        return self


def without_sources(spec: Spec) -> Spec:
    """Return ``spec`` as a lock contains it: without the sources of packages, code and data."""
    image = ImageSpec(**{**dict(spec.image), "sources": SourcesSpec()})
    code = None if spec.code is None else CodeSpec()
    data = None if spec.data is None else dict.fromkeys(spec.data, DataSpec())
    return spec.model_copy(update={"image": image, "code": code, "data": data})
