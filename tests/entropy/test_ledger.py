"""The ledger: each row rests on what the run left behind, and changes when that does."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.entropy.ledger import SOURCES, Ledger, compare_ledgers, compute_ledger
from capsule.experiment.canonical import parse_canonical_json
from tests.entropy.evidence import (
    PROGRAM,
    TRAINER,
    assert_changed,
    executed,
    interpreters,
    judged,
    make_interpreters,
    make_mechanisms,
    make_report,
    mechanisms,
    report,
)


def test_a_trainer_on_a_cpu_in_a_container():
    assert judged(TRAINER) == {
        "Interpreter hash seed": "eliminated",
        "Operating-system entropy": "seeded",
        "Processor randomness": "assumed",
        "Start bytes of programs": "seeded",
        "Memory addresses": "eliminated",
        "Random streams": "seeded",
        "Clocks": "assumed",
        "Listing order": "ordered",
        "Processor count": "eliminated",
        "Process numbers": "eliminated",
        "Scheduling": "ordered",
        "Torch operators": "eliminated",
        "Uninitialised memory": "eliminated",
        "Maths threads": "ordered",
        "CPU instruction sets": "eliminated",
        "Compute device": "eliminated",
        "Software": "eliminated",
        "File system": "assumed",
        "Network": "eliminated",
    }


def test_a_program_has_no_rows_of_what_only_trainers_have():
    assert judged(PROGRAM) == {
        "Interpreter hash seed": "eliminated",
        "Operating-system entropy": "seeded",
        "Processor randomness": "assumed",
        "Start bytes of programs": "seeded",
        "Memory addresses": "eliminated",
        "Clocks": "ordered",
        "Listing order": "ordered",
        "Processor count": "eliminated",
        "Process numbers": "eliminated",
        "Scheduling": "assumed",
        "Torch operators": "eliminated",
        "Uninitialised memory": "eliminated",
        "Maths threads": "ordered",
        "CPU instruction sets": "eliminated",
        "Compute device": "eliminated",
        "Child processes": "eliminated",
        "Software": "eliminated",
        "File system": "assumed",
        "Network": "eliminated",
    }


def test_a_program_without_python_has_no_rows_of_python_and_torch():
    shell = replace(
        PROGRAM,
        mechanisms=make_mechanisms(program=True, interpreters=make_interpreters(0)),
        report=make_report(programs=(executed(), executed("0.2x", "dash")), uses=()),
    )
    found = judged(shell)
    gone = {"Interpreter hash seed", "Torch operators", "Uninitialised memory", "Child processes"}
    assert gone.isdisjoint(found)
    assert found["Maths threads"] == found["CPU instruction sets"] == "assumed"


# A run, the same with a mechanism broken or missing, and the rows of several modules that change.
BROKEN = {
    "hash(): one of two processes ignores its environment, and entropy is the system's": (
        report(mode="system"),
        report(interpreters(TRAINER, 2, torch=1, hash_seeds={"0": 1, "random": 1}), mode="system"),
        {"Interpreter hash seed": "unsupported", "Child processes": "eliminated"},
    ),
    "a Python process that tells nothing": (
        PROGRAM,
        report(PROGRAM, programs=(executed(), executed("0.2x"), executed("0.2x.1x"))),
        {
            "Interpreter hash seed": "assumed",
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "Child processes": "assumed",
        },
    ),
    "an account that the program spoilt": (
        PROGRAM,
        mechanisms(PROGRAM, interpreters=None),
        {
            "Interpreter hash seed": "assumed",
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "CPU instruction sets": "assumed",
            "Child processes": "assumed",
        },
    ),
    "no launcher": (
        TRAINER,
        replace(TRAINER, report=None),
        {
            "Operating-system entropy": "assumed",
            "Entropy by raw system calls": "assumed",
            "Start bytes of programs": "assumed",
            "Memory addresses": "assumed",
            "Process numbers": "assumed",
            "Listing order": "assumed",
            "Processor count": "assumed",
        },
    ),
    "a program whose processes nobody counted": (
        PROGRAM,
        report(PROGRAM, supervised=False, programs=()),
        {
            "Interpreter hash seed": "assumed",
            "Entropy by raw system calls": "assumed",
            "Start bytes of programs": "assumed",
            "Torch operators": "assumed",
            "Uninitialised memory": "assumed",
            "Maths threads": "assumed",
            "Child processes": "assumed",
            "Clocks": "assumed",
            "Listing order": "assumed",
            "Processor count": "assumed",
        },
    ),
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    assert_changed(whole, broken, changes)


def test_ledgers_are_compared_by_their_treatments():
    recorded, here = compute_ledger(TRAINER), compute_ledger(replace(TRAINER, image=None))
    assert compare_ledgers(recorded, recorded) == ()
    (difference,) = compare_ledgers(recorded, here)
    assert (difference.source, difference.recorded, difference.here) == (
        *("Software", "eliminated", "assumed"),
    )
    cut = Ledger(rows=tuple(row for row in recorded.rows if row.treatment != "assumed"))
    hidden = compare_ledgers(cut, recorded)
    assert [(each.source, each.recorded) for each in hidden] == [
        ("Processor randomness", None),
        ("Clocks", None),
        ("File system", None),
    ]


def test_the_document_is_canonical_and_says_what_it_rests_on():
    ledger = compute_ledger(TRAINER)
    document = parse_canonical_json(ledger.document())
    assert document["schema"] == "capsule/ledger/v1"
    assert Ledger.model_validate_json(ledger.document()) == ledger
    assert json.loads(ledger.document()) == document
    assert all(row.evidence and row.weakened_by for row in ledger.rows)


def test_the_documentation_lists_the_rows_in_their_order():
    page = (Path(__file__).parents[2] / "docs/ledger.md").read_text()
    section = page.partition("## The rows")[2]
    rows = re.findall(r"^\| ([A-Za-z][^|]*?) \|", section, re.MULTILINE)
    assert rows == ["source", *(source.name for source in SOURCES)]
