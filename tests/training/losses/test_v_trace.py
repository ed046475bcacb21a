"""V-trace: equation (1) term by term in float64, rlax, Bellman's target; constants, bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.layers import kernels
from capsule.training.losses.v_trace import (
    corrected_targets,
    epsilon_correction,
    importance_ratios,
    no_correction,
    one_step,
    v_trace,
)

pytestmark = pytest.mark.xdist_group("jax")


def trainer(**fields):
    """Return a spec's section ``trainer``."""
    return ImpalaTrainer(algorithm="impala", **fields)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def trajectories(time, batch, seed, *, spread=1.0, ends=0.1):
    """Draw ratios, rewards, discounts and values, float32 numbers in float64."""
    generator = np.random.default_rng(seed)
    discounts = generator.choice([0.99, 0.9, 1.0], (time, batch))
    discounts[generator.random((time, batch)) < ends] = 0
    found = (
        np.exp(generator.normal(0, spread, (time, batch))),
        generator.normal(0, 2, (time, batch)),
        discounts,
        generator.normal(0, 3, (time + 1, batch)),
    )
    return tuple(part.astype(np.float32).astype(np.float64) for part in found)


def tensors(parts):
    return [torch.tensor(part, dtype=torch.float32) for part in parts]


def same_bits(ours, expected):
    return np.array_equal(
        ours.contiguous().numpy().view(np.int32), expected.contiguous().numpy().view(np.int32)
    )


def equation_1(ratios, rewards, discounts, values, start, column, rho_bar, c_bar, decay):
    """Section 4.1 for one state: a sum over steps, each with its own product."""
    total = values[start, column]
    for step in range(start, len(rewards)):
        factor = 1.0
        for before in range(start, step):
            c = decay * min(c_bar, ratios[before, column])
            factor *= discounts[before, column] * c
        bellman = rewards[step, column] + discounts[step, column] * values[step + 1, column]
        error = min(rho_bar, ratios[step, column]) * (bellman - values[step, column])
        total += factor * error
    return total


def expected_of(parts, rho_bar, c_bar, decay, action_values="targets"):
    ratios, rewards, discounts, values = parts
    time, batch = rewards.shape
    targets = values.copy()
    for start in range(time):
        for column in range(batch):
            targets[start, column] = equation_1(*parts, start, column, rho_bar, c_bar, decay)
    following = {"targets": targets, "baseline": values}[action_values][1:]
    states = rewards + discounts * following  # q of appendices A.3 and E.3
    return targets[:-1], np.minimum(rho_bar, ratios) * (states - values[:-1])


LEVELS = st.sampled_from([0.5, 1.0, 2.2, 3.7, math.inf])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32 - 1),
    LEVELS, LEVELS, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from(["targets", "baseline"]),
)  # fmt: skip
def test_the_recursion_is_equation_1_term_by_term(
    time, batch, seed, rho_bar, c_bar, decay, ends, kind
):
    parts = trajectories(time, batch, seed, spread=0.5, ends=ends)
    levels = {"rho_bar": rho_bar, "c_bar": c_bar, "trace_decay": decay}
    found = v_trace(*tensors(parts), **levels, action_values=kind)
    expected = expected_of(parts, rho_bar, c_bar, decay, kind)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        scale = max(1.0, np.abs(expected[0]).max(), np.abs(theirs).max())
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-5 * scale)


def test_by_hand():
    """Two steps; ratio 3 is clipped to 2 for what is learned and to 1 for how fast."""
    targets = v_trace(
        tensor([3.0], [0.5]), tensor([1.0], [2.0]), tensor([0.5], [0.5]),
        tensor([10.0], [4.0], [8.0]), rho_bar=2.0, c_bar=1.0,
    )  # fmt: skip
    # delta_1 = 0.5 (2 + 0.5 8 - 4) = 1, so v_1 = 5; delta_0 = 2 (1 + 0.5 4 - 10) = -14
    assert targets.values.tolist() == [[10 - 14 + 0.5 * 1 * (5 - 4)], [5.0]]
    assert targets.advantages.tolist() == [[2 * (1 + 0.5 * 5 - 10)], [0.5 * (2 + 0.5 * 8 - 4)]]


def test_by_hand_with_action_values_of_the_baseline():
    """Appendix E.3: the same targets; q_0 = 1 + 0.5 4 goes on with V(x_1) = 4, not v_1 = 5."""
    parts = (
        tensor([3.0], [0.5]), tensor([1.0], [2.0]), tensor([0.5], [0.5]),
        tensor([10.0], [4.0], [8.0]),
    )  # fmt: skip
    targets = v_trace(*parts, rho_bar=2.0, c_bar=1.0, action_values="baseline")
    assert targets.values.tolist() == [[-3.5], [5.0]]
    assert targets.advantages.tolist() == [[2 * (1 + 0.5 * 4 - 10)], [0.5 * (2 + 0.5 * 8 - 4)]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rho_bar", [1.0, 3.7, 1e9])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_against_rlax(rho_bar, decay):
    """Where lambda is not 1 only the values: rlax has another advantage then (module's text)."""
    import jax
    import rlax

    parts = [part.astype(np.float32) for part in trajectories(20, 7, 3)]
    ratios, rewards, discounts, values = parts

    def reference(rho, r, d, before, after):
        return rlax.vtrace_td_error_and_advantage(before, after, r, d, rho, decay, rho_bar, rho_bar)

    theirs = jax.vmap(reference, in_axes=1, out_axes=1)(
        ratios, rewards, discounts, values[:-1], values[1:]
    )
    found = v_trace(*tensors(parts), rho_bar=rho_bar, trace_decay=decay)
    errors = found.values.numpy() - values[:-1]
    np.testing.assert_allclose(errors, np.asarray(theirs.errors), rtol=1e-5, atol=2e-5)
    advantages = found.advantages.numpy()
    expected = np.asarray(theirs.pg_advantage)
    if decay == 1:
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=2e-5)
    else:
        assert np.abs(advantages - expected).max() > 0.01


# What the paper says of it


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_on_policy_it_is_the_n_step_bellman_target(time, seed):
    """Equation (2), added up from the front in float64, up to the end of the episode."""
    parts = trajectories(time, 2, seed)
    _, rewards, discounts, values = parts
    _, *others = tensors(parts)
    found = v_trace(torch.ones(time, 2), *others)
    for column in range(2):
        for start in range(time):
            total, factor = 0.0, 1.0
            for step in range(start, time):
                total += factor * rewards[step, column]
                factor *= discounts[step, column]
            total += factor * values[time, column]
            assert found.values[start, column].item() == pytest.approx(total, rel=1e-5, abs=1e-4)
    plain = no_correction(*others)
    assert all(same_bits(a, b) for a, b in zip(found, plain, strict=True))


def test_nothing_after_the_end_of_an_episode_counts():
    ratios, rewards, discounts, values = tensors(trajectories(8, 3, 0, ends=0))
    discounts[3] = 0
    found = v_trace(ratios, rewards, discounts, values)
    alone = v_trace(ratios[:4], rewards[:4], discounts[:4], values[:5])
    for ours, theirs in zip(found, alone, strict=True):
        assert same_bits(ours[:4], theirs)
    values[4:], rewards[4:], ratios[4:] = 77.0, -5.0, 9.0
    for ours, theirs in zip(v_trace(ratios, rewards, discounts, values), found, strict=True):
        assert same_bits(ours[:4], theirs[:4])
    # The last step itself learns its reward and no more.
    expected = values[3] + ratios[3].clamp(max=1) * (rewards[3] - values[3])
    torch.testing.assert_close(found.values[3], expected)


def test_without_traces_it_is_one_step_ahead():
    ratios, rewards, discounts, values = tensors(trajectories(8, 3, 1))
    found = v_trace(ratios, rewards, discounts, values, trace_decay=0.0)
    errors = ratios.clamp(max=1) * (rewards + discounts * values[1:] - values[:-1])
    torch.testing.assert_close(found.values, values[:-1] + errors)


def test_the_level_of_the_traces_does_not_move_the_fixed_point():
    """Values that fit exactly are their own targets, whatever the levels (section 4.1)."""
    _, rewards, discounts, values = tensors(trajectories(9, 2, 2))
    for step in reversed(range(9)):
        values[step] = rewards[step] + discounts[step] * values[step + 1]
    ratios = torch.rand(9, 2, generator=torch.Generator().manual_seed(0)) * 4
    for rho_bar, c_bar in ((1.0, 1.0), (2.0, 0.5), (math.inf, math.inf)):
        found = v_trace(ratios, rewards, discounts, values, rho_bar=rho_bar, c_bar=c_bar)
        assert same_bits(found.values, values[:-1])
        assert not found.advantages.any()


class Chain:
    """A deterministic task of three states and two actions, with all its trajectories from each."""

    GAMMA, STEPS, STATES = 0.8, 5, 3

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        self.following = generator.integers(0, self.STATES, (self.STATES, 2))
        self.rewards = generator.normal(0, 1, (self.STATES, 2))
        self.target, self.behaviour = generator.dirichlet((1, 1), (2, self.STATES)) * 0.9 + 0.05
        plans = np.indices((2,) * self.STEPS).reshape(self.STEPS, -1)  # all sequences of actions
        self.actions = np.tile(plans, self.STATES)
        self.seen = np.empty((self.STEPS + 1, self.actions.shape[1]), int)
        self.seen[0] = np.repeat(range(self.STATES), plans.shape[1])
        for step in range(self.STEPS):
            self.seen[step + 1] = self.following[self.seen[step], self.actions[step]]

    def trajectory(self, generator):
        """Draw actions of the behaviour policy; return columns of states and of actions."""
        start = generator.integers(self.STATES) * 2**self.STEPS
        column = start + generator.choice(
            2**self.STEPS,
            p=self.behaviour[self.seen[:-1], self.actions].prod(0)[start : start + 2**self.STEPS],
        )
        return self.seen[:, [column]], self.actions[:, [column]]

    def targets(self, seen, actions, values, rho_bar, c_bar):
        """Return V-trace's targets of trajectories, float32 [time, trajectories]."""
        parts = (
            (self.target / self.behaviour)[seen[:-1], actions],
            self.rewards[seen[:-1], actions],
            np.full(actions.shape, self.GAMMA),
            values[seen],
        )
        return v_trace(*tensors(parts), rho_bar=rho_bar, c_bar=c_bar).values.numpy()

    def clipped(self, rho_bar):
        """Return the policy pi_rho_bar of equation (3), not yet normalised."""
        return np.minimum(rho_bar * self.behaviour, self.target)

    def operator(self, values, rho_bar, c_bar):
        """Return what the targets of V-trace are on average over the behaviour policy."""
        found = self.targets(self.seen, self.actions, values, rho_bar, c_bar)[0]
        weights = self.behaviour[self.seen[:-1], self.actions].prod(0)
        return np.array([(weights * found)[self.seen[0] == s].sum() for s in range(self.STATES)])

    def values_of(self, policy):
        """Solve Bellman's equation for a policy, whose rows need not add up to 1."""
        policy = policy / policy.sum(1, keepdims=True)
        moves = np.zeros((self.STATES, self.STATES))
        for state, action in np.ndindex(self.STATES, 2):
            moves[state, self.following[state, action]] += policy[state, action]
        earned = (policy * self.rewards).sum(1)
        return np.linalg.solve(np.eye(self.STATES) - self.GAMMA * moves, earned)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5), (0.5, 0.5), (1e9, 1e9)])
def test_theorem_1(seed, rho_bar, c_bar):
    """A contraction by 1 - (1 - gamma) E rho at most, to the values of the policy pi_rho_bar."""
    task = Chain(seed)
    clipped = task.clipped(rho_bar)
    expected = task.values_of(clipped)
    rate = 1 - (1 - task.GAMMA) * clipped.sum(1).min()
    values = np.random.default_rng(seed).normal(0, 10, task.STATES)
    np.testing.assert_allclose(task.operator(expected, rho_bar, c_bar), expected, atol=1e-5)
    for _ in range(20):
        distance = np.abs(values - expected).max()
        values = task.operator(values, rho_bar, c_bar)
        assert np.abs(values - expected).max() <= rate * distance + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_theorem_2(seed):
    """Online updates along trajectories of the behaviour policy converge to the same values."""
    task, generator = Chain(seed), np.random.default_rng(seed)
    values, updates, later = np.zeros(task.STATES), np.zeros(task.STATES), []
    for trajectory in range(3000):
        seen, actions = task.trajectory(generator)
        errors = task.targets(seen, actions, values, 1.0, 1.0)[:, 0] - values[seen[:-1, 0]]
        for state, error in zip(seen[:-1, 0], errors, strict=True):  # equation (7)
            updates[state] += 1
            values[state] += error * updates[state] ** -0.6  # a step size of Robbins and Monro
        if trajectory >= 500:
            later.append(values.copy())
    expected = task.values_of(task.clipped(1.0))
    np.testing.assert_allclose(np.mean(later, 0), expected, atol=0.15)  # averaged: less noise
    for policy in (task.target, task.behaviour):  # which are not what it converges to
        assert np.abs(task.values_of(policy) - expected).max() > 0.6


# The other corrections


def test_one_step_sampling_corrects_the_advantages_only():
    ratios, *others = tensors(trajectories(10, 4, 4))
    plain = no_correction(*others, trace_decay=0.9)
    found = one_step(plain, ratios, rho_bar=1.5)
    assert same_bits(found.values, plain.values)
    assert same_bits(found.advantages, torch.minimum(ratios, torch.tensor(1.5)) * plain.advantages)
    assert (found.advantages != plain.advantages).any()


def test_the_epsilon_correction_is_the_gradient_of_log_pi_plus_epsilon():
    _, *others = trajectories(6, 5, 5)
    plain = no_correction(*tensors(others))
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 5, 3, generator=generator) * 8).double().requires_grad_()
    log_target = torch.log_softmax(logits, 2)[..., 0]
    for epsilon in (1e-6, 0.1):
        ours = epsilon_correction(plain, log_target.float(), epsilon=epsilon)
        assert same_bits(ours.values, plain.values)
        (found,) = torch.autograd.grad(
            (log_target * ours.advantages).sum(), logits, retain_graph=True
        )
        corrected = (log_target.exp() + epsilon).log()
        (expected,) = torch.autograd.grad(
            (corrected * plain.advantages).sum(), logits, retain_graph=True
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (uncorrected,) = torch.autograd.grad((log_target * plain.advantages).sum(), logits)
    assert (uncorrected - expected).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "distinct"), [("targets", 4), ("baseline", 3)])
def test_a_correction_chooses_among_them(kind, distinct):
    """With action values of the baseline the advantages of one-step and V-trace are the same."""
    ratios, *others = tensors(trajectories(6, 3, 6))
    generator = torch.Generator().manual_seed(2)
    log_target, log_behaviour = -torch.rand(2, 6, 3, generator=generator) * 3
    ratios = importance_ratios(log_target, log_behaviour)
    levels = {"rho_bar": 1.2, "c_bar": 0.9, "trace_decay": 0.8}
    plain = no_correction(*others, trace_decay=0.8, action_values=kind)
    expected = {
        "v-trace": v_trace(ratios, *others, **levels, action_values=kind),
        "one-step": one_step(plain, ratios, rho_bar=1.2),
        "epsilon": epsilon_correction(plain, log_target, epsilon=0.3),
        "none": plain,
    }
    for name, theirs in expected.items():
        named = trainer(correction=name, **levels, correction_epsilon=0.3, action_values=kind)
        ours = corrected_targets(named, log_target, log_behaviour, *others)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    advantages = {tuple(part.advantages.flatten().tolist()) for part in expected.values()}
    assert len(advantages) == distinct


def test_action_values_of_the_baseline_change_every_corrections_advantages_only():
    _, *others = tensors(trajectories(6, 3, 6))
    logarithms = -torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(2)) * 3
    for name in ("none", "epsilon", "one-step", "v-trace"):
        targets, baseline = (
            corrected_targets(trainer(correction=name, action_values=kind), *logarithms, *others)
            for kind in ("targets", "baseline")
        )
        assert same_bits(targets.values, baseline.values)
        assert (targets.advantages[:-1] != baseline.advantages[:-1]).any()
        assert same_bits(targets.advantages[-1], baseline.advantages[-1])  # both end with V


def test_the_default_is_the_papers():
    ratios, *others = tensors(trajectories(6, 3, 7))
    ours = corrected_targets(trainer(), ratios.log(), torch.zeros(6, 3), *others)
    expected = v_trace(importance_ratios(ratios.log(), torch.zeros(6, 3)), *others)
    assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))
    assert trainer().correction_epsilon == 1e-6


# Constants, ratios, bits


@pytest.mark.parametrize("name", ["none", "epsilon", "one-step", "v-trace"])
def test_targets_are_constants(name):
    _, rewards, discounts, values = tensors(trajectories(5, 2, 8))
    values.requires_grad_()
    log_target = torch.full((5, 2), -1.0, requires_grad=True)
    log_behaviour = torch.full((5, 2), -2.0)
    found = corrected_targets(
        trainer(correction=name), log_target, log_behaviour, rewards, discounts, values
    )
    assert not any(part.requires_grad for part in found)


def test_ratios_of_equal_policies_are_one():
    logarithms = torch.log_softmax(
        torch.randn(50, 7, generator=torch.Generator().manual_seed(4)), 1
    )
    assert importance_ratios(logarithms, logarithms.clone()).eq(1).all()


def test_ratios_are_rounded_correctly_but_for_rare_ties():
    numbers = np.concatenate((np.linspace(-87, 88, 60_001), np.geomspace(1e-30, 80, 5_000)))
    numbers = numbers.astype(np.float32)
    found = importance_ratios(torch.tensor(numbers), torch.zeros(len(numbers))).numpy()
    exact = np.exp(numbers.astype(np.float64))
    distance = np.abs(found.astype(np.float64) - exact) / np.spacing(exact.astype(np.float32))
    assert distance.max() <= 0.5001


def test_ratios_at_the_ends_of_numbers():
    log_target = torch.tensor([89.0, math.inf, -math.inf, -300.0, math.nan, -0.0])
    found = importance_ratios(log_target, torch.zeros(6))
    assert found[[0, 1, 2, 3, 5]].tolist() == [math.inf, math.inf, 0.0, 0.0, 1.0]
    assert found[4].isnan()
    found = v_trace(found[:4].view(4, 1), *tensors(trajectories(4, 1, 9)[1:]))
    assert all(part.isfinite().all() for part in found)


def test_a_ratio_is_the_same_in_any_place_and_with_any_instructions():
    numbers = torch.randn(1_003, generator=torch.Generator().manual_seed(3)) * 4
    found = importance_ratios(numbers, torch.zeros(1_003))
    alone = [importance_ratios(number, torch.zeros(1)) for number in numbers.split(1)]
    assert same_bits(torch.cat(alone), found)
    try:
        kernels.limit_instruction_set("none")
        assert same_bits(importance_ratios(numbers, torch.zeros(1_003)), found)
    finally:
        kernels.limit_instruction_set("AVX-512")


def test_a_trajectory_alone_gets_what_it_gets_in_a_batch():
    parts = tensors(trajectories(20, 33, 10))
    found = v_trace(*parts)
    for column in range(33):
        alone = v_trace(*(part[:, [column]] for part in parts))
        assert all(same_bits(a[:, [column]], b) for a, b in zip(found, alone, strict=True))


@pytest.mark.gpu
def test_a_gpu_gives_the_cpus_bits_for_the_same_ratios():
    parts = tensors(trajectories(20, 33, 11))
    found = v_trace(*parts)
    on_gpu = v_trace(*(part.cuda() for part in parts))
    assert all(same_bits(a, b.cpu()) for a, b in zip(found, on_gpu, strict=True))
