"""The tutorials, as their readers meet them: the commands are run, and print what is shown."""

import pytest

from tests.docs import pages
from tests.docs.pages import follow, matches

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tutorial")


def test_the_tutorial_for_authors(folder):
    follow("tutorials/author.md", folder)


def test_the_tutorial_for_reviewers(folder):
    follow("tutorials/reviewer.md", folder)
    assert (folder / "report.html").stat().st_size > 10_000


def test_the_tutorial_for_administrators_of_clusters(folder):
    follow("tutorials/cluster.md", folder)
    (author,) = folder.glob("runs/*/*.capsule.tar")
    (cluster,) = folder.glob("cluster-runs/*/*.capsule.tar")
    assert author.name == cluster.name  # they have one claim id


def test_the_tutorial_for_implementers(folder):
    follow("tutorials/implementer.md", folder)


def test_what_is_not_printed_is_noticed():
    assert matches("a\n…\nc …\n", "a\nb\nc 1\n")
    assert not matches("a\nc\n", "a\nb\n")
    assert not matches("b\na\n", "a\nb\n")


@pytest.mark.parametrize("output", ["", "…\n"])
def test_a_command_that_fails_is_noticed(tmp_path, monkeypatch, output):
    (tmp_path / "page.md").write_text(f"```console\n$ echo no; false\n{output}```\n")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    with pytest.raises(AssertionError, match="echo no"):
        follow("page.md", tmp_path)
