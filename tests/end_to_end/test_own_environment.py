"""The environment and the network of one's own that docs/environments.md shows."""

import re

import pytest

from tests.end_to_end.conftest import ROOT, run

pytestmark = [pytest.mark.engine, pytest.mark.network]

SHORTER = (
    *("--set", "trainer.total_steps=400", "--set", "evaluation.interval=400"),
    *("--set", "recording.checkpoint_interval=400"),
)
PAGE = (ROOT / "docs" / "environments.md").read_text()


def shown(language, beginning):
    """Return the code block of the page that begins with a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(beginning)]
    return found


def test_it_is_learned_in_a_container_and_reproduced_under_bubblewrap(workplace, tmp_path):
    folder = workplace / "mine"
    (folder / "tree").mkdir(parents=True)
    (folder / "tree" / "mining.py").write_text(shown("python", "import gymnasium"))
    (folder / "capsule.yaml").write_text(shown("yaml", "schema: "))
    options = ("--engine", "docker", "--output", tmp_path, *SHORTER)
    made = run(workplace, *options, spec="mine/capsule.yaml")
    done = made.verify(made.bundle, "--engine", "bwrap", cwd=workplace)
    assert done.document["verdict"] == "reproduced-bitwise", done.errors
