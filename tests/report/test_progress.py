"""Progress lines, in a pipe and on a pseudo-terminal."""

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from capsule.experiment.contract import Event
from capsule.report.progress import PlainReporter, event_line, open_reporter

PROGRAM = """
import sys
from capsule.experiment.contract import Event
from capsule.report.progress import open_reporter

def event(kind, step, **values):
    return Event(
        kind=kind, time=0.0, step=step, total_steps=1000, steps_per_second=100.0, **values
    )

with open_reporter(quiet=False) as reporter:
    reporter.note("assembling [bold]layers\\x1b[31m")
    reporter.event(event("progress", 250, episode_return=1.5))
    sys.stdin.readline()  # a thread draws the display, and the test says when it has
    reporter.event(event("finish", 1000, loss=0.25))
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that can be drawn on, whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def make_event(kind="progress", **facts):
    return Event(time=0.0, kind=kind, step=500, total_steps=2000, **facts)


def test_a_progress_line_says_step_speed_time_return_and_loss():
    line = event_line(
        make_event(steps_per_second=100.0, episode_return=1.5, loss=0.25, exploration=0.8)
    )
    assert line == (
        "step 500/2,000  100 steps/s  15s left  return 1.50  loss 0.25  exploration 0.80"
    )


HUGE = 10**400  # no float is as large

# A program writes its events itself, and may write anything that has their form.
ABSURD = [
    {"steps_per_second": 1e-320},
    {"steps_per_second": -1e-320},
    {"steps_per_second": math.nan},
    {"total_steps": HUGE, "steps_per_second": 1.0},
    {"step": HUGE, "steps_per_second": 1.0},
]


def test_a_run_beyond_its_total_has_no_time_left():
    event = make_event().model_copy(update={"step": 500, "total_steps": 400})
    event = event.model_copy(update={"kind": "progress", "steps_per_second": 0.1})
    assert "  0s left" in event_line(event)


@pytest.mark.parametrize("facts", ABSURD)
def test_a_time_that_cannot_be_computed_is_a_question_mark(facts):
    event = Event.model_validate_json(json.dumps(make_event().model_dump() | facts))
    assert "  ? left" in event_line(event)
    assert "left" not in event_line(event.model_copy(update={"kind": "checkpoint"}))


@pytest.mark.parametrize(
    "facts", [*ABSURD, {"total_steps": HUGE}, {"step": -HUGE, "total_steps": -HUGE}]
)
def test_the_bar_of_absurd_numbers_is_drawn(facts, terminal, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal)
    with open_reporter(quiet=False) as reporter:
        for step in (1, 2):  # the speed follows from two events
            reporter.event(make_event().model_copy(update={"step": step} | facts))
    assert "step" in terminal.getvalue()


def test_plain_progress_is_thinned_but_nothing_else_is(monkeypatch):
    monkeypatch.setattr("capsule.report.progress.time.monotonic", lambda: 1_000.0)
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    for kind in ("start", "progress", "progress", "checkpoint", "finish"):
        reporter.event(make_event(kind))
    kinds = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert kinds == ["start", "checkpoint", "finish"]


def test_a_live_line_does_not_take_text_of_a_stranger_for_markup(terminal, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal)
    with open_reporter(quiet=False) as reporter:
        reporter.event(make_event(message="[/] [link=file:///]click[/link] \x1b]8;;x\a"))
    assert "[link=file:///]click[/link]" in terminal.getvalue()
    assert "\x1b]8" not in terminal.getvalue()  # neither its own hyperlink nor one by markup


def test_a_terminal_shows_a_bar_with_notes_above_it_and_keeps_only_the_notes():
    terminal, other_end = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=other_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(other_end)
    late = threading.Timer(600.0, child.kill)
    late.start()
    shown = b""
    while chunk := read(terminal):
        shown += chunk
        if b"return 1.50" in shown and not child.stdin.closed:
            child.stdin.close()
    os.close(terminal)
    printed = child.stdout.read()
    child.stdout.close()
    child.wait()
    late.cancel()
    assert (child.returncode, printed) == (0, b"")  # only results are printed there
    text = shown.decode()
    assert "━" in text
    plain = ESCAPES.sub("", text)
    assert "step 250/1,000  100 steps/s  7s left  return 1.50" in plain
    assert "  finish: step 1,000/1,000  100 steps/s  loss 0.25" in plain
    assert "assembling [bold]layers" in plain  # neither markup nor an escape of the message
    assert "\x1b[31m" not in text
    assert text.rstrip().endswith("\x1b[2K")  # the bar is erased at the end


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux' answer once the other end is closed
        return b""
