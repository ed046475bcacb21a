"""The evidence of the ledger: which processes count, what is unknown, and that no spec is in it."""

import dataclasses
from dataclasses import replace

import pytest

from capsule.entropy.evidence import Evidence, is_own
from capsule.entropy.report import RequestTally
from capsule.experiment.spec import Spec
from tests.entropy.evidence import (
    PROGRAM,
    TRAINER,
    executed,
    interpreters,
    make_interpreters,
    make_report,
    mechanisms,
    report,
    told,
    use,
)

UNLAUNCHED = replace(TRAINER, report=None)


def test_no_row_can_be_taken_from_the_spec():
    fields = {field.name for field in dataclasses.fields(Evidence)}
    assert fields == {
        *("runtime", "mechanisms", "report", "streams", "arrivals", "data", "engine", "image")
    }
    assert not any(isinstance(getattr(TRAINER, name), Spec) for name in fields)


# ---- whose processes count ----


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("0", True),
        ("0.1", True),
        ("0.0-3:1", True),
        ("0.2.5", True),
        ("0x", False),
        ("0.2x", False),
        ("0.2x.1", False),
        ("0.2.1x", False),
        ("#c0ffee", False),
    ],
)
def test_what_capsules_interpreter_only_forks_is_its_own(path, own):
    """docs/random-profiles.md: executing a program appends x; a digest stands for a long path."""
    assert is_own(path) is own


def test_a_program_runs_where_no_trainer_does():
    assert PROGRAM.is_program
    assert not TRAINER.is_program


PATHS = ("0", "0.1", "0.2x", "0.2x.1", "#c0ffee")
EVERY = make_report(
    programs=tuple(executed(path) for path in PATHS),
    uses=tuple(use(path, calls=1, size=10) for path in PATHS),
    told=tuple(told(path) for path in PATHS),
)


def test_beside_a_program_capsules_own_processes_do_not_count():
    found = replace(PROGRAM, report=EVERY)
    assert [each.process for each in found.programs] == ["0.2x", "0.2x.1", "#c0ffee"]
    assert [each.process for each in found.told] == ["0.2x", "0.2x.1", "#c0ffee"]


def test_all_processes_of_a_trainer_count():
    found = replace(TRAINER, report=EVERY)
    assert [each.process for each in found.programs] == [*PATHS]
    assert [each.process for each in found.told] == [*PATHS]


def test_every_request_is_counted_on_one_of_two_sides():
    """Of each process: 10 bytes by the preloaded library, and 8 inside the C library."""
    found = replace(PROGRAM, report=EVERY)
    assert found.requests == RequestTally(calls=6, bytes=54)
    assert found.own_requests == RequestTally(calls=4, bytes=36)
    trained = replace(TRAINER, report=EVERY)
    assert trained.requests == RequestTally(calls=10, bytes=90)
    assert trained.own_requests == RequestTally()


def test_a_run_that_the_launcher_did_not_start_has_no_counts():
    assert UNLAUNCHED.programs == UNLAUNCHED.told == ()
    assert UNLAUNCHED.requests == UNLAUNCHED.own_requests == RequestTally()


def test_processes_with_torch_are_those_of_the_records():
    assert sum(each.processes for each in TRAINER.torch) == 1
    assert interpreters(TRAINER, 3, torch=0).torch == ()
    assert mechanisms(interpreters=None).torch == ()


# ---- what is unknown ----


@pytest.mark.parametrize("evidence", [TRAINER, PROGRAM, UNLAUNCHED])
def test_every_python_process_is_known(evidence):
    assert evidence.untold is None


@pytest.mark.parametrize("evidence", [TRAINER, PROGRAM])
def test_without_the_records_no_process_is_known(evidence):
    text = mechanisms(evidence, interpreters=None).untold
    assert text == "the records of the run's Python processes were changed or removed"


@pytest.mark.parametrize(
    "evidence",
    [report(PROGRAM, supervised=False, programs=()), replace(PROGRAM, report=None)],
)
def test_a_program_without_a_supervisor_may_have_run_unrecorded_processes(evidence):
    assert evidence.untold.startswith("the run was not supervised")


def test_a_trainer_without_a_supervisor_starts_only_what_it_records():
    assert report(supervised=False, programs=()).untold is None


@pytest.mark.parametrize(
    ("programs", "started", "restarted", "text"),
    [
        (1, 1, 0, None),
        (2, 1, 1, None),  # restarted: executed twice, recorded once
        (1, 2, 0, None),  # two interpreters in one process that forked count once
        (2, 1, 0, "1 of 2 Python programs left no record"),
        (4, 1, 1, "2 of 4 Python programs left no record"),
        (1, 0, 0, "1 of 1 Python program left no record"),
    ],
)
def test_a_python_program_that_left_no_record_is_counted(programs, started, restarted, text):
    found = report(
        PROGRAM, programs=tuple(executed(f"0.{number}x") for number in range(1, programs + 1))
    )
    records = make_interpreters(started, restarted=restarted)
    assert mechanisms(found, interpreters=records).untold == text


@pytest.mark.parametrize(
    "other",
    [
        executed("0.3x", "dash"),
        executed("0.3x", None),
        executed("0.3x.1", executed=False),
        executed("0"),  # Capsule's own interpreter
    ],
)
def test_only_executed_python_programs_leave_records(other):
    assert report(PROGRAM, programs=(executed("0.2x"), other)).untold is None


# ---- numbers in texts ----
