"""The loss by hand, by finite reasoning, and against rlax where it is installed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.training.losses.q_learning import (
    bootstrap_targets,
    clipped_error_loss,
    clipped_errors,
    exploration_rate,
)

pytestmark = pytest.mark.xdist_group("jax")


def test_targets_by_hand():
    targets = bootstrap_targets(
        torch.tensor([1.0, -1.0, 0.5]),
        torch.tensor([False, True, False]),
        torch.tensor([[2.0, 4.0], [100.0, 200.0], [-3.0, -5.0]]),
        0.5,
    )
    assert targets.tolist() == [1 + 0.5 * 4, -1.0, 0.5 + 0.5 * -3]


def test_loss_and_gradient_by_hand():
    """Errors 0.5, -3 and 0: quadratic inside the threshold, linear outside, summed."""
    values = torch.tensor([[1.0, 9.0], [7.0, -2.0], [4.0, 0.0]], requires_grad=True)
    loss = clipped_error_loss(values, torch.tensor([0, 1, 0]), torch.tensor([0.5, 1.0, 4.0]))
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == 0.5 * 0.5**2 + (3 - 0.5)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, -1.0], [0.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8))
def test_gradient_is_the_clipped_error(errors):
    values = torch.tensor([[error] for error in errors], requires_grad=True)
    actions = torch.zeros(len(errors), dtype=torch.int64)
    loss = clipped_error_loss(values, actions, torch.zeros(len(errors)))
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.squeeze(1).tolist() == [max(-1.0, min(1.0, error)) for error in errors]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_the_clipped_errors_are_the_gradient_of_the_loss(rows, actions, seed):
    generator = torch.Generator().manual_seed(seed)
    values = 2 * torch.randn((rows, actions), generator=generator).requires_grad_()
    chosen = torch.randint(0, actions, (rows,), generator=generator)
    targets = torch.randn(rows, generator=generator)
    (gradient,) = torch.autograd.grad(clipped_error_loss(values, chosen, targets), values)
    assert torch.equal(clipped_errors(values.detach(), chosen, targets), gradient)


def test_exploration_schedule_by_hand():
    schedule = {"initial": 1.0, "final": 0.1, "steps": 1_000}
    rates = {step: exploration_rate(step, **schedule) for step in (0, 250, 500, 999, 1_000, 10**9)}
    expected = {0: 1.0, 250: 0.775, 500: 0.55, 999: 0.1009, 1_000: 0.1, 10**9: 0.1}
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_against_rlax():
    import jax
    import rlax

    generator = np.random.default_rng(7)
    batch, actions, discount = 64, 6, 0.99
    values, following = generator.normal(0, 2, (2, batch, actions)).astype(np.float32)
    chosen = generator.integers(0, actions, batch)
    rewards = generator.integers(-1, 2, batch).astype(np.float32)
    terminals = generator.random(batch) < 0.2
    discounts = np.where(terminals, 0.0, discount).astype(np.float32)

    def reference(online):
        error = jax.vmap(rlax.q_learning)(online, chosen, rewards, discounts, following)
        return jax.numpy.sum(rlax.huber_loss(error, 1.0))

    expected_loss, expected_gradient = jax.value_and_grad(reference)(values)
    online = torch.tensor(values, requires_grad=True)
    targets = bootstrap_targets(
        torch.tensor(rewards), torch.tensor(terminals), torch.tensor(following), discount
    )
    loss = clipped_error_loss(online, torch.tensor(chosen), targets)
    (gradient,) = torch.autograd.grad(loss, online)
    assert math.isclose(loss.item(), float(expected_loss), rel_tol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), np.asarray(expected_gradient), atol=1e-6)
