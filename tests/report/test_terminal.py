"""Verification reports on a terminal."""

import io

from rich.console import Console

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerRow, compare_ledgers
from capsule.machine.compare import FactComparison
from capsule.report.terminal import show_report
from capsule.verification.verdict import (
    Cause,
    ComponentDifference,
    Divergence,
    Explanation,
    Report,
    TraceDifference,
)
from tests.report.conftest import different, read

MAX_LINES = 30


def shown(report):
    stream = io.StringIO()
    show_report(report, Console(file=stream, width=120))
    return stream.getvalue()


def ledger(**treatments):
    rows = [
        LedgerRow(source=source, treatment=treatment, evidence="seen", weakened_by="luck")
        for source, treatment in treatments.items()
    ]
    return Ledger(rows=tuple(rows))


def verified(**facts):
    return Report(
        bundle="run.capsule.tar",
        mode="full",
        verdict="reproduced-bitwise",
        summary="the re-execution reproduced every claim",
        **facts,
    )


def test_the_ledger_of_the_re_execution_is_shown_and_what_the_recorded_one_says_otherwise():
    recorded = ledger(Clocks="eliminated", Software="eliminated", Scheduling="ordered")
    here = ledger(Clocks="eliminated", Software="assumed", Network="assumed")
    text = shown(
        verified(
            recorded_ledger=recorded,
            ledger=here,
            ledger_differences=compare_ledgers(recorded, here),
        )
    )
    assert "Software (assumed), Network (assumed)\n" in text
    assert "ledger differs   Software: recorded eliminated, here assumed" in text
    assert "Scheduling: recorded ordered, here no such row" in text
    assert "and 1 more sources in the report" in text


def test_a_ledger_that_was_not_computed_here_is_said_to_be_the_signers():
    text = shown(verified(recorded_ledger=ledger(Clocks="assumed")))
    assert "Clocks (assumed), as the signer recorded" in text


def test_a_difference_is_told_with_step_component_and_both_values():
    report = Report(
        bundle="run.capsule.tar",
        mode="full",
        verdict="not-reproduced",
        summary="the runs first differ at step 8, in loss",
        integrity=True,
        authentic=True,
        signer="SHA256:abc",
        first_difference=TraceDifference(
            step=8, component="parameters", name="[bold]fc1.weight", claimed="aa", found="bb"
        ),
        differences=(ComponentDifference(component="trace.head", claimed="1", found="2"),),
    )
    text = shown(report)
    assert "step 8, parameters, [bold]fc1.weight" in text
    assert "claimed aa" in text
    assert "found   bb" in text
    assert "trace.head" in text
    assert text.rstrip().splitlines()[-1].startswith("not-reproduced")


def test_every_signer_is_named_and_why_one_does_not_count():
    signers = (
        Signer(kind="dsse", key="SHA256:abc", identity="alice@lab"),
        Signer(kind="sshsig", key="SHA256:def", rejection_reason="is revoked"),
    )
    report = Report(
        bundle="run.capsule.tar",
        mode="integrity",
        verdict="intact",
        summary="",
        integrity=True,
        authentic=True,
        signer="SHA256:abc",
        signers=signers,
    )
    text = shown(report)
    assert "signed by a trusted key: SHA256:abc (alice@lab)" in text
    assert "not counted: SHA256:def is revoked" in text


def test_integrity_and_authenticity_are_told_apart():
    text = shown(
        Report(
            bundle="b.tar",
            mode="integrity",
            verdict="intact",
            summary="s",
            integrity=True,
            authentic=False,
            signer="SHA256:abc",
        )
    )
    assert "unchanged since it was signed" in text
    assert "NOT trusted: SHA256:abc" in text


def test_a_verdict_stays_within_thirty_lines_whatever_differs():
    rows = tuple(
        FactComparison(field=f"gpu.{n}", recorded="x" * 900, here="y", effect=effect, reason="r")
        for n in range(40)
        for effect in ("none", "recorded-only", "gate", "may differ")
    )
    differences = tuple(
        ComponentDifference(component=f"c{n}", claimed="a", found="b") for n in range(40)
    )
    report = Report(
        bundle="b.tar", mode="full", verdict="not-reproduced", summary="s", claim_id="c",
        integrity=True, authentic=True, signer="k", expected="e", environment=rows,
        image_rebuilt=True, differences=differences, relaxations=("r",), reexecuted_steps=1,
        error={"code": "CAP-X001", "message": "m", "fix": "f"},
    )  # fmt: skip
    text = shown(report)
    assert len(text.splitlines()) <= MAX_LINES
    assert "gate" in text
    assert "recorded-only" not in text  # the least grave of so many
    assert "40 facts of the machine are equal" in text
    assert "and 38 more differences" in text


def test_an_analysis_stays_within_thirty_lines_and_keeps_where_and_why(bundles):
    report = different(read(bundles["dqn"])).model_copy(
        update={
            "divergence": Divergence(
                a="a",
                b="b",
                equal=False,
                first=TraceDifference(step=8, component="loss", claimed="1", found="2"),
                causes=(Cause(name="arithmetic", certainty="likely", evidence=("e",) * 14),),
                explanations=tuple(
                    Explanation(what=f"w{n}", a="a", b="b", why="y") for n in range(40)
                ),
                differences=tuple(
                    ComponentDifference(component=f"c{n}", claimed="a", found="b")
                    for n in range(40)
                ),
            )
        }
    )
    text = shown(report)
    assert len(text.splitlines()) <= MAX_LINES
    assert "step 8, loss" in text
    assert "arithmetic (likely)" in text
    assert "more lines in the report" in text
