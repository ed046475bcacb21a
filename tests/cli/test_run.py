"""'capsule run', as far as it comes without an engine."""

import pytest
from typer.testing import CliRunner

from capsule.bundle.keys import generate
from capsule.cli import main
from capsule.engine.supervise import exclusive
from capsule.host.run_directory import LOCK, WORK
from capsule.image.lockfile import write_lock
from tests.verification.runs import make_lock

PROGRAM = {"name": "program", "trainer": {"command": ["true"], "outputs": ["one"]}}


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "run"
    (directory / WORK).mkdir(parents=True)
    write_lock(directory / LOCK, make_lock(PROGRAM))
    return directory


def test_a_run_that_another_process_executes_is_not_resumed(directory, tmp_path):
    generate(tmp_path / "alice")
    words = ["run", "--resume", directory, "--key", tmp_path / "alice", "--engine", "process"]
    words += ["--set", "trainer.outputs=[other]", "--metrics", f"csv:{tmp_path}/metrics.csv"]
    before = (directory / LOCK).read_bytes()
    with exclusive(directory / WORK):
        done = CliRunner().invoke(main.app, [*map(str, words)])
    assert done.exit_code == 2
    assert "CAP-E008: another Capsule process is running" in done.output
    assert (directory / LOCK).read_bytes() == before
    assert not (tmp_path / "metrics.csv").exists()
