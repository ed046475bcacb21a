"""Process and thread numbers, and what programs make of them, in real containers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.keys import load_public
from capsule.engine.connection import connect
from capsule.engine.containers import ContainerEngine
from capsule.engine.select import open_engine
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.spec import SourcesSpec
from capsule.image.cache import Cache
from capsule.report.progress import open_reporter
from tests.end_to_end.conftest import run

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.xdist_group("programs")]

SPEC = """\
schema: capsule/spec/v1
name: numbers
image: {packages: []}
entropy: {clock: fixed}
code: {path: tree}
trainer: {command: [python, train.py]}
limits: {memory_mb: 512, minutes: 5}
"""
SCRIPT = """\
import os, subprocess, tempfile, threading

def say(*words):
    print(*words, flush=True)

say("process", os.getpid(), os.getppid(), os.getsid(0), os.getpgrp())
say("shell", subprocess.getoutput("echo $$ $PPID"))
say("child", os.posix_spawnp("sh", ["sh", "-c", ":"], os.environ), os.wait()[1])
threads = [threading.Thread(target=lambda: say("thread", threading.get_native_id()))
           for _ in range(3)]
for each in threads: each.start(); each.join()
say(tempfile.mktemp(), tempfile.mkdtemp(), os.getcwd(), os.environ["HOME"])
say(sorted(os.environ.items()))
try: say(subprocess.check_output(["bash", "-c", "echo $RANDOM $SRANDOM $$"], text=True))
except FileNotFoundError: say("no bash")
"""


@pytest.fixture(scope="module")
def tree(workplace):
    folder = workplace / "numbers"
    (folder / "tree").mkdir(parents=True)
    (folder / "tree/train.py").write_text(SCRIPT)
    (folder / "own.yaml").write_text(SPEC)
    return "numbers/own.yaml"


def contents(own):
    with open_bundle(own.bundle, [load_public(own.public)]) as bundle:
        return {path: staged.read_bytes() for path, staged in bundle.files.items()}


@pytest.mark.parametrize("engine", ["docker", pytest.param("process", marks=pytest.mark.soak)])
def test_numbers_repeat_on_a_busy_machine_and_nothing_is_left_of_killed_verifications(
    workplace, tree, engine, tmp_path, request, monkeypatch
):
    """One run and one verification; two more executions of what ``verify`` executes."""
    own = run(workplace, "--engine", engine, spec=tree)
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setenv("TMPDIR", str(places))
    for moment in ("capsule-*-held", "capsule-verify-*-held/run/stdout.txt"):
        kill_verify(own, engine, lambda moment=moment: any(places.glob(moment)))
    assert list(places.glob("*.capsule-held"))
    request.getfixturevalue("busy")  # from here on
    done = own.verify(own.bundle, "--engine", engine, cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.output
    assert list(places.iterdir()) == []
    assert engine == "process" or not containers_at(places)
    files = contents(own)
    report = EntropyReport.model_validate_json(files[run_bundle.ENTROPY_REPORT])
    assert report.numbers_pinned
    rows = json.loads(files[run_bundle.LEDGER])["rows"]
    (row,) = (row for row in rows if row["source"] == "Process numbers")
    assert row["treatment"] == "eliminated"
    printed = files[run_bundle.STANDARD_OUTPUT]
    first = contract.FIRST_PROCESS
    assert printed.startswith(f"process 1000 {first} {first} {first}\n".encode())
    for number in range(2):
        assert executed_again(files, engine, tmp_path / f"again-{number}") == printed


def kill_verify(own, engine, moment):
    """Start a verification and kill it once something is so."""
    command = [sys.executable, "-m", "capsule", "verify", own.bundle, "--key", own.public]
    verifying = subprocess.Popen(
        [*command, "--engine", engine, "--quiet"], stdout=subprocess.DEVNULL, cwd=own.key.parent
    )
    while not moment():
        assert verifying.poll() is None
        time.sleep(0.01)
    verifying.kill()
    verifying.wait()


def containers_at(places):
    """Return the containers whose run directory is in a folder."""
    found = ContainerEngine(connect("docker"))._client.containers.list(
        all=True, ignore_removed=True
    )
    mounts = [mount["Source"] for each in found for mount in each.attrs["Mounts"]]
    return [source for source in mounts if Path(source).is_relative_to(places)]


def executed_again(files, engine, directory: Path):
    lock = Lock.model_validate_json(files[run_bundle.LOCK])
    with open_reporter(quiet=True) as reporter:
        opened = open_engine(engine, progress=reporter.note)
        execution.prepare(lock, opened, Cache(), sources=SourcesSpec(), reporter=reporter)
        execution.execute(lock, opened, directory, reporter=reporter)
    return (directory / contract.STANDARD_OUTPUT).read_bytes()
