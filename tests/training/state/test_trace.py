"""The trace: its chain by hand, resuming within a record, tampering, first differences."""

import hashlib
import json

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SeedsSpec
from capsule.experiment.trace import COMPONENTS, first_difference, read_trace, trace_heads
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace, arrays_digest

TENSORS = {
    "gradient": {"w": "aa", "b": "bb"},
    "parameters": {"w": "cc", "b": "dd"},
    "target": {"w": "ee"},
    "optimizer": {"mean/w": "ff"},
}


def write(path, records, *, streams=None, start=0):
    """Write a trace with two pieces of every component per record, tensors every fourth."""
    streams = streams or make_streams(SeedsSpec())
    trace = Trace(path)
    trace.restore(None)
    for number in range(start, records):
        feed(trace, number)
        streams["exploration"].uniform()
        complete = number % 4 == 0
        trace.record(
            8 * (number + 1),
            streams,
            loss=number / 3,
            minibatch="ab" if complete else None,
            tensors=TENSORS if complete else None,
        )
    trace.close()
    return trace


def feed(trace, number):
    for piece in range(2):
        for component in ("observations", "actions", "rewards", "terminals", "indices", "loss"):
            trace.add(component, f"{component} {number} {piece}".encode())


def test_the_chain_by_hand(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = write(path, 3)
    head = bytes(32)
    for line in path.read_bytes().splitlines():
        head = hashlib.sha256(head + hashlib.sha256(line).digest()).digest()
    assert (trace.records, trace.head) == (3, head.hex())
    assert trace_heads(path) == (3, 24, head.hex(), [])


def test_a_leaf_by_hand(tmp_path):
    write(tmp_path / "trace.jsonl", 1)
    fields = json.loads((tmp_path / "trace.jsonl").read_text())
    first = xxhash.xxh3_128_digest(b"actions 0 0")
    assert fields["actions"] == xxhash.xxh3_128_hexdigest(first + b"actions 0 1")
    assert fields["loss"]["last"] == (0.0).hex()
    assert set(fields["streams"]) == set(make_streams(SeedsSpec()))


def test_components_are_in_data_flow_order(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl")
    feed(trace, 0)
    trace.add("schedule", b"slots")
    named = {"minibatch": "ab", "generations": {"one": {}}, "unrolls": {"one": "ab"}}
    trace.record(8, make_streams(SeedsSpec()), loss=0.0, tensors=TENSORS, **named)
    trace.close()
    fields = json.loads((tmp_path / "trace.jsonl").read_text())
    assert tuple(fields) == ("step", *COMPONENTS)


def test_segment_heads_stand_after_every_1024_records(tmp_path):
    path = tmp_path / "trace.jsonl"
    write(path, 2_100)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 2_102
    heads = {number: record.head for number, record in enumerate(read_trace(path), start=1)}
    assert json.loads(lines[1_024]) == {"head": heads[1_024], "records": 1_024}
    assert json.loads(lines[2_049]) == {"head": heads[2_048], "records": 2_048}


@pytest.mark.parametrize("number", [0, 1, 1_022, 1_023, 1_024, 1_029])
def test_it_is_read_from_any_record_on(tmp_path, number):
    path = tmp_path / "trace.jsonl"
    write(path, 1_030)
    records = list(read_trace(path))
    mark = records[number].after
    assert list(read_trace(path, mark)) == records[number + 1 :]
    assert (mark.records, mark.step) == (number + 1, 8 * (number + 1))
    whole = path.read_bytes()
    hole = tmp_path / "hole.jsonl"
    hole.write_bytes(bytes(mark.offset) + whole[mark.offset :])
    assert first_difference(path, hole, since=mark) is None


def test_a_window_ends_with_its_last_record(tmp_path):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    write(whole, 20)
    write(part, 12)
    mark = list(read_trace(whole))[4].after
    assert first_difference(whole, part, since=mark, until=96) is None
    more = first_difference(whole, part, since=mark, until=104)
    assert (more.step, more.component, more.a) == (104, "end", "more")
    fewer = first_difference(whole, part, since=mark, until=88)
    assert (fewer.step, fewer.component, fewer.b) == (96, "end", "more")


def test_it_resumes_in_the_middle_of_a_record(tmp_path):
    write(tmp_path / "whole", 3)
    streams = make_streams(SeedsSpec())
    trace = Trace(tmp_path / "resumed")
    trace.restore(None)
    for number in range(3):
        for piece in range(2):
            for component in ("observations", "actions", "rewards", "terminals", "indices", "loss"):
                trace.add(component, f"{component} {number} {piece}".encode())
            state = json.loads(json.dumps(trace.state(), sort_keys=True))
            trace.add("actions", b"lost")
            trace.record(999, streams)
            trace.close()
            trace = Trace(tmp_path / "resumed")
            trace.restore(state)
        streams["exploration"].uniform()
        complete = number % 4 == 0
        trace.record(
            8 * (number + 1),
            streams,
            loss=number / 3,
            minibatch="ab" if complete else None,
            tensors=TENSORS if complete else None,
        )
    trace.close()
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_shorter_than_the_state_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = Trace(path)
    feed(trace, 0)
    trace.record(8, make_streams(SeedsSpec()))
    state = trace.state()
    trace.close()
    path.write_bytes(path.read_bytes()[:-1])
    trace = Trace(path)
    with pytest.raises(CapsuleError, match=r"CAP-T121.*ends at byte"):
        trace.restore(state)
    trace.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"{",
        lambda data: data + b"[1]\n",
        lambda data: data + b'{"step":1}\n',
        lambda data: data + b'{"step":true}\n',
        lambda data: data + b'{"nothing":1}\n',
        lambda data: data + b'{"records":2,"head":"00"}\n',
        lambda data: data + b"[" * 100_000 + b"\n",
        lambda data: data + b" " * (1 << 21) + b"\n",
    ],
)
def test_what_no_trace_holds_is_refused(tmp_path, damage):
    path = tmp_path / "trace.jsonl"
    write(path, 2)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CapsuleError, match="CAP-T"):
        list(read_trace(path))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_changed_value_is_found_where_it_is(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("traces")
    a, b = directory / "a", directory / "b"
    write(a, 6)
    lines = a.read_bytes().splitlines()
    number = data.draw(st.integers(0, 5))
    fields = json.loads(lines[number])
    component = data.draw(st.sampled_from(sorted(fields.keys() - {"step"})))
    name = None
    if isinstance(fields[component], dict):
        name = data.draw(st.sampled_from(sorted(fields[component])))
        fields[component][name] = "changed"
    else:
        fields[component] = "changed"
    lines[number] = json.dumps(fields, separators=(",", ":")).encode()
    b.write_bytes(b"\n".join(lines) + b"\n")
    found = first_difference(a, b)
    assert (found.step, found.component, found.name) == (8 * (number + 1), component, name)
    assert found.b == "changed"
    assert found.also == ()


def test_the_earliest_component_in_data_flow_order_is_named(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, 1)
    fields = json.loads(a.read_bytes())
    fields["actions"] = fields["gradient"]["b"] = "changed"
    b.write_bytes(json.dumps(fields, separators=(",", ":")).encode() + b"\n")
    found = first_difference(a, b)
    assert (found.component, found.also) == ("actions", ("gradient",))


def test_equal_prefixes_differ_only_in_their_end(tmp_path):
    write(tmp_path / "a", 3)
    write(tmp_path / "b", 5)
    found = first_difference(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.component, found.a, found.b) == (32, "end", None, "more")


def test_another_seed_names_its_stream(tmp_path):
    write(tmp_path / "a", 2)
    other = make_streams(SeedsSpec(streams={"exploration": 1}))
    write(tmp_path / "b", 2, streams=other)
    found = first_difference(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.component, found.name) == (8, "streams", "exploration")


def test_the_digest_of_arrays_reads_elements_in_c_order():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert arrays_digest([array]) == xxhash.xxh3_128_hexdigest(array.tobytes())
    assert arrays_digest([array.T]) == xxhash.xxh3_128_hexdigest(array.T.tobytes())
