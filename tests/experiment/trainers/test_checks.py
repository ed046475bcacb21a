"""Checks of hyper-parameters that several algorithms have: what passes, and what is said."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.fields import Model
from capsule.experiment.trainers import LayersSpec, ModuleSpec
from capsule.experiment.trainers.checks import (
    require_at_most,
    require_micro_batches,
    require_multiple,
    require_no_units,
)

sizes = st.lists(st.integers(1, 64), min_size=1, max_size=8).map(tuple)
positive = st.integers(1, 10_000)
examples = settings(max_examples=40)


class Trainer(Model):
    """A trainer as far as the check of its network reads it."""

    network: str | LayersSpec | ModuleSpec
    hidden_units: int = 256


OWN = [LayersSpec(dense=(8,)), ModuleSpec(module="nets:make")]


@examples
@given(sizes)
def test_parts_that_add_up_to_the_batch_are_accepted(parts):
    require_micro_batches(parts, sum(parts))


@examples
@given(sizes, positive)
def test_parts_that_do_not_are_rejected(parts, batch_size):
    if sum(parts) == batch_size:
        return
    with pytest.raises(ValueError, match="micro_batches") as caught:
        require_micro_batches(parts, batch_size)
    assert str(caught.value) == (
        f"micro_batches {list(parts)} add up to {sum(parts)}, not to batch_size {batch_size}"
    )


def test_no_parts_add_up_to_nothing():
    with pytest.raises(ValueError, match=r"micro_batches \[\] add up to 0, not to batch_size 4"):
        require_micro_batches((), 4)


@pytest.mark.parametrize("network", [*OWN, "mlp"])
def test_the_default_units_are_accepted_with_every_network(network):
    require_no_units(Trainer(network=network))
    require_no_units(Trainer(network=network, hidden_units=256))


def test_a_named_network_may_have_other_units():
    require_no_units(Trainer(network="mlp", hidden_units=3))


@pytest.mark.parametrize("network", OWN)
def test_a_network_of_its_own_lists_its_units_itself(network):
    with pytest.raises(ValueError, match="hidden_units 3 is not used") as caught:
        require_no_units(Trainer(network=network, hidden_units=3))
    assert "remove it, and list the units of its dense layers in network.dense" in str(caught.value)


@given(positive, positive)
def test_a_product_is_a_multiple_of_its_factors(one, other):
    require_multiple(SimpleNamespace(total=one * other, interval=one), "total", "interval")


@examples
@given(positive, st.integers(2, 10_000), st.integers(1, 9_999))
def test_a_number_with_a_remainder_is_no_multiple(times, size, more):
    value = times * size + 1 + more % (size - 1)
    with pytest.raises(ValueError, match=f"^total {value} is not a multiple of interval {size}$"):
        require_multiple(SimpleNamespace(total=value, interval=size), "total", "interval")


@given(positive, positive)
def test_the_larger_of_two_numbers_is_the_limit(one, other):
    low, high = sorted((one, other))
    require_at_most(SimpleNamespace(start=low, capacity=high), "start", "capacity")
    require_at_most(SimpleNamespace(start=high, capacity=high), "start", "capacity")
    with pytest.raises(ValueError, match=f"^start {high + 1} exceeds capacity {high}$"):
        require_at_most(SimpleNamespace(start=high + 1, capacity=high), "start", "capacity")
