"""Actor workers, by the example of R2D2's: who plays what with which version, and snapshots."""

import json
from dataclasses import replace

import numpy as np
import pytest

from capsule.experiment.contract import stream_key
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec, SeedsSpec
from capsule.training.acting.actor_worker import (
    ActorRequest,
    Snapshot,
    actor_streams,
    profiles_of,
)
from capsule.training.acting.batching import Batching
from capsule.training.state.streams import Account, Stream
from tests.training.acting.actor_networks import CountingNetwork, PlacedNetwork
from tests.training.r2d2.conftest import ENVIRONMENTS, SEEDS, bits, parameters_of, settings_of

pytestmark = pytest.mark.usefixtures("one_thread")


def flat_of(settings, version):
    return parameters_of(settings, version).flat.numpy().copy()


def play(worker, requests, versions=None, lag=9):
    """Let a worker play; return ``(actor, what it did)`` in the order of the answers."""
    played = worker.play([ActorRequest(*request) for request in requests], versions or {}, lag)
    return [(each.actor, bits(each.experience)) for each in played]


@pytest.fixture
def settings():
    """Settings of greedy actors of CartPole, so that what they do depends on the version."""
    return settings_of(actors=4, exploration_base=0.0)


# --- streams --------------------------------------------------------------------------------------


def test_the_streams_of_an_actor_have_its_number_and_the_seeds_of_the_spec():
    streams = actor_streams(SeedsSpec(root=3, streams={"no-op": 5}), 7)
    keys = {name: stream.key for name, stream in streams.items()}
    assert keys == {
        "environment": stream_key(3, "environment", 7),
        "no-op": stream_key(5, "no-op", 7),
    }
    chosen = actor_streams(SeedsSpec(root=3), 7, ("exploration",))
    assert [stream.key for stream in chosen.values()] == [stream_key(3, "exploration", 7)]


def snapshot_of(**states):
    """Return a snapshot of an actor whose environment has drawn from these streams."""
    return Snapshot({"environment": {"streams": states}}, np.zeros(0), np.zeros(0, np.float32))


def test_profiles_are_named_by_stream_and_actor_in_the_order_of_names():
    drawn, other = Stream("no-op", 5, 2), Stream("exploration", 3, 2)
    drawn.uniforms(3)
    other.uniforms(4)
    own = (Account("exploration", 3, 2), other.state())
    seeds = SeedsSpec(root=3, streams={"no-op": 5})
    found = profiles_of(seeds, 2, snapshot_of(**{"no-op": drawn.state()}), own)
    assert [(each.name, each.seed, each.draws) for each in found] == [
        ("environment/2", 3, 0),
        ("exploration/2", 3, 4),
        ("no-op/2", 5, 3),
    ]
    assert found[0].key == stream_key(3, "environment", 2)


@pytest.mark.parametrize("other", [("environment", 4, 2), ("environment", 3, 1), ("no-op", 3, 2)])
def test_the_state_of_another_stream_seed_or_actor_has_no_profile(other):
    with pytest.raises(CapsuleError, match="CAP-T201"):
        profiles_of(SeedsSpec(root=3), 2, snapshot_of(environment=Stream(*other).state()))


# --- settings -------------------------------------------------------------------------------------


def test_batches_follow_the_network_and_the_spec():
    assert not settings_of(network=CountingNetwork(2)).batching.fixed
    library = settings_of(network=PlacedNetwork(2), rows=4)
    assert library.batching == Batching(4, fixed=True)
    free = replace(library, determinism=DeterminismSpec(batch_invariance=False))
    assert not free.batching.fixed


def test_actors_play_the_tasks_in_turn():
    tasks = tuple(
        ENVIRONMENTS["cartpole"].model_copy(update={"max_episode_steps": limit}) for limit in (3, 5)
    )
    settings = settings_of(actors=4, tasks=tasks, steps=15)
    worker = settings.make_worker([1, 2, 3])
    played = worker.play([ActorRequest(n, 0) for n in (1, 2, 3)], {0: flat_of(settings, 1)}, 0)
    ends = {each.actor: np.flatnonzero(each.experience.ended).tolist() for each in played}
    assert ends == {1: [4, 9, 14], 2: [2, 5, 8, 11, 14], 3: [4, 9, 14]}


# --- requests and versions ------------------------------------------------------------------------


def test_answers_come_by_version_and_actor_in_whichever_order_was_asked(settings):
    versions = {version: flat_of(settings, version) for version in (1, 2)}
    requests = [(3, 1), (0, 2), (2, 2), (1, 1)]
    found = play(settings.make_worker(range(4)), requests, versions)
    assert [actor for actor, _ in found] == [1, 3, 0, 2]
    again = play(settings.make_worker(range(4)), sorted(requests), versions)
    assert again == found


def test_an_actor_does_the_same_alone_with_the_version_that_was_asked_for(settings):
    versions = {version: flat_of(settings, version) for version in (1, 2)}
    together = dict(play(settings.make_worker(range(4)), [(0, 2), (1, 1), (2, 2)], versions))
    for actor, version in ((0, 2), (1, 1), (2, 2)):
        worker = settings.make_worker([actor])
        assert play(worker, [(actor, version)], versions) == [(actor, together[actor])]
    other = settings.make_worker([0])
    assert play(other, [(0, 1)], versions) != [(0, together[0])]


def test_nothing_is_played_where_nothing_was_asked(settings):
    worker = settings.make_worker([0])
    assert play(worker, [], {1: flat_of(settings, 1)}) == []
    assert play(worker, [(0, 1)]) == play(
        settings.make_worker([0]), [(0, 1)], {1: flat_of(settings, 1)}
    )


def test_a_version_is_copied_and_dropped_when_it_is_older_than_the_lag(settings):
    flat = flat_of(settings, 1)
    expected = play(settings.make_worker([0]), [(0, 1)], {1: flat})
    worker = settings.make_worker([0])
    play(worker, [], {1: flat}, lag=2)
    flat[:] = 0
    play(worker, [], {3: flat}, lag=2)
    assert play(worker, [(0, 1)], lag=2) == expected
    play(worker, [], {4: flat}, lag=2)
    with pytest.raises(KeyError):
        play(worker, [(0, 1)], lag=2)


# --- snapshots ------------------------------------------------------------------------------------


def stored(snapshot):
    """Return a snapshot as it comes back from a file."""
    document = json.loads(json.dumps(snapshot.document))
    return Snapshot(document, snapshot.stack.copy(), snapshot.state.copy())


def test_an_actor_continues_from_its_snapshot_in_another_worker(settings):
    versions = {1: flat_of(settings, 1), 2: flat_of(settings, 2)}
    worker = settings.make_worker(range(4))
    snapshots = {}
    for version in (1, 2, 1):
        requests = [ActorRequest(actor, version) for actor in range(4)]
        for each in worker.play(requests, versions, 9):
            snapshots[each.actor] = stored(each.after)
        versions = {}
    expected = dict(play(worker, [(actor, 2) for actor in range(4)]))
    for share in ([0, 2], [1, 3]):
        other = settings.make_worker(share)
        other.restore({actor: snapshots[actor] for actor in share})
        found = play(other, [(actor, 2) for actor in share], {2: flat_of(settings, 2)})
        assert found == [(actor, expected[actor]) for actor in share]


def test_a_snapshot_stays_as_it_is_while_its_actor_plays_on(settings):
    worker = settings.make_worker([0])
    (first,) = worker.play([ActorRequest(0, 1)], {1: flat_of(settings, 1)}, 0)
    before = bits(stored(first.after))
    (second,) = worker.play([ActorRequest(0, 1)], {}, 0)
    assert bits(stored(first.after)) == before
    assert bits(stored(second.after)) != before


def test_a_snapshot_of_another_actor_or_seed_is_refused(settings):
    worker = settings.make_worker([0])
    (played,) = worker.play([ActorRequest(0, 1)], {1: flat_of(settings, 1)}, 0)
    with pytest.raises(CapsuleError, match="CAP-T201"):
        settings.make_worker([1]).restore({1: played.after})
    reseeded = replace(settings, seeds=SEEDS.model_copy(update={"root": 4}))
    with pytest.raises(CapsuleError, match="CAP-T201"):
        reseeded.make_worker([0]).restore({0: played.after})


def test_a_damaged_episode_of_a_snapshot_is_refused(settings):
    worker = settings.make_worker([0])
    (played,) = worker.play([ActorRequest(0, 1)], {1: flat_of(settings, 1)}, 0)
    damaged = stored(played.after)
    damaged.document["environment"]["episode"]["digest"] = "0" * 32
    with pytest.raises(CapsuleError, match="CAP-T211"):
        settings.make_worker([0]).restore({0: damaged})
