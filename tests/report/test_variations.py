"""What a run depends on, on a terminal."""

import pytest

from capsule.report.variations import show_variations
from capsule.verification.vary import VariedResult, VaryReport
from capsule.verification.verdict import Report
from tests.report.terminals import printed

CONTROL = Report(bundle="b", mode="full", verdict="reproduced-bitwise", summary="all equal")
REFUSED = Report(bundle="b", mode="full", verdict="inconclusive", summary="it does not start")


@pytest.fixture
def shown():
    rows = (
        VariedResult(name="threads", outcome="equal", was="1", became="2", report=CONTROL),
        VariedResult(
            name="timezone", outcome="shielded", was="[red]\x1b", reason="no start", report=REFUSED
        ),
    )
    report = VaryReport(
        bundle="b", conclusion="In short.", control=CONTROL, variations=rows, seconds=1.0
    )
    return printed(show_variations, report, width=100).splitlines()


def test_each_variation_is_a_row_and_the_conclusion_is_last(shown):
    rows = [line.split() for line in shown if line.startswith(("threads", "timezone"))]
    assert rows[0] == ["threads", "1", "2", "equal", "reproduced-bitwise"]
    assert shown[-2:] == ["timezone: no start", "In short."]


def test_what_a_run_saw_is_shown_as_text_and_no_verdict_where_nothing_was_judged(shown):
    (row,) = (line for line in shown if line.startswith("timezone  "))
    assert "[red]\N{REPLACEMENT CHARACTER}" in row
    assert "inconclusive" not in row
