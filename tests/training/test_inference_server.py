"""The inference server: nobody's answer depends on who else asks, when, or on who answers."""

import random
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest
from pydantic import ValidationError

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec
from capsule.training import impala_making
from capsule.training.environments import make_environment
from capsule.training.products import CHAINED, LIBRARY
from capsule.training.schedule.inference_server import (
    Client,
    Server,
    _News,
    require_batch_invariance,
)
from capsule.training.streams import make_streams
from capsule.training.unrolls import Request as UnrollRequest
from capsule.training.unrolls import UnrollHost, UnrollSettings

from .actor_networks import BrokenProducts, LeakyProducts, SizedProducts
from .conftest import make_spec
from .impala_trainers import IMPALA, Trainers, digests, saved

pytestmark = pytest.mark.usefixtures("one_thread", "importable")

ROWS = 4
ACTORS = 11  # more than rows: some share a row
VERSIONS = 3
UPDATES = 4
STRICT = DeterminismSpec()
BOTH = pytest.mark.parametrize("products", [CHAINED, LIBRARY], ids=["chained", "library"])
SERVED = {"trainer": {"inference": {"mode": "server", "rows": ROWS}}}


@pytest.fixture
def begin(tmp_path):
    """A function that makes a trainer."""
    trainers = Trainers(tmp_path)
    yield trainers
    trainers.close()


# --- a server in a thread of this process ---------------------------------------------------------


@pytest.fixture
def settings(monkeypatch):
    """A function that says what makes the actors of a small CartPole run."""

    def make(products, **changes):
        monkeypatch.setattr(impala_making, "products_for", lambda _: products)
        spec = make_spec(IMPALA, **changes)
        example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
        network = impala_making.make_network(spec.trainer, example, spec.accelerator)
        return UnrollSettings((spec.environment,), spec.seeds, network, length=5, rows=ROWS)

    return make


@pytest.fixture
def serve():
    """A function that starts a server with some versions; it returns it and its clients."""
    ends = []

    def start(settings, versions, hosts, determinism=STRICT):
        theirs, news = Pipe(duplex=False)
        pairs = [Pipe() for _ in range(hosts)]
        server = Server(settings, determinism, theirs, [end for _, end in pairs])
        thread = threading.Thread(target=server.serve)
        thread.start()
        news.send(_News(versions, frozenset(versions)))
        ends.append((thread, news, theirs, *(end for pair in pairs for end in pair)))
        return server, [Client(host) for host, _ in pairs]

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
        self.client, self.random = client, random.Random(seed)  # noqa: S311

    def evaluate(self, *asked):
        time.sleep(self.random.random() * 0.004)
        return self.client.evaluate(*asked)


def played(settings, versions, shares, clients):
    """Let hosts play two unrolls of every actor; return digests by actor."""
    found = {}

    def play(actors, client):
        host = UnrollHost(settings, actors, client)
        for turn in range(2):
            requests = [UnrollRequest(actor, (actor + turn) % VERSIONS) for actor in actors]
            given = versions if client is None and turn == 0 else {}
            for each in host.unroll(requests, given, VERSIONS):
                found.setdefault(each.actor, []).append(each.unroll.digest())

    threads = [
        threading.Thread(target=play, args=each) for each in zip(shares, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def spied(server):
    """Have a server note how many rows of each batch were asked for, and which requests met."""
    sizes, evaluate = [], server._batches.evaluate

    def note(requests):
        sizes.append(len(requests))
        return evaluate(requests)

    server._batches.evaluate = note
    return sizes


@BOTH
def test_unrolls_are_those_of_actors_that_serve_themselves_whoever_asks_when(
    products, settings, serve
):
    """Four hosts ask with random delays, so batches differ from time to time."""
    made = settings(products)
    versions = versions_of(made)
    expected = played(made, versions, [range(ACTORS)], [None])
    assert len({digest for each in expected.values() for digest in each}) == 2 * ACTORS
    met = set()
    for seed, hosts in enumerate((1, 2, 4, 4)):
        server, clients = serve(made, versions, hosts)
        sizes = spied(server)
        shares = [range(first, ACTORS, hosts) for first in range(hosts)]
        late = [Late(client, 10 * seed + host) for host, client in enumerate(clients)]
        assert played(made, versions, shares, late) == expected
        met.add(tuple(sizes))
    assert len(met) > 2  # or there was no noise


@pytest.mark.parametrize("padded", [True, False])
def test_without_the_padding_who_else_asks_is_in_the_result(padded, settings, serve):
    """The libraries choose kernels by the size of a batch; here its size is added to be sure."""
    made = settings(SizedProducts())
    determinism = STRICT.model_copy(update={"batch_invariance": padded})
    versions = versions_of(made)
    found = []
    for company in (ACTORS, 1):
        _, (client,) = serve(made, versions, 1, determinism)
        found.append(played(made, versions, [range(company)], [client])[0])
    assert (found[0] == found[1]) == padded


def test_versions_that_nobody_may_ask_for_any_more_are_forgotten(settings, serve):
    made = settings(CHAINED)
    versions = versions_of(made)
    theirs, news = Pipe(duplex=False)
    server = Server(made, STRICT, theirs, [])
    news.send(_News(versions, frozenset(versions)))
    news.send(_News({7: versions[0]}, frozenset({2, 7})))
    assert server._take_news()
    assert sorted(server._versions) == [2, 7]
    news.close()
    assert not server._take_news()
    theirs.close()


def test_a_host_that_ends_is_nobody_elses_concern(settings, serve):
    made = settings(CHAINED)
    versions = versions_of(made)
    _, clients = serve(made, versions, 2)
    clients[0].close()
    expected = played(made, versions, [range(3)], [None])
    assert played(made, versions, [range(3)], [clients[1]]) == expected


# --- the self-test --------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [{}, {"recurrent_units": 0}])
@BOTH
def test_the_self_test_passes_where_rows_are_independent(products, network, settings):
    require_batch_invariance(settings(products, trainer=network), STRICT)


@pytest.mark.parametrize("mode", [{}, SERVED], ids=["actor", "server"])
def test_a_run_does_not_start_where_rows_depend_on_each_other(mode, begin, monkeypatch):
    monkeypatch.setattr(impala_making, "products_for", lambda _: LeakyProducts())
    with pytest.raises(CapsuleError) as caught:
        begin(**mode)
    assert caught.value.code == "CAP-T321"


def test_it_is_a_declared_relaxation_to_do_without(begin, monkeypatch):
    monkeypatch.setattr(impala_making, "products_for", lambda _: LeakyProducts())
    begin(determinism={"batch_invariance": False})


# --- a run ----------------------------------------------------------------------------------------


@BOTH
def test_a_run_learns_the_same_bits_in_either_mode_on_any_number_of_processes(
    products, begin, monkeypatch
):
    """Under the libraries' products the rows of a batch are part of the result, and so set."""
    monkeypatch.setattr(impala_making, "products_for", lambda _: products)
    expected = digests(begin(**SERVED), UPDATES)
    assert digests(begin(workers=2, **SERVED), UPDATES) == expected
    if products is CHAINED:
        assert digests(begin(), UPDATES) == expected
        assert digests(begin(workers=3, **SERVED), UPDATES) == expected


def test_the_servers_death_is_named_and_a_run_goes_on_from_what_was_saved(begin):
    expected = digests(begin(), UPDATES)
    trainer = begin(workers=2, **SERVED)
    assert digests(trainer, 2) == expected[:2]
    state = saved(trainer)
    server = trainer._executor._transport._server
    server._process._process.kill()
    with pytest.raises(CapsuleError) as caught:
        digests(trainer, UPDATES)
    assert caught.value.code == "CAP-T362"
    assert "inference for actors 0 to 13) died: SIGKILL" in str(caught.value)
    again = begin(workers=2, **SERVED)
    again.restore(*state)
    assert digests(again, 2) == expected[2:]


def test_a_server_that_fails_says_why(begin, monkeypatch):
    broken = BrokenProducts()
    monkeypatch.setattr(impala_making, "products_for", lambda _: broken)
    trainer = begin(workers=2, **SERVED)
    with pytest.raises(CapsuleError) as caught:
        trainer.interval()
    assert caught.value.code == "CAP-T332"
    assert "ValueError: as asked" in str(caught.value)


@pytest.mark.parametrize("rows", [0, 1025])
def test_rows_that_are_none_are_refused(rows):
    with pytest.raises(ValidationError, match="rows"):
        make_spec(IMPALA, trainer={"inference": {"mode": "server", "rows": rows}})
