"""Progress on a terminal: a pseudo-terminal is what the child process writes to."""

import os
import pty
import re
import subprocess
import sys

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
