"""A base layer with more in it than its packages: made, run and signed, then refused."""

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
name: {name}
code: {{path: tree}}
image: {{packages: [packaging==26.2], debian: [hostname]}}
trainer: {{command: [python, score.py]}}
limits: {{memory_mb: 1024, minutes: 5}}
"""
# What an attacker runs in place of 'capsule': his base has a file that every interpreter executes.
ATTACK = """\
from capsule.cli.main import app
from capsule.image.assembly import assemble, base
from capsule.image.archives.layers import file_entry

FORGER = b"import builtins; p = print; builtins.print = lambda *_: p('score 500')\\n"
plan_base = base.plan_base

def plan(packages, recipe, cache):
    honest = plan_base(packages, recipe, cache)
    folder = "usr/lib/python3/dist-packages/"
    more = [file_entry(folder + "zz.pth", "-", b"import zz\\n"),
            file_entry(folder + "zz.py", "-", FORGER)]
    return base.Plan("base", "f" * 64, lambda stack: [*honest.entries(stack), *more])

base.plan_base = assemble.plan_base = plan
app()
"""


def execute(*arguments, cwd, program=None, **variables):
    """Execute a command of Capsule, or of another Capsule: a program's text."""
    if program is None:
        return start_command(*arguments, cwd=cwd, **variables)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def run(folder, name, **options):
    (folder / f"{name}.yaml").write_text(SPEC.format(name=name))
    (folder / "tree").mkdir(exist_ok=True)
    (folder / "tree" / "score.py").write_text("print('score 3')\n")
    execute("keygen", name, cwd=folder)
    arguments = ("run", f"{name}.yaml", "--key", name, "--json", "--quiet")
    done = execute(*arguments, cwd=folder, **options)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    printed = (folder / facts["run_directory"] / "work" / "stdout.txt").read_text()
    return (folder / facts["bundle"], folder / f"{name}.pub"), printed


def verify(signed, *options, **variables):
    bundle, key = signed
    arguments = ("verify", bundle, "--key", key, "--json", "--quiet", *options)
    done = execute(*arguments, cwd=key.parent, **variables)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def forged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mallory")
    cache = {"CAPSULE_CACHE": str(folder / "cache")}  # nothing of his may be found in the usual one
    signed, printed = run(folder, "mallory", program=ATTACK, **cache)
    assert printed == "score 500\n"
    return signed


@pytest.fixture
def without_mirrors(tmp_path):
    """Variables of a machine that has no copy of the packages and knows no mirror."""
    return {
        "CAPSULE_DEBIAN_MIRROR": (tmp_path / "none").as_uri(),
        "CAPSULE_CACHE": str(tmp_path / "cache"),
    }


def test_the_honest_twin_is_reproduced_on_a_base_that_was_built_here(tmp_path):
    signed, printed = run(tmp_path, "alice")
    assert printed == "score 3\n"
    status, report = verify(signed)
    assert (status, report["verdict"]) == (0, "reproduced-bitwise"), report
    assert (report["image_source"], report["image_rebuilt"]) == ("rebuilt", True)


@pytest.mark.parametrize("mode", ["full", "integrity"])
def test_a_base_that_its_packages_do_not_make_is_never_executed(forged, mode):
    status, report = verify(forged, "--mode", mode)
    if (
        mode == "integrity"
    ):  # of packages beyond Capsule's own list, only building the layer shows it
        assert (status, report["verdict"]) == (0, "intact"), report
        return
    assert (status, report["verdict"]) == (3, "tampered"), report
    assert report["error"]["code"] == "CAP-I113"


def test_without_the_packages_it_decides_nothing_unless_the_user_accepts_it(
    forged, without_mirrors
):
    status, report = verify(forged, **without_mirrors)
    assert (status, report["verdict"]) == (4, "inconclusive"), report
    assert report["error"]["code"] == "CAP-V013"
    assert "--base supplied" in report["error"]["fix"]
    status, report = verify(forged, "--base", "supplied", **without_mirrors)
    assert (status, report["verdict"]) == (0, "reproduced-bitwise"), report
    assert "the base layer was the signer's own" in report["summary"]
    assert (report["image_source"], report["image_rebuilt"]) == ("supplied-base", False)
