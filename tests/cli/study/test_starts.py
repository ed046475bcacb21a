"""``capsule study starts``: one run whose ranked start sequences all members share."""

import json
import os
import sys

import pytest

from capsule.bundle.keys import generate, load_private
from capsule.experiment.evaluation import StartSet, digest_of_starts
from capsule.host.errors import ExitCode
from capsule.host.run_directory import LOCK
from tests.cli.conftest import capsule
from tests.cli.study.conftest import plan, study
from tests.hostile import genuine
from tests.study.small_studies import STUDY

PYTHON = sys.executable  # which the fixture 'place' replaces
# Takes the place of 'capsule run --resume FOLDER': its bundle is one that was made before.
COPY = """\
import json, pathlib, shutil, sys
folder = pathlib.Path(sys.argv[5])
shutil.copy({bundle!r}, folder / "x.capsule.tar")
print(json.dumps(dict(bundle=str(folder / "x.capsule.tar"), claim_id="a" * 64)))
"""


@pytest.fixture
def with_starts(place):
    """A study whose members share starts, and a folder for the run that ranks them."""
    (place / "tiny.yaml").write_text(STUDY + "starts: {set: {seeds.root: 1000}}\n")
    (place / "runs").mkdir()
    (place / "runs" / "plan").write_text("{}")
    assert capsule("lock", "cart.yaml").exit_code == 0  # whose pins are kept
    return place


@pytest.fixture
def ends_with(with_starts, monkeypatch):
    """Return a function that has the run end with the bundle of a run, signed with a key."""

    def ends_with(run, key):
        bundle = genuine.packed(run, with_starts / "made.capsule.tar", key=load_private(key))
        program = with_starts / "python"
        program.write_text(f"#!{PYTHON} -ISE\n{COPY.format(bundle=str(bundle))}")
        program.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(program))

    return ends_with


def starts(*words):
    return study("starts", "tiny.yaml", "--key", "alice", "--quiet", *words)


def test_starts_needs_a_study_that_has_them(place):
    done = study("starts", "tiny.yaml", "--key", "alice")
    assert (done.exit_code, "CAP-Y002" in done.stderr) == (ExitCode.USAGE, True)
    (place / "tiny.yaml").write_text(STUDY + "starts: {set: {seeds.root: 1000}}\n")
    done = study("lock", "tiny.yaml")
    assert (done.exit_code, "CAP-Y004" in done.stderr) == (ExitCode.USAGE, True)
    plan(place)
    (place / "runs").mkdir()
    (place / "runs" / "plan").write_text("{}")
    done = study("starts", "tiny.yaml", "--key", "alice")
    assert done.exit_code != 0
    assert not (place / "tiny.starts.json").exists()


@pytest.mark.slow
def test_the_starts_of_the_run_are_written_beside_the_study(with_starts, ends_with):
    ends_with(genuine.training(), with_starts / "alice")
    done = starts()
    assert (done.exit_code, done.stderr) == (0, "")
    found = StartSet.model_validate_json((with_starts / "tiny.starts.json").read_bytes())
    assert found.starts == ((0,),)
    assert found.run == genuine.manifest_of(genuine.training())["claimId"]
    (folder,) = (with_starts / "runs").glob("tiny.starts-*")
    assert json.loads((folder / LOCK).read_bytes())["spec"]["seeds"]["root"] == 1000
    assert done.stdout == (
        f"starts  1\ndigest  sha256:{digest_of_starts(found.starts)}\n"
        f"bundle  runs/{folder.name}/x.capsule.tar\nfile    tiny.starts.json\n"
    )
    os.utime(folder / LOCK, (1e9, 1e9))
    written = (with_starts / "tiny.starts.json").read_bytes()
    assert starts().exit_code == 0
    assert [path.name for path in (with_starts / "runs").glob("tiny.*")] == [folder.name]
    assert (with_starts / "tiny.starts.json").read_bytes() == written
    assert (folder / LOCK).stat().st_mtime == 1e9  # when the run started


@pytest.mark.slow
def test_a_run_that_another_key_signed_or_that_ranked_nothing_has_no_starts(with_starts, ends_with):
    generate(with_starts / "mallory")
    ends_with(genuine.training(), with_starts / "mallory")
    done = starts()
    assert (done.exit_code, "CAP-B125" in done.stderr) == (ExitCode.TAMPERED, True)
    ends_with(genuine.program(), with_starts / "alice")
    done = starts()
    assert (done.exit_code, "CAP-S011" in done.stderr) == (ExitCode.USAGE, True)
    assert not (with_starts / "tiny.starts.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "status", "text"),
    [
        ("refused", 6, "CAP-E007: out of memory\nfix: Buy more.\n"),
        ("killed", 130, "interrupted\n"),
    ],
)
def test_the_run_ends_the_command_as_it_ended_itself(with_starts, word, status, text):
    name = directory_of(with_starts)
    (with_starts / "runs" / "plan").write_text(json.dumps({name: word}))
    done = starts()
    assert (done.exit_code, done.stderr) == (status, text)
    assert not (with_starts / "tiny.starts.json").exists()


def directory_of(place):
    """Return the name of the run directory, which follows from the lock."""
    assert starts().exit_code != 0  # its bundle is an empty file
    (folder,) = (place / "runs").glob("tiny.starts-*")
    (folder / "x.capsule.tar").unlink()
    return folder.name


def test_a_key_that_cannot_sign_is_found_before_anything_is_made(with_starts):
    done = study("starts", "tiny.yaml", "--key", "alice.pub", "--output", "new")
    assert (done.exit_code, "CAP-B132" in done.stderr) == (ExitCode.USAGE, True)
    assert not (with_starts / "new").exists()


def test_outputs_that_cannot_be_written_are_found_before_anything_is_made(with_starts):
    (with_starts / "tiny.starts.json").mkdir()
    done = starts("--output", "new")
    assert (done.exit_code, "CAP-X004: the output 'tiny.starts.json'" in done.stderr) == (2, True)
    (with_starts / "tiny.starts.json").rmdir()
    done = starts("--output", "cart.yaml")
    assert (done.exit_code, "CAP-X004: the output 'cart.yaml'" in done.stderr) == (2, True)
    assert not (with_starts / "new").exists()
