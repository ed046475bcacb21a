"""A run of an older Capsule, whose training code the bundle carries, executed in a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.command_server import start_command

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.xdist_group("programs")]

SPEC = """\
schema: capsule/spec/v1
name: older
code: {path: tree}
image: {packages: [packaging==26.2]}
trainer: {command: [python, score.py]}
limits: {memory_mb: 1024, minutes: 5}
"""
# An older Capsule: its training code differs by a comment.
OLDER = """\
from capsule.cli.main import app
from capsule.image import code

taken = code.training_code

def training_code():
    files = taken()
    return files | {"capsule/__init__.py": files["capsule/__init__.py"] + b"# as it was\\n"}

code.training_code = training_code
import capsule.image.assembly.assemble as assemble
assemble.training_code = training_code
app()
"""
# A newer one, with the digest of the older one in its list of releases.
NEWER = """\
import os
from capsule.cli.main import app
from capsule.image import releases

known = releases.Releases(code={os.environ["RELEASED"]: "0.0.9"}, recipes={}, bases={})
releases.releases = lambda: known
app()
"""


def execute(*arguments, cwd, program=None, **variables):
    """Execute a command of Capsule, or of another Capsule: a program's text."""
    words = [*map(str, arguments), "--json", "--quiet"]
    if program is None:
        done = start_command(*words, cwd=cwd)
    else:
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=cwd,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    folder = tmp_path_factory.mktemp("older")
    (folder / "older.yaml").write_text(SPEC)
    (folder / "tree").mkdir()
    (folder / "tree" / "score.py").write_text("print('score 3')\n")
    assert start_command("keygen", "alice", cwd=folder).returncode == 0
    run = ("run", "older.yaml", "--key", "alice")
    status, facts, errors = execute(*run, cwd=folder, program=OLDER)
    assert status == 0, errors
    lock = json.loads((folder / "older.lock.json").read_text())
    return folder, facts["bundle"], lock["image"]["code"]["sha256"]


def verify(older, *options, **how):
    folder, bundle, _ = older
    return execute("verify", bundle, "--key", "alice.pub", *options, cwd=folder, **how)


def test_code_that_nobody_released_is_executed_only_if_it_is_accepted(older):
    status, report, _ = verify(older)
    assert (status, report["error"]["code"]) == (4, "CAP-V014"), report
    status, report, _ = verify(older, "--code", "supplied")
    assert (status, report["verdict"]) == (0, "reproduced-bitwise"), report
    assert "the training code was the signer's own" in report["summary"]
    assert report["own_code"] is False


def test_code_of_a_release_is_executed_as_the_bundle_carries_it(older):
    status, report, _ = verify(older, program=NEWER, RELEASED=older[2])
    assert (status, report["verdict"]) == (0, "reproduced-bitwise"), report
    assert report["summary"].endswith("; the training code was that of Capsule 0.0.9")
    assert (report["own_code"], report["image_rebuilt"]) == (True, True)
