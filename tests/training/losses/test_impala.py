"""IMPALA's loss: by hand, against autograd in float64 and rlax, bit for bit alone and together."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.training.layers import kernels
from capsule.training.losses.impala import (
    clipped_rewards,
    impala_losses,
    softmax_policy,
)
from capsule.training.losses.r2d2 import clip_rewards
from capsule.training.losses.v_trace import Targets, v_trace

pytestmark = pytest.mark.xdist_group("jax")

CPU = torch.device("cpu")
f = np.float32


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def same_bits(ours, expected):
    return np.array_equal(
        ours.detach().contiguous().numpy().view(np.int32),
        expected.detach().contiguous().numpy().view(np.int32),
    )


# Policies


def test_a_policy_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0], [2.0, -1000.0]])
    policy = softmax_policy(logits)
    expected = [math.log(0.25), math.log(0.75), math.log(0.5), math.log(0.5), 0.0, -1002.0]
    assert policy.logarithms.flatten().tolist() == pytest.approx(expected, rel=1e-7)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert policy.entropies.tolist() == pytest.approx([entropy, math.log(2), 0.0], rel=1e-7)
    chosen = policy.of(torch.tensor([1, 0, 0]))
    assert chosen.tolist() == [policy.logarithms[0, 1], policy.logarithms[1, 0], 0.0]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32 - 1),
    st.sampled_from([1e-3, 1.0, 30.0, 1e4]), st.sampled_from([0.0, 1e6]),
)  # fmt: skip
def test_logarithms_and_entropies_are_rounded_once(rows, actions, seed, scale, offset):
    """Half a unit in the last place, and what float64 loses of a number next to 0."""
    logits = (np.random.default_rng(seed).normal(0, scale, (rows, actions)) + offset).astype(f)
    found = softmax_policy(torch.tensor(logits))
    exact = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 1)
    entropies = -(exact.exp() * exact).sum(1)
    for ours, theirs in zip(found, (exact, entropies), strict=True):
        error = (ours.double() - theirs).abs().numpy()
        spacing = np.spacing(theirs.abs().numpy().astype(f))
        assert (error <= 0.5001 * spacing + 1e-13).all()


@pytest.mark.parametrize("actions", [1, 2, 6, 18])
def test_the_gradient_of_a_policy_is_autograds(actions):
    logits = random(7, 3, actions, seed=actions, scale=4.0)
    factors, entropy_factors = random(7, 3, actions, seed=1), random(7, 3, seed=2)
    ours = logits.clone().requires_grad_()
    policy = softmax_policy(ours)
    assert policy.logarithms.shape == (7, 3, actions)
    loss = (policy.logarithms * factors).sum() + (policy.entropies * entropy_factors).sum()
    (found,) = torch.autograd.grad(loss, ours)
    exact = logits.double().requires_grad_()
    logarithms = torch.log_softmax(exact, 2)
    entropies = -(logarithms.exp() * logarithms).sum(2)
    loss = (logarithms * factors).sum() + (entropies * entropy_factors).sum()
    (expected,) = torch.autograd.grad(loss, exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=5e-6)


def test_one_of_the_two_gradients_may_be_missing():
    for part in (0, 1):
        ours, exact = random(4, 5).requires_grad_(), random(4, 5).double().requires_grad_()
        logarithms = torch.log_softmax(exact, 1)
        theirs = logarithms, -(logarithms.exp() * logarithms).sum(1)
        (found,) = torch.autograd.grad(softmax_policy(ours)[part].square().sum(), ours)
        (expected,) = torch.autograd.grad(theirs[part].square().sum(), exact)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_alone_gets_what_it_gets_in_a_batch():
    def evaluate(logits):
        leaf = logits.clone().requires_grad_()
        policy = softmax_policy(leaf)
        loss = (policy.logarithms[..., 0] * 3).sum() + policy.entropies.sum()
        return *policy, torch.autograd.grad(loss, leaf)[0]

    logits = random(37, 18, scale=3.0)
    together = evaluate(logits)
    for row in range(37):
        alone = evaluate(logits[row : row + 1])
        assert all(same_bits(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))
    shaped = evaluate(logits.view(1, 37, 18).transpose(0, 1))
    assert all(same_bits(a, b.squeeze(1)) for a, b in zip(together, shaped, strict=True))


def test_what_is_not_a_number_stays_none():
    logits = random(3, 4)
    logits[1, 2] = math.nan
    policy = softmax_policy(logits)
    assert policy.logarithms[1].isnan().all()
    assert policy.entropies[1].isnan()
    assert policy.logarithms[[0, 2]].isfinite().all()


# Losses


def parts_of(time=4, batch=3, actions=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(time, batch, actions, generator=generator) * 2
    baselines = torch.randn(time, batch, generator=generator)
    chosen = torch.randint(0, actions, (time, batch), generator=generator)
    values, advantages = torch.randn(2, time, batch, generator=generator)
    return logits, baselines, chosen, Targets(values, advantages)


def losses_of(logits, baselines, chosen, targets, **costs):
    policy = softmax_policy(logits)
    return impala_losses(policy.of(chosen), policy.entropies, baselines, targets, **costs)


def test_losses_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)]], [[0.0, 0.0]]])
    targets = Targets(torch.tensor([[2.0], [-1.0]]), torch.tensor([[4.0], [-2.0]]))
    found = losses_of(logits, torch.tensor([[1.0], [1.0]]), torch.tensor([[0], [1]]), targets)
    policy = -(math.log(0.25) * 4 + math.log(0.5) * -2)
    entropy = 0.25 * math.log(0.25) + 0.75 * math.log(0.75) - math.log(2)
    expected = [policy + 0.5 * 2.5 + 0.01 * entropy, policy, 2.5, entropy]
    assert [part.item() for part in found] == pytest.approx(expected, rel=1e-6)


def test_gradients_by_hand():
    """Cost times (V - v) for the baseline; p - onehot times the advantage; p (ln p + H)."""
    logits, baselines, chosen, targets = parts_of()
    logits.requires_grad_()
    baselines.requires_grad_()
    found = losses_of(logits, baselines, chosen, targets, baseline_cost=0.7, entropy_cost=0.3)
    for_logits, for_baselines = torch.autograd.grad(found.total, (logits, baselines))
    expected = 0.7 * (baselines.detach() - targets.values)
    torch.testing.assert_close(for_baselines, expected)
    with torch.no_grad():
        p = torch.softmax(logits.double(), 2)
        entropies = -(p * p.log()).sum(2, keepdim=True)
        one_hot = torch.nn.functional.one_hot(chosen, 5)
        expected = targets.advantages.unsqueeze(2) * (p - one_hot)
        expected += 0.3 * p * (p.log() + entropies)
    torch.testing.assert_close(for_logits.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_whole_loss_has_the_gradient_of_autograd_in_float64():
    """V-trace included, the constants of which come from the same logits and baselines."""
    logits, _, chosen, _ = parts_of(time=6)
    values, rewards, log_behaviour = random(7, 3, seed=5), random(6, 3, seed=6), random(6, 3) - 2
    discounts = torch.full((6, 3), 0.9)
    discounts[3, 1] = 0
    results = []
    for kind in (torch.float32, torch.float64):
        x, v = (part.to(kind).requires_grad_() for part in (logits, values))
        if kind == torch.float32:
            policy = softmax_policy(x)
            log_target, entropies = policy.of(chosen), policy.entropies
            ratios = kernels.exponentiate(log_target.detach() - log_behaviour)
            targets = v_trace(ratios, rewards, discounts, v)
            loss = impala_losses(log_target, entropies, v[:-1], targets).total
        else:
            logarithms = torch.log_softmax(x, 2)
            log_target = logarithms.gather(2, chosen.unsqueeze(2)).squeeze(2)
            targets = v_trace((log_target - log_behaviour).exp(), rewards, discounts, v)
            loss = -(log_target * targets.advantages).sum()
            loss += 0.25 * (targets.values - v[:-1]).square().sum()
            loss += 0.01 * (logarithms.exp() * logarithms).sum()
        results.append([loss, *torch.autograd.grad(loss, (x, v))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
    assert not results[0][2][6].any()  # the value that only bootstraps learns nothing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_losses_against_rlax():
    import jax.numpy as jnp
    import rlax

    logits, baselines, chosen, targets = parts_of(time=40, batch=1, seed=9)
    found = losses_of(logits, baselines, chosen, targets)
    flat, ones = jnp.asarray(logits[:, 0].numpy()), np.ones(40, f)
    mean = rlax.policy_gradient_loss(
        flat, chosen[:, 0].numpy(), targets.advantages[:, 0].numpy(), ones
    )
    assert found.policy.item() == pytest.approx(40 * float(mean), rel=1e-5)
    assert found.entropy.item() == pytest.approx(40 * float(rlax.entropy_loss(flat, ones)))
    missed = jnp.asarray((targets.values - baselines).numpy())
    assert found.baseline.item() == pytest.approx(float(rlax.l2_loss(missed).sum()), rel=1e-5)


def test_losses_of_parts_add_up():
    logits, baselines, chosen, targets = parts_of(batch=6)
    whole = losses_of(logits, baselines, chosen, targets)
    sums = [0.0] * 4
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        piece = Targets(*(values[:, part] for values in targets))
        found = losses_of(logits[:, part], baselines[:, part], chosen[:, part], piece)
        sums = [total + loss.item() for total, loss in zip(sums, found, strict=True)]
    assert sums == pytest.approx([loss.item() for loss in whole], rel=1e-5)


def test_targets_handed_in_with_a_graph_are_still_constants():
    baselines = torch.tensor([[2.0]], requires_grad=True)
    log_target = torch.tensor([[-1.0]], requires_grad=True)
    targets = Targets(baselines * 3, log_target * 5)
    loss = impala_losses(log_target, torch.zeros(1, 1), baselines, targets).total
    found = torch.autograd.grad(loss, (log_target, baselines))
    assert [part.item() for part in found] == [5.0, 0.5 * (2 - 6)]


# Rewards


def test_rewards_are_clipped_three_ways():
    rewards = np.array([-7.0, -0.25, 0.0, 0.5, 1e9])
    assert clipped_rewards(rewards, "unit").tolist() == [-1.0, -0.25, 0.0, 0.5, 1.0]
    assert clipped_rewards(rewards, "none").tolist() == [-7.0, -0.25, 0.0, 0.5, 1e9]
    assert clipped_rewards(rewards, "asymmetric").tolist() == clip_rewards(rewards).tolist()
    for clipping in ("unit", "none", "asymmetric"):
        assert clipped_rewards(rewards, clipping).dtype == np.float32


@pytest.mark.gpu
def test_on_a_gpu_policies_come_close_to_the_cpus():
    logits = random(7, 3, 18, scale=4.0)
    for ours, theirs in zip(softmax_policy(logits), softmax_policy(logits.cuda()), strict=True):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-5, atol=1e-6)
