"""Specs that run a program of the user's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import without_sources
from capsule.experiment.patterns import chosen
from capsule.experiment.spec import CodeSpec, TrainingSpec, relaxations
from capsule.experiment.trainers import CommandTrainer
from capsule.experiment.variables import environment_variables
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
        ("environment={suite: atari, game: pong}", "environment does not apply to trainer.command"),
        ("evaluation.starts=3", "evaluation does not apply to trainer.command"),
        ("recording.trace_interval=8", "recording does not apply to trainer.command"),
        ("seeds.streams.minibatch=1", "seeds.streams does not apply to trainer.command"),
        ("trainer.command=[]", "trainer.command: Tuple should have at least 1 item"),
        ("trainer.command=['']", "trainer.command.0: String should have at least 1 character"),
        ("trainer.outputs=['!']", "trainer.outputs.0: has characters or a form"),
        ("trainer.output=['*']", "trainer.output is not a known key"),
        ("trainer.algorithm=dqn", "trainer.algorithm is not a known key"),
        ("trainer.resumable=true", "trainer.resumable needs standard_output: false"),
    ],
)
def test_what_does_not_apply_is_refused_and_named(override, message):
    assert message in refused(PROGRAM, override)


def test_a_trainer_of_capsules_own_needs_an_environment_and_no_code():
    assert "environment is missing" in refused(TRAINING.replace("environment:", "#"))
    assert "code is not used" in refused(TRAINING, "code={}")
    assert "trainer.algorithm is missing" in refused(TRAINING.replace("{algorithm: dqn}", "{}"))


def test_code_may_have_the_environment_of_a_trainer():
    own = TRAINING.replace("suite: atari, game: breakout", "suite: gymnasium, id: Mine-v0")
    own = own.replace("algorithm: dqn", "algorithm: dqn, network: mlp")
    assert "code is not used" in refused(own, "code={}")
    assert parse(own, "code={}", "environment.modules=[mine]").code == CodeSpec()


def test_a_training_spec_is_known_to_be_one():
    spec = parse(TRAINING).training()
    assert isinstance(spec, TrainingSpec)
    assert spec.model_dump(by_alias=True) == parse(TRAINING).model_dump(by_alias=True)
    with pytest.raises(TypeError):
        parse(PROGRAM).training()


def test_the_place_of_the_code_is_no_part_of_a_lock():
    spec = without_sources(parse(PROGRAM, "code.files=['*', '!data/*']"))
    assert spec.code == CodeSpec()


def test_what_is_not_claimed_is_a_relaxation():
    spec = parse(PROGRAM, "trainer.outputs=['*', '!*.log']", "trainer.standard_output=false")
    assert relaxations(spec) == ["trainer.outputs=!*.log", "trainer.standard_output=False"]


@pytest.mark.parametrize(
    ("patterns", "path", "expected"),
    [
        (["*"], "a/b/.c", True),
        (["*", "!*.log"], "a/b.log", False),
        (["*", "!data/*", "data/small.csv"], "data/small.csv", True),
        (["results/*"], "other", False),
        (["A"], "a", False),
    ],
)
def test_the_last_matching_pattern_decides(patterns, path, expected):
    assert chosen(path, patterns) is expected


@given(st.text(min_size=1), st.lists(st.text(min_size=2)))
def test_a_final_star_takes_everything_and_its_negation_nothing(path, patterns):
    assert chosen(path, [*patterns, "*"])
    assert not chosen(path, [*patterns, "!*"])


def test_only_trainers_of_our_own_have_the_c_library_keep_big_buffers():
    names = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert names <= environment_variables(parse(TRAINING)).keys()
    assert not names & environment_variables(parse(PROGRAM)).keys()
