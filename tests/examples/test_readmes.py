"""Pages of examples, as their readers meet them: the commands are run, and print what is shown."""

import shutil

import pytest

from tests.docs.pages import DOCS, follow

EXAMPLES = DOCS.parent / "examples"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.xdist_group("programs"),
]


@pytest.mark.parametrize("example", ["multi-turn", "own-script"])
def test_the_commands_of_an_example_print_what_it_shows(tmp_path, monkeypatch, example):
    for variable in (
        "GIT_AUTHOR_NAME",
        "GIT_AUTHOR_EMAIL",
        "GIT_COMMITTER_NAME",
        "GIT_COMMITTER_EMAIL",
    ):
        monkeypatch.setenv(variable, "reader")
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder)
    follow(EXAMPLES / example / "README.md", folder)
