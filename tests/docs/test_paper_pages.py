"""The commands of the pages on the papers, in their order, in a copy of the specs and examples.

The specs keep everything but the number of steps, of which a fifth is left, and the studies keep
one run of each setting. Benchmarks, which the pages name too, have tests of their own.
"""

import re
import shutil

import pytest

from tests.docs.pages import DOCS, FENCED, run
from tests.docs.paper_tables import PAPERS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.soak,
    pytest.mark.xdist_group("programs"),
]

ROOT = DOCS.parent
SHARE = 5
LEAST = {"replay_start": 640}  # a sequence of R2D2 for each of 32 actors
STEPS = re.compile(
    r"\b((?:total|exploration)_steps|replay_(?:start|capacity)"
    r"|(?:evaluation\.)?interval|(?:target|tensor|checkpoint)_interval"
    r"|trace_interval(?=: \d+_)): ([\d_]+)"  # a short one is that of updates already
)
RUNS = re.compile(r"\b(runs|count): \d+")
# Benchmarks and what they need; and a study with another build of torch, of three gigabytes.
ELSEWHERE = re.compile(r"pip |python |/tmp/other/|.*chen2022-small-2\.12\.yaml")


def smaller(text):
    """Return a spec or a study with fewer steps and runs."""
    text = STEPS.sub(fewer, text)
    text = RUNS.sub(r"\1: 1", text)
    if "capsule/study/v1" in text and not text.count("\nruns: 1\n"):
        text += "\nruns: 1\n"
    return text


def fewer(found):
    name, steps = found.groups()
    return f"{name}: {max(int(steps) // SHARE, LEAST.get(name, 0))}"


def script(page):
    """Return the commands of a page as a script that ends with the first one that fails."""
    lines = ["set -e"]
    for shown in FENCED.sub("", page.read_text()).replace("\\\n", " ").splitlines():
        if not shown.startswith("    ") or ELSEWHERE.match(shown.strip()):
            continue
        # The page shows runs that differ.
        differ = shown.strip().startswith(("capsule diff", "capsule diagnose"))
        lines.append(f"{shown} || [ $? -eq 1 ]" if differ else shown)
    return "\n".join(lines)


@pytest.mark.parametrize("page", sorted(PAPERS.glob("*.md")), ids=lambda page: page.stem)
def test_the_commands_of_a_page_succeed(page, tmp_path):
    for name in ("specs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.lock.json"))
    for path in (tmp_path / "specs").rglob("*.yaml"):
        path.write_text(smaller(path.read_text()))
    done = run(script(page), tmp_path)
    assert done.returncode == 0, done.stdout
