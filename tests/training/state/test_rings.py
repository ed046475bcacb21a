"""Rings: where entries lie, what a checkpoint keeps, and files that outlive their writer."""

from pathlib import Path

import numpy as np
import pytest

from capsule.experiment.errors import CapsuleError
from capsule.training.state.rings import Rings, require_checkpoint


def rings(directory=None, *, slots=5, slack=2, writers=2):
    fields = {"number": (np.int64, ()), "pair": (np.float32, (2,))}
    return Rings(directory, fields, slots=slots, slack=slack, writers=writers)


def add(memory, count, writer=0):
    for _ in range(count):
        number = int(memory.counts[writer])
        assert memory.append({"number": number, "pair": (number, -number)}, writer) == number


def test_entries_lie_in_the_ring_of_their_writer():
    memory = rings()
    add(memory, 7)
    add(memory, 3, writer=1)
    assert memory.counts.tolist() == [7, 3]
    assert memory.fields["number"].tolist() == [5, 6, 2, 3, 4, 0, 1, 2, 0, 0]
    assert memory.fields["pair"][memory.at(6)].tolist() == [6.0, -6.0]
    numbers, writers = np.array([6, 2, 1]), np.array([0, 0, 1])
    assert memory.fields["number"][memory.at(numbers, writers)].tolist() == [6, 2, 1]


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 3), (2, 7), (5, 5), (4, 8), (10, 15)])
@pytest.mark.parametrize("writer", [0, 1])
def test_parts_are_the_slots_of_a_range_in_order(first, end, writer):
    memory = rings()
    slots = np.arange(10)
    found = [slot for part in memory.parts(first, end, writer) for slot in slots[part].tolist()]
    assert found == [memory.at(number, writer) for number in range(first, end)]


def test_a_checkpoint_is_kept_for_as_many_entries_as_the_slack():
    memory = rings()
    add(memory, 9)
    memory.keep()
    add(memory, 2)
    add(memory, 2, writer=1)
    for writer in (0, 1):
        with pytest.raises(RuntimeError, match="more than 2 entries added since the last"):
            add(memory, 1, writer)
    memory.keep()
    add(memory, 2)
    memory.resume([11, 2])
    add(memory, 2)
    with pytest.raises(RuntimeError, match="more than 2 entries"):
        add(memory, 1)


def test_a_checkpoint_is_on_the_disk_before_it_is_named(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(np.memmap, "flush", lambda array: flushed.append(Path(array.filename).name))
    memory = rings(tmp_path)
    add(memory, 1)
    assert flushed == []
    memory.keep()
    assert sorted(flushed) == ["number.bin", "pair.bin"]


def test_entries_outlive_their_writer_in_files(tmp_path):
    memory = rings(tmp_path)
    add(memory, 4)
    again = rings(tmp_path)
    again.resume([4, 0])
    assert again.fields["number"].tolist()[:5] == [0, 1, 2, 3, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["number.bin", "pair.bin"]


def test_files_that_do_not_hold_the_checkpoint_are_refused():
    require_checkpoint("same", "same", "entries")
    with pytest.raises(CapsuleError, match="CAP-T223 the replay files do not contain the unrolls"):
        require_checkpoint("one", "other", "unrolls of the checkpoint at 3")
