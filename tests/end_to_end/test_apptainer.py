"""Runs under Debian's Apptainer, without root: the claims of a container, and what is refused.

Debian has Apptainer in its unstable distribution only, so it is in a root of its own, from which it
sees this machine's folders below their usual paths.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.experiment.errors import ExitCode
from capsule.image.cache import Cache
from tests.end_to_end.conftest import ROOT, capsule
from tests.end_to_end.hostile_program.attempts import LISTENER, REFUSED, SECRET
from tests.end_to_end.test_confinement import PROGRAM, SPEC
from tests.end_to_end.test_data import PROGRAM as READER
from tests.end_to_end.test_data import SPEC as DATA

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.soak]

USER = 1001
PACKAGES = "http://deb.debian.org/debian"
AS_USER = ("unshare", "--user", f"--map-user={USER}", f"--map-group={USER}")


@pytest.fixture(scope="module")
def apptainer(tmp_path_factory):
    """A program that runs the Apptainer of another root."""
    folder = tmp_path_factory.mktemp("apptainer")
    root, program = folder / "root", folder / "bin" / "apptainer"
    # A mirror's copy of the index may be some days old.
    old = "--aptopt=Acquire::Check-Valid-Until false"
    made = subprocess.run(
        [
            "mmdebstrap",
            "--variant=essential",
            "--include=apptainer,squashfuse,tzdata",
            old,
            "sid",
            root,
            PACKAGES,
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # Apptainer reads it
    with (root / "etc" / "passwd").open("a") as accounts:
        accounts.write(f"author:x:{USER}:{USER}::/:/bin/sh\n")
    folder.chmod(0o755)
    seen = {tempfile.gettempdir(), str(Path.home()), str(ROOT), str(Cache().root.absolute())}
    binds = " ".join(f"--bind {path} {path}" for path in ("/proc", "/sys", *sorted(seen)))
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nexec {shutil.which('bwrap')} --bind {root} / --dev-bind /dev /dev {binds} "
        '--chdir "$PWD" -- /usr/bin/apptainer "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def user(apptainer):
    """Return a function that starts a command of Capsule's as an ordinary user with Apptainer."""
    path = f"{apptainer.parent}{os.pathsep}{os.environ['PATH']}"

    def start(*arguments, cwd):
        return subprocess.Popen(
            [*AS_USER, sys.executable, "-m", "capsule", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PATH": path, SECRET: "of the machine"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def run(user, *arguments, cwd):
    with user("run", *arguments, "--engine", "apptainer", "--json", cwd=cwd) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output)


def test_apptainer_and_a_container_make_the_same_claims(user, workplace, micro, tmp_path):
    made = run(user, "micro.yaml", "--key", "alice", "--output", tmp_path, cwd=workplace)
    assert made["claim_id"] == micro.claim_id
    done = micro.verify(made["bundle"], "--engine", "docker", cwd=workplace)
    assert done.document["verdict"] == "reproduced-bitwise", done.errors
    words = ("verify", micro.bundle, "--key", micro.public, "--json", "--engine", "apptainer")
    with user(*words, cwd=workplace) as process:
        output, errors = process.communicate()
    assert json.loads(output)["verdict"] == "reproduced-bitwise", errors


def test_a_run_sees_its_data_sets(user, workplace, tmp_path):
    folder, output = tmp_path / "12:30", tmp_path / "lr=0.1,seed=2"
    (folder / "tree").mkdir(parents=True)
    (folder / "tree" / "reader.py").write_text(READER)
    (folder / "digits").mkdir()
    (folder / "digits" / "one").write_text("one")
    (folder / "label.csv").write_text("1,2")
    (folder / "reader.yaml").write_text(DATA)
    under = run(user, folder / "reader.yaml", "--key", "alice", "--output", output, cwd=workplace)
    words = ("--key", "alice", "--output", output, "--json", "--engine", "docker")
    done = capsule("run", folder / "reader.yaml", *words, cwd=workplace)
    assert done.document["claim_id"] == under["claim_id"], done.errors


def test_an_interrupted_run_can_be_resumed(user, workplace, micro, tmp_path):
    command = ("run", "micro.yaml", "--key", "alice", "--engine", "apptainer")
    with user(*command, "--output", tmp_path, cwd=workplace) as process:
        while not list(tmp_path.glob("*/work/events.jsonl")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED, errors
    (directory,) = tmp_path.iterdir()
    made = run(user, "--resume", directory, "--key", "alice", cwd=workplace)
    assert made["claim_id"] == micro.claim_id


def test_nothing_succeeds_but_to_execute_what_is_in_tmp_or_in_memory(user, workplace, tmp_path):
    shutil.copytree(PROGRAM, tmp_path / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hostile.yaml").write_text(SPEC)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(LISTENER)
        listener.listen()
        made = run(user, "hostile.yaml", "--key", workplace / "alice", cwd=tmp_path)
    with open_bundle(tmp_path / made["bundle"], [load_public(workplace / "alice.pub")]) as bundle:
        found = json.loads(bundle.files[run_bundle.WORKSPACE + "attempts.json"].read_bytes())
    assert {name: outcome for name, outcome in found.items() if outcome != REFUSED} == {
        "execute: in /tmp": "ended with 0",
        "execute: in /dev/shm": "ended with 0",
        "execute: code mapped from /tmp": "mapped",
    }


def test_apptainer_converts_the_archive_of_an_image(apptainer, workplace, tmp_path):
    archive = tmp_path / "image.tar"
    done = capsule("build", "micro.yaml", "--archive", archive, cwd=workplace)
    assert done.status == 0, done.errors
    image = tmp_path / "image.sif"
    for command in (
        ("build", image, f"oci-archive:{archive}"),
        (
            "exec",
            "--containall",
            "--no-mount",
            "bind-paths",
            image,
            "python3",
            "-I",
            "-S",
            "-c",
            "import json",
        ),
    ):
        ran = subprocess.run(
            [*AS_USER, apptainer, *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr


def test_memory_is_limited_by_watching_and_nothing_is_left(user, workplace, tmp_path):
    shutil.copytree(PROGRAM, tmp_path / "tree", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hostile.yaml").write_text(SPEC)
    command = ("run", "hostile.yaml", "--set", "seeds.root=3", "--key", workplace / "alice")
    with user(*command, "--engine", "apptainer", cwd=tmp_path) as process:
        _, errors = process.communicate()
    assert process.returncode == ExitCode.TRAINING_FAILED
    assert "memory ran out" in errors
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "Apptainer runtime parent" not in shown.stdout
