"""Specs that run a program of the user's own."""

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import relaxations
from capsule.experiment.trainers import CommandTrainer
from capsule.host.spec_file import parse_spec

PROGRAM = """\
schema: capsule/spec/v1
name: own
code: {path: program}
trainer:
  command: [python, train.py]
"""
TRAINING = """\
schema: capsule/spec/v1
name: dqn
environment: {suite: atari, game: breakout}
trainer: {algorithm: dqn}
"""


def parse(text, *overrides):
    return parse_spec(text.encode(), "spec.yaml", overrides)


def refused(text, *overrides):
    with pytest.raises(CapsuleError) as caught:
        parse(text, *overrides)
    assert caught.value.code == "CAP-S003"
    return caught.value.message


def test_a_program_needs_a_command_and_nothing_else():
    spec = parse("schema: capsule/spec/v1\nname: own\ntrainer: {command: [python, -c, pass]}\n")
    assert isinstance(spec.trainer, CommandTrainer)
    assert spec.trainer.outputs == ("*",)
    assert spec.code is None
    assert relaxations(spec) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.command=[]", "trainer.command: must have at least 1 item"),
        ("trainer.command=['']", "trainer.command.0: String should have at least 1 character"),
        ("trainer.outputs=['!']", "trainer.outputs.0: has characters or a form"),
        ("trainer.output=['*']", "trainer.output is not a known key"),
        ("trainer.algorithm=dqn", "trainer.algorithm is not a known key"),
        ("trainer.resumable=true", "trainer.resumable requires standard_output: false"),
    ],
)
def test_what_does_not_apply_is_refused_and_named(override, message):
    assert message in refused(PROGRAM, override)
