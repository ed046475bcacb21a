"""The algorithm: one update against float64, its schedule, its threads, its streams, learning."""

import copy

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from capsule.experiment import contract
from capsule.experiment.trace import first_difference
from capsule.training.dqn import learner as dqn
from capsule.training.dqn.learner import DeepQLearning
from capsule.training.dqn.replay import ReplayMemory
from capsule.training.environments import make_environment
from capsule.training.state.streams import Stream, make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import ANY_GPU, BREAKOUT, CARTPOLE, make_spec

pytestmark = pytest.mark.usefixtures("deterministic")

CPU = torch.device("cpu")


@pytest.fixture
def make():
    """A function that builds a learner which traces into a file."""
    learners = []

    def build(*arguments, **options):
        learners.append(build_learner(*arguments, **options))
        return learners[-1]

    yield build
    for learner in learners:
        learner.close()
        learner.trace.close()


def build_learner(path, document=CARTPOLE, workers=1, device=CPU, **changes):
    spec = make_spec(document, **changes)
    streams = make_streams(spec.seeds)
    environment = make_environment(spec.environment, streams, training=True)
    replay = ReplayMemory(
        None,
        capacity=spec.trainer.replay_capacity,
        slack=2 * spec.trainer.update_interval,
        frame_shape=environment.frame_shape,
        frame_dtype=environment.frame_dtype,
        frame_stack=environment.frame_stack,
    )
    trace = Trace(path)
    trace.restore(None)
    context = TrainerContext(
        path.parent, spec.training(), spec.seeds, streams, trace, device, workers
    )
    learner = DeepQLearning(context, spec.trainer, environment, replay)
    learner.memory, learner.streams, learner.trace = replay, streams, trace
    return learner


def train(learner, steps):
    while learner.step < steps:
        learner.train_step()
    learner.trace.flush()
    return learner


@pytest.mark.slow
def test_the_first_evaluated_network_is_the_one_before_training(cartpole_run, make, tmp_path):
    kept = load_file(cartpole_run / contract.STATE / "networks" / "0.safetensors")
    initial = make(tmp_path / "trace").online.arrays()
    assert kept.keys() == initial.keys()
    assert all(np.array_equal(kept[name], initial[name]) for name in kept)


def test_the_memory_has_rewards_of_training_and_ends_of_returns(make, tmp_path):
    learner = make(tmp_path / "trace")
    step = learner._environment.step

    def altered(action):
        transition = step(action)
        return transition._replace(reward=7.0, terminal=learner.step % 5 == 2 or transition.ended)

    learner._environment.step = altered
    train(learner, 40)
    found = learner.memory.gather(np.arange(30))
    assert set(found.rewards.tolist()) == {7.0}
    assert found.terminals[2::5].all()
    assert not found.terminals.all()
    # A return counts the rewards of the game: one for each step of CartPole.
    assert 0 < learner.mean_return < 40


def q(group, parameters, states):
    """Q-values by torch's own operations, in the precision of the parameters."""
    hidden = torch.tensor(
        states.reshape(len(states), -1), dtype=parameters[f"{group}/dense1.bias"].dtype
    )
    for layer in (1, 2, 3):
        weight = parameters[f"{group}/dense{layer}.weight"]
        hidden = hidden @ weight.T + parameters[f"{group}/dense{layer}.bias"]
        hidden = functional.relu(hidden) if layer < 3 else hidden
    return hidden


def errors(leaves, batch):
    """Return the Huber losses of a minibatch, a row each."""
    following = q("target", leaves, batch.frames[:, 1:]).max(1).values.detach()
    returns = torch.tensor(batch.rewards) + 0.99 * following * ~torch.tensor(batch.terminals)
    chosen = q("parameters", leaves, batch.frames[:, :-1])[torch.arange(32), batch.actions]
    return functional.smooth_l1_loss(chosen, returns, reduction="none")


@pytest.mark.slow
def test_one_update_equals_a_float64_reference(make, tmp_path):
    learner = make(tmp_path / "trace", trainer={"micro_batches": [20, 12]})
    train(learner, 240)
    before = {name: array.astype(np.float64) for name, array in learner.tensors().items()}
    minibatch = copy.deepcopy(learner.streams["minibatch"])
    batch = learner.memory.gather(learner.memory.sample_indices(minibatch, 32))
    learner.train_step()
    after = learner.tensors()

    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in before.items()}
    loss = errors(leaves, batch).sum()
    names = [name for name in leaves if name.startswith("parameters/")]
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
    assert learner.loss == pytest.approx(loss.item() / 32, rel=1e-4)
    for name, gradient in zip(names, gradients, strict=True):
        tail = name.removeprefix("parameters/")
        g = gradient.numpy()
        mean = 0.95 * before[f"optimizer/mean/{tail}"] + 0.05 * g
        square = 0.95 * before[f"optimizer/square/{tail}"] + 0.05 * g * g
        expected = before[name] - 0.00025 * g / np.sqrt(square - mean**2 + 0.01)
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(after[f"optimizer/mean/{tail}"], mean, rtol=1e-3, atol=1e-5)


def test_a_transition_that_a_time_limit_ends_has_the_frame_that_followed(make, tmp_path):
    """And the one after it in the memory shows nothing of its episode."""
    learner = make(tmp_path / "trace", environment={"max_episode_steps": 6, "frame_stack": 2})
    game, episodes = learner._environment, [[learner._frame]]
    reset, step = game.reset, game.step

    def noted_reset():
        episodes.append([reset()])
        return episodes[-1][0]

    def noted_step(action):
        transition = step(action)
        assert not transition.terminal
        episodes[-1].append(transition.frame)
        return transition

    game.reset, game.step = noted_reset, noted_step
    train(learner, 200)
    blank = np.zeros_like(episodes[0][0])
    windows = {
        frames[t].tobytes(): np.stack([frames[t - 1] if t else blank, *frames[t : t + 2]])
        for frames in episodes
        for t in range(len(frames) - 1)
    }
    drawn = learner.memory.sample_indices(Stream("minibatch", 0), 2_000)
    batch = learner.memory.gather(np.unique(drawn))
    for found in batch.frames:
        np.testing.assert_array_equal(found, windows[found[1].tobytes()])
    assert len(batch.frames) > 190  # of which each sixth is the last of an episode
    assert not batch.terminals.any()


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, 0.5])
def test_adam_and_several_updates_an_interval_are_torchs(make, tmp_path, norm):
    settings = {"optimizer": "adam", "learning_rate": 0.01, "max_gradient_norm": norm}
    learner = make(
        tmp_path / "trace",
        trainer={**settings, "updates": 3, "concurrent": False, "micro_batches": [20, 12]},
    )
    train(learner, 240)
    learner.optimizer.updates, learner.optimizer.mean.flat[:] = 0, 0  # as torch's begins
    learner.optimizer.square.flat[:] = 0
    before = {name: torch.tensor(array) for name, array in learner.tensors().items()}
    minibatch = copy.deepcopy(learner.streams["minibatch"])
    learner.train_step()
    names = [name for name in before if name.startswith("parameters/")]
    parameters = [before[name].requires_grad_() for name in names]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(3):
        batch = learner.memory.gather(learner.memory.sample_indices(minibatch, 32))
        optimizer.zero_grad()
        errors(before, batch).mean().backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        optimizer.step()
    assert minibatch.state() == learner.streams["minibatch"].state()
    after = learner.tensors()
    for name, parameter in zip(names, parameters, strict=True):
        np.testing.assert_allclose(after[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_play_is_random_until_learning_starts_and_exploration_follows_its_schedule(make, tmp_path):
    learner = make(tmp_path / "trace")
    rates = {}
    while learner.step < 1_000:
        rates[learner.step] = learner.exploration()
        learner.train_step()
    assert {rates[step] for step in range(0, 200, 4)} == {1.0}
    assert rates[200] == 1.0
    assert rates[500] == pytest.approx(0.55)
    assert rates[800] == rates[996] == 0.1


def test_nothing_is_learned_before_replay_start(make, tmp_path):
    learner = make(tmp_path / "trace")
    start = learner.online.flat.clone()
    train(learner, 200)
    assert torch.equal(learner.online.flat, start)
    assert learner.loss is None
    learner.train_step()
    assert not torch.equal(learner.online.flat, start)


def test_the_target_is_copied_every_target_interval_after_the_update(make, tmp_path):
    learner = make(tmp_path / "trace", trainer={"target_interval": 40})
    train(learner, 200)
    copied = learner.target.flat.clone()
    while learner.step < 400:
        learner.train_step()
        if learner.step % 40 == 0:
            assert torch.equal(learner.target.flat, learner.online.flat)
            assert not torch.equal(learner.target.flat, copied)
            copied = learner.target.flat.clone()
        else:
            assert torch.equal(learner.target.flat, copied)
            assert not torch.equal(learner.target.flat, learner.online.flat)


@pytest.mark.parametrize(("concurrent", "missing"), [(True, 4), (False, 0)])
def test_the_minibatch_is_drawn_before_or_after_the_steps(make, tmp_path, concurrent, missing):
    learner = make(tmp_path / "trace", trainer={"concurrent": concurrent})
    train(learner, 200)
    sizes = []
    draw = learner.memory.sample_indices

    def watch(stream, batch):
        sizes.append(learner.memory.count)
        return draw(stream, batch)

    learner.memory.sample_indices = watch
    while learner.step < 260:
        before = learner.memory.count
        learner.train_step()
        grown = learner.memory.count - before
        assert sizes[-1] == before + (0 if missing else grown)
        assert grown >= 4
    assert len(sizes) == 15


def test_both_schedules_act_with_the_parameters_before_the_update(make, tmp_path):
    """From equal states the steps of the next interval are equal; only the minibatch differs."""
    first = make(tmp_path / "a", trainer={"concurrent": True})
    second = make(tmp_path / "b", trainer={"concurrent": False})
    for learner in (first, second):
        train(learner, 208)
    found = first_difference(tmp_path / "a", tmp_path / "b")
    assert found.step == 208
    assert {"observations", "actions", "rewards"}.isdisjoint({found.component, *found.also})


def test_two_draws_per_step_whatever_is_done_with_them(make, tmp_path):
    learner = train(make(tmp_path / "trace"), 400)
    assert learner.streams["exploration"].draws == 800
    assert learner.streams["evaluation"].draws == 0


@pytest.mark.slow
def test_threads_change_nothing(make, tmp_path):
    """Breakout, concurrent, uneven shards: one thread and two give the same trace and network."""
    alone = train(make(tmp_path / "one", BREAKOUT, workers=1), 240)
    shared = train(make(tmp_path / "two", BREAKOUT, workers=2), 240)
    assert shared._threads.count == 2
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    for name, array in alone.tensors().items():
        assert np.array_equal(array, shared.tensors()[name]), name


@pytest.mark.parametrize("document", [CARTPOLE, BREAKOUT])
def test_passes_without_autograd_change_nothing(make, tmp_path, monkeypatch, document):
    fast = train(make(tmp_path / "fast", document), 240)
    assert fast._passes
    monkeypatch.setattr(dqn, "has_passes", lambda _: False)
    slow = train(make(tmp_path / "slow", document), 240)
    assert not slow._passes
    assert (tmp_path / "fast").read_bytes() == (tmp_path / "slow").read_bytes()
    assert torch.equal(fast.online.flat, slow.online.flat)


def test_an_error_in_the_helper_thread_is_raised(make, tmp_path):
    learner = train(make(tmp_path / "trace", BREAKOUT, workers=2), 124)
    learner.memory.gather = None
    with pytest.raises(TypeError):
        learner.train_step()


def test_shards_are_part_of_the_result(make, tmp_path):
    first = train(make(tmp_path / "a", trainer={"micro_batches": [32]}), 400)
    second = train(make(tmp_path / "b", trainer={"micro_batches": [20, 12]}), 400)
    assert not torch.equal(first.online.flat, second.online.flat)
    torch.testing.assert_close(first.online.flat, second.online.flat, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("stream", "step", "first", "untouched"),
    [
        ("initialization", 8, "initialization", {"observations", "actions", "indices"}),
        ("exploration", 8, "exploration", {"parameters", "indices"}),
        ("environment", 8, "environment", {"actions", "parameters", "indices"}),
        ("minibatch", 208, None, {"observations", "actions", "rewards", "terminals"}),
    ],
)
def test_an_overridden_stream_changes_only_what_it_should(
    make, tmp_path, stream, step, first, untouched
):
    train(make(tmp_path / "a"), 240)
    train(make(tmp_path / "b", seeds={"streams": {stream: 1}}), 240)
    found = first_difference(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.component, found.name) == (step, "streams", first)
    assert untouched.isdisjoint(found.also)


def test_the_evaluation_stream_never_matters_to_training(make, tmp_path):
    train(make(tmp_path / "a"), 240)
    train(make(tmp_path / "b", seeds={"streams": {"evaluation": 1}}), 240)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_global_generators_are_never_used(make, tmp_path):
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    train(make(tmp_path / "trace"), 240)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.soak  # results/ has the study that shows it
def test_it_learns_cartpole(make, tmp_path):
    """Seed 0: the last 20 of 8,000 steps' episodes average above 100; random play scores 22."""
    learner = make(
        tmp_path / "trace",
        trainer={
            "hidden_units": 128,
            "total_steps": 8_000,
            "replay_capacity": 10_000,
            "replay_start": 500,
            "update_interval": 2,
            "target_interval": 100,
            "learning_rate": 0.0005,
            "exploration_final": 0.05,
            "exploration_steps": 3_000,
        },
    )
    train(learner, 8_000)
    newest = list(learner.returns)[-20:]
    assert sum(newest) / len(newest) > 100


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal(make, tmp_path):
    device = torch.device("cuda", 0)
    for name in ("a", "b"):
        train(make(tmp_path / name, BREAKOUT, device=device, accelerator=ANY_GPU), 240)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
