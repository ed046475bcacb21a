"""What 'capsule show' says of bundles, run directories and locks."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.bundle.bundle import open_bundle
from capsule.cli import main
from capsule.experiment import contract
from capsule.host.run_directory import LOCK, WORK
from capsule.image.lockfile import write_lock
from capsule.report.inspection import show_rows
from tests.report import runs
from tests.report.terminals import printed

CORPUS = Path(__file__).parents[1] / "corpus"
BUNDLES = sorted(CORPUS.glob("*.tar"))


def show(path, *options):
    done = CliRunner().invoke(main.app, ["show", str(path), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_every_bundle_fits_one_screen(path):
    lines = show(path).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 30


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_claims_and_signers_are_those_of_the_bundle(path):
    found = json.loads(show(path, "--json"))
    with open_bundle(path, (), kind=None) as opened:
        assert found["kind"] == f"{opened.manifest.kind}-bundle"
        assert found["claim_id"] == opened.claim_id
        assert found["claims"] == json.loads(opened.content("claims.json"))
        assert {each["path"] for each in found["files"]} == set(opened.files)
        assert found["signers"][0] == {
            "key": opened.fingerprint,
            "kind": "dsse",
            "checked": False,
        }
    text = show(path)
    assert found["claim_id"] in text
    assert "not checked" in " ".join(text.split())


def test_a_training_shows_its_result_machine_and_randomness(bundles):
    text = " ".join(show(bundles["dqn"]).split())
    assert "mean return 26 over 4 starts (lowest 10, highest 44)" in text
    assert "400 agent steps of DQN on gymnasium/CartPole-v1" in text
    assert "Intel(R) Xeon(R), NVIDIA H200, 16 GiB, debian 12" in text
    assert re.search(r"sources \d+ (eliminated|seeded|assumed|ordered)", text)


def test_a_program_shows_what_it_claims(bundles):
    assert "2 files, 5 bytes of standard output" in show(bundles["own"])


def test_the_evaluations_of_a_program_are_its_result(tmp_path):
    line = '{"step": 9, "returns": [3.0, 5.0]}\n'
    text = show(runs.pack(tmp_path, runs.PROGRAM, outputs={"evaluation.jsonl": line}))
    assert "result   at step 9, mean return 4 over 2 starts (lowest 3, highest 5)" in text
    assert "claims   1 file, 5 bytes of standard output" in text


def test_text_of_a_bundle_cannot_move_the_cursor(tmp_path):
    processor = runs.MACHINE.cpu.model_copy(update={"name": "\x1b[2Jfast"})
    machine = runs.MACHINE.model_copy(update={"cpu": processor})
    assert "\x1b" not in show(runs.pack(tmp_path, machine=machine))


def test_the_folder_is_one_word_of_the_command_that_continues(tmp_path):
    write_lock(tmp_path / "a run" / LOCK, runs.make_lock(runs.DQN))
    text = " ".join(show(tmp_path / "a run").split())
    assert f"next capsule run --resume '{tmp_path / 'a run'}'" in text


def test_a_run_directory_says_how_to_continue(tmp_path):
    write_lock(tmp_path / LOCK, runs.make_lock(runs.DQN))
    text = " ".join(show(tmp_path).split())
    assert "of a run, not started" in text
    assert f"capsule run --resume {tmp_path}" in text
    assert json.loads(show(tmp_path, "--json"))["state"] == "not started"


def test_a_failed_run_says_why_and_how_to_continue(tmp_path):
    write_lock(tmp_path / LOCK, runs.make_lock(runs.DQN))
    (tmp_path / WORK).mkdir()
    failure = contract.Failure(code="CAP-E010", message="the disk was full", fix="Free space.")
    (tmp_path / WORK / contract.FAILURE).write_bytes(failure.document())
    text = " ".join(show(tmp_path).split())
    assert "problem CAP-E010: the disk was full" in text
    assert f"next capsule run --resume {tmp_path}" in text


def test_a_lock_shows_its_packages(tmp_path):
    with open_bundle(CORPUS / "dqn.capsule.tar", ()) as opened:
        (tmp_path / "dqn.lock.json").write_bytes(opened.content("spec/lock.json"))
    text = show(tmp_path / "dqn.lock.json")
    assert "ale-py 0.12.1" in text
    assert "22 wheels, 25 Debian packages" in text
    assert json.loads(show(tmp_path / "dqn.lock.json", "--json"))["digest"] in text


def test_a_narrow_terminal_loses_no_word_that_a_wide_one_shows():
    text = " ".join(f"word{number}" for number in range(26))

    def shown(width):
        return printed(show_rows, [("signer", text)], width=width)

    assert shown(80).split() == ["signer", *text.split()]
    assert shown(40).split() == shown(80).split()
