"""The digest of a pass: the same each time, and another one for any bit of any result."""

from dataclasses import dataclass, replace

import pytest
import torch

from capsule.training.impala.actors.ray import preflight
from capsule.training.impala.actors.ray.preflight import pass_digest
from capsule.training.layers.backends import LIBRARY
from capsule.training.networks.actor_critic import ActorCriticNetwork
from tests.training.impala.actors.conftest import settings_of

pytestmark = pytest.mark.usefixtures("one_thread")


def with_one_bit_changed(results, place):
    """Return tensors of which one has another last bit."""
    changed = list(results)
    changed[place] = results[place].clone()
    with torch.no_grad():
        changed[place].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    return tuple(changed)


@dataclass(frozen=True)
class Erring(ActorCriticNetwork):
    """A network that returns one wrong bit."""

    place: int = 0

    def unroll(self, *inputs):
        return with_one_bit_changed(super().unroll(*inputs), self.place)


def test_a_pass_is_the_same_each_time_and_leaves_threads_alone():
    settings = settings_of()
    torch.set_num_threads(2)
    assert pass_digest(settings) == pass_digest(settings)
    assert torch.get_num_threads() == 2
    others = [settings_of("cartpole"), settings_of("cartpole", products=LIBRARY)]
    assert len({pass_digest(each) for each in [settings, *others]}) == 3


def test_threads_are_restored_where_a_pass_fails(monkeypatch):
    def fail(*_):
        raise ValueError("no gradient")

    monkeypatch.setattr(torch.autograd, "grad", fail)
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="no gradient"):
        pass_digest(settings_of())
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("place", range(3), ids=["logits", "baselines", "states"])
def test_one_bit_of_a_result_of_the_network_shows_in_a_pass(place):
    settings = settings_of()
    erring = replace(settings, network=Erring(**vars(settings.network), place=place))
    assert pass_digest(erring) != pass_digest(settings)


def test_one_bit_of_any_gradient_shows_in_a_pass(monkeypatch):
    settings, grad = settings_of(), torch.autograd.grad
    digests = {pass_digest(settings)}
    for place in range(len(settings.network.shapes)):

        def changed(*arguments, place=place):
            return with_one_bit_changed(grad(*arguments), place)

        monkeypatch.setattr(torch.autograd, "grad", changed)
        digests.add(pass_digest(settings))
    assert len(digests) == 1 + len(settings.network.shapes)


def test_one_bit_of_a_logarithm_of_a_probability_shows_in_a_pass(monkeypatch):
    settings, log_softmax = settings_of(), preflight.kernels.log_softmax
    before = pass_digest(settings)
    monkeypatch.setattr(
        preflight.kernels,
        "log_softmax",
        lambda logits: with_one_bit_changed(log_softmax(logits), 0),
    )
    assert pass_digest(settings) != before
