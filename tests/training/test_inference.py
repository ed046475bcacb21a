"""Inference for actors: the same answer to a request, whoever else asks, whoever replies, whenever.

Each layer is switched off once, and what then differs is shown.
"""

import subprocess
import sys
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec, SeedsSpec
from capsule.training.inference import (
    ROWS,
    Replica,
    Request,
    replica_of,
    request_stream,
    require_independent_rows,
    route,
    sample_categorical,
)
from capsule.training.networks import Parameters, initialize, make_network
from capsule.training.products import LIBRARY
from capsule.training.streams import Stream

from .conftest import CARTPOLE, ROOT, make_spec, start_variables

STRICT = DeterminismSpec()
SEEDS = SeedsSpec(root=3)
ACTORS = 21  # more than ROWS: some share a row
FEATURES = 4
ACTIONS = 6


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def policy_of(name):
    """Return a policy, and a function that draws a batch of its inputs."""
    generator = torch.Generator().manual_seed(5)
    if name == "lstm":
        cell = torch.nn.LSTMCell(64, 128)
        head = torch.nn.Linear(128, ACTIONS)
        for parameter in [*cell.parameters(), *head.parameters()]:
            torch.nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)

        @torch.no_grad()
        def recurrent(version, inputs):
            hidden, memory = cell(inputs[0], (inputs[1], inputs[2]))
            return head(hidden) + version, hidden, memory

        return recurrent, lambda rows: tuple(
            torch.randn(rows, size, generator=generator) for size in (64, 128, 128)
        )
    shape, stack = ((84, 84), 4) if name == "nature" else ((FEATURES,), 1)
    network = make_network(
        name,
        frame_stack=stack,
        frame_shape=shape,
        actions=ACTIONS,
        hidden_units=64,
        products=LIBRARY,
    )
    parameters = Parameters(network.shapes, torch.device("cpu"))
    initialize(parameters, Stream("initialization", 5))

    @torch.no_grad()
    def feed_forward(version, inputs):
        return (network.values(parameters.views, network.inputs(inputs[0])) + version,)

    def draw(rows):
        size = (rows, stack, *shape)
        if name == "nature":
            return (torch.randint(0, 256, size, dtype=torch.uint8, generator=generator),)
        return (torch.randn(size, generator=generator),)

    return feed_forward, draw


def requests_of(name, versions=2, steps=1):
    """Return a request per actor and step; policy versions differ among the actors."""
    _, draw = policy_of(name)
    batch = draw(ACTORS * steps)
    return [
        Request(
            actor=number % ACTORS,
            step=number // ACTORS,
            version=number % ACTORS % versions,
            inputs=tuple(tensor[number].clone() for tensor in batch),
        )
        for number in range(ACTORS * steps)
    ]


def choose(actor, outputs, stream):
    return sample_categorical(outputs[0], stream)


def answers(name, groups, *, replicas=1, determinism=STRICT, seeds=SEEDS, rows=ROWS):
    """Let replicas answer groups of requests, one group after the other, by (actor, step)."""
    policy, _ = policy_of(name)
    services = [
        Replica(rank, policy, choose, determinism, seeds, rows=rows) for rank in range(replicas)
    ]
    replies = [
        reply
        for group in groups
        for service, share in zip(services, route(group, replicas, determinism), strict=True)
        for reply in service.answer(share)
    ]
    return {
        (reply.actor, reply.step): (reply.action, *(o.numpy().tobytes() for o in reply.outputs))
        for reply in replies
    }, {(reply.actor, reply.step): reply.replica for reply in replies}


def relaxed(**switches):
    return STRICT.model_copy(update=switches)


# --- batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nature", "mlp", "lstm"])
def test_a_row_does_not_depend_on_what_the_others_hold(name):
    policy, draw = policy_of(name)
    require_independent_rows(policy, 0, draw(ROWS))
    first = draw(ROWS)
    for row in range(ROWS):
        neighbours = [draw(ROWS), tuple(torch.full_like(tensor, 7) for tensor in first)]
        if first[0].is_floating_point():
            neighbours.append(tuple(torch.full_like(tensor, torch.nan) for tensor in first))
        for batch in neighbours:
            for tensor, kept in zip(batch, first, strict=True):
                tensor[row] = kept[row]
            for one, other in zip(policy(0, first), policy(0, batch), strict=True):
                assert one[row].numpy().tobytes() == other[row].numpy().tobytes()


PINNED = """
from tests.training.test_inference import *
for name in ("nature", "mlp", "lstm"):
    policy, draw = policy_of(name)
    requests = requests_of(name, versions=1)
    for rows in (ROWS, 17, 24):
        require_independent_rows(policy, 0, draw(rows))
        together, _ = answers(name, [requests], rows=rows)
        alone, _ = answers(name, [[request] for request in requests[12:]], rows=rows)
        assert together.items() >= alone.items(), (name, rows)
print("independent")
"""


def test_nor_under_the_variables_of_a_run_where_its_place_matters():
    done = subprocess.run(
        [sys.executable, "-c", PINNED],
        env={**start_variables(make_spec(CARTPOLE)), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "independent\n", done.stderr


def test_a_policy_that_mixes_its_rows_is_refused():
    def normalised(version, inputs):
        return (inputs[0] - inputs[0].mean(dim=0),)

    with pytest.raises(CapsuleError, match="row 0 of the policy's outputs") as caught:
        require_independent_rows(normalised, 0, (torch.randn(4, 3),))
    assert caught.value.code == "CAP-T321"


@pytest.mark.parametrize("name", ["nature", "mlp", "lstm"])
def test_an_answer_does_not_depend_on_who_else_asks(name):
    requests = requests_of(name)
    expected, _ = answers(name, [requests])
    alone, _ = answers(name, [[request] for request in requests])
    halves, _ = answers(name, [requests[::2], requests[1::2]])
    assert alone == halves == expected


@pytest.mark.parametrize("name", ["nature", "mlp", "lstm"])
def test_without_fixed_batches_it_does(name):
    requests = requests_of(name)
    dynamic = relaxed(batch_invariance=False)
    together, _ = answers(name, [requests], determinism=dynamic)
    alone, _ = answers(name, [[request] for request in requests], determinism=dynamic)
    assert together.keys() == alone.keys()
    assert together != alone


def test_batches_have_one_shape_and_an_actor_has_its_row():
    seen = []

    def policy(version, inputs):
        seen.append((version, inputs[0].tolist()))
        return inputs

    replica = Replica(0, policy, lambda *_: 0, STRICT, SEEDS, rows=4)
    wanted = [(actor, version) for actor, version in ((1, 0), (5, 0), (2, 0), (3, 9))]
    replica.answer(
        Request(actor, 0, version, (torch.tensor(float(actor)),)) for actor, version in wanted
    )
    assert seen == [(0, [0, 1, 2, 0]), (0, [0, 5, 0, 0]), (9, [0, 0, 0, 3])]


def test_replies_outlive_a_policy_that_reuses_its_memory():
    buffer = torch.empty(ROWS)

    def policy(version, inputs):
        return (buffer.copy_(inputs[0] + version),)

    requests = [Request(0, step, step, (torch.tensor(0.0),)) for step in range(3)]
    replies = Replica(0, policy, lambda *_: 0, STRICT, SEEDS).answer(requests)
    assert [float(reply.outputs[0]) for reply in replies] == [0, 1, 2]


# --- seeds ----------------------------------------------------------------------------------------


def test_every_request_draws_from_a_stream_of_its_own():
    draws = {request_stream(0, actor, step).uniform() for actor in range(40) for step in range(40)}
    assert len(draws) == 1600
    assert request_stream(0, 3, 4).uniform() == request_stream(0, 3, 4).uniform()
    assert request_stream(0, 3, 4).uniform() != request_stream(1, 3, 4).uniform()


def test_equal_observations_still_lead_to_different_actions():
    """One seed for all would give every actor the same action: a run that learns nothing."""
    requests = [
        Request(actor, step, 0, (torch.zeros(1, FEATURES),))
        for actor in range(ACTORS)
        for step in range(40)
    ]
    replies, _ = answers("mlp", [requests])
    actions = {key: action for key, (action, *_) in replies.items()}
    for fixed in range(2):  # among the actors at one step, and among the steps of one actor
        groups = {key[fixed] for key in actions}
        assert all(
            len({action for key, action in actions.items() if key[fixed] == group}) > 1
            for group in groups
        )
    (logits,) = {outputs[0] for _, *outputs in replies.values()}
    weights = torch.from_numpy(np.frombuffer(logits, np.float32).copy()).double().softmax(0)
    counts = torch.bincount(torch.tensor(list(actions.values())), minlength=ACTIONS)
    deviation = (counts - weights * len(actions)) / (weights * (1 - weights) * len(actions)).sqrt()
    assert deviation.abs().max() < 5


def test_seeds_follow_the_spec():
    requests = requests_of("mlp", steps=6)
    usual = answers("mlp", [requests])[0]
    assert answers("mlp", [requests], seeds=SeedsSpec(root=4))[0] != usual
    override = SeedsSpec(root=9, streams={"exploration": SEEDS.root})
    assert answers("mlp", [requests], seeds=override)[0] == usual


def test_without_request_seeds_a_reply_depends_on_the_replicas_and_on_who_came_before():
    shared = relaxed(request_seeds=False)
    requests = requests_of("mlp", steps=6)
    one = answers("mlp", [requests], determinism=shared)[0]
    assert one == answers("mlp", [requests], determinism=shared)[0]
    assert one != answers("mlp", [requests], determinism=shared, replicas=3)[0]
    assert one != answers("mlp", [requests[::-1][:60], requests], determinism=shared)[0]


# --- routing --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_neither_arrival_nor_grouping_nor_replicas_change_a_reply(data):
    requests = requests_of_lstm()
    arrived = data.draw(st.permutations(requests))
    cuts = data.draw(st.lists(st.integers(0, len(arrived)), max_size=4).map(sorted))
    groups = [
        arrived[start:end] for start, end in zip([0, *cuts], [*cuts, len(arrived)], strict=True)
    ]
    replicas = data.draw(st.integers(1, 4))
    replies, served_by = answers("lstm", groups, replicas=replicas)
    assert replies == expected_of_lstm()
    assert served_by == {
        (request.actor, request.step): replica_of(request.actor, replicas) for request in requests
    }


@cache
def requests_of_lstm():
    return requests_of("lstm")


@cache
def expected_of_lstm():
    return answers("lstm", [requests_of_lstm()])[0]


def test_the_digest_is_the_documented_one():
    # sha256sum of ["capsule/route/v1",0] begins with these eight bytes
    assert replica_of(0, 2**64) == 0x42475BE47FD91A0D
    assert Counter(replica_of(actor, 4) for actor in range(4000)).most_common()[-1][1] > 900


@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(ACTORS)))
def test_a_replica_works_in_the_order_of_version_actor_and_step(order):
    worked = []

    def note(actor, outputs, stream):
        worked.append((float(outputs[0]), actor))
        return 0

    def policy(version, inputs):
        return (inputs[0] + version,)

    requests = [Request(actor, 0, actor % 3, (torch.tensor(0.0),)) for actor in order]
    Replica(0, policy, note, relaxed(batch_invariance=False), SEEDS).answer(requests)
    assert worked == sorted(worked)


def test_routing_by_arrival_is_noticed():
    by_arrival = relaxed(deterministic_routing=False)
    requests = requests_of("mlp", steps=6)
    replies, served_by = answers("mlp", [requests], replicas=3, determinism=by_arrival)
    late, served_late = answers("mlp", [requests[::-1]], replicas=3, determinism=by_arrival)
    assert served_by != served_late
    assert replies == late  # the two layers below still hold ...
    nothing = relaxed(deterministic_routing=False, request_seeds=False)
    replies, _ = answers("mlp", [requests], replicas=3, determinism=nothing)
    late, _ = answers("mlp", [requests[::-1]], replicas=3, determinism=nothing)
    assert replies != late  # ... and this is what routing is for where they do not


# --- sampling -------------------------------------------------------------------------------------


class Fixed:
    """A stream that gives one uniform."""

    def __init__(self, value):
        self.uniform = lambda: value


def test_an_action_is_the_inverse_of_the_cumulative_distribution():
    logits = torch.log(torch.tensor([0.25, 0.5, 0.25]))
    for uniform, action in ((0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999, 2)):
        assert sample_categorical(logits, Fixed(uniform)) == action


@given(
    logits=st.lists(st.floats(-700, 700, width=32), min_size=1, max_size=18),
    impossible=st.sets(st.integers(0, 17)),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-53]),
)
def test_an_impossible_action_is_never_drawn(logits, impossible, uniform):
    scores = torch.tensor(logits)
    out = [index for index in impossible if index < len(logits)][: len(logits) - 1]
    scores[out] = -torch.inf
    action = sample_categorical(scores, Fixed(uniform))
    assert 0 <= action < len(logits)
    assert action not in out
