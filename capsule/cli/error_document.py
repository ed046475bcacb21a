"""The document that a failed command prints with ``--json``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.host.errors import CapsuleError


class ErrorDocument(Model):
    """A coded error."""

    schema_id: Literal["capsule/error/v1"] = Field("capsule/error/v1", alias="schema")
    code: str = Field(pattern=r"^CAP-[A-Z][0-9]{3}$", description="See docs/errors.md.")
    message: str = Field(description="What failed, with the field and its value.")
    fix: str = Field(description="What to do about it.")
    exit_code: int = Field(description="See docs/exit-codes.md.")

    @classmethod
    def of(cls, error: CapsuleError) -> ErrorDocument:
        """Return the document of an error."""
        return cls(
            code=error.code,
            message=error.message,
            fix=error.fix,
            exit_code=int(error.exit_code),
        )
