"""The mathematics of R2D2: by hand, against loops in float64, and against rlax."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.training.losses.r2d2 import (
    clip_rewards,
    double_q_targets,
    exponentiate,
    importance_weights,
    invert_rescale,
    n_step_returns,
    rescale,
    sequence_loss,
    sequence_priorities,
    td_errors,
)

pytestmark = pytest.mark.xdist_group("jax")

EPSILON = 1e-3
ULP = 2.0**-23  # spacing of float32 at 1


def h(x, epsilon=EPSILON):
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + epsilon * x


def inverse_h(x, epsilon=EPSILON):
    """Proposition A.2 of Pohlen et al. 2018; at epsilon 0 its limit."""
    if epsilon == 0:
        return math.copysign((abs(x) + 1) ** 2 - 1, x)
    root = (math.sqrt(1 + 4 * epsilon * (abs(x) + 1 + epsilon)) - 1) / (2 * epsilon)
    return math.copysign(root * root - 1, x)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


# Value rescaling


def test_rescaling_by_hand():
    values = rescale(torch.tensor([0.0, 1.0, 3.0, -3.0, 300.0]), EPSILON)
    expected = [0.0, 0.4152136, 1.003, -1.003, 16.649351]
    assert values.tolist() == pytest.approx(expected, rel=2e-7)
    assert invert_rescale(torch.tensor([0.0, 1.0]), 0.0).tolist() == [0.0, 3.0]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, 1e-3, 1e-2, 0.5]))
def test_both_ways_are_exact_to_a_few_roundings_everywhere(number, epsilon):
    """Ten ulp, also where the textbook's forms keep no digit at all (rlax: 63 % near 1e-3)."""
    value = torch.tensor([number])
    rescaled = rescale(value, epsilon).item()
    assert rescaled == pytest.approx(precise_h(number, epsilon), rel=10 * ULP, abs=1e-44)
    inverted = invert_rescale(value, epsilon).item()
    assert inverted == pytest.approx(precise_inverse(number, epsilon), rel=10 * ULP, abs=1e-44)


def precise_h(number, epsilon):
    """In float64 with log1p and expm1, which keep small numbers: another route than ours."""
    size = abs(number)
    return math.copysign(math.expm1(math.log1p(size) / 2) + epsilon * size, number)


def precise_inverse(number, epsilon):
    """The root by bisection of float64, of the increasing ``precise_h``."""
    size = abs(number)
    low, high = 0.0, (size + 1) ** 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if precise_h(middle, epsilon) < size else (low, middle)
    return math.copysign(low, number)


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e5, 1e5, width=32))
def test_the_inverse_is_the_published_one(number):
    ours = invert_rescale(torch.tensor([number], dtype=torch.float64), EPSILON).item()
    assert ours == pytest.approx(inverse_h(number), rel=1e-7, abs=1e-9)
    there_and_back = invert_rescale(rescale(torch.tensor([number]), EPSILON), EPSILON).item()
    assert there_and_back == pytest.approx(number, rel=20 * ULP, abs=1e-44)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_rescaling_against_rlax():
    """Tolerances by range: the differences are rlax's cancellation."""
    import rlax

    for low, high, relative, absolute in (
        (1.0, 1e4, 2e-3, 0.0),
        (1e-2, 1.0, 2e-2, 0.0),
        (1e-4, 1e-2, 0.0, 2e-4),
    ):
        numbers = np.geomspace(low, high, 200, dtype=np.float32)
        for signed in (numbers, -numbers):
            ours = rescale(torch.tensor(signed), EPSILON).numpy()
            theirs = np.asarray(rlax.signed_hyperbolic(signed, EPSILON))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-7)
            ours = invert_rescale(torch.tensor(signed), EPSILON).numpy()
            theirs = np.asarray(rlax.signed_parabolic(signed, EPSILON))
            np.testing.assert_allclose(ours, theirs, rtol=relative, atol=absolute)


# Returns and targets


def test_returns_by_hand():
    """The tail bootstraps from the last value, as rlax and SEED RL have it."""
    returns = n_step_returns(
        tensor([1], [2], [3]),
        torch.full((3, 1), 0.9),
        tensor([math.nan], [100], [200], [300]),
        torch.tensor([3]),
        2,
    )
    assert returns.flatten().tolist() == pytest.approx([164.8, 247.7, 273.0])


def test_returns_stop_at_a_terminal_and_bootstrap_after_a_truncation():
    """Columns: a terminal in the middle; padding after a truncation at 2; after a terminal at 2."""
    returns = n_step_returns(
        tensor([1, 1, 1], [2, 2, 2], [4, 7, 7], [8, 7, 7]),
        tensor([0.5, 0.5, 0.5], [0.0, 0.5, 0.0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        tensor([9, 9, 9], [9, 9, 9], [9, 16, 9], [16, 9, 9], [32, 9, 9]),
        torch.tensor([4, 2, 2]),
        3,
    )
    assert returns[:2].T.tolist() == [[2.0, 2.0], [1 + 1 + 4, 2 + 8], [2.0, 2.0]]
    assert returns[2:, 0].tolist() == [4 + 4 + 8, 8 + 16]


@st.composite
def sequences(draw):
    """Time, batch, actions, n, and every input of the targets."""
    time, batch, actions = (
        draw(st.integers(1, 9)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    discounts = generator.choice([0.997, 0.9, 1.0], (time, batch))
    discounts[generator.random((time, batch)) < draw(st.sampled_from([0, 0.2]))] = 0
    few = generator.integers(-2, 3, (2, time + 1, batch, actions))  # full of ties
    return {
        "rewards": generator.normal(0, draw(st.sampled_from([0.0, 1.0, 100.0])), (time, batch)),
        "discounts": discounts,
        "online_values": few[0],
        "target_values": few[1] + generator.normal(0, 3, few[1].shape),
        "lengths": generator.integers(1, time + 1, batch),
        "steps": draw(st.integers(1, 12)),
        "epsilon": draw(st.sampled_from([None, 0.0, 1e-3, 0.5])),
    }


def target_of(case, step, column):
    """The equation of section 2.3 for one step, term by term."""
    length = case["lengths"][column]
    total, factor, now = 0.0, 1.0, step
    while now < min(step + case["steps"], length):
        total += factor * case["rewards"][now, column]
        factor *= case["discounts"][now, column]
        now += 1
    online = case["online_values"][now, column].tolist()
    value = case["target_values"][now, column][online.index(max(online))]
    if case["epsilon"] is None:
        return total + factor * value
    return h(total + factor * inverse_h(value, case["epsilon"]), case["epsilon"])


def targets_of(case):
    tensors = {
        name: torch.tensor(value, dtype=torch.int64 if name == "lengths" else torch.float32)
        for name, value in case.items()
        if isinstance(value, np.ndarray)
    }
    return double_q_targets(**tensors, steps=case["steps"], epsilon=case["epsilon"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(sequences())
def test_targets_are_the_equation_term_by_term(case):
    targets = targets_of(case)
    rounding = 1e-5 + 1e-6 * np.abs(case["rewards"]).max()  # large rewards may cancel out
    for column, length in enumerate(case["lengths"]):
        expected = [target_of(case, step, column) for step in range(length)]
        found = targets[:length, column].tolist()
        assert found == pytest.approx(expected, rel=1e-5, abs=rounding)
    assert targets.dtype == torch.float32
    assert torch.isfinite(targets).all()


@settings(max_examples=50, deadline=None)
@given(sequences())
def test_padding_changes_no_bit(case):
    padded = targets_of(case)
    for column, length in enumerate(case["lengths"]):
        alone = {
            name: value[: length + (len(value) > len(case["rewards"])), column : column + 1]
            for name, value in case.items()
            if isinstance(value, np.ndarray) and value.ndim > 1
        }
        alone = {**case, **alone, "lengths": np.array([length])}
        assert targets_of(alone)[:, 0].tolist() == padded[:length, column].tolist()


def test_the_lowest_of_equal_actions_is_selected():
    for actions in (2, 18, 33):
        online = torch.zeros(2, 5, actions)
        values = torch.arange(float(actions)).expand(2, 5, actions) + 7
        arguments = (torch.zeros(1, 5), torch.ones(1, 5), online, values, torch.ones(5).long())
        targets = double_q_targets(*arguments, steps=1, epsilon=None)
        assert targets.tolist() == [[7.0] * 5]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.slow
def test_errors_against_rlax(steps):
    import jax
    import rlax

    generator = np.random.default_rng(11)
    time, batch, actions = 12, 7, 6
    online, target = generator.normal(0, 3, (2, time + 1, batch, actions)).astype(np.float32)
    rewards = generator.normal(0, 2, (time, batch)).astype(np.float32)
    discounts = np.where(generator.random((time, batch)) < 0.1, 0, 0.997).astype(np.float32)
    chosen = generator.integers(0, actions, (time, batch))
    for pair, epsilon, tolerance in (
        (rlax.IDENTITY_PAIR, None, 2e-6),
        (rlax.SIGNED_HYPERBOLIC_PAIR, EPSILON, 5e-4),
    ):

        def reference(values, pair=pair):
            errors = jax.vmap(
                lambda q, a, v, s, r, d: rlax.transformed_n_step_q_learning(
                    q, a, v, s, r, d, steps, tx_pair=pair
                ),
                in_axes=1,
                out_axes=1,
            )(values[:-1], chosen, target[1:], values[1:].argmax(2), rewards, discounts)
            return 0.5 * (errors**2).sum() / batch, errors

        (loss, expected), gradient = jax.value_and_grad(reference, has_aux=True)(online)
        values = torch.tensor(online, requires_grad=True)
        targets = double_q_targets(
            torch.tensor(rewards),
            torch.tensor(discounts),
            values,
            torch.tensor(target),
            torch.full((batch,), time),
            steps=steps,
            epsilon=epsilon,
        )
        errors = td_errors(values[:-1], torch.tensor(chosen), targets)
        np.testing.assert_allclose(
            errors.detach().numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance
        )
        everything = torch.ones(time, batch, dtype=torch.bool)
        ours = sequence_loss(errors, everything, torch.ones(batch), batch)
        assert ours.item() == pytest.approx(float(loss), rel=tolerance)
        (ours,) = torch.autograd.grad(ours, values)
        np.testing.assert_allclose(ours.numpy(), np.asarray(gradient), atol=tolerance)


# Gradients


def test_no_gradient_reaches_the_target_or_the_selector():
    generator = torch.Generator().manual_seed(3)
    online, target = (
        torch.randn(6, 2, 3, generator=generator, requires_grad=True) for _ in range(2)
    )
    rewards = torch.randn(5, 2, generator=generator)
    discounts = torch.full((5, 2), 0.9)
    lengths = torch.tensor([5, 3])
    targets = double_q_targets(
        rewards, discounts, online, target, lengths, steps=2, epsilon=EPSILON
    )
    assert not targets.requires_grad
    actions = torch.tensor([[0, 1], [2, 1], [0, 0], [1, 0], [2, 0]])
    valid = torch.arange(5).unsqueeze(1) < lengths
    weights = torch.tensor([1.0, 0.5])
    errors = td_errors(online[:-1], actions, targets)
    sequence_loss(errors, valid, weights, 4).backward()
    assert target.grad is None
    expected = torch.zeros(6, 2, 3)
    for step in range(5):
        for column in range(2):
            if step < lengths[column]:
                slope = -weights[column] * errors[step, column].detach() / 4
                expected[step, column, actions[step, column]] = slope
    torch.testing.assert_close(online.grad, expected, rtol=1e-6, atol=0)
    assert online.grad[3:, 1].eq(0).all()


def test_targets_handed_in_with_a_graph_are_still_constants():
    values = torch.ones(1, 1, 2, requires_grad=True)
    errors = td_errors(values, torch.zeros(1, 1).long(), values.sum(2) * 3)
    (gradient,) = torch.autograd.grad(errors.sum(), values)
    assert gradient.tolist() == [[[-1.0, 0.0]]]


def test_a_loss_by_hand_and_by_parts():
    errors = tensor([1.0, -2.0], [3.0, 100.0])
    valid = torch.tensor([[True, True], [True, False]])
    weights = torch.tensor([1.0, 0.25])
    assert sequence_loss(errors, valid, weights, 2).item() == (1 + 9 + 0.25 * 4) / 4
    parts = [
        sequence_loss(errors[:, part], valid[:, part], weights[part], 2).item()
        for part in (slice(0, 1), slice(1, 2))
    ]
    assert sum(parts) == (1 + 9 + 0.25 * 4) / 4


def test_an_error_in_the_padding_is_nothing_even_if_it_is_not_finite():
    errors = tensor([1.0], [math.nan], [math.inf]).requires_grad_()
    valid = torch.tensor([[True], [False], [False]])
    loss = sequence_loss(errors, valid, torch.ones(1), 1)
    (gradient,) = torch.autograd.grad(loss, errors)
    assert (loss.item(), gradient.flatten().tolist()) == (0.5, [1.0, 0.0, 0.0])
    assert sequence_priorities(errors, valid, 0.9).tolist() == [1.0]


# Priorities and weights


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_priorities_are_the_equation(numbers, padding, share):
    errors = torch.tensor([[number] for number in numbers + [1e9] * padding])
    valid = torch.tensor([[True]] * len(numbers) + [[False]] * padding)
    sizes = [abs(number) for number in numbers]
    mean = math.fsum(sizes) / len(sizes)
    expected = share * max(sizes) + (1 - share) * mean
    priority = sequence_priorities(errors, valid, share)
    assert priority.dtype == np.float64
    assert priority[0] == pytest.approx(expected, rel=1e-14)


def test_padding_changes_no_bit_of_a_priority():
    generator = torch.Generator().manual_seed(5)
    errors = torch.randn(80, 3, generator=generator)
    valid = torch.arange(80).unsqueeze(1) < torch.tensor([80, 41, 1])
    together = sequence_priorities(errors, valid, 0.9)
    alone = [
        sequence_priorities(errors[:size, [column]], valid[:size, [column]], 0.9)[0]
        for column, size in enumerate((80, 41, 1))
    ]
    assert together.tolist() == alone
    assert together[2] == pytest.approx(abs(errors[0, 2].item()))


def test_powers_hold_float32_numbers():
    priorities = np.array([0.0, 1.0, 2.0, 1e-3, 7.5])
    powers = exponentiate(priorities, 0.9)
    assert powers.tolist() == [float(np.float32(p**0.9)) for p in priorities.tolist()]
    assert powers.dtype == np.float64


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=20),
    st.integers(1, 10**6),
    st.sampled_from([0.0, 0.4, 0.6, 1.0]),
)
def test_weights_are_the_equation(probabilities, size, exponent):
    weights = [(size * probability) ** -exponent for probability in probabilities]
    expected = [weight / max(weights) for weight in weights]
    ours = importance_weights(np.array(probabilities), exponent)
    assert ours.dtype == np.float32
    assert ours.tolist() == pytest.approx(expected, rel=2e-7)
    assert ours.max() == 1.0


def test_rewards_are_clipped_optimistically():
    rewards = np.array([-1e9, -1.0, 0.0, 1.0, 1e9])
    expected = [-0.3, -0.3 * math.tanh(1), 0.0, 5 * math.tanh(1), 5.0]
    clipped = clip_rewards(rewards)
    assert clipped.dtype == np.float32
    assert clipped.tolist() == [float(np.float32(value)) for value in expected]
