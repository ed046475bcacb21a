"""The tutorials, as their readers meet them: the commands are run, and print what is shown."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"(?:as|Save this\nas) `([\w.]+)`")
ANYTHING = "…"

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def follow(folder):
    """Return a function that does what a page says: files are saved, and commands are run."""
    environment = {**os.environ, "CAPSULE_CONFIG": str(folder / "configuration"), "COLUMNS": "80"}

    def run(command):
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def follow_page(name):
        page = (TUTORIALS / name).read_text()
        for block in FENCED.finditer(page):
            if block[1] == "console":
                for command, shown in commands(block[2]):
                    done = run(command)
                    assert matches(shown, done.stdout), f"{command}\n{done.stdout}"
            else:
                before = page[: block.start()]
                (folder / SAVED.findall(before)[-1]).write_text(block[2])

    follow_page.run = run
    return follow_page


def commands(block):
    """Yield the commands of a console block, each with the output that is shown."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def matches(shown, printed):
    """Tell whether an output has the lines that are shown, in their order, with others between."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for wanted in shown.splitlines():
        if wanted == ANYTHING:
            continue
        pattern = ".*".join(map(re.escape, wanted.split(ANYTHING)))
        if not any(re.fullmatch(pattern, line) for line in lines):
            return False
    return True


def test_the_tutorial_for_authors(follow, folder):
    follow("author.md")
    (bundle,) = folder.glob("runs/*/*.capsule.tar")
    shutil.copy(bundle, folder / "run.capsule.tar")
    shutil.copy(folder / "configuration" / "key.pub", folder / "author.pub")


def test_the_tutorial_for_reviewers(follow, folder):
    assert follow.run("capsule keygen reviewer").returncode == 0
    follow("reviewer.md")
    assert (folder / "report.html").stat().st_size > 10_000


def test_the_tutorial_for_administrators_of_clusters(follow, folder):
    follow("cluster.md")
    (author,) = folder.glob("runs/*/*.capsule.tar")
    (cluster,) = folder.glob("cluster-runs/*/*.capsule.tar")
    assert author.name == cluster.name  # they have one claim id


def test_the_tutorial_for_implementers(follow):
    follow("implementer.md")


def test_what_is_not_printed_is_noticed():
    assert matches("a\n…\nc …\n", "a\nb\nc 1\n")
    assert not matches("a\nc\n", "a\nb\n")
    assert not matches("b\na\n", "a\nb\n")
