"""The ledger and the findings of a diagnosis, on a terminal."""

import io

from rich.console import Console

from capsule.entropy.ledger import Ledger, LedgerRow
from capsule.report.diagnosis import show_ledger


def test_every_row_shows_source_treatment_and_evidence_and_steers_nothing():
    row = LedgerRow(
        source="Clocks", treatment="assumed", evidence="left\x1b[31m alone", weakened_by="x"
    )
    stream = io.StringIO()
    show_ledger(Ledger(rows=(row,)), Console(file=stream, width=100))
    assert "source of nondeterminism" in stream.getvalue()
    assert "Clocks" in stream.getvalue()
    assert "assumed" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
