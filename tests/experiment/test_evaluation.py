"""How a spec says that networks are evaluated: what does not fit is refused and named."""

import json
import re
from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.host.spec_file import load_spec, parse_spec

SPECS = Path(__file__).parents[2] / "specs"


def load(name, *overrides):
    return load_spec(SPECS / f"{name}.yaml", overrides)


def test_the_documented_command_is_the_papers_environment_group():
    """Nagarajan et al. 2019: p = 0.25, epsilon down to 0.01, no start sequences, own seeds."""
    text = (SPECS.parent / "docs" / "papers" / "nagarajan2019.md").read_text()
    command = text[text.index("runs/environment") :].split("\n\n")[0]
    options = re.findall(r"--set (\S+)", command.replace("$seed", "1"))
    spec = load("dqn-breakout", *options)
    assert spec.environment.sticky_action_probability == 0.25
    assert spec.trainer.exploration_final == 0.01
    assert (spec.evaluation.min_actions, spec.evaluation.max_actions) == (0, 0)
    assert spec.seeds.streams == {"environment": 1}


PINNED = {
    "schema": "capsule/starts/v1",
    "run": "a" * 64,
    "task": "breakout",
    "full_action_set": False,
    "candidates": 32,
    "shortlist": 16,
    "min_actions": 20,
    "max_actions": 60,
    "starts": [[0, 1, 2], [3], [], [1], [1, 1], [2], [0], [0, 0]],
}


@pytest.fixture
def pinned(tmp_path):
    """Load the small spec with a start set that is written beside it."""

    def load_pinned(*overrides, **changes):
        (tmp_path / "starts.json").write_text(json.dumps(PINNED | changes))
        path = tmp_path / "dqn-breakout-small.yaml"
        path.write_bytes((SPECS / path.name).read_bytes())
        return load_spec(path, ["evaluation.start_set=starts.json", *overrides])

    return load_pinned


def test_pinned_starts_are_part_of_the_spec(pinned):
    found = pinned().evaluation.start_set
    assert found.starts[:3] == ((0, 1, 2), (3,), ())
    assert pinned().digest() != pinned(starts=[[1]] * 8).digest()
    assert pinned().digest() != load("dqn-breakout-small").digest()


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        (
            {"candidates": 1000},
            [],
            "evaluation.candidates 32 is not the 1000 of start_set: write candidates: 1000",
        ),
        ({"max_actions": 95}, [], "max_actions 60 is not the 95 of start_set"),
        ({"starts": [[1]]}, [], "starts 8 is not the 1 of start_set: write starts: 1"),
        ({}, ["evaluation.noop_max=30"], "noop_max 30 is not the 0 of start_set"),
    ],
)
def test_pinned_starts_that_do_not_fit_are_refused(pinned, changes, overrides, message):
    with pytest.raises(CapsuleError) as caught:
        pinned(*overrides, **changes)
    assert caught.value.code == "CAP-S003"
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": []}, "starts.json: starts: Tuple should have at least 1 item"),
        ({"starts": [[-1]]}, "starts.0.0: Input should be greater than or equal to 0"),
        ({"run": "b"}, "run: String should match pattern"),
        ({"schema": "capsule/starts/v2"}, "schema: Input should be 'capsule/starts/v1'"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_no_start_set_is_refused(pinned, changes, message):
    with pytest.raises(CapsuleError) as caught:
        pinned(**changes)
    assert caught.value.code == "CAP-S010"
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file or directory"),
        (b"{", "Invalid JSON"),
        (b" " * (1 << 20) + b"{}", "is larger than 1 MiB"),
    ],
)
def test_a_start_set_that_cannot_be_read_is_refused(tmp_path, data, message):
    path = tmp_path / "set.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CapsuleError) as caught:
        load("dqn-breakout-small", f"evaluation.start_set={path}")
    assert caught.value.code == "CAP-S010"
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_a_spec_that_comes_from_no_folder_names_no_file():
    data = (SPECS / "dqn-breakout-small.yaml").read_bytes()
    with pytest.raises(CapsuleError, match=r"evaluation\.start_set: must be") as caught:
        parse_spec(data, "spec.yaml", ["evaluation.start_set=starts.json"])
    assert caught.value.code == "CAP-S003"
