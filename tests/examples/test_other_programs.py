"""Other people's programs, one of them run and verified in Docker.

``pytest -m soak`` verifies bundles of both engines of each program five times while another process
keeps each core busy.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.command_server import start_command

FOLDER = Path(__file__).parents[2] / "examples" / "other-programs"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# The others are left to the soak tests: each takes a minute, mostly to install its packages.
IN_DOCKER = ["sb3_ppo"]
BUSY = "while True: pass"

pytestmark = pytest.mark.network


def capsule(*arguments, cwd):
    done = start_command(*arguments, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other-programs")
    assert capsule("keygen", "alice", cwd=folder).returncode == 0
    return folder


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.engine)])
def engine(request):
    return request.param


def run(program, engine, place):
    """Run a program and return its bundle."""
    spec = FOLDER / f"{program}.yaml"
    options = ("--key", place / "alice", "--engine", engine, "--output", place / "runs", "--json")
    done = capsule("run", spec, *options, "--quiet", cwd=place)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["bundle"]


def verify(bundle, engine, place):
    """Verify a bundle and return its report."""
    options = ("--key", place / "alice.pub", "--engine", engine, "--json", "--quiet")
    done = capsule("verify", bundle, *options, cwd=place)
    report = json.loads(done.stdout)
    assert (done.returncode == 0) == (report["verdict"] == "reproduced-bitwise"), report["summary"]
    return report


def test_there_are_the_programs_that_the_readme_names():
    readme = (FOLDER / "README.md").read_text()
    assert len(PROGRAMS) == 6
    assert all(f"({program}.py)" in readme for program in PROGRAMS)


@pytest.mark.engine
@pytest.mark.parametrize("program", IN_DOCKER)
def test_the_program_is_reproduced_bit_for_bit(program, place):
    report = verify(run(program, "docker", place), "docker", place)
    assert report["verdict"] == "reproduced-bitwise", report["summary"]


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_is_reproduced_five_times_on_a_busy_machine(program, engine, place):
    bundle = run(program, engine, place)
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(busy.kill)
        verdicts = [verify(bundle, engine, place)["verdict"] for _ in range(5)]
    assert verdicts == ["reproduced-bitwise"] * 5
