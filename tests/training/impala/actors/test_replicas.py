"""Replicas: no answer depends on who else asks, when, on who answers, or on how many there are."""

import random
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe, Value

import numpy as np
import pytest
from pydantic import ValidationError

from capsule.experiment.errors import CapsuleError
from capsule.experiment.inference import Inference
from capsule.training.acting.actor_worker import ActorRequest
from capsule.training.acting.inference import counted
from capsule.training.environments import make_environment
from capsule.training.impala import factory
from capsule.training.impala.actors.actor_worker import UnrollSettings, UnrollWorker
from capsule.training.impala.actors.replicas import (
    Client,
    Server,
    _News,
    require_batch_invariance,
)
from capsule.training.impala.actors.unrolls import stream_profiles
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.state.streams import make_streams
from tests.training.acting.actor_networks import BrokenProducts, LeakyProducts, SizedProducts
from tests.training.conftest import make_spec
from tests.training.impala.trainers import IMPALA, Trainers, digests, saved

pytestmark = pytest.mark.usefixtures("one_thread", "importable")

ROWS = 4
ACTORS = 11  # more than rows: some share a row
VERSIONS = 3
UPDATES = 4
BOTH = pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["chained", "library"])
SERVED = {"trainer": {"inference": {"mode": "server", "rows": ROWS}}}


@pytest.fixture
def begin(tmp_path):
    """A function that makes a trainer."""
    trainers = Trainers(tmp_path)
    yield trainers
    trainers.close()


# --- replicas in threads of this process ----------------------------------------------------------


@pytest.fixture
def settings(monkeypatch):
    """A function that says what makes the actors of a small CartPole run."""

    def make(products, **changes):
        monkeypatch.setattr(factory, "backend_for", lambda *_: products)
        spec = make_spec(IMPALA, **changes)
        example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
        network = factory.make_network(spec.trainer, example, spec.accelerator)
        made = UnrollSettings((spec.environment,), spec.seeds, network, steps=5, rows=ROWS)
        return replace(made, determinism=spec.determinism)

    return make


@pytest.fixture
def serve():
    """A function that starts replicas with some versions; it returns them and their clients."""
    ends = []

    def start(settings, versions, workers, replicas=1):
        servers, pipes = [], []
        for rank in range(replicas):
            theirs, news = Pipe(duplex=False)
            pairs = [Pipe() for _ in range(workers)]
            server = Server(settings, rank, theirs, [end for _, end in pairs])
            thread = threading.Thread(target=server.serve)
            thread.start()
            news.send(_News(versions, frozenset(versions)))
            ends.append((thread, news, theirs, *(end for pair in pairs for end in pair)))
            servers.append(server)
            pipes.append([worker for worker, _ in pairs])
        arrivals = None if settings.determinism.deterministic_routing else Value("Q")
        return servers, [Client(each, arrivals) for each in zip(*pipes, strict=True)]

    yield start
    for thread, news, *pipes in ends:
        news.close()
        thread.join()
        for pipe in pipes:
            pipe.close()


def versions_of(settings):
    """Return versions of the policy, far apart."""
    size = sum(int(np.prod(shape)) for shape in settings.network.shapes.values())
    draw = np.random.default_rng(4)
    return {v: draw.normal(size=size).astype(np.float32) for v in range(VERSIONS)}


class Late:
    """A client who asks when it occurs to him."""

    def __init__(self, client, seed):
        self.client, self.replicas = client, client.replicas
        self.random = random.Random(seed)  # noqa: S311

    def answer(self, asked):
        time.sleep(self.random.random() * 0.004)
        return self.client.answer(asked)


def play(settings, versions, actors, client, found):
    """Let a worker play two unrolls of every actor, into digests and last snapshots by actor."""
    worker = UnrollWorker(settings, actors, client)
    for turn in range(2):
        requests = [ActorRequest(actor, (actor + turn) % VERSIONS) for actor in actors]
        given = versions if client is None and turn == 0 else {}
        for each in worker.play(requests, given, VERSIONS):
            digests, _ = found.get(each.actor, ([], None))
            found[each.actor] = [*digests, each.experience.digest()], each.after


def played(settings, versions, shares, clients):
    """Let workers play at the same time; return digests by actor."""
    found = {}
    threads = [
        threading.Thread(target=play, args=(settings, versions, *each, found))
        for each in zip(shares, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {actor: digests for actor, (digests, _) in found.items()}


def spied(server):
    """Have a replica note how many requests met."""
    sizes, answer_all = [], server._replica.answer_all

    def note(asked):
        sizes.append(sum(len(each.actors) for each in asked))
        return answer_all(asked)

    server._replica.answer_all = note
    return sizes


@pytest.mark.slow
@BOTH
def test_unrolls_are_those_of_actors_that_answer_themselves_whoever_asks_when(
    products, settings, serve
):
    """Hosts ask several replicas with random delays, so batches differ from time to time."""
    made = settings(products)
    versions = versions_of(made)
    expected = played(made, versions, [range(ACTORS)], [None])
    assert len({digest for each in expected.values() for digest in each}) == 2 * ACTORS
    met = set()
    for seed, (workers, replicas) in enumerate([(1, 1), (2, 1), (4, 2), (4, 2), (2, 4)]):
        servers, clients = serve(made, versions, workers, replicas)
        sizes = [spied(server) for server in servers]
        shares = [range(first, ACTORS, workers) for first in range(workers)]
        late = [Late(client, 10 * seed + worker) for worker, client in enumerate(clients)]
        assert played(made, versions, shares, late) == expected
        assert all(sizes)  # every replica was asked
        met.add(tuple(map(tuple, sizes)))
    assert len(met) > 3  # or there was no noise


# --- one layer off, under load --------------------------------------------------------------------


def in_turn(settings, serve, workers, order, replicas=2):
    """Let workers play one after the other, the earlier ones being fast and the others slow.

    Returns:
        What each actor did and counted, by actor.
    """
    versions = versions_of(settings)
    _, clients = serve(settings, versions, workers, replicas)
    found = {}
    for worker in order:
        play(settings, versions, range(worker, ACTORS, workers), clients[worker], found)
    return found


def bits(found):
    return {actor: digests for actor, (digests, _) in found.items()}


def counts(found):
    return counted([after.document["requests"] for _, after in found.values()])


REQUESTS = ACTORS * 2 * 5


@pytest.mark.slow
@BOTH
def test_with_every_layer_on_no_load_shows(products, settings, serve):
    made = settings(products)
    one, other = (in_turn(made, serve, 2, order) for order in ([0, 1], [1, 0]))
    assert bits(one) == bits(other) == bits(in_turn(made, serve, 1, [0], replicas=4))
    own_row = REQUESTS if products is LIBRARY else 0  # where rows are independent there are none
    assert counts(one) == {
        "requests": REQUESTS, "own_stream": REQUESTS, "own_row": own_row, "misrouted": 0
    }  # fmt: skip
    assert counts(one) == counts(other)


def test_without_request_seeds_who_comes_first_is_in_the_result(settings, serve):
    made = settings(FIXED_ORDER, determinism={"request_seeds": False})
    one, other = (in_turn(made, serve, 2, order, replicas=1) for order in ([0, 1], [1, 0]))
    assert bits(one) != bits(other)
    assert counts(one)["own_stream"] == 0
    names = {each.name for each in stream_profiles(made.seeds, 0, one[0][1])}
    assert names == {"environment/0", "no-op/0"}  # no account of a stream that was not used


@pytest.mark.slow
def test_without_routing_who_comes_first_decides_who_answers(settings, serve):
    """With the two layers above, that still reaches no result; without them it would."""
    made = settings(FIXED_ORDER, determinism={"deterministic_routing": False})
    one, other = (in_turn(made, serve, 2, order) for order in ([0, 1], [1, 0]))
    assert bits(one) == bits(other) == bits(in_turn(settings(FIXED_ORDER), serve, 1, [0]))
    assert 0 < counts(one)["misrouted"] < REQUESTS
    nothing = {"deterministic_routing": False, "request_seeds": False}
    bare = settings(FIXED_ORDER, determinism=nothing)
    one, other = (in_turn(bare, serve, 2, order) for order in ([0, 1], [1, 0]))
    assert bits(one) != bits(other)


@pytest.mark.parametrize("padded", [True, False])
def test_without_the_padding_who_else_asks_is_in_the_result(padded, settings, serve):
    """The libraries choose kernels by the size of a batch; here its size is added to be sure."""
    made = settings(SizedProducts(), determinism={"batch_invariance": padded})
    versions = versions_of(made)
    found = []
    for company in (ACTORS, 1):
        _, (client,) = serve(made, versions, 1)
        found.append(played(made, versions, [range(company)], [client])[0])
    assert (found[0] == found[1]) == padded
    alone = played(made, versions, [range(1)], [None])[0]
    assert alone == found[1]  # a worker that answers itself does the same
    counted_alone = counts(in_turn(made, serve, 1, [0]))
    assert counted_alone["own_row"] == (REQUESTS if padded else 0)


def test_versions_that_nobody_may_ask_for_any_more_are_forgotten(settings, serve):
    made = settings(FIXED_ORDER)
    versions = versions_of(made)
    theirs, news = Pipe(duplex=False)
    server = Server(made, 0, theirs, [])
    news.send(_News(versions, frozenset(versions)))
    news.send(_News({7: versions[0]}, frozenset({2, 7})))
    assert server._take_news()
    assert sorted(server._versions) == [2, 7]
    news.close()
    assert not server._take_news()
    theirs.close()


def test_a_worker_that_ends_is_nobody_elses_concern(settings, serve):
    made = settings(FIXED_ORDER)
    versions = versions_of(made)
    _, clients = serve(made, versions, 2)
    clients[0].close()
    expected = played(made, versions, [range(3)], [None])
    assert played(made, versions, [range(3)], [clients[1]]) == expected


# --- the self-test --------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [{}, {"recurrent_units": 0}])
@BOTH
def test_the_self_test_passes_where_rows_are_independent(products, network, settings):
    assert require_batch_invariance(settings(products, trainer=network)) == ROWS


@pytest.mark.parametrize("mode", [{}, SERVED], ids=["actor", "server"])
def test_a_run_does_not_start_where_rows_depend_on_each_other(mode, begin, monkeypatch):
    monkeypatch.setattr(factory, "backend_for", lambda *_: LeakyProducts())
    with pytest.raises(CapsuleError) as caught:
        begin(**mode)
    assert caught.value.code == "CAP-T321"


def test_it_is_a_declared_relaxation_to_do_without(begin, monkeypatch):
    monkeypatch.setattr(factory, "backend_for", lambda *_: LeakyProducts())
    begin(determinism={"batch_invariance": False})


# --- a run ----------------------------------------------------------------------------------------


def evidence(trainer):
    return trainer.use().inference


@pytest.mark.slow
@BOTH
def test_a_run_learns_the_same_bits_in_either_mode_on_any_number_of_replicas(
    products, begin, monkeypatch, request
):
    """Under the libraries' products the rows of a batch are part of the result, and so set."""
    if products is FIXED_ORDER:  # the processes of the other one are spawned, as those of runs are
        request.getfixturevalue("warm_workers")
    monkeypatch.setattr(factory, "backend_for", lambda *_: products)
    alone = begin(**SERVED)
    expected = digests(alone, UPDATES)
    requests = UPDATES * alone._trainer.interval_steps
    common = {"requests": requests, "own_stream": requests, "rows": ROWS, "tested_rows": ROWS}
    chained = {"independent": True, "own_row": 0}
    common |= chained if products is FIXED_ORDER else {"independent": False, "own_row": requests}
    assert evidence(alone) == Inference(replicas=0, **common)
    workers, replicas = (1, 3) if products is FIXED_ORDER else (2, 1)
    trainer = begin(workers=workers, replicas=replicas, **SERVED)
    assert digests(trainer, UPDATES) == expected
    assert evidence(trainer) == Inference(replicas=replicas, **common)
    trainer.close()
    if products is FIXED_ORDER:
        assert digests(begin(), UPDATES) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_run_without_the_layers_says_so(begin):
    off = {"request_seeds": False, "deterministic_routing": False}
    strict, trainer = begin(), begin(workers=2, replicas=2, determinism=off, **SERVED)
    assert digests(trainer, UPDATES) != digests(strict, UPDATES)
    found = evidence(trainer)
    assert (found.requests, found.own_stream, found.replicas) == (evidence(strict).requests, 0, 2)
    assert found.misrouted > 0
    assert not any(each.name.startswith("exploration/") for each in trainer.stream_profiles())


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_replicas_death_is_named_and_a_run_goes_on_from_what_was_saved(begin):
    expected = digests(begin(), UPDATES)
    trainer = begin(workers=2, replicas=2, **SERVED)
    assert digests(trainer, 2) == expected[:2]
    state = saved(trainer)
    replicas = trainer._executor._transport._inference
    replicas._processes[1]._process.kill()
    with pytest.raises(CapsuleError) as caught:
        digests(trainer, UPDATES)
    assert caught.value.code == "CAP-T362"
    assert "process 1 (inference for actors 1, 3, …, 13) died: SIGKILL" in str(caught.value)
    again = begin(**SERVED)
    again.restore(*state)
    assert digests(again, 2) == expected[2:]
    assert evidence(again).requests == UPDATES * again._trainer.interval_steps


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_replica_that_fails_at_its_start_says_why(begin, monkeypatch):
    broken = BrokenProducts()
    monkeypatch.setattr(factory, "backend_for", lambda *_: broken)
    with pytest.raises(CapsuleError) as caught:
        begin(workers=2, **SERVED)
    assert caught.value.code == "CAP-T332"
    assert "ValueError: as asked" in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_replica_that_cannot_draw_says_why(begin):
    trainer = begin(workers=2, **SERVED)
    trainer.online.flat.fill_(float("nan"))
    with pytest.raises(CapsuleError) as caught:
        trainer.train_step()
    assert caught.value.code == "CAP-T151"
    assert "inference for actors 0 to 13" in str(caught.value)


@pytest.mark.parametrize("rows", [0, 1025])
def test_rows_that_are_none_are_refused(rows):
    with pytest.raises(ValidationError, match="rows"):
        make_spec(IMPALA, trainer={"inference": {"mode": "server", "rows": rows}})
