"""docs/configuration.md lists the environment variables that the code names, and no others."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCED

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"(CAPSULE|XDG)_[A-Z_]+|(DOCKER|CONTAINER)_HOST")
LEVELS = re.compile(r"CAPSULE_REPRODUCED_[A-Z]+")  # of receipts, in the form that SLSA has


def variables_of(path):
    """Return the variables that a file of Python names in strings of their own."""
    constants = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
    texts = {constant.value for constant in constants if isinstance(constant.value, str)}
    return {text for text in texts if VARIABLE.fullmatch(text) and not LEVELS.fullmatch(text)}


@pytest.mark.slow
def test_every_variable_is_listed():
    named = set().union(*map(variables_of, (ROOT / "capsule").rglob("*.py")))
    page = FENCED.sub("", (ROOT / "docs" / "configuration.md").read_text())
    listed = {word for word in re.findall(r"`([^`]+)`", page) if VARIABLE.fullmatch(word)}
    assert listed == named
