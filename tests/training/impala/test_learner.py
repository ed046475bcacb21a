"""IMPALA: one update against float64, its schedules on one process and several, resumption."""

import json
import math
import multiprocessing
import random
import shutil
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import parse_schedule
from capsule.experiment.trace import first_difference
from capsule.training.impala.gradient import ImpalaGradient
from capsule.training.state.streams import Stream
from tests.conftest import strictly
from tests.training.conftest import (
    ROOT,
    claimed,
    finish_run,
    kill_when_traced,
    make_spec,
    merge,
    new_run,
    trainers_in,
)
from tests.training.impala import tasks as impala_tasks
from tests.training.impala.conftest import COUNTING, LIVE, TASK, edited, log_of, refusal_of, train
from tests.training.warm_workers import fork_workers

# The processes of runs, further below, are spawned.
pytestmark = pytest.mark.usefixtures("deterministic", "importable", "warm_workers")


def trace_of(learner):
    learner.trace.flush()
    return learner.directory / contract.TRACE


def results(learner):
    """Return what a re-execution must give again, bit for bit."""
    tensors = {name: array.tobytes() for name, array in learner.tensors().items()}
    profiles = {profile.name: profile for profile in learner.stream_profiles()}
    return learner.trace.head, tensors, profiles, learner.artifacts(), learner.returns


def collected(learner):
    """Make one update; return the unrolls that were learned by it."""
    collect, kept = learner._executor.collect, []

    def keep(update):
        kept.extend(collect(update))
        return kept

    learner._executor.collect = keep
    learner.train_step()
    learner._executor.collect = collect
    return [item.unroll for item in kept]


# --- one update -----------------------------------------------------------------------------------


class Reference:
    """The network in float64, one unroll at a time, step by step."""

    def __init__(self, tensors):
        arrays = {
            name.removeprefix("parameters/"): torch.tensor(array, dtype=torch.float64)
            for name, array in tensors.items()
            if name.startswith("parameters/")
        }
        self.weights = {name: array.requires_grad_() for name, array in arrays.items()}

    def dense(self, name, features):
        return self.weights[f"{name}.weight"] @ features + self.weights[f"{name}.bias"]

    def step(self, unroll, row, state):
        hidden = torch.relu(self.dense("dense1", torch.tensor(unroll.frames[row]).double()))
        if "lstm.bias" in self.weights:
            chosen = torch.zeros(2, dtype=torch.float64)
            if unroll.previous_actions[row] >= 0:
                chosen[unroll.previous_actions[row]] = 1
            reward = torch.tensor([unroll.previous_rewards[row]], dtype=torch.float64)
            hidden, w = torch.cat((hidden, reward, chosen)), self.weights
            if unroll.ages[row] == 0:
                state = torch.zeros_like(state)
            h, c = torch._VF.lstm_cell(
                hidden.unsqueeze(0),
                tuple(part.unsqueeze(0) for part in state),
                w["lstm.inputs.weight"],
                w["lstm.recurrent.weight"],
                w["lstm.bias"],
                torch.zeros_like(w["lstm.bias"]),
            )
            hidden, state = h[0], torch.stack((h[0], c[0]))
        return self.dense("policy", hidden), self.dense("baseline", hidden)[0], state

    def loss(self, unroll, trainer):
        """Section 4.2, with the targets of section 4.1 as sums over steps."""
        state, rows = torch.tensor(unroll.state).double(), len(unroll.ages)
        logits, values = [], []
        for row in range(rows):
            policy, value, state = self.step(unroll, row, state)
            logits.append(policy.log_softmax(0))
            values.append(value)
        steps = rows - 1
        acted = unroll.acted.tolist()
        log_pi = [logits[t][int(unroll.actions[t])] for t in range(steps)]
        v = [value.item() for value in values]
        ratio = [math.exp(log_pi[t].item() - unroll.log_behaviour[t]) for t in range(steps)]
        gamma = [0.0 if end else trainer.discount for end in unroll.terminals]
        assert all(gamma[t] == 0 for t in range(steps) if not acted[t])
        reward = [min(1.0, max(-1.0, r)) for r in unroll.rewards]
        rho = [min(trainer.rho_bar, each) for each in ratio]
        c = [trainer.trace_decay * min(trainer.c_bar, each) for each in ratio]

        def target(s):
            """Nothing is taught at the last frame of a truncated episode, nor beyond it."""
            total = v[s]
            for t in range(s, next((t for t in range(s, steps) if not acted[t]), steps)):
                factor = math.prod(gamma[i] * c[i] for i in range(s, t))
                total += factor * rho[t] * (reward[t] + gamma[t] * v[t + 1] - v[t])
            return total

        loss = torch.zeros((), dtype=torch.float64)
        for s in filter(acted.__getitem__, range(steps)):
            advantage = rho[s] * (reward[s] + gamma[s] * target(s + 1) - v[s])
            entropy = -(logits[s].exp() * logits[s]).sum()
            loss = loss - log_pi[s] * advantage - trainer.entropy_cost * entropy
            loss = loss + trainer.baseline_cost * 0.5 * (target(s) - values[s]) ** 2
        return loss, ratio


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "norm", "truncation"),
    [(7, 0.8, "bootstrap"), (7, None, "terminal"), (0, 0.8, "terminal"), (0, None, "bootstrap")],
)
def test_one_update_equals_a_float64_reference(make, units, norm, truncation):
    changes = {
        "truncation": truncation,
        "recurrent_units": units, "max_gradient_norm": norm, "rmsprop_momentum": 0.4,
        "rho_bar": 1.002, "c_bar": 1.001, "trace_decay": 0.9, "learning_rate": 0.03,
        "schedule": {"mode": "lockstep", "policy_lag": 2}, "entropy_cost": 0.05,
        "unroll_length": 10, "actors": 4, "rmsprop_decay": 0.9, "total_steps": 1200,
    }  # fmt: skip
    recording = {"trace_interval": 40, "tensor_interval": 200, "checkpoint_interval": 200}
    environment = {"max_episode_steps": 16 if truncation == "bootstrap" else 60}
    learner = make(trainer=changes, recording=recording, environment=environment)
    train(learner, 680)
    trainer, before, step = learner._trainer, learner.tensors(), learner.step
    unrolls = collected(learner)
    assert any(unroll.terminals[:-1].any() for unroll in unrolls)
    shown_last = any((~unroll.acted[1:]).any() for unroll in unrolls)
    assert shown_last == (truncation == "bootstrap")
    reference, loss, ratios = Reference(before), 0.0, []
    for unroll in unrolls:
        one, theirs = reference.loss(unroll, trainer)
        loss, ratios = loss + one, ratios + theirs
    assert min(ratios) < 0.998
    assert max(ratios) > 1.003  # beyond both levels of clipping
    weights = reference.weights
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    assert learner.loss == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-5)
    length = math.sqrt(sum(float(part.square().sum()) for part in gradients.values()))
    if norm is not None:
        assert length > norm
    factor = 1.0 if norm is None else min(1.0, norm / length)
    rate = trainer.learning_rate * (1 - step / trainer.total_steps)
    after = learner.tensors()
    for name, gradient in gradients.items():
        g = gradient.numpy() * factor
        square = 0.9 * before[f"optimizer/square/{name}"] + 0.1 * g**2
        move = 0.4 * before[f"optimizer/step/{name}"] + rate * g / np.sqrt(square + 0.01)
        for kind, expected in (
            ("optimizer/square", square),
            ("optimizer/step", move),
            ("parameters", before[f"parameters/{name}"] - move),
        ):
            np.testing.assert_allclose(after[f"{kind}/{name}"], expected, rtol=2e-5, atol=1e-6)
        assert np.abs(move).max() > 1e-5


@pytest.mark.slow
def test_the_first_square_is_one_and_the_first_rate_is_whole(make):
    learner = make()
    before = learner.tensors()
    assert {array.min() for name, array in before.items() if "square" in name} == {1.0}
    learner.train_step()
    for name in learner.network.shapes:
        after = learner.tensors()
        square, move = (after[f"optimizer/{part}/{name}"] for part in ("square", "step"))
        gradient = np.sqrt(np.maximum(square.astype(float) - 0.99, 0) / 0.01)
        expected = 0.01 * gradient / np.sqrt(square + 0.01)
        np.testing.assert_allclose(np.abs(move), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("annealing", [True, False])
def test_the_last_rate_is_that_of_one_update(make, annealing):
    learner = train(make(trainer={"annealing": annealing}), 580)
    rates, update = [], learner.optimizer.update
    learner.optimizer.update = lambda g, rate, norm: (rates.append(rate), update(g, rate, norm))
    learner.train_step()
    assert rates == [pytest.approx(0.01 / 30 if annealing else 0.01)]


@pytest.mark.parametrize(
    ("annealing", "members", "anneals"),
    [(None, 0, True), (None, 2, False), (True, 2, True), (False, 0, False)],
)
def test_a_population_does_not_anneal_by_default(annealing, members, anneals):
    """Figure F.1 compares the schedule that a population discovers with the linear one."""
    document = merge(TASK, {"trainer": {"annealing": annealing}})
    if members:
        references = {"CartPole-v1": {"random": 5.0, "human": 200.0}}
        population = {"members": members, "references": references}
        document["trainer"] = {**document["trainer"], "population": population}
        document["trainer"].pop("learning_rate")
    assert make_spec(document).trainer.anneals == anneals


def test_gradients_of_shards_are_summed_in_order(make):
    whole, parts = (make(trainer={"micro_batches": shards}) for shards in ([4], [1, 2, 1]))
    unrolls = [collected(learner) for learner in (whole, parts)]
    assert [each.digest() for each in unrolls[0]] == [each.digest() for each in unrolls[1]]
    torch.testing.assert_close(whole._gradient, parts._gradient, rtol=1e-4, atol=1e-6)
    again = make()
    gradient = ImpalaGradient(again._trainer, again.network, 1, again.online)
    shards = slice(0, 1), slice(1, 3), slice(3, 4)
    one, two, three = (gradient(unrolls[0][shard])[1] for shard in shards)
    assert torch.equal(parts._gradient, (one + two) + three)
    assert not torch.equal(parts._gradient, whole._gradient)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-5)


VARIANTS = {
    "one-step": {"correction": "one-step"},
    "epsilon": {"correction": "epsilon", "correction_epsilon": 0.01},
    "none": {"correction": "none"},
    "rho": {"rho_bar": 5.0},
    "decay": {"trace_decay": 0.5},
    "truncation": {"truncation": "terminal"},
    "action-values": {"action_values": "baseline"},
    "entropy": {"entropy_cost": 0.1},
    "baseline": {"baseline_cost": 1.0},
    "rewards": {"reward_clipping": "asymmetric"},
    "constant": {"annealing": False},
    "feed-forward": {"recurrent_units": 0},
    "lag": {"schedule": {"mode": "lockstep", "policy_lag": 3}},
    "norm": {"max_gradient_norm": 0.01},
}


@pytest.mark.slow
def test_every_variant_trains_and_differs(make):
    heads = {}
    for name, changes in {"plain": {}, **VARIANTS}.items():
        learner = train(make(trainer=changes, environment={"max_episode_steps": 8}), 120)
        assert math.isfinite(learner.loss)
        heads[name] = learner.trace.head
    assert len(set(heads.values())) == len(heads)


@pytest.mark.parametrize(("rate", "said"), [(1e30, "the loss is"), (3e38, "a probability of")])
def test_a_policy_that_is_no_more_ends_the_run_with_its_code(make, rate, said):
    trainer = {"learning_rate": rate, "max_gradient_norm": None}
    with pytest.raises(CapsuleError, match=said) as failure:
        train(make(trainer=trainer))
    assert failure.value.code == "CAP-T151"
    assert "learning_rate" in failure.value.fix


# --- one process and several ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "workers"), [(0, 2), (2, 3)])
def test_processes_and_threads_change_nothing(make, lag, workers):
    trainer = {"schedule": {"mode": "lockstep", "policy_lag": lag}}
    expected = train(make(trainer=trainer), 300)
    assert expected.episodes > 0
    assert results(train(make(trainer=trainer, workers=workers), 300)) == results(expected)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A finished live run in which steps take random times: its trace, results, and log."""
    with (
        pytest.MonkeyPatch.context() as patch,
        strictly(),
        trainers_in(tmp_path_factory.mktemp("noisy")) as build,
    ):
        patch.syspath_prepend(ROOT)
        patch.setenv("COUNTING_SLEEP", "1.5")
        fork_workers(patch)
        live = train(build(COUNTING, workers=2, trainer=LIVE))
        return SimpleNamespace(trace=trace_of(live), results=results(live), log=log_of(live))


@pytest.mark.slow
def test_live_runs_differ_and_each_replays_to_its_own_bits(make, monkeypatch):
    live = []
    for slow in range(2):  # other episodes are slow in each
        monkeypatch.setenv("COUNTING_SLOW", str(slow))
        live.append(train(make(COUNTING, workers=2, trainer=LIVE)))
    expected = [results(learner) for learner in live]
    logs = [log_of(learner) for learner in live]
    assert len({learner.trace.head for learner in live}) == len(set(logs)) == 2
    assert all(0 < max(parse_schedule(log).lags) <= 3 for log in logs)
    for learner in live:
        learner.close()
    replayed = train(make(COUNTING, workers=2, trainer=LIVE, replay=logs[0]))
    assert results(replayed) == expected[0]
    monkeypatch.delenv("COUNTING_SLOW")
    for log, whole in zip(logs, expected, strict=True):
        assert results(train(make(COUNTING, trainer=LIVE, replay=log))) == whole


# --- what a trace names ---------------------------------------------------------------------------


@cache
def moment_of(actor, unroll, length=5, seed=0):
    """Return a step of an unroll that is not an episode's last, as ``SEED:STEP``.

    The last frame of a truncated episode has a row of its own.
    """
    stream, begin = Stream("environment", seed, actor), 0
    while True:
        episode = stream.integer(2**32)
        for step in range(1, impala_tasks.length_of(episode)):
            if begin + step > unroll * length:
                assert begin + step < (unroll + 1) * length
                return f"{episode}:{step}"
        begin += impala_tasks.length_of(episode) + impala_tasks.is_truncated(episode)


@pytest.mark.slow
@pytest.mark.parametrize(("actor", "unroll"), [(2, 3), (5, 0), (0, 7)])
def test_an_actor_that_errs_once_is_named(make, monkeypatch, actor, unroll):
    """In one unroll of one actor the environment shows something else, in lockstep and replayed."""
    right = train(make(COUNTING))
    monkeypatch.setenv("COUNTING_LIE", moment_of(actor, unroll))
    wrong = train(make(COUNTING))
    found = first_difference(trace_of(right), trace_of(wrong))
    update = (unroll * 6 + actor) // 4
    assert (found.component, found.step) == ("unrolls", 20 * (update + 1))
    assert found.name == f"update {update}, actor {actor}, unroll {unroll}"
    assert found.a != found.b


@pytest.mark.slow
def test_an_actor_that_errs_in_a_replay_is_named_by_its_place_in_the_log(make, noisy, monkeypatch):
    learned = parse_schedule(noisy.log)
    places = [p for p, actor in enumerate(learned.played) if actor == 3]
    monkeypatch.setenv("COUNTING_LIE", moment_of(3, 4))
    wrong = train(make(COUNTING, trainer=LIVE, replay=noisy.log))
    found = first_difference(noisy.trace, trace_of(wrong))
    assert found.component == "unrolls"
    assert found.name == f"update {places[4] // 4}, actor 3, unroll 4"


# --- a log that ends before the run ---------------------------------------------------------------


@pytest.mark.slow
def test_a_log_that_is_too_short_is_followed_to_its_end(make):
    log = parse_schedule(log_of(train(make(COUNTING, trainer=LIVE))))
    short = edited(log, played=log.played[: 4 * 12], lags=log.lags[: 4 * 12])
    prefix = train(make(COUNTING, trainer=LIVE, replay=short), 240)
    assert log_of(prefix) == short
    refusal = refusal_of(make, short)
    assert (refusal.code, refusal.message) == (
        "CAP-T343",
        "the schedule log ends after 12 updates, the run does not",
    )


# --- resumption -----------------------------------------------------------------------------------


def state_of(learner):
    """Return everything that a run saves, as it is read back."""
    return json.loads(
        canonical_json(
            {
                "trainer": learner.state(),
                "streams": {name: stream.state() for name, stream in learner.streams.items()},
                "trace": learner.trace.state(),
            }
        )
    ), learner.tensors()


def go_on(learner, source, step, saved):
    """Restore a learner in its own run directory, with the files that another one left."""
    state, tensors = saved
    files = [contract.TRACE, f"{contract.STATE}/schedule"]
    for name in files:
        if (source.directory / name).exists():
            shutil.copyfile(source.directory / name, learner.directory / name)
    for name, stream in learner.streams.items():
        stream.restore(state["streams"][name])
    learner.trace.restore(state["trace"])
    learner.restore(step, state["trainer"], tensors)
    return learner


def test_the_names_of_the_last_tensors_are_known_before_training(make):
    learner = make(trainer={"schedule": {"mode": "lockstep", "policy_lag": 3}, "total_steps": 240})
    names = learner.tensor_names()
    assert len(names) == len(learner.tensors()) + 3
    assert names == list(train(learner).tensors())


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{}, LIVE], ids=["lockstep", "live"])
@pytest.mark.parametrize("step", [220, 300])
def test_a_snapshot_continues_to_the_same_bits(make, trainer, step):
    """At step 220 in the middle of a trace record; in one process a live schedule is a rule too."""
    first = train(make(trainer=trainer), step)
    saved = state_of(first)
    train(first)
    second = train(go_on(make(trainer=trainer), first, step, saved))
    if trainer:
        log = log_of(second)
        assert results(train(make(trainer=trainer, replay=log))) == results(second)
    else:
        assert results(second) == results(first)


@pytest.mark.slow
def test_a_replay_that_was_interrupted_goes_on(make, noisy):
    first = train(make(COUNTING, trainer=LIVE, replay=noisy.log), 220)
    saved = state_of(first)
    train(first, 300)
    second = go_on(make(COUNTING, trainer=LIVE, replay=noisy.log), first, 220, saved)
    assert results(train(second)) == noisy.results


def test_a_recording_that_is_gone_is_refused(make):
    first = train(make(trainer=LIVE), 300)
    saved = state_of(first)
    with pytest.raises(CapsuleError) as refusal:
        make(trainer=LIVE).restore(300, saved[0]["trainer"], saved[1])
    assert refusal.value.code == "CAP-T342"


@pytest.mark.slow
def test_a_dead_actor_is_told_and_the_run_goes_on_from_its_saved_state(make, monkeypatch):
    whole = train(make(COUNTING))
    monkeypatch.setenv("COUNTING_DIE", moment_of(3, 9))
    first = train(make(COUNTING, workers=2), 200)
    saved = state_of(first)
    with pytest.raises(CapsuleError) as failure:
        train(first)
    assert failure.value.code == "CAP-T331"
    assert failure.value.message == "process 1 (actors 1, 3, …, 5) died: SIGKILL"
    assert not multiprocessing.active_children()
    monkeypatch.delenv("COUNTING_DIE")
    second = go_on(make(COUNTING), first, 200, saved)
    assert results(train(second)) == results(whole)


# --- whole runs -----------------------------------------------------------------------------------


def finish(directory, **options):
    status, errors = finish_run(directory, **options)
    assert status == 0, errors
    return claimed(directory)


@pytest.mark.slow
def test_a_run_that_was_killed_at_any_moment_resumes_to_the_same_bytes(tmp_path, one_core):
    whole = new_run(tmp_path / "whole", make_spec(TASK))
    expected = finish(whole, warm=False)
    moment = random.SystemRandom().random()
    killed = new_run(tmp_path / "killed", make_spec(TASK))
    kill_when_traced(killed, (whole / contract.TRACE).stat().st_size * moment)
    assert finish(killed) == expected, f"killed at {moment}"


@pytest.mark.slow
def test_a_live_run_that_was_killed_replays_to_what_it_claims(tmp_path, request):
    spec = make_spec(TASK, trainer=LIVE)
    killed = new_run(tmp_path / "killed", spec)
    kill_when_traced(killed, 1_500)
    expected = finish(killed)
    log = (killed / contract.SCHEDULE).read_bytes()
    assert parse_schedule(log).updates == 30
    request.getfixturevalue("one_core")
    again = new_run(tmp_path / "again", spec)
    (again / contract.SCHEDULE_REPLAY).write_bytes(log)
    assert finish(again, warm=False) == expected
    assert (again / contract.SCHEDULE).read_bytes() == log
