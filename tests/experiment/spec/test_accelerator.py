"""The section ``accelerator``: kinds, versions, and fields that stored specs may leave out."""

import json

import pytest

from capsule.entropy.launch import launch_arguments
from capsule.experiment.canonical import canonical_json
from capsule.experiment.spec import CpuAccelerator, CudaAccelerator, Spec
from capsule.experiment.variables import environment_variables
from tests.experiment.specs import CUDA, DQN, make_spec, refusal


def stored(**accelerator):
    return make_spec(accelerator=accelerator).document()


def section(document):
    return json.loads(document)["accelerator"]


def test_a_lock_of_before_keeps_what_it_meant_and_its_identity():
    document = stored(**CUDA, numerics="native")
    assert "numerics" not in section(document)
    read = Spec.parse(document)
    assert (read.cpu_numerics, read.document()) == ("native", document)
    words = launch_arguments(read, native="/n", directory="/d", replay=False)
    assert not [word for word in words if "libcapsule-math" in word]
    settled = json.loads(environment_variables(read)["CAPSULE_DETERMINISM"])
    assert settled["numerics"] is None


def test_a_new_profile_is_stored():
    document = json.loads(stored(**CUDA))
    assert document["accelerator"]["numerics"] == "portable-v3"
    assert Spec.parse(canonical_json(document)).cpu_numerics == "portable-v3"


def test_graphs_are_left_out_of_a_document_unless_asked_for():
    assert "cuda_graphs" not in section(stored(**CUDA))
    asked = stored(**CUDA, cuda_graphs=True)
    assert section(asked)["cuda_graphs"] is True
    assert Spec.parse(asked).document() == asked


def test_a_build_for_cuda_is_left_out_of_a_document_unless_it_is_accepted():
    assert section(stored(kind="cpu")) == {"kind": "cpu", "numerics": "portable-v3"}
    accepted = stored(kind="cpu", cuda_build=True)
    assert section(accepted)["cuda_build"] is True
    assert Spec.parse(accepted).accelerator == CpuAccelerator(cuda_build=True)


def test_what_is_spelled_out_for_its_absence_is_no_stored_document():
    facts = json.loads(stored(**CUDA))
    facts["accelerator"]["cuda_graphs"] = False
    with pytest.raises(ValueError, match="contains a field whose value means its absence"):
        Spec.parse(canonical_json(facts))


@pytest.mark.parametrize("name", ["cuda", "cudnn", "driver"])
def test_a_gpu_run_pins_the_versions_that_it_needs(name):
    lacking = {key: value for key, value in CUDA.items() if key != name}
    assert f"accelerator.cuda.{name}\n  Field required" in refusal(accelerator=lacking)
    assert f"accelerator.cuda.{name}\n" in refusal(accelerator={**CUDA, name: "newest"})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("cpu", "cuda_graphs", True),
        ("cpu", "gpu", "NVIDIA H200"),
        ("cpu", "numerics", "portable-v4"),
        ("cpu", "cuda_build", 1),
        ("cuda", "cuda_build", True),
        ("cuda", "numerics", "portable"),
        ("cuda", "compute_capability", "9"),
        ("cuda", "compute_capability", "9.10"),
        ("cuda", "compute_capability", "sm_90"),
        ("cuda", "compute_capability", "9.0\n"),
    ],
)
def test_what_a_kind_does_not_have_is_rejected_by_its_field(kind, field, value):
    whole = CUDA if kind == "cuda" else {"kind": "cpu"}
    assert f"accelerator.{kind}.{field}\n" in refusal(DQN, accelerator={**whole, field: value})


@pytest.mark.parametrize("capability", ["9.0", "12.0", "0.1"])
def test_a_gpu_may_be_pinned_by_name_and_capability(capability):
    own = {**CUDA, "gpu": "NVIDIA H200", "compute_capability": capability}
    accelerator = make_spec(accelerator=own).accelerator
    assert isinstance(accelerator, CudaAccelerator)
    assert (accelerator.gpu, accelerator.compute_capability) == ("NVIDIA H200", capability)
    assert CudaAccelerator.parse(accelerator.document()) == accelerator


def test_without_a_name_any_gpu_will_do():
    accelerator = make_spec(accelerator=CUDA).accelerator
    assert (accelerator.gpu, accelerator.compute_capability) == (None, None)
