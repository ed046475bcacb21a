"""What is wrong with a spec, in words, and what to write instead."""

import json
import re

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError
from capsule.host.spec_file import parse_spec
from capsule.host.validation import first_reason, validate
from capsule.host.yaml_document import YamlDocument
from capsule.study.spec import StudySpec

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
            "Write 1_000_000, without a decimal point or an exponent.",
        ),
        (
            "algorithm: dqn",
            "algorithm: dqn, total_steps: true",
            "4:27: trainer.total_steps: must be a valid integer, not true",
            "Change trainer.total_steps.",
        ),
        (
            "algorithm: dqn",
            "algorithm: dqn, total_steps: null",
            "4:27: trainer.total_steps: must be a valid integer, not null",
            "Change trainer.total_steps.",
        ),
        (
            "algorithm: dqn",
            "algoritm: dqn",
            "4:1: trainer.algorithm is missing",
            "Write trainer.algorithm instead of trainer.algoritm.",
        ),
        (
            "name: tiny",
            "name: tiny\nimage: {python: 3.12}",
            "3:9: image.python: must be '3.11', '3.12' or '3.13', not 3.12",
            "Put image.python into quotation marks, without which YAML reads a number.",
        ),
        (
            "name: tiny",
            "name: tiny\nimage: {python: 2.7}",
            "3:9: image.python: must be '3.11', '3.12' or '3.13', not 2.7",
            "Change image.python.",
        ),
        (
            "name: tiny",
            "name: tiny\naccelerator: {device: cuda}",
            "3:15: accelerator.device is not a known key",
            "Did you mean accelerator.kind?",
        ),
        (
            "name: tiny",
            "name: tiny\naccelerator: {something_else: 1}",
            "3:15: accelerator.something_else is not a known key",
            "Known keys of accelerator: compute_capability, cuda, cuda_build, ",
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
            "name: tiny\ndata: {mnist.v1: {folder: x}}",
            "3:19: data.mnist.v1.folder is not a known key",
            "Known keys of data.mnist.v1: path, sha256, url.",
        ),
        (
            "name: tiny",
            "name: tiny\ndata: {d: {urll: x}}",
            "3:12: data.d.urll is not a known key",
            "Did you mean data.d.url?",
        ),
        (
            "name: tiny",
            "name: tiny\nurl: x",
            "3:1: url is not a known key",
            "Known keys of the spec: ",
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
        (
            "suite: minatar, game",
            "suite: gymnasium, id: CartPole-v1, game",
            "3:50: environment.game is not a known key here: it belongs to environment.suite",
            "Remove environment.game, or use environment.suite 'atari' or 'minatar'.",
        ),
        (
            "{algorithm",
            "{command: [a], algorithm",
            "4:25: trainer.algorithm is not a known key here: it excludes trainer.command",
            "Remove trainer.algorithm or trainer.command.",
        ),
        (
            "algorithm: dqn, network: small-conv",
            "command: [a], network: mlp",
            "4:25: trainer.network is not a known key here: it belongs to trainer.algorithm",
            "Remove trainer.network, or use trainer.algorithm 'dqn' or 'r2d2' or 'impala'.",
        ),
        (
            "algorithm: dqn",
            "algorithm: dqn, resumable: true",
            "4:27: trainer.resumable is not a known key here: it belongs to trainer.command",
            "Remove trainer.resumable, or use trainer.command.",
        ),
        (
            "algorithm: dqn, network: small-conv",
            "command: [a]",
            "3:1: environment does not apply to trainer.command",
            "Remove environment, or change trainer.command.",
        ),
        (
            "environment: {suite: minatar, game: breakout}\n",
            "",
            "1:1: the spec: environment is missing",
            "Add environment.",
        ),
        (
            "small-conv",
            "small-conv, replay_start: 2000, replay_capacity: 10",
            "4:48: trainer.replay_start 2000 exceeds replay_capacity 10",
            "Change trainer.replay_start or trainer.replay_capacity.",
        ),
        (
            "dqn, network: small-conv",
            "r2d2, network: small-conv, sequence_length: 3",
            "4:49: trainer.sequence_length 3 is not a multiple of sequence_stride 40",
            "Change trainer.sequence_length, or add trainer.sequence_stride.",
        ),
        (
            "name: tiny",
            "name: tiny\nevaluation: {starts: 5, shortlist: 3}",
            "3:14: evaluation.starts 5 <= shortlist 3 <= candidates 1000 does not hold",
            "Change evaluation.starts or evaluation.shortlist, or add evaluation.candidates.",
        ),
        (
            "name: tiny",
            "name: tiny\nevaluation: {tolerance: {}}",
            "3:14: evaluation.tolerance.relative: give either relative or absolute",
            "Add evaluation.tolerance.relative or evaluation.tolerance.absolute.",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_to_write(before, after, message, fix):
    with pytest.raises(CapsuleError) as caught:
        parse_spec(SPEC.replace(before, after).encode(), "s.yaml")
    assert f"s.yaml:{message}" in caught.value.message
    assert fix in caught.value.fix


def test_a_wrong_field_is_the_only_complaint_where_a_default_depends_on_it():
    with pytest.raises(CapsuleError) as caught:
        parse_spec(f"{SPEC}image: {{base: ubuntu}}\n".encode(), "s.yaml")
    assert caught.value.message == (
        "s.yaml:5:9: image.base: must be 'debian-12', 'debian-13' or 'ubuntu-24.04', not 'ubuntu'"
    )
    assert caught.value.fix == "Change image.base."


def test_a_number_in_quotation_marks_is_to_be_written_without_them():
    with pytest.raises(CapsuleError) as caught:
        parse_spec(SPEC.replace("dqn", 'dqn, total_steps: "1200"').encode(), "s.yaml")
    assert "trainer.total_steps: must be a valid integer, not '1200'" in caught.value.message
    assert caught.value.fix == "Write 1200 without quotation marks."


PROGRAM = "name: x\ntrainer: {command: [python, train.py]}\n"


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        (
            PROGRAM.replace("train.py", "train.py, 1"),
            "2:39: trainer.command.2: must be a valid string, not 1",
            "Put trainer.command.2 into quotation marks, without which YAML reads a number.",
        ),
        (
            f"{PROGRAM}image: {{packages: requirements.txt}}\n",
            "3:9: image.packages: must be a list, not 'requirements.txt'",
            "Write requirements of Python packages: numpy==2.4.6. Copy the lines of a requirements",
        ),
        (
            f"{PROGRAM}image: {{python: 3.11}}\n",
            "3:9: image.python: must be '3.11', '3.12' or '3.13', not 3.11",
            "Put image.python into quotation marks, without which YAML reads a number.",
        ),
        (
            f"{PROGRAM}entropy: {{supervised: off}}\n",
            "3:11: entropy.supervised: must be a valid boolean, not 'off'",
            "Write false, since YAML 1.2 has no other word for it.",
        ),
        (
            f"{PROGRAM}seeds.root: 1\n",
            "3:1: seeds.root is not a known key",
            "Write root as a key of the section seeds, since no key has a dot.",
        ),
        (
            f"{PROGRAM}seeds: {{root: '1_000'}}\n",
            "3:9: seeds.root: must be a valid integer, not '1_000'",
            "Write 1_000 without quotation marks.",
        ),
        (
            f"{PROGRAM}seeds: {{root: 1e300}}\n",
            "3:9: seeds.root: must be a valid integer, not 1e+300",
            "Change seeds.root.",
        ),
        (
            f"{PROGRAM}data: {{}}\n",
            "3:1: data: must have at least 1 item",
            "Change data.",
        ),
        (
            f"{PROGRAM}data: {{A B: {{path: x}}}}\n",
            "3:8: data.A B: has characters or a form that are not allowed, not 'A B'",
            "Use at most 64 lower-case letters",
        ),
        (
            f"{PROGRAM}data: {{a: {{path: x, sha256: {'AB' * 32}}}}}\n",
            "3:21: data.a.sha256: has characters or a form that are not allowed",
            "Write 64 hexadecimal digits, in lower case.",
        ),
        (
            PROGRAM.replace("]", "], outputs: ['!']"),
            "2:50: trainer.outputs.0: has characters or a form that are not allowed, not '!'",
            "Write patterns that are not empty, such as 'results/*' or '!*.log'.",
        ),
    ],
)
def test_of_a_value_that_is_nearly_right_the_only_complaint_says_how_to_write_it(
    text, message, fix
):
    with pytest.raises(CapsuleError) as caught:
        parse_spec(text.encode(), "s.yaml")
    assert caught.value.message.startswith(f"s.yaml:{message}")
    assert caught.value.message.count("\n") == 0
    assert caught.value.fix.startswith(fix)


def test_a_field_without_a_value_is_called_null_as_in_the_file():
    with pytest.raises(CapsuleError) as caught:
        parse_spec(b"seeds: {root: null}\n", "test")
    assert "seeds.root: must be a valid integer, not null" in caught.value.message


def test_a_list_with_too_few_valid_items_is_too_short():
    environment = "{suite: gymnasium, id: x, frames: image, images: [left]}"
    with pytest.raises(CapsuleError) as caught:
        parse_spec(SPEC.replace("{suite: minatar, game: breakout}", environment).encode(), "s")
    assert "environment.images: must have at least 2 items" in caught.value.message


@pytest.mark.parametrize(
    ("schema", "kind", "model", "command"),
    [
        ("capsule/study/v1", "spec", Spec, "capsule study run"),
        ("capsule/spec/v1", "study", StudySpec, "capsule run"),
    ],
)
def test_a_file_of_another_kind_is_the_only_complaint(schema, kind, model, command):
    text = f"# comment\nschema: {schema}\nname: x\nother: 1\n"
    with pytest.raises(CapsuleError) as caught:
        validate(YamlDocument(text.encode(), "f.yaml", kind), model)
    other = "study" if kind == "spec" else "spec"
    assert caught.value.message == f"f.yaml:2:1: schema: this is a {other}, not a {kind}"
    assert f"'{command}'" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (
            {
                "trainer": {"command": ["true"]},
                "environment": {"suite": "minatar", "game": "breakout"},
                "evaluation": {"starts": 3},
                "recording": {"trace_interval": 8},
                "seeds": {"streams": {"minibatch": 1}},
            },
            ["environment", "evaluation", "recording", "seeds.streams"],
        ),
        (
            {
                "trainer": {"algorithm": "dqn", "network": "mlp"},
                "environment": {"suite": "minatar", "game": "breakout"},
                "evaluation": {"actions": "sampled", "action_sweep": True, "interval": 1},
                "recording": {"trace_interval": 1},
                "code": {"path": "."},
            },
            [
                "code",
                "recording.trace_interval",
                "evaluation.interval",
                "trainer.network",
                "evaluation.actions",
                "evaluation.action_sweep",
            ],
        ),
        (
            {
                "trainer": {
                    "algorithm": "dqn",
                    "network": "small-conv",
                    "optimizer": "adam",
                    "gradient_momentum": 0.5,
                    "squared_gradient_momentum": 0.5,
                },
                "environment": {"suite": "minatar", "game": "breakout"},
            },
            ["trainer.gradient_momentum", "trainer.squared_gradient_momentum"],
        ),
    ],
    ids=["program", "algorithm", "optimizer"],
)
def test_all_sections_that_do_not_fit_are_reported_at_once(changes, fields):
    text = json.dumps({"schema": "capsule/spec/v1", "name": "x", **changes})
    with pytest.raises(CapsuleError) as caught:
        parse_spec(text.encode(), "s")
    lines = caught.value.message.splitlines()
    assert [re.match(r"s:1:\d+: ([a-z_.]+)", line)[1] for line in lines] == fields
    for field in fields:
        assert field in caught.value.fix


def test_the_first_reason_is_one_line_and_names_the_field_or_what_the_system_says():
    with pytest.raises(ValidationError) as caught:
        Spec.model_validate_json('{"name": "a", "seeds": {"root": 1.5, "leaf\\nfix: do this": 2}}')
    assert first_reason(caught.value) == "seeds.root: Input should be a valid integer"
    assert first_reason(FileNotFoundError(2, "No such file", "/a")) == "No such file"
    assert first_reason(ValueError("one\ntwo")) == "one"
    assert first_reason(ValueError()) == ""
