"""What people see: progress lines, verdicts, and text from strangers."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerRow, compare_ledgers
from capsule.experiment.contract import Event
from capsule.report.progress import PlainReporter, event_line, open_reporter
from capsule.report.terminal import show_report
from capsule.report.text import MAX_CHARACTERS, printable
from capsule.verification.verdict import ComponentDifference, Report, TraceDifference


def make_event(kind="progress", **facts):
    return Event(time=0.0, kind=kind, step=500, total_steps=2000, **facts)


def test_a_progress_line_says_step_speed_time_return_and_loss():
    line = event_line(
        make_event(steps_per_second=100.0, episode_return=1.5, loss=0.25, exploration=0.8)
    )
    assert line == (
        "step 500/2,000  100 steps/s  15s left  return 1.50  loss 0.25  exploration 0.80"
    )


def test_plain_progress_is_thinned_but_nothing_else_is():
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    for kind in ("start", "progress", "progress", "checkpoint", "finish"):
        reporter.event(make_event(kind))
    kinds = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert kinds == ["start", "checkpoint", "finish"]


@pytest.mark.parametrize(
    "text",
    ["\x1b[31mred", "\u202eevil", "a\r\nb", "bell\a", "\u200bzero", "\x9b1m", "\ud800"],
)
def test_text_from_strangers_cannot_steer_the_terminal(text):
    assert "\N{REPLACEMENT CHARACTER}" in printable(text)
    assert printable(text).isprintable()


@given(st.text())
def test_printable_text_is_printable_and_bounded(text):
    assert len(printable(text)) <= MAX_CHARACTERS + 1
    assert printable(text).replace("\u3000", "").replace("\xa0", "") is not None
    assert all(character.isprintable() or character.isspace() for character in printable(text))


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


def test_a_live_line_does_not_take_text_of_a_stranger_for_markup(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with open_reporter(quiet=False) as reporter:
        reporter.event(make_event(message="[/] [link=file:///]click[/link] \x1b]8;;x\a"))
    assert "[link=file:///]click[/link]" in terminal.getvalue()
    assert "\x1b]8" not in terminal.getvalue()  # neither its own hyperlink nor one by markup
