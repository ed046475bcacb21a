"""Recording a schedule: what is written, continued and cut."""

import numpy as np
import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import parse_schedule
from capsule.training.impala.schedule.recorder import ScheduleRecorder
from tests.training.impala.schedule.conftest import SPEC


def slots(*pairs):
    return np.array(pairs, np.int64)


@pytest.fixture
def recorder(tmp_path):
    """A function that opens the recorder of one file."""
    opened = []

    def open_it():
        opened.append(ScheduleRecorder(tmp_path / "schedule", SPEC, 300, 2))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


def test_a_recording_is_the_log_of_what_was_learned(recorder):
    first = recorder()
    assert first.log().updates == 0
    for update in range(300):
        first.append(update, slots((299, update), (update % 299, max(0, update - 256))))
    log = parse_schedule(first.log().document())
    assert (log.spec, log.actors, log.batch, log.updates) == (SPEC, 300, 2, 300)
    for update in range(300):
        assert list(log.slots(update)) == [(299, update), (update % 299, max(0, update - 256))]


def test_a_recording_begins_anew_or_where_it_is_cut(recorder):
    first = recorder()
    for update in range(5):
        first.append(update, slots((update, 0), (9, 0)))
    first.flush()
    second = recorder()
    second.cut(3)
    second.append(3, slots((7, 3), (8, 3)))
    assert second.log().played.tolist() == [0, 9, 1, 9, 2, 9, 7, 8]
    assert second.log().lags.tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    second.flush()
    third = recorder()
    third.append(0, slots((1, 0), (2, 0)))
    assert third.log().played.tolist() == [1, 2]


def test_a_recording_that_is_not_all_there_is_refused(recorder):
    first = recorder()
    first.append(0, slots((1, 0), (2, 0)))
    first.flush()
    with pytest.raises(CapsuleError, match="has 8 bytes, but the saved state needs 16") as refusal:
        recorder().cut(2)
    assert refusal.value.code == "CAP-T342"
