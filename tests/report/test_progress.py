"""Progress lines, in a pipe and on a pseudo-terminal."""

import io
import os
import pty
import re
import subprocess
import sys

from capsule.experiment.contract import Event
from capsule.report.progress import PlainReporter, event_line, open_reporter

PROGRAM = """
import time
from capsule.experiment.contract import Event
from capsule.report.progress import open_reporter

def event(kind, step, **values):
    return Event(
        kind=kind, time=0.0, step=step, total_steps=1000, steps_per_second=100.0, **values
    )

with open_reporter(quiet=False) as reporter:
    reporter.note("assembling [bold]layers\\x1b[31m")
    reporter.event(event("progress", 250, episode_return=1.5))
    time.sleep(0.3)  # the display is drawn ten times a second
    reporter.event(event("finish", 1000, loss=0.25))
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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


def test_a_terminal_shows_a_bar_with_notes_above_it_and_keeps_only_the_notes():
    terminal, other_end = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stderr=other_end,
        stdout=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(other_end)
    shown = b""
    while chunk := read(terminal):
        shown += chunk
    os.close(terminal)
    printed, _ = child.communicate()
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
