"""Pickles are compared opcode by opcode, and nothing in them is executed."""

import io
import math
import pickle
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content import pickles
from capsule.verification.content.parts import NotComparableError
from capsule.verification.content.pickles import compare_pickle, storage_types
from tests.verification.content.comparing import (
    CLAIMED,
    CONTEXT,
    FOUND,
    Trap,
    compare,
    facts,
    saved,
    summary,
    zipped,
)


def test_a_pickle_is_read_and_never_executed(tmp_path):
    trap = tmp_path / "sprung"
    for wrap in (pickle.dumps, lambda value: zipped({"archive/data.pkl": pickle.dumps(value, 2)})):
        found = compare(wrap(Trap(trap, 1)), wrap(Trap(trap, 2)))
        assert found.nature == "content"
        assert not trap.exists()


def test_a_pickle_names_the_text_before_what_differs():
    left, right = ({"loss": 0.5, "steps": 7}, {"loss": 0.25, "steps": 7})
    found = compare(pickle.dumps(left), pickle.dumps(right))
    assert (found.format, summary(found)) == ("pickle", [("number after 'loss'", "content")])
    found = compare(pickle.dumps({"start": CLAIMED + 1.5}), pickle.dumps({"start": FOUND + 2.5}))
    assert summary(found) == [("number after 'start'", "date")]
    assert compare(pickle.dumps([1]), pickle.dumps([1, 2])).parts[0].where.startswith("structure")


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=9), FINITE, st.data())
def test_one_number_of_many_is_found_with_both_values(numbers, other, data):
    place = data.draw(st.integers(0, len(numbers) - 1))
    changed = [*numbers[:place], other, *numbers[place + 1 :]]
    left, right = ({"x": values} for values in (numbers, changed))
    found = compare_pickle(pickle.dumps(left), pickle.dumps(right), CONTEXT)
    if repr(numbers) == repr(changed):
        assert found.nature == "packaging"
        return
    ((where, claimed, shown),) = facts(found)
    assert (where, claimed) == ("number after 'x'", repr(numbers[place]))
    assert shown.startswith(f"{other!r}, ")


@pytest.mark.parametrize(
    ("left", "right", "where"),
    [
        ({"a": "x" * 40}, {"a": "y" * 40}, "text after 'a'"),
        ({"a": b"x"}, {"a": b"y"}, "bytes after 'a'"),
        ({"a": 7}, {"a": 9}, "number after 'a'"),
        ([0.0], [-0.0], "number after the beginning"),
        ([1], [True], "structure after the beginning"),
        ([1], [256], "structure after the beginning"),  # of one byte and of two
    ],
)
def test_a_value_that_differs_is_content(left, right, where):
    assert summary(compare(pickle.dumps(left), pickle.dumps(right))) == [(where, "content")]


def test_nan_is_equal_to_itself():
    left, right = ({"a": math.nan, "b": number} for number in (0.5, 0.25))
    assert [part.where for part in compare(pickle.dumps(left), pickle.dumps(right)).parts] == [
        "number after 'b'"
    ]


def test_the_frames_and_the_version_of_a_protocol_are_packaging():
    value = {"a": [1, 2.5, "x"]}
    found = compare(pickle.dumps(value, 4), pickle.dumps(value, 5))
    assert (found.format, found.nature) == ("pickle", "packaging")


@pytest.mark.parametrize(
    ("load", "length"),
    [
        pytest.param(pickle.loads, lambda size: size + 1, id="behind the file"),
        pytest.param(pickle.loads, lambda _: 1 << 63, id="beyond a file"),
        pytest.param(pickle._loads, lambda size: size - 6, id="within an opcode"),
    ],
)
def test_a_frame_that_a_reader_rejects_is_no_packaging(load, length):
    data = pickle.dumps({"loss": 0.5}, 4)
    size = int.from_bytes(data[3:11], "little")
    forged = data[:3] + length(size).to_bytes(8, "little") + data[11:]
    with pytest.raises((pickle.UnpicklingError, OverflowError)):
        load(forged)  # the readers in C and in Python check different things
    assert compare(forged, data).nature == "content"


def test_a_frame_within_a_frame_is_no_packaging():
    data = pickle.dumps([1, 2], 4)
    frame = data[2:11]
    forged = data[:11] + frame + data[11:]
    assert compare(forged, data).nature == "content"


def test_bytes_outside_of_frames_are_compared():
    left, right = ([bytes(70_000), number, bytes(70_000)] for number in (1, 2))
    found = compare(pickle.dumps(left, 4), pickle.dumps(right, 4))
    assert (found.format, [part.claimed for part in found.parts]) == ("pickle", ["1"])


def test_another_structure_is_named_with_its_place():
    found = compare(pickle.dumps([1, 2], 2), pickle.dumps([1], 2))
    # After the protocol (2 bytes), the empty list (1) and its number (2) comes MARK or a number.
    assert facts(found) == [
        ("structure after the beginning", "MARK at byte 5", "BININT1 at byte 5")
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"(lp0\n.", "not a pickle"),  # protocol 0
        (b"\x80\x06N.", "not a pickle"),  # a protocol to come
        (b"", "not a pickle"),
        (pickle.dumps(1, 2) + b"x", "bytes behind the pickle"),
        (pickle.dumps(1, 2) * 2, "bytes behind the pickle"),
    ],
)
def test_a_file_that_is_not_one_pickle_is_not_compared(data, reason):
    with pytest.raises(NotComparableError, match=reason):
        compare_pickle(data, data, CONTEXT)


def test_a_pickle_that_is_cut_off_is_not_compared():
    whole = pickle.dumps([1, 2, 3], 2)
    for end in range(2, len(whole)):
        with pytest.raises(ValueError):
            compare_pickle(whole[:end], whole, CONTEXT)


def test_the_number_of_opcodes_is_bounded(monkeypatch):
    data = pickle.dumps(1, 2)  # PROTO, BININT1, STOP
    monkeypatch.setattr(pickles, "MAX_OPCODES", 3)
    compare_pickle(data, data, CONTEXT)
    monkeypatch.setattr(pickles, "MAX_OPCODES", 2)
    with pytest.raises(NotComparableError, match="more than 2 opcodes"):
        compare_pickle(data, data, CONTEXT)


def description(value):
    """Return the pickle within a torch file."""
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        return archive.read("archive/data.pkl")


def test_the_type_of_each_storage_of_a_torch_file_is_found():
    types = [torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.int64, torch.float32]
    value = {f"w{place}": torch.zeros(2, dtype=each) for place, each in enumerate(types)}
    names = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}
    assert storage_types(description(value)) == {
        str(place): names[each] for place, each in enumerate(types)
    }


def test_storages_of_other_types_and_other_texts_have_no_type():
    assert storage_types(description({"mask": torch.ones(2, dtype=torch.bool), "text": "0"})) == {}
    assert storage_types(pickle.dumps({"FloatStorage": "0"}, 2)) == {}


def test_two_views_of_one_storage_have_its_type():
    whole = torch.zeros(4)
    assert storage_types(description({"a": whole[:2], "b": whole[2:]})) == {"0": "F32"}
