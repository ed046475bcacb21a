"""The spec's section ``data``: files and folders outside the image that a run reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from capsule.experiment.fields import Model


class DataSpec(Model):
    """A data set: a file or a folder that the lock pins and that a run sees read-only.

    Its place and its expected digest are never part of a lock.
    """

    path: str | None = Field(
        None,
        description="File or folder, relative to the spec file; null if 'url' is given, and in "
        "locks.",
    )
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = Field(
        None,
        description="Address of a file, which is downloaded when the spec is locked; null if "
        "'path' is given, and in locks.",
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None,
        description="Expected SHA-256 of the file, or of the listing of the folder; null: any "
        "content is accepted and pinned.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataSpec:
        if self.path is not None and self.url is not None:
            raise ValueError("path and url contradict each other: remove one of them")
        return self
