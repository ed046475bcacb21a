"""Answers to actors: the same to a request, whoever else asks, whoever answers, in any order.

Each layer is switched off once, and what then differs is shown; beside equality stands diversity.
"""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.batching import Batching
from capsule.training.acting.inference import (
    InferenceReplica,
    RequestBatch,
    RequestCounts,
    counted,
    replica_of,
)
from capsule.training.state.streams import RequestWords, Stream, uniform_of
from tests.training.acting.conftest import ACTIONS, FEATURES, STRICT, network_of, relaxed
from tests.training.conftest import CARTPOLE, ROOT, make_spec, start_variables

SEEDS = SeedsSpec(root=3)
ACTORS = 21  # more than the rows of a batch: some share a row
FIXED, FREE = Batching(), Batching(fixed=False)


pytestmark = pytest.mark.usefixtures("one_thread")


def policy_of(name):
    """Return a policy whose versions differ."""
    network, _ = network_of(name)

    def policy(version, inputs):
        logits, states = network(inputs)
        logarithms = (logits + version * torch.arange(ACTIONS)).log_softmax(1)
        return logarithms, logarithms.exp(), states

    return policy


@cache
def requests_of(name, steps=1):
    """Return one request for each actor and step; policy versions differ among the actors."""
    _, draw = network_of(name)
    batch = [tensor.numpy() for tensor in draw(ACTORS * steps)]
    return [
        RequestBatch(
            version=row % ACTORS % 2,
            actors=np.array([row % ACTORS]),
            numbers=np.array([row // ACTORS]),
            inputs=tuple(array[row : row + 1] for array in batch),
        )
        for row in range(ACTORS * steps)
    ]


def replica_for(name, rank=0, determinism=STRICT, seeds=SEEDS, batching=FIXED):
    if not determinism.batch_invariance:
        batching = FREE
    return InferenceReplica(rank, policy_of(name), batching, determinism, seeds)


def answers(name, groups, *, replicas=1, **options):
    """Let replicas answer groups of requests, one group after the other.

    Returns:
        Action, logarithm and state of each, by actor and number.
    """
    services = [replica_for(name, rank, **options) for rank in range(replicas)]
    found = {}
    for group in groups:
        for rank, service in enumerate(services):
            share = [each for each in group if replica_of(each.actors[0], replicas) == rank]
            for asked, answer in zip(
                share, service.answer_all(share) if share else [], strict=True
            ):
                value = (int(answer.actions[0]), answer.logarithms.tobytes())
                found[asked.actors[0], asked.numbers[0]] = (*value, answer.states.tobytes())
    return found


# --- batch invariance -----------------------------------------------------------------------------


PINNED = """
from capsule.training.acting.batching import ROWS, Batching, require_independent_rows
from tests.training.acting.conftest import network_of
from tests.training.acting.test_inference import answers, requests_of
for name in ("nature", "mlp", "lstm"):
    network, draw = network_of(name)
    requests = requests_of(name)
    for rows in (ROWS, 17, 24):
        batching = Batching(rows)
        require_independent_rows(network, draw(rows), batching)
        together = answers(name, [requests], batching=batching)
        alone = answers(name, [[request] for request in requests[12:]], batching=batching)
        assert together.items() >= alone.items(), (name, rows)
print("independent")
"""


@pytest.mark.slow
def test_nor_under_the_variables_of_a_run_where_its_place_matters():
    done = subprocess.run(
        [sys.executable, "-c", PINNED],
        env={**start_variables(make_spec(CARTPOLE)), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "independent\n", done.stderr


@pytest.mark.parametrize("name", ["nature", "mlp", "lstm"])
def test_an_answer_does_not_depend_on_who_else_asks(name):
    requests = requests_of(name)
    expected = answers(name, [requests])
    assert answers(name, [[request] for request in requests]) == expected
    assert answers(name, [requests[::2], requests[1::2]]) == expected


@pytest.mark.parametrize("name", ["nature", "mlp", "lstm"])
def test_without_fixed_batches_it_does(name):
    requests = requests_of(name, steps=4)  # of few, all may have the same bits by chance
    dynamic = relaxed(batch_invariance=False)
    together = answers(name, [requests], determinism=dynamic)
    alone = answers(name, [[request] for request in requests], determinism=dynamic)
    assert together.keys() == alone.keys()
    assert together != alone


# --- seeds ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(order=st.permutations(range(12)), key=st.integers(0, 2**128 - 1))
def test_the_word_of_a_request_is_the_first_of_its_block_in_any_order(order, key):
    digits = key.to_bytes(16, "little").hex()
    words = RequestWords(digits)
    textbook = np.random.Philox(key=key, counter=2**256 - 1).random_raw(48)
    for number in order:
        assert words.word(number) == textbook[4 * number]
    far = np.random.Philox(key=key, counter=2**60 - 1).random_raw()
    assert words.word(2**60) == far


def test_every_request_draws_a_word_of_its_own():
    words = {
        RequestWords(Stream("exploration", 0, actor).key).word(number)
        for actor in range(40)
        for number in range(40)
    }
    assert len(words) == 1600


def test_equal_observations_still_lead_to_different_actions():
    """One seed for all would give every actor the same action: a run that learns nothing."""
    steps = 40
    zeros = np.zeros((ACTORS, 1, FEATURES), np.float32)
    replica, actions, logarithms = replica_for("mlp"), [], set()
    for number in range(steps):
        asked = RequestBatch(0, np.arange(ACTORS), np.full(ACTORS, number), (zeros,))
        found = replica.answer(asked)
        actions.append(found.actions)
        logarithms |= set(zip(found.actions.tolist(), found.logarithms.tolist(), strict=True))
    table = np.array(actions)
    assert all(len(set(each)) > 1 for each in [*table, *table.T])  # at one step; of one actor
    weights = np.exp([logarithm for _, logarithm in sorted(logarithms)])
    assert len(weights) == ACTIONS
    counts = np.bincount(table.ravel(), minlength=ACTIONS)
    deviation = (counts - weights * table.size) / np.sqrt(weights * (1 - weights) * table.size)
    assert np.abs(deviation).max() < 5


def test_seeds_follow_the_spec():
    requests = requests_of("mlp", steps=6)
    usual = answers("mlp", [requests])
    assert answers("mlp", [requests], seeds=SeedsSpec(root=4)) != usual
    override = SeedsSpec(root=9, streams={"exploration": SEEDS.root})
    assert answers("mlp", [requests], seeds=override) == usual


def test_without_request_seeds_an_answer_depends_on_the_replicas_and_on_who_came_before():
    shared = {"determinism": relaxed(request_seeds=False)}
    requests = requests_of("mlp", steps=6)
    one = answers("mlp", [requests], **shared)
    assert one == answers("mlp", [requests], **shared)
    assert one != answers("mlp", [requests], replicas=3, **shared)
    assert one != answers("mlp", [requests[::-1][:60], requests], **shared)


def test_a_replica_that_begins_with_a_later_version_does_not_draw_the_same_again():
    """So a run that is resumed without request seeds does not repeat its luck."""
    zeros = (np.zeros((1, 1, FEATURES), np.float32),)
    words = [
        int(replica.answer(RequestBatch(version, np.array([0]), np.array([0]), zeros)).words[0])
        for version in (0, 3)
        for replica in [replica_for("mlp", determinism=relaxed(request_seeds=False))]
    ]
    assert words[0] != words[1]


# --- order ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_neither_arrival_nor_grouping_nor_replicas_change_an_answer(data):
    requests = requests_of("lstm")
    arrived = data.draw(st.permutations(requests))
    cuts = data.draw(st.lists(st.integers(0, len(arrived)), max_size=4).map(sorted))
    groups = [
        arrived[start:end] for start, end in zip([0, *cuts], [*cuts, len(arrived)], strict=True)
    ]
    found = answers("lstm", groups, replicas=data.draw(st.integers(1, 4)))
    assert found == expected_of_lstm()


@cache
def expected_of_lstm():
    return answers("lstm", [requests_of("lstm")])


@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(ACTORS)), routed=st.booleans())
def test_a_replica_works_in_the_order_of_version_actor_and_number_unless_told_otherwise(
    order, routed
):
    worked = []

    def policy(version, inputs):
        worked.extend((version, int(actor)) for actor in inputs[0])
        mu = torch.ones(len(inputs[0]), 1)
        return mu.log(), mu, inputs[0]

    determinism = relaxed(deterministic_routing=routed)
    asked = [
        RequestBatch(actor % 3, np.array([actor]), np.array([0]), (np.array([actor], np.float32),))
        for actor in order
    ]
    found = InferenceReplica(0, policy, FREE, determinism, SEEDS).answer_all(asked)
    arrived = [(actor % 3, actor) for actor in order]
    assert worked == (sorted(arrived) if routed else arrived)
    assert [answer.states.tolist() for answer in found] == [[actor] for actor in order]


# --- what actors count ----------------------------------------------------------------------------


def count(found, asked, *, actor, batching=FIXED, replicas=0):
    """Let an actor enter its answers; return what it counted."""
    requests = RequestCounts(SEEDS, actor, batching, replicas)
    origins = found.words, found.replicas, found.sizes, found.places
    for origin in zip(*(array.tolist() for array in origins), strict=True):
        requests.enter(*origin)
    again = RequestCounts(SEEDS, actor, batching, replicas)
    again.restore(requests.state())
    assert again.state() == requests.state()
    return counted([requests.state()])


def asked_by(actor, requests=8):
    zeros = (np.zeros((requests, 1, FEATURES), np.float32),)
    return RequestBatch(0, np.full(requests, actor), np.arange(requests), zeros)


def test_an_actor_counts_what_was_drawn_from_its_own_stream_in_its_own_row():
    asked = asked_by(17)
    found = replica_for("mlp", rank=1).answer(asked)
    counts = count(found, asked, actor=17, replicas=2)
    assert counts == {"requests": 8, "own_stream": 8, "own_row": 8, "misrouted": 0}


@pytest.mark.parametrize(
    ("broken", "changed"),
    [
        ({"words": np.arange(8, dtype=np.uint64)}, {"own_stream": 0}),
        ({"sizes": np.array([16] * 5 + [3] * 3)}, {"own_row": 5}),
        ({"places": np.array([1] * 6 + [0] * 2)}, {"own_row": 6}),
        ({"replicas": np.array([1, 0, 1, 1, 0, 1, 1, 1])}, {"misrouted": 2}),
    ],
)
def test_an_actor_notices_an_answer_that_came_about_otherwise(broken, changed):
    asked = asked_by(17)
    found = replica_for("mlp", rank=1).answer(asked)._replace(**broken)
    usual = {"requests": 8, "own_stream": 8, "own_row": 8, "misrouted": 0}
    assert count(found, asked, actor=17, replicas=2) == usual | changed


def test_a_replica_without_request_seeds_is_noticed():
    asked = asked_by(17)
    found = replica_for("mlp", determinism=relaxed(request_seeds=False)).answer(asked)
    assert count(found, asked, actor=17)["own_stream"] == 0


def test_requests_go_on_only_from_those_of_the_same_actor():
    with pytest.raises(CapsuleError, match="CAP-T201"):
        RequestCounts(SEEDS, 1, FIXED, 0).restore(RequestCounts(SEEDS, 2, FIXED, 0).state())


def test_a_uniform_is_below_one():
    assert uniform_of(2**64 - 1) == 1 - 2.0**-53
    assert uniform_of(0) == 0.0


def test_a_policy_of_no_probabilities_is_refused():
    def policy(_version, inputs):
        nan = torch.full((len(inputs[0]), 2), torch.nan)
        return nan, nan, inputs[0]

    with pytest.raises(CapsuleError, match="CAP-T151"):
        InferenceReplica(0, policy, FREE, STRICT, SEEDS).answer(asked_by(0))
