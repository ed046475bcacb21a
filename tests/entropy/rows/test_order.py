"""Rows on time and order: clocks, listings, processors, numbers, schedules and arrivals."""

from dataclasses import replace
from pathlib import Path

import pytest

from capsule.entropy.ledger import compute_ledger
from capsule.entropy.rows import order
from capsule.experiment.arrival_log import NOTHING, ArrivalLog, Messages
from capsule.experiment.contract import FIRST_PROCESS, PROGRAM_PROCESS
from tests.entropy.evidence import (
    PROGRAM,
    SERIAL,
    TRAINER,
    assert_changed,
    changed_rows,
    evidence_of,
    executed,
    judged,
    mechanisms,
    report,
    telling,
    told,
)

ARRIVALS = ArrivalLog(waits={"mail~1": Messages(sources=("a",), order=(0, NOTHING, 0))})

# A run, the same with a mechanism broken or missing, and the rows that change; None: no such row.
BROKEN = {
    "a fixed clock": (TRAINER, telling(TRAINER, clock="fixed"), {"Clocks": "eliminated"}),
    "a virtual clock": (TRAINER, telling(TRAINER, clock="virtual"), {"Clocks": "ordered"}),
    "a program that reads the machine's clock": (
        PROGRAM,
        telling(PROGRAM, clock="system"),
        {"Clocks": "assumed"},
    ),
    "listings in the order of the file system": (
        PROGRAM,
        telling(PROGRAM, sorted=False, listings=0),
        {"Listing order": "assumed"},
    ),
    "the machine's number of processors": (
        PROGRAM,
        telling(PROGRAM, cores=None, core_questions=0),
        {"Processor count": "assumed"},
    ),
    "programs that were told different numbers of processors": (
        PROGRAM,
        report(PROGRAM, told=(*PROGRAM.report.told, told("0.2x.1x", clock="virtual", cores=2))),
        {"Processor count": "assumed"},
    ),
    "a static program": (
        PROGRAM,
        report(
            PROGRAM,
            programs=(executed(), executed("0.2x", preloaded=False, linkage="static")),
        ),
        {"Clocks": "assumed", "Listing order": "assumed", "Processor count": "assumed"},
    ),
    "a trainer without a supervisor, whose programs are known": (
        TRAINER,
        report(supervised=False),
        {"Entropy by raw system calls": "assumed", "Start bytes of programs": "assumed"},
    ),
    "the launcher is not alone in its process id namespace": (
        PROGRAM,
        report(PROGRAM, own_numbers=False),
        {"Process numbers": "assumed"},
    ),
    "the first process has another number": (
        TRAINER,
        report(first_process=FIRST_PROCESS + 1),
        {"Process numbers": "assumed"},
    ),
    "the program has another number": (
        PROGRAM,
        mechanisms(PROGRAM, process=PROGRAM_PROCESS + 1),
        {"Process numbers": "assumed"},
    ),
    "unrolls in the order of arrival, written down": (
        TRAINER,
        mechanisms(trainer=SERIAL.model_copy(update={"schedule": "recorded", "actors": 4})),
        {"Scheduling": "recorded"},
    ),
    "unrolls in the order of arrival": (
        TRAINER,
        mechanisms(trainer=SERIAL.model_copy(update={"schedule": "live", "actors": 4})),
        {"Scheduling": "unsupported"},
    ),
    "arrivals, written down": (
        PROGRAM,
        replace(PROGRAM, arrivals=ARRIVALS),
        {"Order of arrival": "recorded"},
    ),
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    assert_changed(whole, broken, changes)


def test_every_row_is_broken_by_some_case():
    assert {source.name for source in order.SOURCES} - changed_rows(BROKEN) == set()


def scheduled(schedule, actors=4):
    return mechanisms(trainer=SERIAL.model_copy(update={"schedule": schedule, "actors": actors}))


@pytest.mark.parametrize(
    ("schedule", "treatment"),
    [
        ("serial", "ordered"),
        ("lockstep", "ordered"),
        ("recorded", "recorded"),
        ("replayed", "recorded"),
        ("live", "unsupported"),
    ],
)
def test_every_schedule_of_a_trainer_is_judged(schedule, treatment):
    found = scheduled(schedule)
    assert judged(found)["Scheduling"] == treatment
    assert ("4 actors" in evidence_of(found, "Scheduling")) is (schedule != "serial")


def test_the_processes_of_a_program_are_counted_where_they_were_supervised():
    assert evidence_of(PROGRAM, "Scheduling").endswith("processes and threads: 3 processes")
    unknown = report(PROGRAM, supervised=False, programs=())
    assert evidence_of(unknown, "Scheduling").endswith("the program's processes and threads")


def test_readings_of_the_clock_are_those_of_the_program():
    """Not those of Capsule's own interpreter, which starts it."""
    assert evidence_of(PROGRAM, "Clocks") == (
        "the calendar clock was virtual and was read 70 times; the other clocks were the machine's"
    )
    assert "was read 9 times" in evidence_of(telling(TRAINER, clock="fixed", readings=9), "Clocks")
    assert "was read 1 time;" in evidence_of(telling(TRAINER, clock="fixed", readings=1), "Clocks")


def test_entries_that_contradict_each_other_give_the_weaker_row():
    both = report(
        PROGRAM,
        told=(told("0.2x", clock="fixed"), told("0.3x", clock="virtual", sorted=False, cores=2)),
    )
    found = judged(both)
    assert found["Clocks"] == found["Listing order"] == found["Processor count"] == "assumed"


def test_listings_and_questions_are_added_up_over_processes():
    several = report(PROGRAM, told=(told("0.2x"), told("0.3x", listings=1_000, core_questions=1)))
    assert evidence_of(several, "Listing order") == (
        "1,012 folders were listed in the order of their names"
    )
    assert "programs asked 3 times and got 4" in evidence_of(several, "Processor count")


def test_a_program_without_the_preloaded_library_is_counted():
    static = [executed(path, preloaded=False, linkage="static") for path in ("0.2x", "0.3x")]
    forked = executed("0.2x.1", executed=False, preloaded=False)
    found = report(PROGRAM, programs=(executed(), *static, forked))
    for name in ("Clocks", "Listing order", "Processor count"):
        assert evidence_of(found, name).endswith("but 2 programs did not load Capsule's library")


def test_programs_that_were_not_seen_may_be_answered_by_the_kernel():
    found = report(PROGRAM, supervised=False)
    for name in ("Clocks", "Listing order", "Processor count"):
        assert judged(found)[name] == "assumed"
        assert evidence_of(found, name).endswith(
            "but the run was not supervised, so programs without Capsule's library were not seen"
        )


@pytest.mark.parametrize("name", ["Clocks", "Listing order", "Processor count"])
def test_programs_that_ask_the_kernel_themselves_weaken_what_the_library_answers(name):
    """The evidence does not show them: they may have loaded the library."""
    (row,) = (each for each in compute_ledger(PROGRAM).rows if each.source == name)
    assert "a program that asks the kernel without the C library" in row.weakened_by.split("; ")
    page = (Path(__file__).parents[3] / "docs" / "ledger.md").read_text()
    assert any(
        line.startswith(f"| {name} |") and line.endswith(f"| {row.weakened_by} |")
        for line in page.splitlines()
    )


def test_numbers_are_pinned_only_where_the_program_has_its_own():
    assert evidence_of(PROGRAM, "Process numbers") == (
        f"alone in its namespace, the launcher started process {FIRST_PROCESS}, which started the "
        f"program as process {PROGRAM_PROCESS}"
    )
    unknown = mechanisms(PROGRAM, process=None)
    assert judged(unknown)["Process numbers"] == "assumed"
    assert "can differ between runs" in evidence_of(unknown, "Process numbers")


def test_arrivals_are_counted_without_the_moments_at_which_nothing_had_come():
    evidence = replace(PROGRAM, arrivals=ARRIVALS)
    assert evidence_of(evidence, "Order of arrival") == "the order of 2 arrivals was recorded"


def test_one_thing_is_written_in_the_singular():
    one = report(
        PROGRAM,
        told=(told("0.2x", listings=1),),
        programs=(executed("0.2x", preloaded=False, linkage="static"),),
    )
    assert evidence_of(one, "Listing order") == (
        "1 folder was listed in the order of its names, but 1 program did not load Capsule's "
        "library"
    )
    assert evidence_of(scheduled("lockstep", actors=1), "Scheduling").endswith(" of 1 actor")
    arrival = ArrivalLog(waits={"mail~1": Messages(sources=("a",), order=(0, NOTHING))})
    found = evidence_of(replace(PROGRAM, arrivals=arrival), "Order of arrival")
    assert found == "the order of 1 arrival was recorded"
