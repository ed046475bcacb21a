"""The ledger and the findings of a diagnosis, on a terminal."""

from pathlib import Path
from typing import get_args

import pytest

from capsule.diagnosis.diagnose import Diagnosis, OperatorCensus
from capsule.diagnosis.findings import CATALOGUE, finding
from capsule.diagnosis.trial import Trial
from capsule.entropy.evidence import Treatment
from capsule.entropy.ledger import Ledger, LedgerRow
from capsule.report.diagnosis import show_diagnosis, show_ledger, show_trial
from capsule.training.instruments.report import Location
from tests.report.terminals import printed


def test_every_row_shows_source_treatment_and_evidence_and_steers_nothing():
    row = LedgerRow(
        source="Clocks", treatment="assumed", evidence="left\x1b[31m alone", weakened_by="x"
    )
    text = printed(show_ledger, Ledger(rows=(row,)), width=100)
    assert "source of nondeterminism" in text
    assert "Clocks" in text
    assert "assumed" in text
    assert "\x1b" not in text


def row(source, treatment):
    return LedgerRow(source=source, treatment=treatment, evidence="seen", weakened_by="x")


def test_every_treatment_has_a_row_in_the_order_of_the_ledger():
    treatments = get_args(Treatment)
    rows = tuple(row(f"source {n}", treatment) for n, treatment in enumerate(treatments))
    shown = text_of(show_ledger, Ledger(rows=rows)).splitlines()[1:]
    assert [line.split()[:3] for line in shown] == [
        ["source", str(n), treatment] for n, treatment in enumerate(treatments)
    ]


# --- diagnoses ----------------------------------------------------------------------------------

WHERE = Location(file="train.py", line=4, function="<module>")


def text_of(show, *arguments):
    return printed(show, *arguments, width=60)


def diagnosis(*findings, steps=None, equal=False, **census):
    usual = {"calls": 0, "repeated": 0, "differing": 0, "statuses": {}}
    operators = OperatorCensus(**{**usual, **census})
    return Diagnosis(name="own", steps=steps, equal=equal, operators=operators, findings=findings)


def test_a_finding_is_shown_with_place_line_remedy_and_setting():
    item = finding("CAP-D105", "'x' differs", where=WHERE, text="x = list(y)")
    text = text_of(show_diagnosis, diagnosis(item))
    assert text.startswith(
        "CAP-D105  train.py:4  'x' differs\n"
        "    x = list(y)\n"
        f"    fix: {CATALOGUE['CAP-D105'].fix}\n"
        "    --apply tries determinism.hash_seed: 0\n"
        "\n"
    )


def test_a_finding_without_place_line_and_setting_has_a_message_and_a_remedy():
    text = text_of(show_diagnosis, diagnosis(finding("CAP-D107", "a message")))
    first, fix, *rest = text.splitlines()
    assert (first, fix) == ("CAP-D107  a message", f"    fix: {CATALOGUE['CAP-D107'].fix}")
    assert rest[0] == ""


def test_the_comparison_comes_after_the_findings():
    found = [finding("CAP-D105", ""), finding("CAP-D107", ""), finding("CAP-D108", "")]
    statuses = {"deterministic": 12, "seeded": 0, "raises": 1}
    census = {"calls": 12_345, "repeated": 6_000, "differing": 1, "statuses": statuses}
    text = text_of(show_diagnosis, diagnosis(*found, steps=1024, **census))
    assert text.splitlines()[-4:] == [
        "operators  12,345 calls: 12 deterministic, 1 raises",
        "repeated   6,000 calls, 1 of them gave other bits",
        "runs       2, 1,024 steps: different results",
        "findings   2 errors, 1 warning, 0 notes",
    ]


def test_one_thing_is_written_in_the_singular():
    census = {"calls": 1, "repeated": 1, "statuses": {"seeded": 1}}
    text = text_of(show_diagnosis, diagnosis(finding("CAP-D105", ""), steps=1, **census))
    assert text.splitlines()[-4:] == [
        "operators  1 call: 1 seeded",
        "repeated   1 call, 0 of them gave other bits",
        "runs       2, 1 step: different results",
        "findings   1 error, 0 warnings, 0 notes",
    ]


def test_a_program_without_a_finding_runs_to_its_end():
    text = text_of(show_diagnosis, diagnosis(equal=True))
    assert text.splitlines()[0] == "operators  0 calls: none"
    assert "runs       2, to the end: equal bits\n" in text


def test_text_of_the_program_is_neither_markup_nor_steers_the_terminal():
    item = finding("CAP-D105", "[bold]a\x1b[31m", where=WHERE, text="x = '[/]\u202e'")
    text = text_of(show_diagnosis, diagnosis(item))
    assert "[bold]a" in text
    assert "x = '[/]" in text
    assert not {"\x1b", "\u202e"} & set(text)


# --- trials -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equal", "applied", "outcome"),
    [
        (True, True, "two runs gave equal bits; my spec.yaml was changed, lock it again"),
        (True, False, "two runs gave equal bits; my spec.yaml was not changed"),
        (False, False, "the two runs still differ; the spec was not changed"),
    ],
)
def test_a_trial_is_shown_with_its_settings_and_its_outcome(equal, applied, outcome):
    found = () if equal else (finding("CAP-D107", "a number"),)
    trial = Trial(
        settings={"entropy.clock": "virtual", "determinism.hash_seed": 0},
        diagnosis=diagnosis(*found, equal=equal),
        applied=applied,
    )
    text = text_of(show_trial, trial, Path("my spec.yaml")).splitlines()
    assert text[:2] == [
        "tried      entropy.clock: virtual, determinism.hash_seed: 0",
        f"           {outcome}",
    ]
    assert ("CAP-D107  a number" in text) == (not equal)
