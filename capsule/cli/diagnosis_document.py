"""The document that ``capsule diagnose --json`` prints."""

from __future__ import annotations

from pydantic import Field

from capsule.cli.error_document import ErrorDocument
from capsule.diagnosis.diagnose import Diagnosis
from capsule.diagnosis.trial import Trial


class DiagnosisDocument(Diagnosis):
    """A diagnosis, with what came of trying its settings."""

    trial: Trial | None = Field(
        description="Two runs with the settings that --apply tries; null if none were tried."
    )
    error: ErrorDocument | None = Field(
        description="The error that ended the trial, after the diagnosis; null if none did."
    )
