"""The study spec: what is refused, where, and with which fix."""

import pytest
from pydantic import ValidationError

from capsule.host.errors import CapsuleError
from capsule.study.study_file import StudyFile
from tests.study.small_studies import BASE, STUDY, write
from tests.study.studies import make_file


def refused(tmp_path, study, code="CAP-S003"):
    with pytest.raises(CapsuleError) as caught:
        StudyFile.load(write(tmp_path, study))
    assert caught.value.code == code
    return caught.value


def with_group(text):
    return STUDY + f"  other: {text}\n"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            "{sample: {count: 2, fields: {trainer.learning_rate: {log_uniform: [0.1, 0.1]}}}}",
            "log_uniform: the range from 0.1 to 0.1 is empty",
        ),
        (
            "{sample: {count: 2, fields: {trainer.learning_rate: {uniform: [2, 1]}}}}",
            "uniform: the range from 2.0 to 1.0 is empty",
        ),
        (
            "{sample: {count: 2, fields: {trainer.learning_rate: {log_uniform: [0, 1]}}}}",
            "must be greater than 0, not 0",
        ),
        (
            "{sample: {count: 2, fields: {trainer.learning_rate: {normal: [0, 1]}}}}",
            "it has neither log_uniform nor uniform nor choice",
        ),
        (
            "{sample: {count: 2, fields: {trainer.learning_rate: 7}}}",
            "it has neither log_uniform nor uniform nor choice",
        ),
        (
            "{sample: {count: 2, fields: {trainer.learning_rate: {uniform: [1, 2], choice: [1]}}}}",
            "groups.other.sample.fields.trainer.learning_rate.choice is not a known key",
        ),
        ("{sample: {count: 0, fields: {seeds.root: {choice: [1]}}}}", "greater than 0, not 0"),
        ("{sample: {count: 2, fields: {}}}", "at least 1 item"),
        ("{sample: {count: 2, fields: {seeds.root: {choice: []}}}}", "at least 1 item"),
        ("{grid: {seeds.root: [1]}, settings: [{}]}", "grid and settings exclude each other"),
        (
            "{grid: {seeds.root: [1]}, sample: {count: 1, fields: {seeds.root: {choice: [1]}}}}",
            "grid and sample exclude each other",
        ),
        ("{grid: {}}", "at least 1 item"),
        ("{grid: {seeds.root: []}}", "at least 1 item"),
        ("{settings: []}", "at least 1 item"),
        ("{vary: [exploration, exploration]}", "vary names a stream twice: exploration"),
        ("{vary: [root, exploration]}", "'root' includes all other streams: name it alone"),
        ("{vary: [weather]}", "must be 'environment'"),
        ("{runs: 0}", "must be greater than 0, not 0"),
        ("{set: {seeds..root: 1}}", "seeds..root"),
        ("{set: {.root: 1}}", ".root"),
        ("{set: {Seeds.Root: 1}}", "Seeds.Root"),
        ("{overrides: {}}", "groups.other.overrides is not a known key"),
    ],
)
def test_a_wrong_group_is_refused_in_one_line_with_its_place(tmp_path, group, message):
    error = refused(tmp_path, with_group(group))
    assert message in error.message
    assert "tiny.yaml:8:" in error.message
    assert "groups.other" in error.message
    assert len(error.message.splitlines()) == 1


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("{set: FIELDS}", "1"),
        ("{settings: [FIELDS]}", "1"),
        ("{grid: FIELDS}", "[1]"),
        ("{sample: {count: 2, fields: FIELDS}}", "{choice: [1]}"),
    ],
)
def test_a_group_that_sets_more_fields_than_any_spec_has_is_refused(tmp_path, group, value):
    fields = ", ".join(f"trainer.x{number}: {value}" for number in range(501))
    error = refused(tmp_path, with_group(group.replace("FIELDS", f"{{{fields}}}")))
    assert "at most 500 items" in error.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  deterministic", "  de.terministic", "groups.de.terministic"),
        ("  deterministic", "  -d", "groups.-d"),
        ("  deterministic", f"  {'d' * 33}", "groups.ddd"),
        ("base: cart.yaml\n", "", "base is missing"),
        ("base: cart.yaml", "base: ''", "base: String should have at least 1 character"),
        ("base: cart.yaml", 'base: "cart\\0.yaml"', "base: has characters or a form"),
        ("base: cart.yaml", "base: cat.yaml", "base: 'cat.yaml' is not a file in"),
        ("base: cart.yaml", "base: .", "base: '.' is not a file in"),
        ("runs: 2", "runs: 2001", "runs: must be less than or equal to 2000, not 2001"),
        ("runs: 2", "seed: -1", "seed: must be greater than or equal to 0, not -1"),
        ("runs: 2", "resources: {gpus: 2}", "resources.gpus: must be less than"),
        ("name: tiny", "name: ../tiny", "name: has characters or a form"),
        ("study/v1", "study/v2", "schema: must be 'capsule/study/v1'"),
    ],
)
def test_a_wrong_field_of_the_study_is_refused(tmp_path, old, new, message):
    error = refused(tmp_path, STUDY.replace(old, new))
    assert message in error.message


def test_a_study_has_groups(tmp_path):
    head, _, _ = STUDY.partition("groups:")
    assert "groups is missing" in refused(tmp_path, head).message
    assert "groups: must have at least 1 item" in (refused(tmp_path, head + "groups: {}\n").message)


@pytest.mark.parametrize("text", ["", "[1, 2]", "tiny"])
def test_a_study_that_is_not_a_mapping_is_refused_as_a_study(tmp_path, text):
    error = refused(tmp_path, text, "CAP-S002")
    assert error.fix == "Write the study's name, its base and its groups."


def test_the_fix_of_a_name_or_of_the_place_of_a_score_shows_the_form(tmp_path):
    error = refused(tmp_path, STUDY.replace("  exploration:", "  Explo ration:"))
    assert "groups.Explo ration: has characters or a form" in error.message
    assert error.fix.startswith("Use at most 32 lower-case letters, digits and '-'")
    error = refused(tmp_path, "scores: {accuracy: metrics.json}\n" + STUDY)
    assert "scores.accuracy: has characters or a form" in error.message
    assert error.fix.startswith("Write NAME: PATH#POINTER, such as accuracy: results/metrics.json#")


@pytest.mark.parametrize(
    "name",
    [
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "a\x1b[2J",
        "a\u202eb",
        "a\nb",
        "a\u2028b",
        "\x9b1m",
        "x" * 101,
    ],
)
def test_the_name_of_a_score_is_text_in_a_terminal_and_in_a_spreadsheet(tmp_path, name):
    """The bundle of a study is printed as CSV, in which nothing is replaced."""
    with pytest.raises(ValidationError):
        make_file(scores={name: "metrics.json#/loss"})
    error = refused(tmp_path, 'scores: {"=1+1": "metrics.json#/loss"}\n' + STUDY)
    assert "does not begin with = + - or @" in error.fix
    make_file(scores={"Genauigkeit ü (%), 准确率": "metrics.json#/loss"})


def test_a_misspelt_key_is_suggested(tmp_path):
    error = refused(tmp_path, STUDY.replace("vary:", "varies:"))
    assert "groups.exploration.varies is not a known key" in error.message
    error = refused(tmp_path, STUDY.replace("runs: 2", "run: 2"))
    assert "Did you mean runs?" in error.fix


def test_numbers_that_no_document_can_hold_are_refused_when_they_are_read(tmp_path):
    huge = with_group("{sample: {count: 1, fields: {seeds.root: {choice: [9007199254740992]}}}}")
    assert "larger than 2^53 - 1" in refused(tmp_path, huge, "CAP-S002").message


def test_a_study_that_cannot_be_read_is_called_a_study(tmp_path):
    with pytest.raises(CapsuleError, match="cannot read study") as caught:
        StudyFile.load(tmp_path / "absent.yaml")
    assert caught.value.code == "CAP-S001"


def test_every_field_of_a_spec_can_be_set(tmp_path):
    study = STUDY + "set: {determinism.tf32: false, seeds.streams.minibatch: 3}\n"
    file = StudyFile.load(write(tmp_path, study, BASE))
    _, spec = next(file.member_specs(None))
    assert spec.seeds.streams == {"minibatch": 3}
