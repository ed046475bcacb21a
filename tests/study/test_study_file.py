"""The specs of a study's members, and what is said of settings that give none."""

import json

import pytest

from capsule.experiment.evaluation import StartSet
from capsule.host.errors import CapsuleError
from capsule.study.study_file import StudyFile
from tests.study.small_studies import STUDY, write

STARTS = StartSet(
    run="0" * 64,
    task="CartPole-v1",
    full_action_set=False,
    candidates=2,
    shortlist=2,
    min_actions=0,
    max_actions=0,
    starts=((), ()),
)


def specs_of(tmp_path, study, starts=None):
    file = StudyFile.load(write(tmp_path, study))
    return {member.name: spec for member, spec in file.member_specs(starts)}


def refused(tmp_path, study, code="CAP-S003"):
    with pytest.raises(CapsuleError) as caught:
        specs_of(tmp_path, study)
    assert caught.value.code == code
    return caught.value


def with_group(text):
    return STUDY + f"  other: {text}\n"


def test_members_are_the_base_with_their_settings(tmp_path):
    study = with_group("{runs: 1, set: {trainer.discount: 0.5}, grid: {seeds.root: [4, 5]}}")
    specs = specs_of(tmp_path, study + "set: {trainer.learning_rate: 0.5}\n")
    assert {spec.trainer.learning_rate for spec in specs.values()} == {0.5}
    assert specs["deterministic.1"] is specs["deterministic.2"]
    assert specs["exploration.1"] != specs["exploration.2"]
    other = [specs["other.1.1"], specs["other.2.1"]]
    assert [(spec.trainer.discount, spec.seeds.root) for spec in other] == [(0.5, 4), (0.5, 5)]


def test_an_unknown_field_is_said_to_be_the_groups_and_is_suggested(tmp_path):
    error = refused(tmp_path, with_group("{set: {trainer.learningrate: 0.1}}"))
    assert "groups.other of tiny.yaml: trainer.learningrate is not a known key" in error.message
    assert error.fix == "Did you mean trainer.learning_rate?"


def test_a_wrong_value_is_said_to_be_the_groups(tmp_path):
    error = refused(tmp_path, with_group("{settings: [{seeds.root: 1}, {seeds.root: x}]}"))
    assert "groups.other of tiny.yaml: seeds.root: must be a valid integer" in error.message


def test_a_wrong_field_of_all_members_is_said_to_be_the_studys(tmp_path):
    error = refused(tmp_path, STUDY + "set: {trainer.learningrate: 0.1}\n")
    assert "set of tiny.yaml: trainer.learningrate is not a known key" in error.message


def test_a_wrong_field_of_a_section_is_said_to_be_the_groups(tmp_path):
    section = "{suite: gymnasium, id: 7}"  # 'id' has a line of its own in the base, too
    error = refused(tmp_path, with_group(f"{{set: {{environment: {section}}}}}"))
    assert "groups.other of tiny.yaml: environment.id: must be a valid string" in (error.message)


def test_settings_that_do_not_fit_one_another_are_said_to_be_the_groups(tmp_path):
    error = refused(tmp_path, with_group("{set: {trainer.total_steps: 1_023}}"))
    assert "groups.other of tiny.yaml: trainer.total_steps 1023 " in error.message
    error = refused(tmp_path, with_group("{set: {trainer.update_interval: 7}}"))
    assert "trainer.total_steps 1024 is not a multiple of update_interval 7" in error.message
    assert error.message.endswith("(with the settings of groups.other of tiny.yaml)")


def test_a_wrong_field_of_the_base_has_its_line(tmp_path):
    path = write(tmp_path, base="schema: capsule/spec/v1\nname: cart\nenvironments: {}\n")
    with pytest.raises(CapsuleError, match=r"cart\.yaml:3:1: environments is not a known key"):
        list(StudyFile.load(path).member_specs(None))


def test_a_setting_that_leads_into_a_value_is_refused(tmp_path):
    error = refused(tmp_path, with_group("{set: {name.first: x}}"), "CAP-S004")
    assert error.message == (
        "groups.other of tiny.yaml: 'name.first' leads into a value that is not a section"
    )


def test_a_number_that_no_whole_field_takes_is_refused(tmp_path):
    sample = "{count: 1, fields: {trainer.batch_size: {uniform: [1, 9]}}}"
    error = refused(tmp_path, with_group(f"{{sample: {sample}}}"))
    assert "groups.other of tiny.yaml: trainer.batch_size" in error.message


def test_a_section_precedes_its_fields_in_whatever_order_they_are_set(tmp_path):
    streams = "{exploration: 1}"
    study = with_group(f"{{set: {{seeds: {{streams: {streams}}}, seeds.root: 3}}}}")
    study += f"  reverse: {{set: {{seeds.root: 3, seeds: {{streams: {streams}}}}}}}\n"
    specs = specs_of(tmp_path, study)
    assert specs["other.1"] == specs["reverse.1"]
    assert specs["other.1"].seeds.root == 3
    assert specs["other.1"].seeds.streams == {"exploration": 1}


def test_all_members_have_the_start_sequences_of_the_study(tmp_path):
    specs = specs_of(tmp_path, with_group("{set: {evaluation.start_set: null}}"), STARTS)
    assert specs["deterministic.1"].evaluation.start_set == STARTS
    assert specs["other.1"].evaluation.start_set is None


def test_a_group_may_name_a_file_of_start_sequences_beside_the_base(tmp_path):
    write(tmp_path)
    (tmp_path / "own.json").write_text(json.dumps(STARTS.model_dump(mode="json", by_alias=True)))
    specs = specs_of(tmp_path, with_group("{set: {evaluation.start_set: own.json}}"))
    assert specs["other.1"].evaluation.start_set == STARTS
    refused(tmp_path, with_group("{set: {evaluation.start_set: absent.json}}"), "CAP-S010")


def test_the_run_that_ranks_start_sequences_has_settings_of_its_own(tmp_path):
    starts = "set: {trainer.discount: 0.5}\nstarts: {set: {seeds.root: 1000}}\n"
    file = StudyFile.load(write(tmp_path, STUDY + starts))
    spec = file.starts_spec()
    assert (spec.seeds.root, spec.trainer.discount) == (1000, 0.5)
    assert spec.evaluation.start_set is None
    with pytest.raises(CapsuleError, match="has no 'starts'") as caught:
        StudyFile.load(write(tmp_path)).starts_spec()
    assert caught.value.code == "CAP-Y002"


def test_the_base_is_found_beside_the_study_wherever_the_command_runs(tmp_path):
    path = write(tmp_path / "studies", STUDY.replace("cart.yaml", "../specs/base.yaml"))
    (tmp_path / "specs").mkdir()
    (tmp_path / "studies" / "cart.yaml").rename(tmp_path / "specs" / "base.yaml")
    file = StudyFile.load(path)
    assert file.folder.resolve() == tmp_path / "specs"
    assert file.base_lock.resolve() == tmp_path / "specs" / "base.lock.json"
    assert file.beside(".study.lock.json") == tmp_path / "studies" / "tiny.study.lock.json"
