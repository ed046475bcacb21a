"""Changes of a run's surroundings: what each changes, and nothing else."""

import json
import subprocess

import pytest

from capsule.experiment.variables import environment_variables
from capsule.host.errors import CapsuleError
from capsule.verification.variation import (
    CONTROL,
    NAMES,
    Inapplicable,
    Variation,
    listed,
    parse_names,
    pinned,
    variation_of,
    without_last,
)
from tests.verification.runs import CARTPOLE, IMPALA, make_lock, merged

PROGRAM = {"name": "own", "image": {"packages": []}, "trainer": {"command": ["./a=b", "two words"]}}
DQN, SERVED = make_lock(CARTPOLE), merged(IMPALA, {"trainer": {"inference": {"mode": "server"}}})
OWN = make_lock(PROGRAM)


def of(name, lock, usable="0-1", *, container=True):
    return variation_of(name, lock, usable, container=container)


def test_names_are_parsed_in_their_order():
    assert parse_names("all") == (NAMES, True)
    assert parse_names(" hostname,threads,hostname") == (("threads", "hostname"), False)


@pytest.mark.parametrize("text", ["", "moon", "threads,", "all,threads"])
def test_other_names_are_refused(text):
    with pytest.raises(CapsuleError, match="cannot be varied") as caught:
        parse_names(text)
    assert caught.value.code == "CAP-V066"


def test_processors_are_listed_as_the_kernel_writes_them():
    assert listed("0-2,5,8-9") == [0, 1, 2, 5, 8, 9]
    assert without_last("0-2,5") == "0,1,2"
    assert without_last("3") is None


def test_the_control_changes_nothing():
    for lock in (DQN, OWN):
        assert CONTROL.lock(lock) == lock
        surroundings = CONTROL.surroundings(lock)
        assert (surroundings.hostname, surroundings.processors) == (None, None)
        assert (surroundings.variables, surroundings.shell) == ({}, ())
    assert CONTROL.flags == frozenset()


def test_threads_and_processors_are_others_than_the_pinned_ones():
    two = make_lock(merged(CARTPOLE, {"determinism": {"threads": 2}}))
    none = make_lock(merged(CARTPOLE, {"determinism": {"threads": None, "cores": None}}))
    assert of("threads", DQN).lock(DQN).spec.determinism.threads == 2
    assert of("threads", two).lock(two).spec.determinism.threads == 1
    assert of("threads", none).lock(none).spec.determinism.threads == 1
    changed = of("cpu-count", DQN)
    assert (changed.processors, changed.lock(DQN)) == ("0", DQN)  # a trainer asks the kernel
    assert of("cpu-count", OWN).lock(OWN).spec.determinism.cores == 3
    one = make_lock(merged(PROGRAM, {"determinism": {"cores": 1}}))
    assert of("cpu-count", one).lock(one).spec.determinism.cores == 2
    assert of("cpu-count", none).lock(none) == none
    assert "torch.num_threads" in of("cpu-count", none).flags


def test_on_one_processor_only_what_programs_are_told_can_change():
    assert isinstance(of("cpu-count", DQN, "3"), Inapplicable)
    changed = of("cpu-count", OWN, "3")
    assert (changed.processors, dict(changed.determinism)) == (None, {"cores": 3})


def test_processes_are_varied_where_a_trainer_has_several():
    assert of("processes", make_lock(IMPALA)) == Variation(learners=2)
    assert of("processes", make_lock(SERVED)) == Variation(learners=2, replicas=2)
    for lock in (DQN, OWN):
        assert isinstance(of("processes", lock), Inapplicable)


def test_threads_stay_where_a_recorded_schedule_is_followed():
    assert isinstance(of("threads", make_lock(IMPALA)), Inapplicable)
    lockstep = merged(IMPALA, {"trainer": {"schedule": {"mode": "lockstep"}}})
    assert of("threads", make_lock(lockstep)) == of("threads", DQN)


def test_a_host_name_takes_a_container():
    assert of("hostname", DQN).surroundings(DQN).hostname == "varied-host"
    assert of("hostname", DQN, container=False).elsewhere


@pytest.mark.parametrize("name", ["locale", "timezone"])
def test_variables_of_a_trainer_are_set_from_outside(name):
    changed = of(name, DQN)
    assert changed.lock(DQN) == DQN
    given = changed.surroundings(DQN).variables
    usual = environment_variables(DQN.spec)
    assert given
    assert all(usual[variable] != value for variable, value in given.items())
    assert changed.neutral(DQN) is None


def test_variables_of_a_program_are_set_by_a_shell_that_becomes_it():
    changed = of("timezone", OWN)
    command = changed.lock(OWN).spec.trainer.command
    assert command[-2:] == ("./a=b", "two words")
    assert changed.surroundings(OWN).shell == command[:-2]
    assert changed.surroundings(OWN).variables == {}
    show = (
        "python3",
        "-c",
        "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv]))",
    )
    done = subprocess.run([*command[:-2], *show, "two words"], capture_output=True, check=True)
    environment, arguments = json.loads(done.stdout)
    assert environment["TZ"] == "<+14>-14"
    assert arguments[1:] == ["two words"]
    # What the hook compares with when the program imports torch.
    before, after = (
        json.loads(each["CAPSULE_DETERMINISM"])
        for each in (environment_variables(OWN.spec), environment)
    )
    assert after["environment"].pop("TZ") == "<+14>-14"
    assert before["environment"].pop("TZ") == "UTC"
    assert after == before


def test_a_shell_with_the_recorded_values_is_neutral():
    neutral = of("locale", OWN).neutral(OWN)
    assert dict(neutral.variables) == {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    assert neutral.lock(OWN) != OWN
    assert of("threads", OWN).neutral(OWN) is None


def test_what_every_re_execution_has_is_named():
    assert pinned("timezone", DQN) == "TZ=UTC"
    assert pinned("threads", DQN) == "determinism.threads: 1"
    assert pinned("cpu-count", OWN) == "determinism.cores: 4"
    assert pinned("cpu-count", DQN) is None  # a trainer asks the kernel
    assert pinned("processes", DQN) is None
