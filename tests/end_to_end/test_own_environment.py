"""The environment and the network of one's own that docs/environments.md shows."""

import re

import pytest

from tests.end_to_end.conftest import ROOT, run

pytestmark = [pytest.mark.engine, pytest.mark.network]

PAGE = (ROOT / "docs" / "environments.md").read_text()


def shown(language, beginning):
    """Return the code block of the page that begins with a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(beginning)]
    return found


def test_it_is_learned_in_a_container_and_reproduced(workplace, tmp_path):
    folder = workplace / "mine"
    (folder / "tree").mkdir(parents=True)
    (folder / "tree" / "mining.py").write_text(shown("python", "import gymnasium"))
    (folder / "capsule.yaml").write_text(shown("yaml", "schema: "))
    made = run(workplace, "--output", tmp_path, spec="mine/capsule.yaml")
    done = made.verify(made.bundle, cwd=workplace)
    assert done.document["verdict"] == "reproduced-bitwise", done.errors
    again = run(workplace, "--output", tmp_path, "--engine", "bwrap", spec="mine/capsule.yaml")
    assert again.claim_id == made.claim_id
