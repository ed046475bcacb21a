"""What the tables of growth are made of."""

import os
import subprocess
import sys

import pytest
from growth import (
    RECORD,
    ROOT,
    SEGMENT,
    SHORTER,
    descendants,
    exponents,
    proportional_set_size,
    readable,
)

from capsule.host.spec_file import load_spec

MEGABYTES = 64
GRANDCHILD = f"""
import subprocess, sys
code = "memory = bytearray(b'1' * {MEGABYTES * 1_000_000}); print(); input()"
subprocess.run([sys.executable, "-c", code], start_new_session=True)
"""


def test_the_intervals_are_a_twentieth_of_those_of_the_breakout_study():
    recording = load_spec(ROOT / "specs" / "impala-pong.yaml").recording  # the base of that study
    assert recording.trace_interval / RECORD == SHORTER
    assert recording.checkpoint_interval / SEGMENT == pytest.approx(SHORTER, rel=0.03)


def test_an_exponent_says_how_a_column_grows_with_the_first():
    rows = [(0, 9, 9, 9, 9), (10, 5, 10, 100, 1000), (20, 5, 20, 400, 1000 * 2**0.5)]
    assert exponents(rows) == pytest.approx([0, 1, 2, 0.5])


def test_large_numbers_have_no_exponents():
    assert [readable(value) for value in (0.0125, 3.14159, 999.94, 12_500.0)] == [
        "0.0125",
        "3.142",
        "999.9",
        "12,500",
    ]


def test_the_memory_of_a_process_in_another_session_counts():
    with subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()  # the grandchild has its memory
        found = [*descendants(process.pid)]
        assert found[0] == process.pid and len(found) == 2
        assert os.getsid(found[1]) != os.getsid(process.pid)
        assert sum(map(proportional_set_size, found)) > MEGABYTES
        process.communicate(b"\n")


def test_a_process_that_ended_has_no_memory():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert proportional_set_size(process.pid) == 0
