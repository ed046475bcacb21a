"""What is wrong with a spec, in words, and what to write instead."""

import pytest

from capsule.host.errors import CapsuleError
from capsule.host.spec_file import parse_spec

SPEC = """\
schema: capsule/spec/v1
name: tiny
environment: {suite: minatar, game: breakout}
trainer: {algorithm: dqn, network: small-conv}
"""


@pytest.mark.parametrize(
    ("before", "after", "message", "fix"),
    [
        (
            "algorithm: dqn",
            "algorithm: ppo",
            "4:11: trainer.algorithm: must be one of 'dqn', 'r2d2', 'impala', not 'ppo'",
            "trainer.command",
        ),
        (
            "algorithm: dqn",
            "algorithm: dqn, total_steps: 1e6",
            "4:27: trainer.total_steps: must be a valid integer, not 1000000.0",
            "Write 1_000_000, since YAML reads 1e+06 as a floating-point number.",
        ),
        (
            "{algorithm: dqn, network: small-conv}",
            "{command: python -c 'a b'}",
            "4:11: trainer.command: must be a list, not \"python -c 'a b'\"",
            "Write trainer.command: [python, -c, a b]",
        ),
        (
            "name: tiny",
            "name: Tiny One",
            "2:1: name: has characters or a form that are not allowed, not 'Tiny One'",
            "Use at most 64 lower-case letters",
        ),
        (
            "algorithm: dqn",
            "algorithm: dqn, gamma: 0.9",
            "4:27: trainer.gamma is not a known key",
            "Did you mean trainer.discount?",
        ),
        (
            "name: tiny",
            "name: tiny\nseed: 3",
            "3:1: seed is not a known key",
            "Did you mean seeds.root?",
        ),
        (
            "small-conv",
            "nature",
            "4:27: trainer.network 'nature' does not fit environment.suite 'minatar'",
            "Change trainer.network or environment.suite.",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_to_write(before, after, message, fix):
    with pytest.raises(CapsuleError) as caught:
        parse_spec(SPEC.replace(before, after).encode(), "s.yaml")
    assert f"s.yaml:{message}" in caught.value.message
    assert fix in caught.value.fix
