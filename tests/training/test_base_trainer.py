"""The parts that all trainers share, in DQN on a small task: theta, episodes, records, states."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.training import base_trainer
from tests.training.conftest import CARTPOLE, trainers_in

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A trainer that has not begun, whose counters tests may change."""
    with trainers_in(tmp_path_factory.mktemp("trainers")) as build:
        yield build(CARTPOLE)


def records(trainer):
    trainer.trace.flush()
    lines = (trainer.directory / contract.TRACE).read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- theta ----------------------------------------------------------------------------------------


def test_theta_is_drawn_from_the_stream_of_that_name_alone(open_trainer):
    first, again = (
        open_trainer(CARTPOLE),
        open_trainer(CARTPOLE, seeds={"streams": {"minibatch": 9}}),
    )
    other = open_trainer(CARTPOLE, seeds={"streams": {"initialization": 9}})
    assert first.online.flat.tolist() == again.online.flat.tolist()
    assert first.online.flat.tolist() != other.online.flat.tolist()
    # One uniform for each element: 4 x 32, 32 x 32 and 32 x 2 weights, and as many biases as rows.
    assert first.streams["initialization"].draws == 4 * 32 + 32 + 32 * 32 + 32 + 32 * 2 + 2


def test_theta_is_bounded_by_its_fan_in(shared):
    views = shared.online.views
    for name, fan_in in (("dense1", 4), ("dense2", 32)):
        for part in ("weight", "bias"):
            largest = views[f"{name}.{part}"].abs().max().item()
            assert 0.5 / math.sqrt(fan_in) < largest <= 1 / math.sqrt(fan_in)


# --- episodes -------------------------------------------------------------------------------------


def test_before_the_first_episode_and_update_there_is_no_mean_and_no_loss(shared):
    shared.returns.clear()
    assert (shared.mean_return, shared.loss) == (None, None)
    assert (shared.step, shared.episodes) == (0, 0)


def test_the_mean_is_of_the_last_100_returns_and_rounded_once(shared):
    shared.returns.clear()
    shared.returns.extend([1e9] * 7 + [0.1] * 100)
    assert len(shared.returns) == 100
    assert shared.mean_return == 0.1  # sum([0.1] * 100) is 9.99999999999998
    shared.returns.clear()
    shared.returns.extend([1e100, 1.0, -1e100])
    assert shared.mean_return == 1 / 3


def test_episodes_are_counted_as_they_end(open_trainer):
    trainer = open_trainer(CARTPOLE, environment={"max_episode_steps": 1})
    for _ in range(3):
        trainer.train_step()
    assert trainer.episodes == trainer.step > 0
    assert list(trainer.returns) == [1.0] * trainer.step  # a step of CartPole pays 1


# --- states ---------------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.lists(FLOATS, max_size=120), FLOATS)
def test_a_snapshot_returns_exactly_through_json(shared, step, episodes, returns, loss):
    tensors = shared.tensors()
    state = {"episodes": episodes, "returns": returns, "loss": loss.hex()}
    document = {**shared.state(), **state}
    shared.restore(step, json.loads(json.dumps(document)), tensors)
    assert (shared.step, shared.episodes, shared.loss) == (step, episodes, loss)
    assert math.copysign(1, shared.loss) == math.copysign(1, loss)
    assert list(shared.returns) == returns[-100:]
    again = json.loads(json.dumps(shared.state()))
    assert again == {**document, "returns": returns[-100:]}
    shared.restore(0, {**document, "episodes": 0, "returns": [], "loss": None}, tensors)
    assert (shared.loss, shared.state()["loss"]) == (None, None)


def test_tensors_are_taken_over(open_trainer):
    one, other = (
        open_trainer(CARTPOLE),
        open_trainer(CARTPOLE, seeds={"streams": {"initialization": 9}}),
    )
    assert one.digests() != other.digests()
    other.restore(0, one.state(), one.tensors())
    assert one.digests() == other.digests()
    assert one.online.flat.tolist() == other.online.flat.tolist()


# --- records --------------------------------------------------------------------------------------


def test_the_first_record_and_those_of_the_interval_hold_every_tensor(open_trainer):
    trainer = open_trainer(CARTPOLE)  # with a tensor_interval of 80
    for step in (0, 8, 80, 88):
        trainer.step = step
        trainer.record()
    trainer.record(complete=True)
    found = records(trainer)
    assert [record["step"] for record in found] == [0, 8, 80, 88, 88]
    assert ["parameters" in record for record in found] == [True, False, True, False, True]
    assert found[0]["parameters"] == trainer.digests()["parameters"]
    assert isinstance(found[1]["streams"], str)
    assert "initialization" in found[0]["streams"]
    assert not any("minibatch" in record or "unrolls" in record for record in found)


def test_a_record_after_an_update_has_its_loss_gradient_and_minibatch(open_trainer):
    trainer = open_trainer(CARTPOLE)
    assert "gradient" not in trainer.digests()
    while trainer.loss is None:
        trainer.train_step()
    trainer.record(complete=True)
    last = records(trainer)[-1]
    assert last["loss"]["last"] == trainer.loss.hex()
    assert set(last["gradient"]) == set(trainer.online.views)
    assert len(last["minibatch"]) == 32
    trainer.step += 1
    trainer.record()
    assert "minibatch" not in records(trainer)[-1]


def test_neither_a_record_nor_a_state_follows_a_failed_allocation(shared, monkeypatch):
    def fail(device):
        raise CapsuleError("CAP-T116", str(device), fix="")

    monkeypatch.setattr(base_trainer, "check_memory", fail)
    for write in (shared.record, shared.state):
        with pytest.raises(CapsuleError, match="CAP-T116"):
            write()


def test_a_loss_that_is_no_number_ends_the_run(open_trainer):
    trainer = open_trainer(CARTPOLE)
    trainer.online.flat.fill_(math.nan)
    with pytest.raises(CapsuleError, match="the loss is nan at step") as failure:
        for _ in itertools.repeat(None, 400):
            trainer.train_step()
    assert failure.value.code == "CAP-T151"
    assert failure.value.message == f"the loss is nan at step {trainer.step}"
    assert "trainer.learning_rate" in failure.value.fix


# --- defaults -------------------------------------------------------------------------------------


def test_a_trainer_has_no_unrolls_files_and_streams_of_its_own_by_default(shared):
    assert (shared.take_unrolls(), shared.artifacts(), shared.stream_profiles()) == (None, {}, [])
