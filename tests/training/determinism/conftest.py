"""Interpreters of their own, for the settings of a process."""

import json
import subprocess

from tests.training.conftest import CARTPOLE, ROOT, make_spec


def spec_with(**determinism):
    return make_spec(CARTPOLE, determinism=determinism)


def run(interpreter, code, variables, *options, arguments=()):
    """Run code in an interpreter of its own; return what it printed, as JSON."""
    done = subprocess.run(
        [interpreter, *options, "-c", code, *arguments],
        env={"PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
