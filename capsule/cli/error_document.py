"""The document that a failed command prints with ``--json``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.host.errors import CapsuleError


class ErrorDocument(Model):
    """A coded error."""

    schema_id: Literal["capsule/error/v1"] = Field("capsule/error/v1", alias="schema")
    code: str = Field(
        pattern=r"^CAP-[A-Z][0-9]{3}$",
        description="Code of the error; docs/errors.md lists all codes.",
    )
    message: str = Field(description="The failure, with the field and its value.")
    fix: str = Field(description="The remedy.")
    exit_code: int = Field(
        description="Exit status of the command; docs/exit-codes.md lists all of them."
    )

    @classmethod
    def of(cls, error: CapsuleError) -> ErrorDocument:
        """Return the document of an error."""
        return cls(
            code=error.code,
            message=error.message,
            fix=error.fix,
            exit_code=int(error.exit_code),
        )
