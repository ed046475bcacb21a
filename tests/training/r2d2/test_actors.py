"""Logical actors: what they report, alone and together, in one process and in several."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.transports import local_transport
from capsule.training.r2d2.actors import Actors
from tests.conftest import wait_until
from tests.training.conftest import CARTPOLE, ROOT, make_spec, start_variables
from tests.training.r2d2.conftest import bits, parameters_of, recurrent, settings_of

pytestmark = pytest.mark.usefixtures("one_thread", "importable")


@pytest.fixture
def start():
    """A function that starts actors."""
    started = []

    def begin(settings, processes, **options):
        started.append(make_actors(settings, processes, **options))
        return started[-1]

    yield begin
    for actors in started:
        actors.close()


def make_actors(settings, processes, numerics="native"):
    """Start actors in this process or in several others."""
    others = 0 if processes == 1 else processes
    transport = local_transport(
        settings, settings.actors, processes=others, lag=0, numerics=numerics
    )
    return Actors(settings, transport)


def act(actors, parameters=None):
    actors.begin(None if parameters is None else parameters.flat)
    return actors.finish()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "numbers"), [("cartpole", (1, 2, 4)), ("breakout", (1, 2))])
@pytest.mark.usefixtures("warm_workers")
def test_any_number_of_processes_gives_the_same_bits(name, numbers, start):
    settings = settings_of(name, actors=5, network=recurrent(name), steps=15)
    first, second = (parameters_of(settings, seed) for seed in (1, 2))
    made = []
    for processes in numbers:
        actors = start(settings, processes)
        assert len(multiprocessing.active_children()) == (processes if processes > 1 else 0)
        experiences = [act(actors, first), act(actors), act(actors, second)]
        state = actors.state()
        made.append((bits(experiences), bits(state), actors.profiles()))
        actors.close()
        assert not multiprocessing.active_children()
    assert all(each == made[0] for each in made)
    actors = [bits(experience) for experience in experiences[0]]
    assert len(set(actors)) == len(actors)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("cartpole", 2), ("breakout", 1)])
@pytest.mark.usefixtures("warm_workers")
def test_restored_actors_go_on_as_if_nothing_had_happened(name, processes, start):
    settings = settings_of(name, actors=3, steps=33)
    parameters = parameters_of(settings)
    whole = start(settings, 1)
    act(whole, parameters)
    saved = json.loads(json.dumps(whole.state()))
    expected = act(whole)
    restored = start(settings, processes)
    act(restored, parameters)
    act(restored)
    restored.restore(saved)
    assert restored.state() == saved
    assert bits(act(restored)) == bits(expected)
    assert restored.profiles() == whole.profiles()


def test_a_state_of_other_seeds_is_refused(start):
    settings = settings_of(actors=2)
    first = start(settings, 1)
    act(first, parameters_of(settings))
    saved = first.state()
    other = start(settings_of(actors=2, seeds=SeedsSpec(root=4)), 1)
    with pytest.raises(CapsuleError) as refusal:
        other.restore(saved)
    assert refusal.value.code == "CAP-T201"


@pytest.mark.slow
def test_streams_belong_to_one_actor_each(start):
    settings = settings_of("sticky", actors=3)
    actors = start(settings, 1)
    act(actors, parameters_of(settings))
    profiles = actors.profiles()
    assert len({profile.key for profile in profiles}) == 9
    assert [(profile.name, profile.seed) for profile in profiles] == [
        (f"{name}/{actor}", seed)
        for actor in range(3)
        for name, seed in (("environment", 3), ("exploration", 3), ("no-op", 5))
    ]


def test_each_step_draws_twice_whichever_draw_is_used(start):
    for base in (0.0, 0.5, 1.0):
        settings = settings_of(actors=2, exploration_base=base, steps=30)
        actors = start(settings, 1)
        act(actors, parameters_of(settings))
        draws = {profile.name: profile.draws for profile in actors.profiles()}
        assert (draws["exploration/0"], draws["exploration/1"]) == (60, 60)


def test_parameters_are_taken_as_they_are_when_the_actors_begin(start):
    settings = settings_of(exploration_base=0.0, steps=30)
    parameters, copy = parameters_of(settings), parameters_of(settings)
    expected = act(start(settings, 1), copy)
    actors = start(settings, 1)
    actors.begin(parameters.flat)
    parameters.flat.mul_(-1)
    assert bits(actors.finish()) == bits(expected)


def test_calls_out_of_order_are_refused(start):
    settings = settings_of()
    actors = start(settings, 1)
    with pytest.raises(RuntimeError, match="needs parameters"):
        actors.begin(None)
    for call in (actors.state, actors.profiles):
        with pytest.raises(RuntimeError, match="have not acted yet"):
            call()
    with pytest.raises(RuntimeError, match="follows begin"):
        actors.finish()
    actors.begin(parameters_of(settings).flat)
    for call in (actors.state, actors.profiles, lambda: actors.begin(None)):
        with pytest.raises(RuntimeError, match="the actors act"):
            call()


# The end of the trainer


SCRIPT = """
import hashlib, multiprocessing, os, signal, sys
from capsule.experiment.spec import Spec
from tests.training.r2d2.conftest import bits, parameters_of, recurrent, settings_of
from tests.training.r2d2.test_actors import act, make_actors

def main(end):
    spec = Spec.model_validate_json(os.environ["SPEC"])
    settings = settings_of(
        actors=3,
        network=recurrent("cartpole"),
        determinism=spec.determinism,
        steps=1_000 if end == "kill" else 30,
    )
    for processes in (1, 2):
        actors = make_actors(settings, processes, spec.accelerator.numerics)
        made = act(actors, parameters_of(settings))
        print(hashlib.sha256(repr(bits(made)).encode()).hexdigest(), flush=True)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    if end == "kill":
        actors.begin(None)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("leave", 0), ("kill", -signal.SIGKILL)])
def test_no_process_outlives_the_trainer(end, status, tmp_path):
    """Under a portable profile, with all that a run's processes are given."""
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT)
    spec = make_spec(CARTPOLE)
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "SPEC": spec.model_dump_json(by_alias=True),
        **start_variables(spec),
    }
    done = subprocess.run(
        [sys.executable, script, end], env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == status, done.stderr
    one, two, processes = done.stdout.splitlines()
    assert one == two
    wait_for_end([int(number) for number in processes.split()])
    assert done.stderr == ""


def wait_for_end(processes):
    assert len(processes) == 2
    wait_until(lambda: not any(running(process) for process in processes), seconds=600)


def running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
