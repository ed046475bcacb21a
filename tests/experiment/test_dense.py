"""Dense records: what is one, its updates in order, and what is malformed."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment import dense
from capsule.experiment.dense import (
    DenseHeader,
    OperatorCall,
    OperatorResult,
    Update,
    is_dense,
    read_header,
    read_updates,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.trace import Record

HEADER = {"first": 4, "last": 8, "schema": "capsule/dense/v1", "spec": "0" * 64}
CALL = {
    "operator": "aten::mm",
    "where": "agent.py:3",
    "arguments": {"1": "0.5"},
    "inputs": ["a", "b"],
    "results": [{"dtype": "float32", "shape": [2, 1], "digest": "c", "data": None}],
}
RECORD = {"step": 4, "loss": "l", "parameters": {"w": "d"}}


def line(facts):
    return json.dumps(facts, separators=(",", ":")) + "\n"


@pytest.fixture
def write(tmp_path):
    """Write a dense record, of objects or of their texts."""

    def record(*lines):
        path = tmp_path / "dense.jsonl"
        texts = [line(each) if isinstance(each, dict) else each for each in lines]
        path.write_text("".join(texts), errors="surrogateescape")
        return path

    return record


def malformed(read, path):
    with pytest.raises(CapsuleError) as caught:
        read(path)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V074", ExitCode.USAGE)
    assert "capsule diff" in caught.value.fix
    assert path.name in caught.value.message
    return caught.value.message


def all_updates(path):
    return list(read_updates(path))


def test_an_update_has_the_calls_before_its_record(write):
    other = {**CALL, "operator": "aten::add", "where": None, "inputs": [], "results": []}
    path = write(HEADER, CALL, other, RECORD, {"step": 8}, CALL, {"step": 12, "loss": "m"})
    result = OperatorResult(dtype="float32", shape=(2, 1), digest="c")
    first = OperatorCall(
        operator="aten::mm",
        where="agent.py:3",
        arguments={"1": "0.5"},
        inputs=("a", "b"),
        results=(result,),
    )
    second = OperatorCall(operator="aten::add", where=None, arguments={"1": "0.5"}, inputs=(),
                          results=())  # fmt: skip
    assert all_updates(path) == [
        Update((first, second), Record(0, 4, {"loss": "l", "parameters": {"w": "d"}}, "")),
        Update((), Record(0, 8, {}, "")),
        Update((first,), Record(0, 12, {"loss": "m"}, "")),
    ]


def test_a_record_of_no_update_has_a_header_only(write):
    path = write(HEADER)
    assert all_updates(path) == []
    assert read_header(path) == DenseHeader(spec="0" * 64, first=4, last=8)


def test_calls_after_the_last_record_belong_to_no_update(write):
    assert [len(each.calls) for each in read_updates(write(HEADER, CALL, RECORD, CALL))] == [1]


def test_updates_are_read_one_after_the_other(write):
    updates = read_updates(write(HEADER, CALL, RECORD, "{\n"))
    assert next(updates).record.step == 4
    with pytest.raises(CapsuleError, match="line 4"):
        next(updates)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "capsule/dense/v2"},
        {"spec": "0" * 63},
        {"first": "4"},
        {"more": 1},
        {"last": None},
    ],
)
def test_another_header_is_malformed(write, change):
    assert "line 1 of a dense record" in malformed(read_header, write({**HEADER, **change}))


@pytest.mark.parametrize("text", ["[]\n", "{\n", "\n", "null\n"])
def test_a_first_line_that_is_no_header_is_malformed(write, text):
    assert "line 1" in malformed(read_header, write(text))


def test_an_empty_file_has_no_header(write):
    assert "line 1 of a dense record: is missing" in malformed(read_header, write())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{\n", "Expecting property name"),
        ("[]\n", ""),
        ("3\n", ""),
        ('"operator"\n', ""),
        ("[" * 10_000 + "\n", ""),
        ({"loss": "l"}, "step"),
        ({"step": "4"}, "has no step"),
        ({"step": 4.0}, "has no step"),
        ({"step": True}, "has no step"),
        ({**CALL, "more": 1}, "OperatorCall"),
        ({"operator": "f"}, "OperatorCall"),
        ("\udcff\n", ""),  # no UTF-8
    ],
)
def test_a_line_that_is_neither_call_nor_record_is_malformed(write, wrong, said):
    message = malformed(all_updates, write(HEADER, RECORD, wrong))
    assert "line 3 of a dense record: " in message
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("lines", [(HEADER, '{"step":4}'), (HEADER, RECORD, '{"st')])
def test_a_record_that_is_cut_off_is_malformed(write, lines):
    assert f"line {len(lines)}" in malformed(all_updates, write(*lines))


def test_a_line_beyond_the_limit_is_not_read(write, monkeypatch):
    monkeypatch.setattr(dense, "MAX_LINE_BYTES", 200)
    long = {"step": 8, "loss": "l" * 200}
    assert "cut off or too long" in malformed(all_updates, write(HEADER, RECORD, long))
    fits = line({"step": 8, "loss": "l" * (200 - len(line({"step": 8, "loss": ""})))})
    assert len(fits) == 200
    assert len(all_updates(write(HEADER, RECORD, fits))) == 2


def test_an_update_has_only_so_many_calls(write, monkeypatch):
    monkeypatch.setattr(dense, "MAX_CALLS", 2)
    two = (CALL, CALL, RECORD)
    assert [len(each.calls) for each in read_updates(write(HEADER, *two, *two))] == [2, 2]
    message = malformed(all_updates, write(HEADER, *two, CALL, *two))
    assert message.endswith("line 7 of a dense record: more than 2 calls of one update")


def test_a_dense_record_is_known_by_its_beginning(write, tmp_path):
    assert is_dense(write(HEADER, CALL, RECORD))
    assert is_dense(write(HEADER))
    for other in ({**HEADER, "schema": "capsule/dense/v2"}, RECORD, "x" * 2_000 + line(HEADER)):
        assert not is_dense(write(other))
    assert not is_dense(tmp_path / "absent")
    assert not is_dense(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert not is_dense(tmp_path / "pipe")


def test_a_link_is_not_followed_when_a_record_is_read(write, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(write(HEADER, RECORD))
    for read in (read_header, all_updates):
        with pytest.raises(OSError, match="link"):
            read(link)


@given(st.binary(max_size=60))
def test_any_bytes_after_a_header_give_updates_or_a_coded_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.dense"
    path.write_bytes(line(HEADER).encode() + data)
    try:
        assert all(type(each.record.step) is int for each in read_updates(path))
    except CapsuleError as error:
        assert error.code == "CAP-V074"
