"""Experience replay of unrolls: what is kept, what is drawn, and how a batch is made of both."""

import json
import shutil
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import parse_schedule
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.impala.replay import UnrollReplay
from capsule.training.state.streams import Stream
from tests.training.impala.conftest import COUNTING, LIVE, log_of, train
from tests.training.impala.test_learner import go_on, results, state_of, trace_of

pytestmark = pytest.mark.usefixtures("deterministic", "importable")

REPLAYED = {"replay": {"unrolls": 2, "capacity": 9}}
RARELY = {"trainer": REPLAYED, "recording": {"checkpoint_interval": 600}}


def unroll(number):
    """Return an unroll that tells its number in every part."""
    return Unroll(
        **{
            name: np.full((3, 2), number)
            for name in Unroll._fields
            if name != "returns"
        },
        returns=[float(number)],
    )  # fmt: skip


def number_of(drawn):
    (number,) = {int(part.flat[0]) for name, part in drawn._asdict().items() if name != "returns"}
    return number


@given(
    capacity=st.integers(1, 7),
    slack=st.integers(1, 9),
    count=st.integers(1, 30),
    seed=st.integers(),
)
def test_only_the_newest_are_drawn_and_each_is_itself(capacity, slack, count, seed):
    replay = UnrollReplay(None, unroll(0), capacity=capacity, slack=slack)
    replay.append([unroll(number) for number in range(count)])
    indices, drawn = replay.sample(Stream("minibatch", abs(seed) % 2**53), 20)
    assert [number_of(each) for each in drawn] == indices.tolist()
    assert set(indices.tolist()) <= set(range(max(0, count - capacity), count))
    assert all(each.returns == [] for each in drawn)


def test_all_that_is_kept_is_drawn_equally_often():
    replay = UnrollReplay(None, unroll(0), capacity=4, slack=1)
    replay.append([unroll(number) for number in range(7)])
    indices, _ = replay.sample(Stream("minibatch", 0), 8_000)
    counts = Counter(indices.tolist())
    assert sorted(counts) == [3, 4, 5, 6]
    assert all(abs(count - 2_000) < 200 for count in counts.values())  # 5 standard deviations


def test_what_a_checkpoint_needs_outlives_what_follows(tmp_path):
    replay = UnrollReplay(tmp_path, unroll(0), capacity=3, slack=4)
    replay.append([unroll(number) for number in range(8)])
    saved = replay.state()
    replay.append([unroll(number) for number in range(8, 12)])
    with pytest.raises(RuntimeError, match="more than 4 entries"):
        replay.append([unroll(12)])
    again = UnrollReplay(tmp_path, unroll(0), capacity=3, slack=4)
    again.restore(saved)
    indices, drawn = again.sample(Stream("minibatch", 1), 50)
    assert set(indices.tolist()) == {5, 6, 7}
    assert [number_of(each) for each in drawn] == indices.tolist()


@pytest.mark.parametrize("name", [name for name in Unroll._fields if name != "returns"])
def test_files_that_were_changed_are_refused(tmp_path, name):
    replay = UnrollReplay(tmp_path, unroll(0), capacity=3, slack=1)
    replay.append([unroll(number) for number in range(3)])
    saved = replay.state()
    data = bytearray((tmp_path / f"{name}.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / f"{name}.bin").write_bytes(data)
    with pytest.raises(CapsuleError, match="CAP-T223"):
        UnrollReplay(tmp_path, unroll(0), capacity=3, slack=1).restore(saved)


def test_half_of_a_batch_is_new_and_half_is_drawn(make):
    learner = make(trainer=REPLAYED, recording={"trace_interval": 10})
    learn, batches = learner._learners.differentiate, []
    learner._learners.differentiate = lambda shards: (
        batches.append(list(chain(*shards))) or learn(shards)
    )
    train(learner, 100)
    assert learner.updates == 10  # of 2 new unrolls of 5 steps
    digests = [[each._replace(returns=[]).digest() for each in batch] for batch in batches]
    fresh = [digest for batch in digests for digest in batch[:2]]
    for update, batch in enumerate(digests):
        kept = fresh[: 2 * (update + 1)][-9:]
        assert len(batch) == 4
        assert set(batch[2:]) <= set(kept)
    assert any(set(batch[2:]) - set(batch[:2]) for batch in digests)


def test_the_trace_says_which_unrolls_were_drawn(make):
    learner = make(trainer=REPLAYED, recording={"trace_interval": 10})
    sample, drawn = learner._replay.sample, []

    def noted(*arguments):
        indices, unrolls = sample(*arguments)
        drawn.append(xxhash.xxh3_128_hexdigest(indices.tobytes()))
        return indices, unrolls

    learner._replay.sample = noted
    train(learner, 60)
    records = [json.loads(line) for line in trace_of(learner).read_text().splitlines()]
    assert [record["indices"] for record in records] == drawn
    assert len(set(drawn)) > 1


@pytest.mark.slow
def test_a_recorded_schedule_of_a_run_with_replay_is_followed_to_its_bits(make):
    recorded = train(make(COUNTING, trainer=LIVE | REPLAYED))
    log = log_of(recorded)
    assert parse_schedule(log).batch == 2  # new unrolls
    followed = make(COUNTING, workers=2, trainer=LIVE | REPLAYED, replay=log)
    assert results(train(followed)) == results(recorded)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "workers"), [(10, 1), (300, 2)])
def test_a_run_with_replay_continues_to_the_same_bits(make, step, workers):
    whole = train(make(**RARELY))
    source = train(make(**RARELY), step)
    saved = state_of(source)
    learner = make(**RARELY, workers=workers)
    replay = f"{contract.STATE}/replay"
    shutil.copytree(source.directory / replay, learner.directory / replay, dirs_exist_ok=True)
    assert results(train(go_on(learner, source, step, saved))) == results(whole)
