"""The spec as a document: its sections, its defaults, its identity and its canonical form."""

import hashlib
import json

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from capsule.experiment.spec import CodeSpec, CpuAccelerator, CudaAccelerator, Spec, TrainingSpec
from capsule.experiment.spec.document import MAX_DATA_SETS
from tests.experiment.specs import (
    ATARI,
    CARTPOLE,
    CUDA,
    DQN,
    IMPALA,
    PROGRAM,
    R2D2,
    make_spec,
    refusal,
)

DOCUMENTS = [DQN, R2D2, IMPALA, PROGRAM]
each_kind = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each["name"])


@each_kind
def test_a_spec_survives_its_own_document(document):
    spec = make_spec(document)
    assert Spec.parse(spec.document()) == spec
    facts = json.loads(spec.document())
    assert Spec.model_validate_json(json.dumps(facts)) == spec


@each_kind
def test_the_digest_is_that_of_the_canonical_document(document):
    spec = make_spec(document)
    assert spec.digest() == hashlib.sha256(rfc8785.dumps(json.loads(spec.document()))).hexdigest()


def test_a_default_that_is_spelled_out_changes_no_identity():
    spelled = make_spec(seeds={"root": 0}, entropy={"mode": "virtual"}, accelerator={"kind": "cpu"})
    assert spelled.digest() == make_spec().digest()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"image": {"debian": ["git"]}},
        {"accelerator": {"numerics": "portable-v2"}},
        {"accelerator": CUDA},
        {"determinism": {"cores": 2}},
        {"entropy": {"seed": 0}},
        {"seeds": {"streams": {"minibatch": 1}}},
        {"data": {"mnist": {}}},
        {"environment": {"id": "CartPole-v0"}},
        {"trainer": {"discount": 0.98}},
        {"evaluation": {"starts": 99}},
        {"recording": {"segment_states": True}},
        {"limits": {"minutes": 1}},
    ],
)
def test_every_section_is_part_of_the_identity(change):
    assert make_spec(**change).digest() != make_spec().digest()


def test_the_hardware_is_a_cpu_unless_another_kind_is_named():
    assert make_spec(accelerator={"numerics": "native"}).accelerator == CpuAccelerator(
        numerics="native"
    )
    assert isinstance(make_spec(accelerator=CUDA).accelerator, CudaAccelerator)
    assert "numerics" in refusal(accelerator={"numerics": "portable"})
    assert "'cpu', 'cuda'" in refusal(accelerator={"kind": "tpu"})
    assert "accelerator" in refusal(accelerator=None)


@pytest.mark.parametrize(
    ("accelerator", "numerics"),
    [({}, "portable-v3"), ({"numerics": "native"}, "native"), (CUDA, "portable-v3")],
)
def test_a_spec_has_one_profile_of_its_cpu(accelerator, numerics):
    assert make_spec(accelerator=accelerator).cpu_numerics == numerics


# ---- sections that belong together ----


def without(name):
    return {key: value for key, value in DQN.items() if key != name}


def test_a_trainer_of_capsules_own_needs_an_environment_and_no_code():
    assert "environment is missing" in refusal(without("environment"))
    assert "code is not used" in refusal(code={})
    assert "trainer.of an algorithm" in refusal(without("trainer"), trainer={"network": "mlp"})


def test_code_may_have_the_environment_of_a_trainer():
    assert make_spec(code={}, environment={"modules": ["mine"]}).code == CodeSpec()


def test_code_may_have_the_network_of_a_trainer():
    own = {"network": {"module": "nets:make"}}
    spec = make_spec(code={}, trainer=own, accelerator={"numerics": "native"})
    assert spec.code == CodeSpec()


def test_an_environment_of_another_suite_has_no_code():
    atari = {"environment": ATARI, "trainer": {"network": "nature"}}
    assert "code is not used: it is the source tree of trainer.command, of " in refusal(
        code={}, **atari
    )


def test_a_program_needs_no_code():
    document = {name: each for name, each in PROGRAM.items() if name != "code"}
    assert make_spec(document).code is None


@pytest.mark.parametrize("name", ["name", "trainer"])
def test_a_section_without_a_default_is_required(name):
    assert f"{name}\n  Field required" in refusal(without(name))


@pytest.mark.parametrize("schema", ["capsule/spec/v2", "", None])
def test_another_version_of_the_format_is_rejected(schema):
    assert "schema" in refusal(schema=schema)


@pytest.mark.parametrize("name", ["a", "a-b", "0.9_x", "a" * 64])
def test_names_that_fit_a_file(name):
    assert make_spec(name=name).name == name


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a/b", "a b", "é", "a" * 65, "a\n", ".a"])
def test_names_that_fit_no_file_are_rejected(name):
    assert "name\n" in refusal(name=name)


# ---- data sets ----


def test_a_spec_names_at_most_so_many_data_sets():
    sets = {f"set-{number}": {"path": "data"} for number in range(MAX_DATA_SETS)}
    assert len(make_spec(data=sets).data) == MAX_DATA_SETS
    assert "data" in refusal(data={**sets, "more": {}})
    assert "data" in refusal(data={})
    assert "data" in refusal(data={"A": {}})


def test_a_spec_without_data_keeps_the_document_that_it_had_before_data_sets():
    stored = make_spec().document()
    assert "data" not in json.loads(stored)
    assert Spec.parse(stored).data is None
    assert "data" in json.loads(make_spec(data={"a": {}}).document())


# ---- training ----


@pytest.mark.parametrize("document", [DQN, R2D2, IMPALA], ids=lambda each: each["name"])
def test_a_training_spec_is_known_to_be_one(document):
    spec = make_spec(document)
    training = spec.training()
    assert isinstance(training, TrainingSpec)
    assert training.model_dump(by_alias=True) == spec.model_dump(by_alias=True)
    assert (training.digest(), training.document()) == (spec.digest(), spec.document())
    assert training.trainer is spec.trainer


def test_a_program_has_no_training_spec():
    with pytest.raises(TypeError, match="the spec runs a command"):
        make_spec(PROGRAM).training()


@pytest.mark.parametrize("section", ["seeds", "trainer", "environment"])
def test_nothing_of_a_spec_can_be_changed(section):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(make_spec(), section, None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=50)
@given(st.sampled_from([*Spec.model_fields]), json_values)
def test_any_value_of_a_section_gives_a_spec_or_a_validation_error(name, value):
    key = Spec.model_fields[name].alias or name
    try:
        spec = Spec.model_validate_json(json.dumps({**DQN, "environment": CARTPOLE, key: value}))
    except ValidationError:
        return
    assert Spec.parse(spec.document()) == spec
