"""Batches: each actor has its row in them, and rows that depend on others are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.training.acting.batching import ROWS, Batching, require_independent_rows
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from tests.training.acting.conftest import STRICT, network_of, relaxed

FIXED, FREE = Batching(), Batching(fixed=False)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["nature", "mlp", "lstm"])
def test_a_row_does_not_depend_on_what_the_others_hold(name):
    network, draw = network_of(name)
    assert require_independent_rows(network, draw(ROWS), FIXED) == ROWS
    first = draw(ROWS)
    expected = FIXED.evaluate(network, range(ROWS), tuple(map(np.asarray, first)))
    for row in range(ROWS):
        neighbours = [draw(ROWS), tuple(torch.full_like(tensor, 7) for tensor in first)]
        if first[0].is_floating_point():
            neighbours.append(tuple(torch.full_like(tensor, torch.nan) for tensor in first))
        for batch in neighbours:
            for tensor, kept in zip(batch, first, strict=True):
                tensor[row] = kept[row]
            found = FIXED.evaluate(network, range(ROWS), tuple(map(np.asarray, batch)))
            for one, other in zip(expected.outputs, found.outputs, strict=True):
                assert one[row].tobytes() == other[row].tobytes()


@pytest.mark.parametrize("batching", [FIXED, FREE])
def test_a_policy_that_mixes_its_rows_is_refused(batching):
    def normalised(inputs):
        return (inputs[0] - inputs[0].mean(dim=0),)

    with pytest.raises(CapsuleError, match="row 0 of the policy's outputs") as caught:
        require_independent_rows(normalised, (torch.randn(4, 3),), batching)
    assert caught.value.code == "CAP-T321"


def test_a_policy_that_shows_the_size_of_its_batch_is_refused_where_sizes_are_free():
    def sized(inputs):
        return (inputs[0] + len(inputs[0]),)

    inputs = (torch.randn(4, 3),)
    assert require_independent_rows(sized, inputs, Batching(4)) == 4
    with pytest.raises(CapsuleError, match="CAP-T321"):
        require_independent_rows(sized, inputs, FREE)


def test_batches_have_one_size_and_an_actor_has_its_row():
    seen = []

    def network(inputs):
        seen.append(inputs[0].tolist())
        return inputs

    values = np.array([1, 5, 2, 9], np.float32)
    found = Batching(4).evaluate(network, [1, 5, 2, 9], (values,))
    assert seen == [[0, 1, 2, 0], [0, 5, 0, 0], [0, 9, 0, 0]]
    assert found.outputs[0].tolist() == values.tolist()
    assert (found.sizes.tolist(), found.places.tolist()) == ([4] * 4, [1, 1, 2, 1])


def test_batching_follows_the_switch_and_the_products():
    assert Batching.of(STRICT, LIBRARY, 4) == Batching(4, fixed=True)
    assert not Batching.of(STRICT, FIXED_ORDER).fixed
    assert not Batching.of(relaxed(batch_invariance=False), LIBRARY).fixed


ASKED = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=50)
@given(ASKED, st.integers(1, 6))
def test_outputs_are_in_the_order_of_the_actors_each_with_its_place(actors, rows):
    sizes = []

    def network(inputs):
        sizes.append(len(inputs[0]))
        assert len(inputs[1]) == len(inputs[0])
        return inputs[0] * 2, inputs[1].sum(1)

    singles = np.arange(len(actors), dtype=np.int64)
    pairs = np.stack((singles, singles + 0.5), 1)
    found = Batching(rows).evaluate(network, actors, (singles, pairs))
    assert found.outputs[0].tolist() == (singles * 2).tolist()
    assert found.outputs[1].tolist() == (pairs[:, 0] + pairs[:, 1]).tolist()
    assert [output.dtype for output in found.outputs] == [np.int64, np.float64]
    assert found.places.tolist() == [actor % rows for actor in actors]
    assert found.sizes.tolist() == [rows] * len(actors)
    # A row is filled once in a batch, so there are as many batches as actors of the busiest row.
    busiest = max(found.places.tolist().count(place) for place in range(rows))
    assert sizes == [rows] * busiest


@given(ASKED)
def test_without_fixed_batches_one_batch_holds_whatever_was_asked_for(actors):
    seen = []

    def network(inputs):
        seen.append(inputs[0].tolist())
        return inputs

    values = np.arange(len(actors), dtype=np.float32)
    found = FREE.evaluate(network, actors, (values,))
    assert seen == [values.tolist()]
    assert found.outputs[0].tolist() == values.tolist()
    assert found.sizes.tolist() == [len(actors)] * len(actors)
    assert found.places.tolist() == list(range(len(actors)))


@pytest.mark.parametrize("batching", [FIXED, FREE])
def test_inputs_are_left_as_they_are_and_nothing_is_kept_for_a_gradient(batching):
    weight = torch.ones(3, requires_grad=True)
    graphs = []

    def network(inputs):
        output = inputs[0].mul_(weight * 2)  # in place, as a network may
        graphs.append(output.requires_grad)
        return (output.clone(),)

    values = np.ones((2, 3), np.float32)
    found = batching.evaluate(network, [0, 1], (values.copy(),))
    assert found.outputs[0].tolist() == [[2.0] * 3] * 2
    assert graphs == [False]


@pytest.mark.parametrize("batching", [FIXED, FREE])
@pytest.mark.parametrize("value", [0.0, -0.0, float("nan")])
def test_rows_are_compared_by_their_bytes(batching, value):
    def network(inputs):
        return (torch.full_like(inputs[0], value),)

    assert require_independent_rows(network, (torch.randn(4, 3),), batching) == 4


def test_a_zero_whose_sign_depends_on_the_other_rows_is_refused():
    def network(inputs):
        others = (inputs[0] != 0).all(1).sum() > 1
        return (torch.zeros(len(inputs[0]), 1) * (-1 if others else 1),)

    with pytest.raises(CapsuleError, match="CAP-T321"):
        require_independent_rows(network, (torch.ones(4, 3),), Batching(4))


def test_a_row_that_depends_on_another_is_named_with_the_remedy():
    def network(inputs):
        values = inputs[0].clone()
        values[2] += values[1]
        return (values,)

    with pytest.raises(CapsuleError) as refused:
        require_independent_rows(network, (torch.ones(4, 3),), Batching(4))
    assert (refused.value.code, refused.value.message) == (
        "CAP-T321",
        "row 2 of the policy's outputs depends on the other rows of its batch",
    )
    assert "determinism.batch_invariance: false" in refused.value.fix
