"""The trace format: chaining, reading, and finding the first difference."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.trace import (
    GENESIS,
    SEGMENT_RECORDS,
    extend,
    first_difference,
    read_trace,
    segment_line,
    trace_heads,
)


def line(**fields):
    return json.dumps(fields, separators=(",", ":")).encode()


def write(path, lines):
    path.write_bytes(b"".join(item + b"\n" for item in lines))
    return path


def test_the_chain_by_hand(tmp_path):
    first, second = line(step=4, loss="a"), line(step=8, loss="b")
    head = hashlib.sha256(bytes(32) + hashlib.sha256(first).digest()).digest()
    head = hashlib.sha256(head + hashlib.sha256(second).digest()).digest()
    assert trace_heads(write(tmp_path / "t", [first, second])) == (2, 8, head.hex(), [])
    assert trace_heads(write(tmp_path / "empty", [])) == (0, 0, GENESIS.hex(), [])


def test_heads_of_a_trace_are_those_after_the_last_record_up_to_each_step(tmp_path):
    lines = [line(step=2, streams="0"), line(step=4, streams="1")]
    first = extend(GENESIS, lines[0])
    second = extend(first, lines[1])
    genesis, first, second = GENESIS.hex(), first.hex(), second.hex()
    found = trace_heads(write(tmp_path / "t", lines), [1, 2, 3, 4, 5])
    assert found == (2, 4, second, [genesis, first, first, second, second])
    assert trace_heads(write(tmp_path / "empty", []), [4]) == (0, 0, genesis, [genesis])


def segmented(count):
    head, lines = GENESIS, []
    for number in range(count):
        record = line(step=number + 1)
        head = extend(head, record)
        lines.append(record)
        if (number + 1) % SEGMENT_RECORDS == 0:
            lines.append(segment_line(head, number + 1))
    return lines


def test_segment_heads_are_checked_and_not_chained(tmp_path):
    lines = segmented(SEGMENT_RECORDS + 3)
    path = write(tmp_path / "t", lines)
    records = list(read_trace(path))
    assert len(records) == SEGMENT_RECORDS + 3
    assert records[-1].step == SEGMENT_RECORDS + 3
    lines[10] = line(step=11, loss="changed")
    with pytest.raises(CapsuleError, match="segment head"):
        trace_heads(write(path, lines))


@pytest.mark.parametrize("record", [0, 1, SEGMENT_RECORDS - 1, SEGMENT_RECORDS + 1])
def test_a_segment_line_follows_the_last_record_of_a_segment_only(tmp_path, record):
    lines = segmented(SEGMENT_RECORDS + 3)
    head = GENESIS
    for each in (line for line in lines[:record] if b"records" not in line):
        head = extend(head, each)
    number = record - (record > SEGMENT_RECORDS)
    path = write(tmp_path / "t", [*lines[:record], segment_line(head, number), *lines[record:]])
    with pytest.raises(
        CapsuleError, match=rf"line {record + 1} is a segment line, .* 1024"
    ) as caught:
        trace_heads(path)
    assert caught.value.code == "CAP-T141"


def test_a_segment_line_may_be_missing_at_the_end_only(tmp_path):
    lines = segmented(SEGMENT_RECORDS + 3)
    cut = write(tmp_path / "t", lines[:SEGMENT_RECORDS])
    assert trace_heads(cut).records == SEGMENT_RECORDS
    del lines[SEGMENT_RECORDS]
    with pytest.raises(CapsuleError, match=r"line 1025 is not a segment line, .* 1024") as caught:
        trace_heads(write(cut, lines))
    assert caught.value.code == "CAP-T141"


def test_a_segment_line_occurs_once(tmp_path):
    lines = segmented(SEGMENT_RECORDS + 3)
    lines.insert(SEGMENT_RECORDS, lines[SEGMENT_RECORDS])
    with pytest.raises(CapsuleError, match=r"line 1026 is a segment line, .* 1024"):
        trace_heads(write(tmp_path / "t", lines))


def test_a_trace_can_be_read_from_after_each_of_its_records(tmp_path):
    path = write(tmp_path / "t", segmented(2 * SEGMENT_RECORDS + 2))
    records = list(read_trace(path))
    for record in records[SEGMENT_RECORDS - 2 : SEGMENT_RECORDS + 2] + records[-3:]:
        assert list(read_trace(path, record.after)) == records[record.number + 1 :]


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]\n", b'{"step":4}', b'{"step":0}\n', b'{"step":"4"}\n', b'{"step":true}\n',
     b'{"step":4}\n{"step":4}\n', b'{"loss":"a"}\n', b"\xff\n", b'{"records":1}\n',
     b'{"step":4,"step":5}\n', b'{"step":4,"loss":{"last":null,"last":"0x1p+0"}}\n'],
)  # fmt: skip
def test_what_is_not_a_trace_is_refused(tmp_path, data):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        trace_heads(tmp_path / "t")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-T141", ExitCode.TAMPERED)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=120))
def test_no_bytes_give_anything_but_a_head_or_a_coded_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "t"
    path.write_bytes(data)
    try:
        assert len(trace_heads(path).last) == 64
    except CapsuleError as error:
        assert error.code == "CAP-T141"


BASE = {"streams": "s", "observations": "o", "actions": "a", "loss": "l"}


@pytest.mark.parametrize("component", [*BASE])
def test_the_first_difference_is_the_earliest_record_and_component(tmp_path, component):
    lines = [line(step=step, **BASE) for step in (4, 8, 12)]
    other = list(lines)
    other[1] = line(step=8, **(BASE | {component: "x", "loss": "x"}))
    other[2] = line(step=12, **(BASE | {"streams": "x"}))
    found = first_difference(write(tmp_path / "a", lines), write(tmp_path / "b", other))
    assert (found.step, found.component, found.b) == (8, component, "x")


def test_a_differing_tensor_is_named(tmp_path):
    left = line(step=4, parameters={"conv1": "1", "conv2": "2"}, optimizer={"conv1": "3"})
    right = line(step=4, parameters={"conv1": "1", "conv2": "9"}, optimizer={"conv1": "9"})
    found = first_difference(write(tmp_path / "a", [left]), write(tmp_path / "b", [right]))
    assert (found.component, found.name, found.a, found.b) == ("parameters", "conv2", "2", "9")
    assert found.also == ("optimizer",)


def test_the_same_facts_written_otherwise_are_a_difference_of_format(tmp_path):
    left, right = b'{"step":4,"loss":"a"}', b'{"step":4, "loss":"a"}'
    found = first_difference(write(tmp_path / "a", [left]), write(tmp_path / "b", [right]))
    assert found.component == "format"


def test_equal_traces_have_no_difference_and_a_prefix_only_its_end(tmp_path):
    lines = segmented(SEGMENT_RECORDS + 2)
    whole, part = write(tmp_path / "a", lines), write(tmp_path / "b", lines[:5])
    assert first_difference(whole, whole) is None
    assert first_difference(whole, part).component == "end"
