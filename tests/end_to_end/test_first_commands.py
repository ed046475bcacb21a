"""The first commands of a user, in an empty folder, as README has them."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import run

README = (Path(__file__).parents[2] / "README.md").read_text()
OWN_EXPERIMENT = README.partition("## Your own experiment")[2]
REPRODUCED = "reproduced-bitwise"

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.network]


@pytest.mark.engine
def test_the_commands_of_the_readme(tmp_path):
    block = re.search(r"(?:^    .+\n)+", OWN_EXPERIMENT, re.MULTILINE)[0]
    commands = [line.strip() for line in block.splitlines()]
    assert [line.split()[1] for line in commands] == [
        *("init", "schema", "lock", "build", "run", "verify")
    ]
    for command in commands:
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
    assert REPRODUCED in done.stdout


def test_four_words_are_enough_without_a_container_engine(tmp_path):
    settings = "--set trainer.total_steps=2_000 --set evaluation.interval=2_000"
    done = run(
        "capsule init && capsule plan > plan && "
        f"capsule run --engine process {settings} && "
        "capsule verify --engine process runs/*/*.capsule.tar",
        tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "made a signing key" in done.stdout
    assert REPRODUCED in done.stdout
