"""Transports, by the example of R2D2's actors: the same answers from any number of processes."""

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.training.acting.actor_worker import ActorRequest
from capsule.training.acting.transports import Processes, Serial, local_transport
from tests.training.acting.actor_networks import TellingNetwork
from tests.training.r2d2.conftest import (
    ENVIRONMENTS,
    bits,
    parameters_of,
    recurrent,
    settings_of,
)

pytestmark = pytest.mark.usefixtures("one_thread", "importable")


@pytest.fixture
def start():
    """A function that starts what plays actors in other processes; 0: in this one."""
    started = []

    def begin(settings, processes, *, lag=0, numerics="native"):
        started.append(
            local_transport(
                settings, settings.actors, processes=processes, lag=lag, numerics=numerics
            )
        )
        return started[-1]

    yield begin
    for transport in started:
        transport.close()


def versions_of(settings, *numbers):
    return {number: parameters_of(settings, number).flat.numpy() for number in numbers}


def ask(transport, settings, version=1):
    """Ask all actors at once."""
    transport.begin([ActorRequest(actor, version) for actor in range(settings.actors)])


def finish(transport, count):
    """Wait for so many answers; return what each actor did, and a snapshot of it then."""
    played = []
    while len(played) < count:
        found = transport.finished()
        assert found
        played += found
    assert len(played) == count
    return {each.actor: each for each in played}


def made_by(played):
    return {actor: bits(each.experience) for actor, each in sorted(played.items())}


# --- in this process ------------------------------------------------------------------------------


def test_without_other_processes_actors_play_in_this_one(start):
    settings = settings_of(actors=3)
    transport = start(settings, 0)
    assert isinstance(transport, Serial)
    assert transport.replicas == 0
    assert not multiprocessing.active_children()
    transport.publish(versions_of(settings, 1))
    ask(transport, settings)
    played = made_by(finish(transport, 3))
    worker = settings.make_worker(range(3))
    requests = [ActorRequest(actor, 1) for actor in range(3)]
    expected = worker.play(requests, versions_of(settings, 1), 0)
    assert played == {each.actor: bits(each.experience) for each in expected}


def test_what_was_begun_in_parts_is_finished_once(start):
    settings = settings_of(actors=4)
    transport = start(settings, 0)
    transport.publish(versions_of(settings, 1))
    for actors in ((2,), (0, 3)):
        transport.begin([ActorRequest(actor, 1) for actor in actors])
    assert sorted(finish(transport, 3)) == [0, 2, 3]
    assert transport.finished() == []
    transport.begin([ActorRequest(1, 1)])
    assert sorted(finish(transport, 1)) == [1]


def test_a_version_that_was_asked_for_is_kept_for_the_lag_when_it_is_no_longer_published(start):
    settings = settings_of(actors=2, exploration_base=0.0)
    transport, expected = start(settings, 0, lag=1), start(settings, 0, lag=1)
    expected.publish(versions_of(settings, 1, 2))
    transport.publish(versions_of(settings, 1))
    for each in (transport, expected):
        each.begin([ActorRequest(0, 1)])
    assert made_by(finish(transport, 1)) == made_by(finish(expected, 1))
    transport.publish(versions_of(settings, 2))
    for each in (transport, expected):
        each.begin([ActorRequest(0, 2), ActorRequest(1, 1)])
    assert made_by(finish(transport, 2)) == made_by(finish(expected, 2))


def test_a_version_that_was_never_published_cannot_be_asked_for(start):
    settings = settings_of(actors=1)
    transport = start(settings, 0)
    transport.publish(versions_of(settings, 1))
    ask(transport, settings, version=2)
    with pytest.raises(KeyError):
        transport.finished()


def test_restored_actors_answer_as_they_did_before(start):
    settings = settings_of(actors=3)
    transport = start(settings, 0)
    transport.publish(versions_of(settings, 1))
    ask(transport, settings)
    snapshots = {actor: each.after for actor, each in finish(transport, 3).items()}
    ask(transport, settings)
    expected = made_by(finish(transport, 3))
    transport.restore(snapshots)
    ask(transport, settings)
    assert made_by(finish(transport, 3)) == expected


# --- in other processes ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(("processes", "started"), [(2, 2), (9, 3)])
def test_answers_are_the_same_from_any_number_of_processes(start, processes, started):
    settings = settings_of(actors=3)
    transports = start(settings, 0, lag=1), start(settings, processes, lag=1)
    assert isinstance(transports[1], Processes)
    assert len(multiprocessing.active_children()) == started
    assert transports[1].replicas == 0
    answers = [[], []]
    for transport, found in zip(transports, answers, strict=True):
        snapshots = {}
        for version in (1, 2, 2):
            transport.publish(versions_of(settings, *{1, version}))
            ask(transport, settings, version)
            played = finish(transport, 3)
            snapshots = snapshots or {actor: each.after for actor, each in played.items()}
            found.append(made_by(played))
        transport.restore(snapshots)
        ask(transport, settings, 2)
        found.append(made_by(finish(transport, 3)))
    assert answers[0] == answers[1]
    assert answers[0][3] == answers[0][1]
    transports[1].close()
    assert not multiprocessing.active_children()
    transports[1].close()  # a second time


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_actors_that_are_asked_one_after_the_other_are_all_answered(start):
    settings = settings_of(actors=5)
    transport = start(settings, 2)
    transport.publish(versions_of(settings, 1))
    for actor in (4, 0, 2, 3, 1):
        transport.begin([ActorRequest(actor, 1)])
    serial = start(settings, 0)
    serial.publish(versions_of(settings, 1))
    ask(serial, settings)
    assert made_by(finish(transport, 5)) == made_by(finish(serial, 5))


# --- processes that fail, are killed, or are left alone -------------------------------------------


def process_of(number):
    """Return the process that plays the actors of one share."""
    name = f"actors-{number}"
    return next(p for p in multiprocessing.active_children() if p.name == name)


def failure_of(transport, settings):
    """Ask all actors, and return the error that comes instead of an answer."""
    transport.publish(versions_of(settings, 1))
    with pytest.raises(CapsuleError) as failure:
        ask(transport, settings)
        finish(transport, settings.actors)
    assert not multiprocessing.active_children()
    return failure.value


def check_death(transport, who):
    with pytest.raises(CapsuleError) as failure:
        transport.finished()
    assert failure.value.code == "CAP-T331"
    assert failure.value.message == f"{who} died: SIGKILL"
    assert "limits.memory_mb" in failure.value.fix
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_process_killed_while_it_acts_is_named(start):
    settings = settings_of(steps=1_000_000, actors=1)
    transport = start(settings, 2)
    transport.publish(versions_of(settings, 1))
    ask(transport, settings)
    os.kill(process_of(0).pid, signal.SIGKILL)
    check_death(transport, "process 0 (actor 0)")


@pytest.mark.slow
def test_orders_to_stop_are_the_trainers_but_a_kill_is_a_kill(start):
    settings = settings_of(actors=3)
    transport = start(settings, 2)
    for number in range(2):
        for order in (signal.SIGTERM, signal.SIGINT):
            os.kill(process_of(number).pid, order)
    transport.publish(versions_of(settings, 1))
    ask(transport, settings)
    assert len(finish(transport, 3)) == 3
    process = process_of(0)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    transport.begin([ActorRequest(0, 1)])
    check_death(transport, "process 0 (actors 0 and 2)")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_process_that_died_before_actors_are_restored_is_named(start):
    settings = settings_of(actors=2)
    transport = start(settings, 2)
    transport.publish(versions_of(settings, 1))
    ask(transport, settings)
    snapshots = {actor: each.after for actor, each in finish(transport, 2).items()}
    process = process_of(1)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(CapsuleError, match=r"CAP-T331 process 1 \(actor 1\) died: SIGKILL"):
        transport.restore(snapshots)
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_an_exception_in_a_process_is_told_with_its_settings(start):
    network = recurrent("cartpole")
    settings = settings_of(actors=1, network=TellingNetwork(**vars(network)))
    failure = failure_of(start(settings, 2), settings)
    assert failure.code == "CAP-T332"
    assert failure.message == "process 0 (actor 0): ValueError: 1 threads, strict: True"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_foreseen_failure_keeps_its_code(start):
    environment = ENVIRONMENTS["breakout"].model_copy(update={"game": "no_such_game"})
    settings = settings_of("breakout", actors=4)
    failure = failure_of(start(replace(settings, tasks=(environment,)), 2), settings)
    assert failure.code == "CAP-T212"
    process, _, what = failure.message.partition(": ")
    assert process in ("process 0 (actors 0 and 2)", "process 1 (actors 1 and 3)")
    assert what.startswith("environment.game")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_process_that_cannot_keep_the_numerics_is_refused(start):
    settings = settings_of(actors=1)
    failure = failure_of(start(settings, 2, numerics="portable-v3"), settings)  # without the shim
    assert failure.code == "CAP-T104"
    assert failure.message.startswith("process 0 (actor 0): library flag ")
