"""The transcript of the README, with the identities of the image and of the claims."""

import pytest

from tests.docs.pages import DOCS, follow, run

ROOT = DOCS.parent


@pytest.mark.engine
@pytest.mark.network
@pytest.mark.soak
def test_its_commands_print_what_it_shows(tmp_path):
    """If an identity has changed, and was meant to, copy it into the README."""
    # In a clone, since a lock names the last commit of a program's files.
    for command in (f"git clone -q {ROOT} .", "mkdir .cache", "capsule keygen .cache/demo.key"):
        assert run(command, tmp_path).returncode == 0
    follow(ROOT / "README.md", tmp_path)
