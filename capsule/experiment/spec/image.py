"""The spec's sections ``image`` and ``code``: the contents of the image."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from capsule.experiment.fields import DebianName, Model, Patterns, Requirement

Base = Literal["debian-12", "debian-13", "ubuntu-24.04"]
Python = Literal["3.11", "3.12", "3.13"]
PYTHON: dict[Base, Python] = {"debian-12": "3.11", "debian-13": "3.13", "ubuntu-24.04": "3.12"}


def _python_of_base(known: dict[str, Any]) -> Python:
    return PYTHON[known.get("base", "debian-12")]  # without it, the base itself is wrong


class SourcesSpec(Model):
    """The sources of packages. They are not part of locks, which contain names and digests only."""

    index: str | None = Field(
        None,
        description="Main package index; null: the one that pip is configured to use, else PyPI.",
    )
    extra_indexes: tuple[str, ...] = Field(
        (), description="Package indexes in addition to those that pip is configured to use."
    )
    find_links: tuple[str, ...] = Field(
        (),
        description="Folders or pages with wheels, in addition to those that pip is configured to "
        "use. Paths are relative to the spec file.",
    )
    debian: tuple[str, ...] = Field(
        (),
        description="Mirrors of the archive of image.base (Debian's or Ubuntu's). If there are "
        "none, those of the variable CAPSULE_DEBIAN_MIRROR or CAPSULE_UBUNTU_MIRROR are used, else "
        "those that this machine's apt is configured to use, else deb.debian.org or "
        "archive.ubuntu.com.",
    )


class ImageSpec(Model):
    """The contents of the image in addition to Capsule's own training code."""

    base: Base = Field(
        "debian-12",
        description="Base recipe of the image: Debian 12, Debian 13 or Ubuntu 24.04.",
    )
    python: Python = Field(
        default_factory=_python_of_base,
        description="Python version. It must be that of the base: 3.11 for Debian 12, 3.13 for "
        "Debian 13, and 3.12 for Ubuntu 24.04.",
        json_schema_extra={"default": "3.11"},
    )
    packages: tuple[Requirement, ...] = Field(
        (
            "torch==2.13.0",
            "numpy==2.4.6",
            "gymnasium==1.4.0",
            "ale-py==0.12.1",
            "safetensors==0.8.0",
        ),
        description="Python packages (PEP 508). The lock pins each one to a wheel and its SHA-256.",
    )
    debian: tuple[DebianName, ...] = Field(
        (), description="Additional packages of the base's distribution, Debian or Ubuntu."
    )
    sources: SourcesSpec = Field(
        SourcesSpec(),
        description="Sources from which packages are downloaded. They are never part of a lock.",
    )

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.python != PYTHON[self.base]:
            raise ValueError(
                f"image.python must be {PYTHON[self.base]!r}, the version of image.base "
                f"{self.base!r}"
            )
        return self


class CodeSpec(Model):
    """The source tree of a program. In a git work tree, it excludes the files that git ignores."""

    path: str = Field(".", description="Folder of the tree, relative to the spec file.")
    files: Patterns = Field(
        ("*",),
        description="Patterns that select files of the tree. '*' matches any characters, including "
        "'/'; a leading '!' excludes; the last pattern that matches decides. Example: ['*', "
        "'!data/*'].",
    )
