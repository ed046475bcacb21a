"""Every parser, given anything: a coded error, or a value that is written as it was read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS, FindingError, check

RUNS = 15_000  # of a fuzzer that looks at coverage; run.py does as many as one likes
EDITS = 3

# What mutations of bytes seldom find by themselves.
PIECES = [
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"[" * 2000, b"{}", b"[]"),
    *(b'""', b'"\\ud800"', b"\xff", b"\0", b"\xef\xbb\xbf", b"\n", b"&a ", b"*a", b"!!int ", b"? "),
    *(b"0x" + b"f" * 5000, b"\x80" * 11, b"\xff" * 9, bytes(512), b"../", b"\x1b[2J"),
]


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[float, float, bytes]]:
    """Where to cut, how much of what follows to drop, and what to put there."""
    piece = st.sampled_from(PIECES) | st.binary(max_size=8)
    edit = st.tuples(st.floats(0, 1), st.sampled_from([0, 1e-6, 1e-3, 0.1, 1]), piece)
    return draw(st.lists(edit, min_size=1, max_size=EDITS))


def edited(seed: bytes, changes: list[tuple[float, float, bytes]]) -> bytes:
    for where, dropped, piece in changes:
        start = round(where * len(seed))
        end = start + (dropped > 0) * max(1, round(dropped * len(seed)))
        seed = seed[:start] + piece + seed[end:]
    return seed


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_its_seeds_are_taken(name):
    assert all(check(name, seed) for seed in PARSERS[name].seeds())


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_edited_documents(name):
    seeds = PARSERS[name].seeds()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(seeds) - 1), edits())
    def takes(number, changes):
        check(name, edited(seeds[number], changes))

    takes()


@pytest.mark.parametrize("name", PARSERS)
def test_noise(name):
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=300))
    def takes(data):
        check(name, data)

    takes()


@pytest.mark.parametrize("name", ["canonical", "profile", "layer", "tensors"])
def test_every_flipped_byte_is_refused_or_meant(name):
    (seed, *_) = PARSERS[name].seeds()
    for position in range(0, len(seed), 1 + len(seed) // 700):
        data = bytearray(seed)
        data[position] ^= 1 << position % 8
        check(name, bytes(data))


@pytest.mark.soak
@pytest.mark.slow
def test_a_fuzzer_that_looks_at_coverage(tmp_path):
    program = str(Path(__file__).with_name("run.py"))
    done = subprocess.run(
        [sys.executable, program, "all", "--runs", str(RUNS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {RUNS} runs" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_written_otherwise_is_a_finding(monkeypatch):
    from tests.fuzz import parsers

    monkeypatch.setattr(parsers, "canonical_json", lambda _: b"")
    with pytest.raises(FindingError):
        check("canonical", b"{}")
