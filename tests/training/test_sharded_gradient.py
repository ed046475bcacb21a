"""Sharded gradients: equal bits for any number of threads and ranks; a lost rank ends the run."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.contract import Job
from capsule.experiment.errors import CapsuleError
from capsule.training import sharded_gradient
from capsule.training.networks.feedforward import Parameters
from capsule.training.sharded_gradient import (
    Learners,
    ShardGradient,
    Threads,
    _device,
    _Rank,
    added,
    flat_gradient,
    split,
)
from tests.training.conftest import (
    ANY_GPU,
    claimed,
    finish_run,
    make_spec,
    new_run,
    read,
    start_run,
)
from tests.training.impala.trainers import IMPALA, SHARDS, Trainers, digests, saved

# The processes of a run, further below, are spawned.
pytestmark = pytest.mark.usefixtures("one_thread", "importable", "warm_workers")

UPDATES = 4
CPU = torch.device("cpu")


@pytest.fixture
def begin(tmp_path):
    """A function that makes a trainer."""
    trainers = Trainers(tmp_path)
    yield trainers
    trainers.close()


# --- equal bits -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "learners",
    [pytest.param(2, marks=pytest.mark.soak), 4, pytest.param(8, marks=pytest.mark.soak)],
)
def test_several_learners_make_the_updates_of_one(begin, learners):
    expected = digests(begin(), UPDATES)
    assert len({update[1] for update in expected}) == UPDATES  # it learns
    trainer = begin(learners=learners)
    assert digests(trainer, UPDATES) == expected
    others = [other._process.pid for other in trainer._learners._others]
    assert len(others) == learners - 1
    trainer.close()
    for pid in others:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_threads_and_ranks_that_do_not_divide_the_shards_make_them_too(begin):
    expected = digests(begin(), 2)
    assert digests(begin(workers=2), 2) == expected
    assert digests(begin(learners=3), 2) == expected


def test_how_the_batch_is_split_is_part_of_the_result(begin):
    """Were it not, equal bits would show nothing."""
    whole = begin(trainer={"micro_batches": [sum(SHARDS)]})
    assert digests(whole, 1)[0][1] != digests(begin(), 1)[0][1]


class Telling:
    """A gradient that tells its shard and the parameters; can be made in another process."""

    def __init__(self, parameters):
        self.parameters = parameters

    def __call__(self, shard):
        return ShardGradient(torch.tensor(float(sum(shard))), self.parameters.flat * sum(shard))


@pytest.fixture
def ranks():
    """A function that starts ranks, or threads of one, with :class:`Telling`."""
    started = []

    def start(parameters, count, make=Telling, shards=8, threads=1):
        spec = make_spec(IMPALA)
        options = {"determinism": spec.determinism, "numerics": "native", "threads": threads}
        started.append(Learners(parameters, make, shards, ranks=count, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.slow
def test_gradients_are_added_in_the_order_of_the_shards_and_ranks_follow_the_parameters(ranks):
    """In float32, where eight numbers of very different sizes have as many sums as orders."""
    parameters = Parameters({"weight": (3,)}, torch.device("cpu"))
    parameters.flat.copy_(torch.tensor([1.0, 1 / 3, -7.0]))
    batch = [1e8, 1.0, -1e8, 3.0, 1e-3, 2**24, 1.0, -5e7]
    total = np.zeros(3, np.float32)
    for number, each in enumerate(batch):
        part = (parameters.flat * each).numpy()
        total = part if number == 0 else total + part
    backwards = np.float32(0)
    for each in reversed(batch):
        backwards = backwards + np.float32(each)
    assert backwards != total[0]
    learners = [ranks(parameters, 1, threads=3), ranks(parameters, 3)]
    for each in learners:
        for _ in range(2):  # threads share the work from the second time on
            parts = each.differentiate(split(batch, [1] * 8))
            assert [float(part.loss) for part in parts] == [float(np.float32(n)) for n in batch]
            assert added(part.gradient for part in parts).numpy().tobytes() == total.tobytes()
    for value in (1.0, 5.0):
        parameters.flat.fill_(value)
        parts = learners[1].differentiate([[1.0]] * 8)
        assert added(part.gradient for part in parts).tolist() == [8 * value] * 3


# --- the parts ------------------------------------------------------------------------------------


def test_each_rank_has_a_gpu_as_long_as_there_are_some(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [_device("cuda", rank) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [_device("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:0"]
    assert _device("cpu", 1) == "cpu"


def test_a_rank_tests_its_own_gpu(monkeypatch):
    tested, checked = [], []
    monkeypatch.setattr(
        sharded_gradient, "gpu_test", lambda device, **options: tested.append((device, options))
    )
    monkeypatch.setattr(sharded_gradient, "check_memory", checked.append)
    monkeypatch.setattr(
        sharded_gradient, "Parameters", lambda shapes, _device: Parameters(shapes, CPU)
    )
    gpu, shapes = torch.device("cuda:1"), {"weight": (3,)}
    rank = _Rank(Telling, shapes, str(gpu), make_spec(IMPALA).determinism)
    assert tested == [(gpu, {"repeats": True, "tf32": False})]
    rank.differentiate(np.zeros(3, np.float32), [[1.0]])
    assert checked == [gpu]


def test_a_batch_is_split_in_order():
    assert split(list("abcdef"), [1, 3, 2]) == [["a"], ["b", "c", "d"], ["e", "f"]]
    assert [part.tolist() for part in split(np.arange(5), [2, 3])] == [[0, 1], [2, 3, 4]]
    assert [part.tolist() for part in split(torch.arange(3), [3])] == [[0, 1, 2]]


def test_a_flat_gradient_lies_as_the_parameters_do():
    parameters = Parameters({"filters": (2, 3, 4, 5), "bias": (2,)}, torch.device("cpu"))
    parameters.flat.copy_(torch.arange(122.0))
    leaves = parameters.leaves()
    loss = sum((leaf * leaf).sum() for leaf in leaves.values())
    assert torch.equal(flat_gradient(loss, leaves), 2 * parameters.flat)


@pytest.fixture
def threads():
    """Three threads, which have worked before."""
    three = Threads(3)
    three.map(lambda _: None, [0])
    yield three
    three.close()


def test_threads_return_results_in_order_and_the_caller_works_beside(threads):
    names, done = [], []
    both = threading.Barrier(2, timeout=600)

    def square(number):
        names.append(threading.current_thread().name)
        if number == 0:
            both.wait()
        return number * number

    def beside():
        both.wait()  # another thread is at work on the first item
        done.append(threading.current_thread())

    assert threads.map(square, range(20), beside=beside) == [n * n for n in range(20)]
    assert done == [threading.current_thread()]
    assert any(name.startswith("learner") for name in names)
    assert threads.map(square, []) == []


def test_the_first_work_of_threads_is_done_by_the_caller_alone():
    first = Threads(3)
    found = first.map(lambda _: threading.current_thread(), range(9))
    assert set(found) == {threading.current_thread()}
    first.close()


@pytest.mark.parametrize("failing", [0, 7])
def test_the_failure_of_an_item_is_raised_when_all_threads_have_stopped(threads, failing):
    running = set()

    def work(number):
        running.add(number)
        if number == failing:
            running.remove(number)
            raise ValueError(f"item {number}")
        time.sleep(0.01)
        running.remove(number)

    with pytest.raises(ValueError, match=f"item {failing}"):
        threads.map(work, range(8))
    assert not running
    assert threads.map(lambda number: number, range(3)) == [0, 1, 2]


def test_a_failure_beside_the_items_is_raised_and_leaves_no_item_at_work(threads):
    def beside():
        raise KeyError("beside")

    with pytest.raises(KeyError, match="beside"):
        threads.map(time.sleep, [0.01] * 50, beside=beside)
    assert threads.map(str, [1]) == ["1"]


# --- losses ---------------------------------------------------------------------------------------


class Failing(Telling):
    def __call__(self, shard):
        if len(shard) == 2:
            raise ValueError("as asked")
        return super().__call__(shard)


@pytest.mark.slow
def test_a_rank_that_fails_says_why_and_there_are_none_without_a_shard(ranks):
    parameters = Parameters({"weight": (2,)}, torch.device("cpu"))
    learners = ranks(parameters, 20, Failing, shards=2)
    assert len(learners._others) == 1
    with pytest.raises(CapsuleError) as caught:
        learners.differentiate([[1.0], [1.0, 1.0]])
    assert caught.value.code == "CAP-T332"
    assert "ValueError: as asked" in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_any_number_goes_on_from_what_was_saved(begin):
    expected = digests(begin(), UPDATES)
    trainer = begin(learners=3)
    digests(trainer, 2)
    state = saved(trainer)
    trainer._learners._others[1]._process.kill()
    with pytest.raises(CapsuleError) as caught:
        trainer.train_step()
    assert caught.value.code == "CAP-T361"
    assert "process 2 (gradient shards 2 and 5) died: SIGKILL" in str(caught.value)
    for learners in (1, 2):
        again = begin(learners=learners)
        again.restore(*state)
        assert digests(again, 2) == expected[2:]


@pytest.mark.slow
def test_a_run_that_loses_a_learner_is_resumed(tmp_path, one_core):
    changes = {"trainer": {"total_steps": 3_600}, "recording": {"checkpoint_interval": 300}}
    spec = make_spec(IMPALA, **changes, evaluation={"interval": 3_600})
    whole = new_run(tmp_path / "whole", spec)
    status, errors = finish_run(whole, warm=False)
    assert status == 0, errors
    broken = new_run(tmp_path / "broken", spec)
    order(broken, spec, 3)
    run = start_run(broken)
    wait_for(lambda: len(read(broken, contract.CHECKPOINT_INDEX)["checkpoints"]) > 1, run)
    os.kill(children(run.pid)[-1], signal.SIGKILL)  # begun last
    run.communicate(timeout=600)
    failure = read(broken, contract.FAILURE)
    assert failure["code"] == "CAP-T361"
    order(broken, spec, 2)
    status, errors = finish_run(broken)
    assert status == 0, errors
    assert claimed(broken) == claimed(whole)


def order(directory, spec, learners):
    """Say how many learners an attempt has."""
    job = Job(spec=spec, learners=learners)
    (directory / contract.JOB).write_bytes(job.document())


def wait_for(condition, process):
    """Wait until something is so, while a run goes on."""
    while process.poll() is None:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    pytest.fail("the run ended before")


def children(pid):
    """Return the processes that one has begun, in order."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_runs_on_gpus_are_equal_for_any_number_of_learners(tmp_path):
    spec = make_spec(IMPALA, accelerator=ANY_GPU)
    found = []
    for learners in (1, 2, 4, 8):
        directory = new_run(tmp_path / str(learners), spec)
        order(directory, spec, learners)
        status, errors = finish_run(directory)
        assert status == 0, errors
        found.append(claimed(directory))
    assert all(each == found[0] for each in found)
