"""Dense records: what is handed over once goes into the records of the window alone."""

import json

import pytest

from capsule.training.instruments.dense_record import DenseTrace


@pytest.fixture
def trace(tmp_path):
    trace = DenseTrace(tmp_path / "trace", tmp_path / "dense")
    yield trace
    trace.close()


def unrolls(path):
    """Return step to names of unrolls, of the records of a file."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    return {each["step"]: [*each.get("unrolls", {})] for each in records}


def test_a_trace_keeps_nothing_for_dense_records_before_they_begin(trace, tmp_path):
    for step in range(1, 4):
        trace.record(step, {}, unrolls={f"unroll {step}": "00"})
        assert not trace._owed.get(trace._lines)
    for step in (4, 5):
        with trace.watching():
            if step == 5:
                trace.record(step, {}, unrolls={"unroll 5": "00"})
        with trace.dense():
            trace.record(step, {}, unrolls={"unroll 4": "00"} if step == 4 else None)
    trace.record(6, {}, unrolls={"unroll 6": "00"})
    assert not trace._owed.get(trace._lines)
    trace.flush()
    expected = {1: ["unroll 1"], 2: ["unroll 2"], 3: ["unroll 3"], 5: ["unroll 4", "unroll 5"]}
    assert unrolls(tmp_path / "trace") == {**expected, 6: ["unroll 6"]}
    assert unrolls(tmp_path / "dense") == {4: ["unroll 4"], 5: ["unroll 5"]}
