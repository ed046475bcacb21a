"""R2D2: one update against float64, its schedule, its processes, its variants, resumption."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.training.losses.r2d2 import importance_weights
from tests.training.conftest import (
    ANY_GPU,
    CARTPOLE,
    claimed,
    finish_run,
    kill_when_traced,
    make_spec,
    merge,
    new_run,
    read,
)

pytestmark = pytest.mark.usefixtures("deterministic")

TASK = {
    "schema": "capsule/spec/v1",
    "name": "r2d2-cartpole",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1", "max_episode_steps": 60},
    "trainer": {
        "algorithm": "r2d2",
        "network": "mlp",
        "recurrent_units": 16,
        "hidden_units": 12,
        "actors": 6,
        "update_interval": 5,
        "actor_update_interval": 10,
        "burn_in": 4,
        "sequence_length": 8,
        "sequence_stride": 4,
        "n_step": 3,
        "discount": 0.97,
        "replay_capacity": 1_200,
        "replay_start": 300,
        "batch_size": 8,
        "micro_batches": [5, 3],
        "learning_rate": 0.001,
        "target_interval": 7,
        "total_steps": 900,
    },
    "evaluation": {**CARTPOLE["evaluation"], "interval": 900},
    "recording": {"trace_interval": 30, "tensor_interval": 300, "checkpoint_interval": 300},
}
BREAKOUT = merge(
    TASK,
    {
        "environment": {"suite": "atari", "game": "breakout", "terminal_on_life_loss": False},
        "trainer": {"network": "nature", "actors": 2, "total_steps": 400, "replay_start": 200},
        "evaluation": {"interval": 400, "max_minutes": 0.01},
        "recording": {"trace_interval": 10, "tensor_interval": 100, "checkpoint_interval": 100},
    },
)
for key in ("id", "max_episode_steps"):
    BREAKOUT["environment"].pop(key)


@pytest.fixture
def make(open_trainer):
    """A function that makes a trainer of TASK, or of another task."""
    return lambda document=TASK, *arguments, **options: open_trainer(
        document, *arguments, **options
    )


def train(learner, steps):
    while learner.step < steps:
        learner.train_step()
    return learner


# One update


class Reference:
    """The network in float64 and by the step, one sequence at a time."""

    def __init__(self, learner, group):
        arrays = {
            name.removeprefix(f"{group}/"): torch.tensor(array, dtype=torch.float64)
            for name, array in learner.tensors().items()
            if name.startswith(f"{group}/")
        }
        self.weights = {name: array.requires_grad_() for name, array in arrays.items()}

    def step(self, observation, action, reward, state):
        w = self.weights
        features = torch.relu(w["dense1.weight"] @ observation + w["dense1.bias"])
        chosen = torch.zeros(2, dtype=torch.float64)
        if action >= 0:
            chosen[action] = 1
        inputs = torch.cat((features, torch.tensor([reward], dtype=torch.float64), chosen))
        hidden, cell = torch._VF.lstm_cell(
            inputs.unsqueeze(0),
            tuple(part.unsqueeze(0) for part in state),
            w["lstm.inputs.weight"],
            w["lstm.recurrent.weight"],
            w["lstm.bias"],
            torch.zeros_like(w["lstm.bias"]),
        )
        heads = {}
        for head in ("advantage", "value"):
            inner = torch.relu(w[f"{head}1.weight"] @ hidden[0] + w[f"{head}1.bias"])
            heads[head] = w[f"{head}2.weight"] @ inner + w[f"{head}2.bias"]
        values = heads["value"] + heads["advantage"] - heads["advantage"].mean()
        return values, torch.stack((hidden[0], cell[0]))

    def unroll(self, batch, column, burn_in):
        state = initial = torch.tensor(batch.states[column], dtype=torch.float64)
        found = []
        for row in range(len(batch.resets)):
            state = initial if batch.resets[row, column] else state
            values, state = self.step(
                torch.tensor(batch.observations[row, column].ravel(), dtype=torch.float64),
                int(batch.previous_actions[row, column]),
                float(batch.previous_rewards[row, column]),
                state,
            )
            if row < burn_in:
                state = state.detach()
            else:
                found.append(values)
        return torch.stack(found)


def h(x):
    return torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 1e-3 * x


def h_inverse(y):
    root = torch.sqrt(1 + 4e-3 * (torch.abs(y) + 1 + 1e-3)) - 1
    return torch.sign(y) * ((root / 2e-3) ** 2 - 1)


def goals(trainer, batch, column, bootstraps):
    """Targets of the learned steps of one sequence, by the paper's equation.

    The bootstraps are the values of its states, from the first learned one on.
    """
    first = trainer.burn_in
    steps = int(batch.valid[first:, column].sum())
    found = []
    for t in range(min(trainer.sequence_length, steps)):
        total, weight, ahead = 0.0, 1.0, 0
        while ahead < trainer.n_step and t + ahead < steps:
            total += weight * float(batch.rewards[first + t + ahead, column])
            weight *= 0.0 if batch.terminals[first + t + ahead, column] else trainer.discount
            ahead += 1
        found.append(h(total + weight * h_inverse(bootstraps[t + ahead])))
    return torch.stack(found)


def sequence_errors(learner, batch, column, online, target):
    """Errors of the learned steps of one sequence."""
    trainer = learner._trainer
    first = trainer.burn_in
    values = online.unroll(batch, column, first)
    with torch.no_grad():
        best = values.argmax(1, keepdim=True)
        bootstraps = target.unroll(batch, column, first).gather(1, best).squeeze(1)
    found = goals(trainer, batch, column, bootstraps)
    actions = torch.tensor(batch.actions[first : first + len(found), column])
    return found - values[: len(found)].gather(1, actions.unsqueeze(1)).squeeze(1)


def priority(errors):
    sizes = errors.detach().abs()
    return float(0.9 * sizes.max() + 0.1 * sizes.mean())


@pytest.mark.slow
@pytest.mark.parametrize("burn_in", [4, 0])
def test_one_update_equals_a_float64_reference(make, burn_in):
    learner = train(make(trainer={"burn_in": burn_in, "max_gradient_norm": None}), 1_200)
    learner.target.flat.neg_()  # otherwise both networks have the same best action in every state
    before = learner.tensors()
    stream = copy.deepcopy(learner.streams["minibatch"])
    draw = learner._replay.sample(stream, 8)
    batch = learner._replay.gather(draw.indices)
    assert batch.terminals.any()
    online, target = Reference(learner, "parameters"), Reference(learner, "target")
    weights = importance_weights(draw.probabilities, 0.6)
    loss, priorities = 0.0, []
    for column, weight in enumerate(weights.tolist()):
        errors = sequence_errors(learner, batch, column, online, target)
        loss = loss + 0.5 * weight * errors.square().sum() / 8
        priorities.append(priority(errors))
    gradients = torch.autograd.grad(loss, list(online.weights.values()))
    stored = learner._replay.update_priorities
    given = []
    learner._replay.update_priorities = lambda *pair: (given.append(pair), stored(*pair))
    learner.train_step()
    assert learner.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    assert given[0][0].tolist() == draw.indices.tolist()
    np.testing.assert_allclose(given[0][1], priorities, rtol=1e-3)
    updates = learner.updates
    for name, gradient in zip(online.weights, gradients, strict=True):
        mean, square = (before[f"optimizer/{part}/{name}"] for part in ("mean", "square"))
        mean = 0.9 * mean + 0.1 * gradient.numpy()
        square = 0.999 * square + 0.001 * gradient.numpy() ** 2
        root = np.sqrt(square / (1 - 0.999**updates)) + 1e-3
        expected = before[f"parameters/{name}"] - 1e-3 * mean / (1 - 0.9**updates) / root
        after = learner.tensors()[f"parameters/{name}"]
        np.testing.assert_allclose(after, expected, atol=3e-6)


# The schedule


@pytest.mark.slow
def test_processes_and_threads_change_nothing(make):
    heads = {train(make(workers=workers), 900).trace.head for workers in (1, 3)}
    assert len(heads) == 1


@pytest.mark.slow
def test_actors_take_new_parameters_when_they_are_due(make):
    learner = train(make(), 600)
    assert learner.step // 6 % 10 == 0
    for due in (True, False, True):
        online = learner.online.flat.clone()
        learner.train_step()
        assert torch.equal(learner.acting.flat, online) == due


@pytest.mark.slow
def test_the_target_is_copied_every_target_interval(make):
    learner = train(make(), 300)
    copied = []
    for _ in range(15):
        learner.train_step()
        copied.append(torch.equal(learner.target.flat, learner.online.flat))
    assert [update for update, same in enumerate(copied, 1) if same] == [7, 14]


def test_nothing_is_learned_before_replay_start(make):
    learner = train(make(), 300)
    assert (learner.updates, learner.loss) == (0, None)
    learner.train_step()
    assert learner.updates == 1


def test_every_sequence_has_a_priority_of_the_actors(make):
    learner = train(make(), 300)
    leaves = learner._replay._priorities.tree.leaves
    assert (leaves > 0).sum() == learner._replay.sequences > 20
    assert len(np.unique(leaves)) > 20


def test_first_priorities_are_those_of_the_errors_of_the_actors_own_values(make):
    learner = train(make(), 300)
    replay, trainer = learner._replay, learner._trainer
    finished = [int(count) for count in replay._sequences.counts]
    pairs = [(actor, number) for actor in range(6) for number in range(finished[actor])]
    actors, numbers = np.array(pairs).T
    batch = replay.gather(numbers * 6 + actors, frames=False)
    first, expected = trainer.burn_in, []
    for column in range(len(pairs)):
        taken, largest = torch.tensor(batch.values[first:, column], dtype=torch.float64).T
        found = goals(trainer, batch, column, largest)
        expected.append(max(priority(found - taken[: len(found)]), 1e-6) ** 0.9)
    weights = replay._priorities.tree.get(replay._priorities._leaves(actors, numbers))
    np.testing.assert_allclose(weights, expected, rtol=1e-4)
    assert len(pairs) > 20


@pytest.mark.parametrize("step", [240, 330])  # the actors' values, before learning; the learner's
def test_values_that_are_no_numbers_end_the_run_with_their_code(make, step):
    learner = train(make(), step)
    learner.online.flat.fill_(math.nan)
    with pytest.raises(CapsuleError, match="difference is not finite at step") as failure:
        train(learner, 600)
    assert failure.value.code == "CAP-T151"
    assert failure.value.message.endswith(f"at step {learner.step}")
    assert "trainer.learning_rate" in failure.value.fix


@pytest.mark.slow
def test_a_snapshot_continues_to_the_same_bits(make):
    whole = train(make(), 1_200)
    first = train(make(), 600)
    saved = [copy.deepcopy(part) for part in (first.state(), first.tensors())]
    streams = {name: stream.state() for name, stream in first.streams.items()}
    trace = first.trace.state()
    second = make(workers=2)
    # What is on disk goes along with the snapshot, as it does in a run directory.
    _copy_files(first, second)
    for name, state in streams.items():
        second.streams[name].restore(state)
    second.trace.restore(trace)
    second.restore(600, *saved)
    train(second, 1_200)
    assert second.trace.head == whole.trace.head
    assert all(np.array_equal(a, b) for a, b in _pairs(second.tensors(), whole.tensors()))


def _copy_files(source, target):
    for rings in ("_entries", "_sequences"):
        for name, array in getattr(source._replay, rings).fields.items():
            getattr(target._replay, rings).fields[name][:] = array
    source.trace.flush()
    target.trace._file.write(Path(source.trace._file.name).read_bytes())
    target.trace._file.flush()


def _pairs(first, second):
    assert first.keys() == second.keys()
    return [(first[name], second[name]) for name in first]


# Variants

VARIANTS = {
    "zero state": {"recurrent_state": "zero"},
    "no burn-in": {"burn_in": 0},
    "feed-forward": {"recurrent_units": 0, "recurrent_state": "zero"},
    "no rescaling": {"rescaling_epsilon": None},
    "asymmetric clipping": {"asymmetric_clipping": True},
    "one step": {"n_step": 1},
    "uniform": {"priority_exponent": 0.0},
    "unclipped gradient": {"max_gradient_norm": None},
}


@pytest.fixture(scope="module")
def heads():
    """Trace heads seen, to tell that every variant is another algorithm."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *VARIANTS])
def test_every_variant_trains_and_differs(make, heads, name):
    learner = train(make(trainer=VARIANTS.get(name, {}) | {"learning_rate": 0.01}), 600)
    assert np.isfinite(learner.loss)
    # A gradient within its bound is the same whether it is bounded or not.
    if name != "unclipped gradient":
        assert learner.trace.head not in heads.values()
    heads[name] = learner.trace.head


def test_the_memory_has_rewards_of_training_and_ends_of_returns(make):
    """With 'roll', a return may end within an episode, as by a lost life."""
    learner = make()
    insert, append, stored = learner._insert, learner._replay.append, []

    def altered(actor, experience):
        rewards, terminals = np.full(5, 7.0), experience.terminals.copy()
        terminals[2] = True
        insert(actor, experience._replace(rewards=rewards, terminals=terminals))

    def kept(actor, frame, action, reward, terminal, **others):
        stored.append((reward, terminal, others["ended"]))
        return append(actor, frame, action, reward, terminal, **others)

    learner._insert, learner._replay.append = altered, kept
    train(learner, 240)
    rewards, terminals, ended = zip(*stored, strict=True)
    assert set(rewards) == {7.0}
    assert all(terminals[2::5])
    assert any(ended)
    assert not all(ended[2::5])


@pytest.mark.slow
@pytest.mark.parametrize("life_loss", ["roll", "reset"])
def test_a_lost_life_can_end_returns(make, life_loss):
    environment = {"terminal_on_life_loss": True}
    trainer = {"life_loss": life_loss, "network": "residual", "hidden_units": 8, "actors": 2}
    learner = train(make(BREAKOUT, environment=environment, trainer=trainer), 220)
    assert np.isfinite(learner.loss)


# Whole runs


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    directory = new_run(tmp_path_factory.mktemp("r2d2") / "whole", make_spec(TASK))
    status, errors = finish_run(directory, warm=False)
    assert status == 0, errors
    return directory


@pytest.mark.slow
def test_a_run_on_one_core_gives_the_same_bytes(whole_run, tmp_path, one_core):
    again = new_run(tmp_path / "again", make_spec(TASK))
    status, errors = finish_run(again)
    assert status == 0, errors
    assert claimed(again) == claimed(whole_run)
    streams = {profile["name"]: profile for profile in read(again, contract.STREAMS)["streams"]}
    assert streams["exploration/5"]["draws"] == 2 * 900 // 6
    assert streams["exploration/5"]["key"] != streams["exploration/4"]["key"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [*(pytest.param(moment, marks=pytest.mark.soak) for moment in (0.1, 0.5)), 0.93]
)
def test_a_killed_run_resumes_to_the_same_bytes(whole_run, tmp_path, one_core, moment):
    directory = new_run(tmp_path / "killed", make_spec(TASK))
    kill_when_traced(directory, (whole_run / contract.TRACE).stat().st_size * moment)
    assert finish_run(directory)[0] == 0
    assert claimed(directory) == claimed(whole_run)


@pytest.mark.soak
@pytest.mark.slow
def test_a_killed_atari_run_resumes_to_the_same_bytes(tmp_path):
    whole = new_run(tmp_path / "whole", make_spec(BREAKOUT))
    status, errors = finish_run(whole)
    assert status == 0, errors
    killed = new_run(tmp_path / "killed", make_spec(BREAKOUT))
    kill_when_traced(killed, (whole / contract.TRACE).stat().st_size * 0.7)
    assert finish_run(killed)[0] == 0
    assert claimed(killed) == claimed(whole)


@pytest.mark.soak
@pytest.mark.slow
def test_it_learns_cartpole(make):
    changes = {
        "actors": 8,
        "recurrent_units": 32,
        "hidden_units": 32,
        "actor_update_interval": 20,
        "burn_in": 8,
        "sequence_length": 16,
        "sequence_stride": 8,
        "discount": 0.99,
        "replay_capacity": 20_000,
        "replay_start": 1_000,
        "batch_size": 16,
        "micro_batches": [8, 8],
        "target_interval": 50,
        "total_steps": 40_000,
    }
    recording = {"trace_interval": 40, "tensor_interval": 400, "checkpoint_interval": 4_000}
    environment = {"max_episode_steps": 500}
    learner = make(
        trainer=changes, recording=recording, environment=environment, evaluation={"interval": 400}
    )
    assert train(learner, 36_000).mean_return > 60


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal(make):
    learners = [train(make(BREAKOUT, accelerator=ANY_GPU, device="cuda"), 300) for _ in range(2)]
    assert learners[0].loss is not None
    assert learners[0].trace.head == learners[1].trace.head
