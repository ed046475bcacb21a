"""How a spec says that networks are evaluated: what does not fit is refused and named."""

import re
from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec_file import load_spec

SPECS = Path(__file__).parents[2] / "specs"
MINATAR = ("environment={suite: minatar, game: breakout}", "trainer.network=small-conv")


def load(name, *overrides):
    return load_spec(SPECS / f"{name}.yaml", overrides)


@pytest.mark.parametrize("name", ["dqn-breakout-small", "r2d2-breakout-small"])
def test_q_values_are_not_sampled_from(name):
    with pytest.raises(CapsuleError) as caught:
        load(name, "evaluation.actions=sampled")
    algorithm = name.partition("-")[0]
    assert (
        f"evaluation.actions 'sampled' does not apply to trainer.algorithm {algorithm!r}, whose "
        "Q-values are no probabilities: use 'greedy'"
    ) in caught.value.message


def test_a_policy_is_sampled_from():
    assert load("impala-atari", "evaluation.actions=sampled").evaluation.actions == "sampled"


def test_an_action_sweep_needs_lives():
    assert load("dqn-breakout", "evaluation.action_sweep=true").evaluation.action_sweep
    with pytest.raises(CapsuleError) as caught:
        load("dqn-breakout-small", *MINATAR, "evaluation.action_sweep=true")
    assert "does not apply to environment.suite 'minatar'" in caught.value.message


def test_the_documented_command_is_the_papers_environment_group():
    """Nagarajan et al. 2019: p = 0.25, epsilon down to 0.01, no start sequences, own seeds."""
    text = (SPECS.parent / "docs" / "dqn.md").read_text()
    command = text[text.index("    capsule run specs/dqn-breakout.yaml --set") :].split("\n\n")[0]
    spec = load("dqn-breakout", *re.findall(r"--set (\S+)", command))
    assert spec.environment.sticky_action_probability == 0.25
    assert spec.trainer.exploration_final == 0.01
    assert (spec.evaluation.min_actions, spec.evaluation.max_actions) == (0, 0)
    assert spec.seeds.streams == {"environment": 1}
