"""Rows on randomness: what the system, the processor and the interpreter gave."""

from dataclasses import replace

import pytest

from capsule.entropy.report import RequestTally
from capsule.entropy.rows import randomness
from capsule.entropy.rows.randomness import system_treatment
from capsule.experiment.contract import StreamProfiles
from tests.entropy.evidence import (
    PROGRAM,
    STREAMS,
    TRAINER,
    assert_changed,
    changed_rows,
    evidence_of,
    executed,
    interpreters,
    judged,
    report,
    surroundings,
    use,
)

# A run, the same with a mechanism broken or missing, and the rows that change; None: no such row.
BROKEN = {
    "hash(): another seed": (
        TRAINER,
        interpreters(hash_seeds={"7": 1}),
        {"Interpreter hash seed": "seeded"},
    ),
    "hash(): drawn, from virtual entropy": (
        TRAINER,
        interpreters(hash_seeds={"random": 1}),
        {"Interpreter hash seed": "seeded"},
    ),
    "entropy left alone": (
        TRAINER,
        report(mode="system"),
        {
            "Operating-system entropy": "unsupported",
            "Entropy by raw system calls": "unsupported",
            "Start bytes of programs": "assumed",
        },
    ),
    "entropy recorded": (
        TRAINER,
        report(mode="record"),
        {"Operating-system entropy": "recorded", "Start bytes of programs": "recorded"},
    ),
    "a program that calls the kernel itself": (
        TRAINER,
        report(programs=(executed(getrandom=RequestTally(calls=3, bytes=24)),)),
        {"Entropy by raw system calls": "seeded"},
    ),
    "a program that opens a random file which nothing answers for": (
        TRAINER,
        report(programs=(executed(unanswered=1),)),
        {"Entropy by raw system calls": "unsupported"},
    ),
    "no supervisor": (
        TRAINER,
        report(supervised=False, programs=()),
        {"Entropy by raw system calls": "assumed", "Start bytes of programs": "assumed"},
    ),
    "start bytes of one program from the kernel": (
        PROGRAM,
        report(PROGRAM, programs=(executed("0.2x", start_bytes_derived=False),)),
        {"Start bytes of programs": "assumed"},
    ),
    "random addresses": (
        TRAINER,
        report(address_randomization=True),
        {"Memory addresses": "unsupported"},
    ),
    "paths of this machine's own": (
        TRAINER,
        surroundings(fixed_paths=False),
        {"Memory addresses": "assumed"},
    ),
    "no streams": (TRAINER, replace(TRAINER, streams=None), {"Random streams": None}),
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    assert_changed(whole, broken, changes)


def test_every_row_is_broken_by_some_case():
    assert {source.name for source in randomness.SOURCES} - changed_rows(BROKEN) == {
        "Processor randomness"
    }


def test_instructions_of_the_processor_are_never_known():
    assert "configured not to use them" in evidence_of(TRAINER, "Processor randomness")
    for unmasked in (report(mode="system"), replace(TRAINER, report=None)):
        assert judged(unmasked)["Processor randomness"] == "assumed"
        assert "they were not masked" in evidence_of(unmasked, "Processor randomness")


@pytest.mark.parametrize(
    ("mode", "judgement"),
    [
        ("virtual", ("seeded", "the launcher derived it from a seed (entropy.mode: virtual)")),
        ("record", ("recorded", "the launcher recorded it in a random profile")),
        ("replay", ("recorded", "the launcher replayed it from a random profile")),
        ("system", ("unsupported", "the spec leaves it to the system (entropy.mode: system)")),
    ],
)
def test_the_systems_entropy_is_what_the_launcher_replaced_it_by(mode, judgement):
    assert system_treatment(report(mode=mode)) == judgement


def test_without_the_launcher_nothing_replaced_the_systems_entropy():
    assert system_treatment(replace(TRAINER, report=None)) == (
        "assumed",
        "the launcher did not start the run",
    )


def test_requests_of_capsules_own_interpreter_are_told_apart():
    assert evidence_of(PROGRAM, "Operating-system entropy") == (
        "answered: 4 requests for 72 bytes (and 5 of Capsule's own interpreter)"
    )
    assert evidence_of(TRAINER, "Operating-system entropy") == (
        "answered: 3 requests for 2,504 bytes"
    )


def test_one_request_is_written_in_the_singular():
    one = report(uses=(use(calls=1, size=1),), programs=(executed(inside_libc=RequestTally()),))
    assert evidence_of(one, "Operating-system entropy") == "answered: 1 request for 1 byte"


@pytest.mark.parametrize("starts", [2, 3])
def test_a_resumed_run_says_of_which_start_it_speaks(starts):
    text = evidence_of(report(starts=starts), "Operating-system entropy")
    assert text.endswith(f"in the last of {starts} attempts")


def test_the_hash_seeds_are_listed_with_the_number_of_processes():
    found = interpreters(TRAINER, 3, hash_seeds={"7": 1, "0": 2})
    assert judged(found)["Interpreter hash seed"] == "seeded"
    assert evidence_of(found, "Interpreter hash seed") == (
        "read back in 3 Python processes: PYTHONHASHSEED=0, 7"
    )
    drawn = interpreters(TRAINER, 3, hash_seeds={"random": 2, "0": 1})
    assert evidence_of(drawn, "Interpreter hash seed") == ("2 of 3 Python processes drew their own")


@pytest.mark.parametrize(
    ("mode", "treatment"),
    [("virtual", "seeded"), ("record", "recorded"), ("system", "unsupported")],
)
def test_a_drawn_hash_seed_is_treated_as_the_entropy_it_was_drawn_from(mode, treatment):
    drawn = report(interpreters(hash_seeds={"random": 1}), mode=mode)
    assert judged(drawn)["Interpreter hash seed"] == treatment


def test_requests_past_the_preloaded_library_are_counted_over_all_programs():
    bypassing = executed("0.2x", getrandom=RequestTally(calls=3), devices=RequestTally(calls=2))
    found = report(PROGRAM, programs=(executed(), bypassing))
    assert evidence_of(found, "Entropy by raw system calls") == (
        "answered past the preloaded library: 5 requests"
    )
    missed = report(PROGRAM, programs=(executed("0.1x", unanswered=1), bypassing))
    assert evidence_of(missed, "Entropy by raw system calls") == (
        "let through: 1 open of a random file"
    )


def test_a_forked_process_has_the_start_bytes_of_its_parent():
    forked = executed("0.1", executed=False, start_bytes_derived=False)
    found = report(programs=(executed(), forked))
    assert judged(found)["Start bytes of programs"] == "seeded"
    assert evidence_of(found, "Start bytes of programs") == "replaced in 1 of 1 program"


def test_addresses_are_known_only_where_they_were_read_back_and_paths_are_fixed():
    assert "read back as off" in evidence_of(TRAINER, "Memory addresses")
    assert "machine's own paths" in evidence_of(surroundings(fixed_paths=False), "Memory addresses")
    both = report(surroundings(fixed_paths=False), address_randomization=True)
    assert judged(both)["Memory addresses"] == "unsupported"


def test_streams_are_counted():
    streams = StreamProfiles(streams=STREAMS.streams * 3)
    assert "3 counter-based streams gave 3,702 words" in evidence_of(
        replace(TRAINER, streams=streams), "Random streams"
    )


def test_one_thing_is_written_in_the_singular():
    drawn = interpreters(hash_seeds={"random": 1})
    assert evidence_of(drawn, "Interpreter hash seed") == "1 of 1 Python process drew its own"
    stream = STREAMS.streams[0].model_copy(update={"draws": 1})
    one = replace(TRAINER, streams=StreamProfiles(streams=(stream,)))
    assert evidence_of(one, "Random streams") == (
        "1 counter-based stream gave 1 word; each draw is digested"
    )
