"""Reading specs: what is refused, where, and with which fix."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.fields import VersionConstraint
from capsule.experiment.spec import Spec
from capsule.host.spec_file import load_spec, parse_spec, schema_document
from capsule.host.validation import MAX_FINDINGS

SPECS = Path(__file__).parents[2] / "specs"
SMALL = (SPECS / "dqn-breakout-small.yaml").read_text()


def refused(text: str, *overrides: str) -> CapsuleError:
    with pytest.raises(CapsuleError) as caught:
        parse_spec(text.encode(), "spec.yaml", overrides)
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_specs_that_come_with_capsule_are_valid_and_named_after_their_file(path):
    assert load_spec(path).name == path.stem


def test_the_full_spec_is_the_protocol_of_the_papers():
    spec = load_spec(SPECS / "dqn-breakout.yaml")
    # Nagarajan et al. 2019: 20M steps, deterministic ALE, evaluation every 250K steps from 100
    # starts of 55 to 95 actions out of 1000 candidates, the best 250 of which are drawn from.
    assert spec.trainer.total_steps == 20_000_000
    assert spec.environment.sticky_action_probability == 0.0
    evaluation = spec.evaluation
    assert (evaluation.interval, evaluation.starts) == (250_000, 100)
    assert (evaluation.candidates, evaluation.shortlist) == (1000, 250)
    assert (evaluation.min_actions, evaluation.max_actions, evaluation.max_minutes) == (55, 95, 5.0)
    # Mnih et al. 2015, Extended Data Table 1.
    trainer = spec.trainer
    assert (trainer.batch_size, trainer.replay_capacity, trainer.replay_start) == (
        32,
        1_000_000,
        50_000,
    )
    assert (trainer.discount, trainer.update_interval, trainer.learning_rate) == (0.99, 4, 0.00025)
    # Both reference codes anneal over a million agent steps from the start of learning on.
    assert (trainer.exploration_initial, trainer.exploration_final) == (1.0, 0.1)
    assert trainer.exploration_steps == 1_000_000
    assert (trainer.gradient_momentum, trainer.squared_gradient_momentum) == (0.95, 0.95)
    assert trainer.min_squared_gradient == 0.01


@pytest.mark.parametrize(
    ("old", "new", "where", "message", "fix"),
    [
        (
            "total_steps: 8_000",
            "total_step: 8_000",
            "16:3",
            "trainer.total_step is not a known key",
            "Did you mean trainer.total_steps?",
        ),
        ("seeds:", "seed:", "6:1", "seed is not a known key", "Did you mean seeds?"),
        (
            "root: 1",
            "root: -1",
            "7:3",
            "seeds.root: must be greater than or equal to 0, not -1",
            "Change seeds.root.",
        ),
        (
            "replay_start: 2_000",
            "replay_start: '2000'",
            "18:3",
            "trainer.replay_start: must be a valid integer, not '2000'",
            "Write 2000 without quotation marks.",
        ),
        ("  game: breakout\n", "", "9:1", "environment.game is missing", "Add environment.game."),
        (
            "starts: 8",
            "starts: 64",
            "24:3",
            "evaluation.starts 64 <= shortlist 16 <= candidates 32 does not hold",
            "Change evaluation.starts or evaluation.shortlist or evaluation.candidates.",
        ),
    ],
)
def test_a_wrong_field_is_named_with_line_column_and_fix(old, new, where, message, fix):
    assert old in SMALL
    error = refused(SMALL.replace(old, new, 1))
    assert error.code == "CAP-S003"
    assert f"spec.yaml:{where}: {message}" in error.message
    assert fix in error.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL + "\nname: again\n", "key 'name' was already given at 4:1"),
        ("a: &x 1\nb: *x\n", "anchors and aliases are not allowed"),
        ("a: !!python/object:os.system 1", "is not allowed"),
        ("a: [1", "1:6"),
        ("", "the file is empty"),
        ("- 1", "the top level is not a mapping"),
        (SMALL.replace("root: 1", "root: .nan"), "'.nan' is not a finite number"),
        (SMALL.replace("root: 1", "root: 1e999"), "'1e999' is not a finite number"),
        (SMALL.replace("root: 1", "root: 01"), "'01' is not a number"),
        ("a:\n  b: !!bool yes\n", "spec.yaml:2:6: 'yes' (bool) is not allowed"),
        ("%YAML 1.1\n---\na: no\n", "spec.yaml:3:4: 'no' (bool) is not allowed"),
        ("a: !!null 5\n", "spec.yaml:1:4: '5' (null) is not allowed"),
        ("a: b\nc: d\x01\n", "spec.yaml:2:5: the character U+0001 is not allowed"),
        ('a: "\\ud83d"\n', r"spec.yaml:1:4: '\ud83d' has half of a surrogate pair"),
        ('a: b\n"\\ud83d": 1\n', r"spec.yaml:2:1: '\ud83d' has half of a surrogate pair"),
        (
            "a: " + "[" * 65 + "]" * 65,
            "spec.yaml:1:68: sections and lists are nested more than 64 deep",
        ),
        ("a: " + "[" * 4000, "spec.yaml: sections and lists are nested more than 64 deep"),
        (
            "a:\n  " + "- " * 4000 + "b\n",
            "spec.yaml: sections and lists are nested more than 64 deep",
        ),
        ("[" * 5000, "brackets"),
        ("? [a]\n: 1\n", "keys must be plain text"),
    ],
    ids=lambda text: text[-24:].replace("\n", " "),
)
def test_what_is_not_strict_yaml_is_refused(text, message):
    error = refused(text)
    assert error.code == "CAP-S002"
    assert message in error.message


def test_a_byte_that_is_not_utf_8_has_its_place():
    with pytest.raises(CapsuleError) as caught:
        parse_spec("name: x\n# café\n".encode("latin-1"), "spec.yaml")
    assert caught.value.message == "spec.yaml:2:6: the byte 0xe9 is not UTF-8"


def test_json_may_write_a_character_as_a_pair_of_surrogates():
    spec = {"name": "x", "trainer": {"command": ["echo", "\N{DRAGON}"]}}
    assert parse_spec(json.dumps(spec).encode(), "spec.json").trainer.command[1] == "\N{DRAGON}"


def test_tabs_are_to_be_replaced_by_spaces():
    error = refused("trainer:\n\talgorithm: dqn\n")
    assert error.message.startswith("spec.yaml:2:1: ")
    assert error.fix == "Indent with spaces instead of tabs."


def test_a_requirement_with_extras_needs_quotes_in_a_list_in_brackets():
    error = refused("image: {packages: [numpy, gymnasium[mujoco]==1.2.2]}\n")
    assert error.message.startswith("spec.yaml:1:36: ")
    assert "needs quotes: ['gymnasium[mujoco]']" in error.fix


def test_a_comment_may_stand_between_a_key_and_its_value():
    text = re.sub("name: (.*)", r"name: # after the key\n  \1\n", SMALL, count=1)
    assert parse_spec(text.encode(), "spec.yaml") == parse_spec(SMALL.encode(), "spec.yaml")


def test_all_findings_are_listed_at_once():
    error = refused(SMALL.replace("batch", "batsch").replace("8_000", "twelve"))
    assert error.message.count("\n") == 1  # total_steps and replay_capacity


def test_overrides_are_applied_and_checked_like_the_file():
    spec = parse_spec(SMALL.encode(), "spec.yaml", ["seeds.root=7", "seeds.streams.minibatch=9"])
    assert spec.seeds.root == 7
    assert spec.seeds.streams == {"minibatch": 9}
    assert refused(SMALL, "trainer.batch=3").message == ("--set: trainer.batch is not a known key")
    assert refused(SMALL, "nonsense").code == "CAP-S004"
    assert refused(SMALL, "name.x=1").code == "CAP-S004"


@pytest.mark.parametrize("value", ["1\nseeds.random: true", "1\nvalue2: 3", "1\n--- 2"])
def test_an_override_is_one_value(value):
    error = refused(SMALL, f"seeds.root={value}")
    assert error.code in ("CAP-S002", "CAP-S004")
    assert "seeds.root" in error.message


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CapsuleError, match=r"cannot read spec .*absent\.yaml: No such file"):
        load_spec(tmp_path / "absent.yaml")


def test_a_spec_survives_its_own_json():
    spec = parse_spec(SMALL.encode(), "spec.yaml")
    document = spec.model_dump(mode="json", by_alias=True)
    assert parse_spec(json.dumps(document).encode(), "spec.json") == spec


def test_the_schema_takes_the_path_of_a_start_set():
    schema = schema_document()["$defs"]["EvaluationSpec"]["properties"]["start_set"]
    assert {"type": "string"} in schema["anyOf"]


def test_the_schema_documents_every_field_of_the_trainer():
    schema = schema_document()
    assert schema["$defs"]["DqnTrainer"]["properties"]["discount"]["default"] == 0.99
    assert schema["additionalProperties"] is False


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_spec_or_a_coded_error(data):
    try:
        assert isinstance(parse_spec(data, "spec.yaml"), Spec)
    except CapsuleError as error:
        assert error.code in {"CAP-S002", "CAP-S003"}


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_mutated_spec_gives_a_spec_or_a_coded_error(data):
    text = SMALL.encode()
    position = data.draw(st.integers(0, len(text) - 1))
    mutated = text[:position] + data.draw(st.binary(min_size=0, max_size=4)) + text[position + 1 :]
    try:
        assert isinstance(parse_spec(mutated, "spec.yaml"), Spec)
    except CapsuleError as error:
        assert error.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("constraint", ["13.0", ">=580", "==12.8.*", ">=9.1,<10"])
def test_version_constraints(constraint):
    assert TypeAdapter(VersionConstraint).validate_python(constraint) == constraint


@pytest.mark.parametrize("constraint", ["", ">=580,x", "9..1", ">= 9", "9,", "latest", ">=9\n"])
def test_a_malformed_version_constraint_is_refused(constraint):
    with pytest.raises(ValidationError):
        TypeAdapter(VersionConstraint).validate_python(constraint)


@pytest.mark.parametrize(
    "text",
    [
        "a: 0x" + "f" * 5000,
        "a: " + "9" * 5000,
        "a: 9007199254740992",
        "a: -9007199254740992",
        "[" * 5000,
        "a: !!set {b, c}",
        "a: !!python/object/apply:os.system [id]",
        "a: !!python/none:null x",
        "!!omap [a: 1]",
    ],
)
def test_numbers_brackets_and_tags_that_no_spec_has(text):
    with pytest.raises(CapsuleError) as caught:
        parse_spec(text.encode(), "spec")
    assert caught.value.code == "CAP-S002"
    assert len(caught.value.message) < 200
    with pytest.raises(CapsuleError) as caught:
        parse_spec(b"a: 9007199254740991\nb: [[]]\nc: !!map {d: !!seq [1]}", "spec")
    assert caught.value.code == "CAP-S003"


@pytest.mark.slow
def test_of_ten_thousand_wrong_fields_the_first_are_explained():
    text = "".join(f"field{number}: 1\n" for number in range(10_000))
    with pytest.raises(CapsuleError) as caught:
        parse_spec(text.encode(), "spec")
    assert caught.value.message.count("\n") == MAX_FINDINGS - 1


MINIMAL_TRAINER = """\
schema: capsule/spec/v1
name: x
environment: {suite: atari, game: breakout}
trainer: TRAINER
"""


@pytest.mark.parametrize("value", ["text", "[1]", "3", "null"])
def test_a_trainer_that_is_no_mapping_is_refused_by_its_field(value):
    text = MINIMAL_TRAINER.replace("TRAINER", value)
    with pytest.raises(CapsuleError) as caught:
        parse_spec(text.encode(), "spec.yaml")
    assert "trainer" in caught.value.message


def test_only_relative_folders_of_wheels_are_taken_from_the_specs_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    links = ("wheels", "../up", "/absolute", "~/own", "https://pages.example/w", "file:///w")
    (tmp_path / "spec.yaml").write_text(SMALL)
    found = load_spec(
        tmp_path / "spec.yaml",
        [f"image.sources.find_links={json.dumps(links)}", "image.sources.index=https://i.example"],
    ).image.sources
    assert found.find_links == (
        f"{tmp_path}/wheels",
        f"{tmp_path}/../up",
        "/absolute",
        "/home/alice/own",
        "https://pages.example/w",
        "file:///w",
    )
    assert found.index == "https://i.example"


PROGRAM = """\
schema: capsule/spec/v1
name: a
image: {packages: []}
code: {path: .}
data: {d: {path: x}}
trainer: {command: [python, m.py]}
"""


@pytest.mark.parametrize(
    ("old", "new", "field", "said"),
    [
        ("path: x", "url: 'http://[x/y'", "data.d.url", "Invalid IPv6 URL"),
        ("path: x", "path: ~no-such-user/x", "data.d.path", "home directory"),
        ("path: x", 'path: "a\\0b"', "data.d.path", "NUL"),
        ("path: .", 'path: "a\\0b"', "code.path", "NUL"),
        *(
            ("[]", f"[], sources: {{{field}: ['{value}']}}", f"image.sources.{field}.0", said)
            for field, value, said in (
                ("find_links", "http://[x", "Invalid IPv6 URL"),
                ("find_links", "~no-such-user/x", "home"),
                ("debian", "http://[x", "Invalid IPv6 URL"),
                ("debian", "mirror.example/debian", "an address begins with https, http, file"),
                ("extra_indexes", "ftp://index.example", "an address begins with https"),
            )
        ),
        ("[]", "[], sources: {index: pypi.org/simple}", "image.sources.index", "begins with https"),
        ("[]", "[], sources: {index: ''}", "image.sources.index", "begins with https"),
    ],
)
def test_a_path_or_address_that_leads_nowhere_is_named(tmp_path, old, new, field, said):
    (tmp_path / "a.yaml").write_text(PROGRAM.replace(old, new))
    with pytest.raises(CapsuleError, match=said) as caught:
        load_spec(tmp_path / "a.yaml")
    assert caught.value.code == "CAP-S003"
    assert re.search(rf"a\.yaml:[0-9]+:[0-9]+: {re.escape(field)}: ", caught.value.message)
    assert caught.value.fix == f"Change {field}."


def test_the_spec_of_an_existing_lock_may_have_places_of_another_machine(tmp_path):
    """A verifier, who compares it with a bundle, need not know the home directory of its author."""
    text = PROGRAM.replace("[]", "[], sources: {find_links: [~no-such-user/wheels]}")
    for place in ("path: .", "path: x"):
        text = text.replace(place, "path: ~no-such-user/x")
    (tmp_path / "a.yaml").write_text(text)
    spec = load_spec(tmp_path / "a.yaml", for_lock=False)
    assert spec.code.path == spec.data["d"].path == "~no-such-user/x"
    assert spec.image.sources.find_links == ("~no-such-user/wheels",)


def test_an_override_that_is_not_utf_8_is_named():
    error = refused(SMALL, "name=\udcff")
    assert (error.code, error.message) == ("CAP-S004", r"override 'name=\udcff' is not UTF-8")
