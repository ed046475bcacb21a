"""Interpreters of their own, for the settings of a process."""

import json

from tests.conftest import printed
from tests.training.conftest import CARTPOLE, ROOT, make_spec


def spec_with(**determinism):
    return make_spec(CARTPOLE, determinism=determinism)


def run(interpreter, code, variables, *options, arguments=()):
    """Run code in an interpreter of its own; return what it printed, as JSON."""
    command = [interpreter, *options, "-c", code, *arguments]
    return json.loads(printed(command, {"PYTHONPATH": str(ROOT), **variables}))
