"""All cases, in order of their numbers."""

from __future__ import annotations

from tests.hostile import (
    archive_cases,
    document_cases,
    image_cases,
    lock_cases,
    member_cases,
    trust_cases,
)
from tests.hostile.case import Case

CASES: list[Case] = sorted(
    [
        *document_cases.CASES,
        *archive_cases.CASES,
        *image_cases.CASES,
        *lock_cases.CASES,
        *trust_cases.CASES,
        *member_cases.CASES,
    ],
    key=lambda case: (case.number, case.name),
)
