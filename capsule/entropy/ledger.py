"""The ledger: the sources of nondeterminism of one run, and what became of each.

It is computed from what the run left behind (:class:`~capsule.entropy.evidence.Evidence`): flags
that were read back inside it, what the launcher counted, what the trainer says that it did. A
source that does not apply to the run has no row. The rows are judged in ``capsule/entropy/rows``:
a new one takes a :class:`~capsule.entropy.evidence.LedgerSource` there, a line in
``docs/ledger.md`` and a case in ``tests/entropy/test_ledger.py`` that breaks the mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from capsule.entropy.evidence import Evidence, LedgerSource, Treatment
from capsule.entropy.rows import computing, order, randomness, requests, surroundings
from capsule.experiment.fields import Model

SOURCES: tuple[LedgerSource, ...] = (
    *randomness.SOURCES,
    *order.SOURCES,
    *requests.SOURCES,
    *computing.SOURCES,
    *surroundings.SOURCES,
)
"""Every source, in the order of the rows."""


class LedgerRow(Model):
    """One source of nondeterminism."""

    source: str
    treatment: Treatment
    evidence: str = Field(description="What was measured or read back.")
    weakened_by: str = Field(description="What would make the treatment fail.")


class Ledger(Model):
    """The sources of nondeterminism that apply to a run, in a fixed order."""

    schema_id: Literal["capsule/ledger/v1"] = Field("capsule/ledger/v1", alias="schema")
    rows: tuple[LedgerRow, ...]

    @property
    def uncontrolled(self) -> tuple[LedgerRow, ...]:
        """The rows of sources that were not controlled."""
        return tuple(row for row in self.rows if row.treatment in ("assumed", "unsupported"))


class LedgerDifference(Model):
    """A source that two ledgers treat differently."""

    source: str
    recorded: Treatment | None = Field(
        description="Treatment in the first ledger; null if that has no such row."
    )
    here: Treatment | None = Field(
        description="Treatment in the second ledger; null if that has no such row."
    )


def compute_ledger(evidence: Evidence) -> Ledger:
    """Judge every source by what a finished run left behind."""
    return Ledger(rows=tuple(_rows(evidence)))


def compare_ledgers(recorded: Ledger, here: Ledger) -> tuple[LedgerDifference, ...]:
    """Return the sources whose treatments differ, in the order of rows; evidence may differ."""
    old, new = ({row.source: row.treatment for row in ledger.rows} for ledger in (recorded, here))
    return tuple(
        LedgerDifference(source=source, recorded=old.get(source), here=new.get(source))
        for source in {**old, **new}
        if old.get(source) != new.get(source)
    )


def _rows(evidence: Evidence) -> Iterator[LedgerRow]:
    for source in SOURCES:
        judgement = source.judge(evidence)
        if judgement is not None:
            treatment, found = judgement
            yield LedgerRow(
                source=source.name,
                treatment=treatment,
                evidence=found,
                weakened_by=source.weakened_by,
            )
