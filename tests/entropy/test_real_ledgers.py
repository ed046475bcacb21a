"""Ledgers of programs that really ran: with every mechanism, and with mechanisms broken."""

import textwrap

import pytest

from capsule import execution
from capsule.bundle.claims import read_document
from capsule.entropy.ledger import Ledger
from capsule.experiment import contract
from capsule.report.progress import SilentReporter
from tests.diagnosis.conftest import PROGRAM, LocalEngine, locked, parsed

CHILD = """\
import os, subprocess, sys
subprocess.run([sys.executable, "-c", ""], env={{**os.environ, "PYTHONHASHSEED": "{seed}"}})
"""


@pytest.fixture
def ledger_of(tmp_path):
    """Return a function that runs a program under the launcher and gives its rows by source."""

    def run(program, **sections):
        project = tmp_path / "project"
        project.mkdir()
        (project / "train.py").write_text(textwrap.dedent(program))
        directory = tmp_path / "run"
        execution.execute(
            locked(parsed(PROGRAM, **sections), project),
            LocalEngine(tmp_path, project, torch=False),
            directory,
            reporter=SilentReporter(),
        )
        ledger = read_document(directory / contract.LEDGER, Ledger)
        return {row.source: row for row in ledger.rows}

    return run


@pytest.mark.slow
def test_a_script_has_the_rows_of_what_it_used(ledger_of):
    rows = ledger_of(CHILD.format(seed=0))
    found = {source: row.treatment for source, row in rows.items()}
    assert found["Interpreter hash seed"] == "eliminated"
    assert "in 2 Python processes" in rows["Interpreter hash seed"].evidence
    assert found["Operating-system entropy"] == "seeded"
    assert "Capsule's own interpreter" in rows["Operating-system entropy"].evidence
    assert found["Start bytes of programs"] == "seeded"
    assert found["Clocks"] == "ordered"
    assert found["Listing order"] == "ordered"
    assert found["Processor count"] == "eliminated"
    of_others = {
        *("Random streams", "Torch operators", "Child processes", "cuDNN autotuning"),
        *("Seeds of requests", "Routing of requests", "Batching of inference"),
        *("Entropy by raw system calls", "Change of machine"),
    }
    assert of_others.isdisjoint(found)


@pytest.mark.slow
def test_what_is_broken_shows_in_its_row(ledger_of):
    rows = ledger_of(
        CHILD.format(seed="random") + "open('/proc/sys/kernel/random/uuid').read()\n",
        entropy={"address_randomization": True, "clock": "system"},
        determinism={"sorted_listings": False, "cores": None, "threads": None},
    )
    assert "1 of 2 Python processes drew its own" in rows["Interpreter hash seed"].evidence
    found = {source: row.treatment for source, row in rows.items()}
    assert found["Interpreter hash seed"] == "seeded"  # by the entropy, which is virtual
    assert found["Entropy by raw system calls"] == "unsupported"
    assert found["Start bytes of programs"] == "seeded"  # these were replaced all the same
    assert found["Memory addresses"] == "unsupported"
    assert found["Clocks"] == found["Listing order"] == found["Processor count"] == "assumed"
    assert found["Maths threads"] == "unsupported"


@pytest.mark.slow
def test_entropy_that_is_left_alone_shows_in_every_row_that_rests_on_it(ledger_of):
    rows = ledger_of(CHILD.format(seed="random"), entropy={"mode": "system"})
    found = {source: row.treatment for source, row in rows.items()}
    assert found["Interpreter hash seed"] == "assumed"  # nobody counted the processes
    assert "not supervised" in rows["Interpreter hash seed"].evidence
    assert found["Operating-system entropy"] == "unsupported"
    assert found["Start bytes of programs"] == "assumed"


@pytest.mark.slow
def test_a_program_that_spoils_the_account_of_its_processes_gains_nothing(ledger_of):
    rows = ledger_of(
        """\
        import os, pathlib
        account = pathlib.Path(os.environ["CAPSULE_RUN"], "interpreters.jsonl")
        account.write_text('{"hash_seed":"0","watched":"always"}')
        """
    )
    assert rows["Interpreter hash seed"].treatment == "assumed"
    assert "changed or removed" in rows["Interpreter hash seed"].evidence
