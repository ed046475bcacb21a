"""Determinism flags: each in a fresh interpreter, as they must be there before it starts."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.variables import environment_variables
from capsule.machine.gpu import load_nvml, read_gpus
from capsule.training.determinism.flags import (
    _check_library,
    _requested_versions,
    check_architectures,
)
from tests.conftest import printed
from tests.training.conftest import (
    ANY_GPU,
    CARTPOLE,
    ROOT,
    finish_run,
    make_spec,
    new_run,
    read,
    start_run,
    start_variables,
)

CUDA = {
    "kind": "cuda",
    "cuda": "13.0",
    "cudnn": ">=9.10",
    "driver": ">=580.65",
    "gpu": "NVIDIA H200",
}


def python(code, spec, *options, **changes):
    """Run code in an interpreter with the spec's variables; ``spec`` is defined there."""
    variables = {**start_variables(spec), **changes}
    prelude = (
        "import sys\n"
        "from capsule.experiment.spec import Spec\n"
        "from capsule.experiment.errors import CapsuleError\n"
        "from capsule.training.determinism import flags\n"
        "spec = Spec.model_validate_json(sys.argv[1])\n"
    )
    return printed(
        [sys.executable, *options, "-c", prelude + code, spec.model_dump_json(by_alias=True)],
        {"PYTHONPATH": str(ROOT), **{k: v for k, v in variables.items() if v is not None}},
    )


REFUSAL = """
try:
    flags.{call}(spec)
    print("accepted")
except CapsuleError as error:
    print(error.exit_code.name, error)
"""


WRONG = {"PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "9", "ATEN_CPU_CAPABILITY": "avx512"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(environment_variables(make_spec(CARTPOLE))))
def test_a_missing_or_wrong_variable_is_named(name):
    value = WRONG.get(name)
    said = python(REFUSAL.format(call="prepare"), make_spec(CARTPOLE), **{name: value})
    assert said.startswith("TRAINING_FAILED CAP-T101")
    assert f"variable {name} is {value!r}" in said


def test_the_right_variables_are_accepted():
    spec = make_spec(CARTPOLE, determinism={"hash_seed": 42})
    assert python(REFUSAL.format(call="prepare"), spec) == "accepted\n"


def test_a_variable_set_after_the_start_does_not_count():
    code = "import os\nos.environ['MKL_CBWR'] = 'AVX2'\n" + REFUSAL.format(call="prepare")
    said = python(code, make_spec(CARTPOLE), MKL_CBWR=None)
    assert "CAP-T101" in said
    assert "MKL_CBWR is None" in said


def test_a_variable_changed_after_the_start_does_not_count():
    code = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n" + REFUSAL.format(call="prepare")
    assert "OMP_NUM_THREADS is '2'" in python(code, make_spec(CARTPOLE))


@pytest.mark.slow
def test_torch_must_not_be_there_yet():
    said = python("import torch\n" + REFUSAL.format(call="prepare"), make_spec(CARTPOLE))
    assert said.startswith("TRAINING_FAILED CAP-T102")


def test_an_interpreter_that_randomises_hashes_is_refused():
    said = python(REFUSAL.format(call="prepare"), make_spec(CARTPOLE), "-R")
    assert said.startswith("TRAINING_FAILED CAP-T102")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "flag"),
    [
        ("ATEN_CPU_CAPABILITY", "default", "torch.cpu_capability"),
        ("ONEDNN_MAX_CPU_ISA", "SSE41", "onednn.isa"),
        ("OPENBLAS_CORETYPE", "Nehalem", "openblas.core"),
        ("MKL_NUM_THREADS", "2", "mkl.threads"),
    ],
)
def test_a_flag_that_did_not_take_effect_stops_the_run(variable, value, flag):
    said = python(REFUSAL.format(call="apply"), make_spec(CARTPOLE), **{variable: value})
    if variable == "MKL_NUM_THREADS":  # torch.set_num_threads settles it for MKL, too
        assert said == "accepted\n"
    else:
        assert said.startswith("TRAINING_FAILED CAP-T104")
        assert flag in said


def test_a_program_on_a_gpu_needs_torch_which_checks_it():
    code = "import importlib.util\nimportlib.util.find_spec = lambda name: None\n"
    spec = make_spec(CARTPOLE, accelerator=CUDA)
    said = python(code + REFUSAL.format(call="apply"), spec)
    assert "CAP-T107 package 'torch' is not in the image" in said
    assert "accelerator.kind: cuda" in said


def test_a_package_that_its_marker_excludes_from_the_image_has_no_version():
    requirements = ["pytest>=8", "no-such-package; python_version < '3.11'", "numpy"]
    versions = _requested_versions(requirements)
    assert list(versions) == ["numpy", "pytest"]
    assert versions["pytest"] == pytest.__version__
    with pytest.raises(CapsuleError, match="CAP-T107 package 'no-such-package' is not in the"):
        _requested_versions(["no-such-package==1"])


def test_a_gpu_for_which_torch_has_no_code_is_refused_before_the_first_kernel():
    check_architectures(["sm_75", "sm_90"], "9.0", "NVIDIA H200")
    with pytest.raises(CapsuleError, match=r"CAP-T115 .*sm_75, sm_90.*Tesla V100.*7\.0") as refused:
        check_architectures(["sm_75", "sm_90"], "7.0", "Tesla V100")
    assert refused.value.exit_code == 4


@pytest.mark.slow
def test_what_was_read_back_is_recorded(cartpole_run):
    runtime = read(cartpole_run, contract.RUNTIME)
    flags = runtime["flags"]
    assert flags["torch.num_threads"] == flags["torch.num_interop_threads"] == "1"
    assert flags["torch.deterministic_debug_mode"] == "2"
    assert flags["torch.fill_uninitialized_memory"] == "True"
    assert flags["torch.cpu_capability"] == "AVX2"
    assert flags["onednn.isa"] == "Intel AVX2"
    assert flags["environment.PYTHONHASHSEED"] == "0"
    assert {"python", "torch", "numpy", "gymnasium", "safetensors"} == set(runtime["libraries"])
    assert runtime["device"]["kind"] == "cpu"


@pytest.mark.slow
def test_weaker_settings_take_effect_too():
    spec = make_spec(
        CARTPOLE,
        accelerator={"kind": "cpu", "numerics": "native"},
        determinism={"algorithms": "warn", "fill_uninitialized_memory": False, "tf32": True},
    )
    code = "import gc, json\nprint(json.dumps([flags.apply(spec).flags, gc.get_freeze_count()]))"
    flags, frozen = json.loads(python(code, spec))
    assert frozen > 100_000  # objects of torch, which the garbage collector visits no more
    assert flags["torch.deterministic_debug_mode"] == "1"
    assert flags["torch.fill_uninitialized_memory"] == "False"
    assert flags["torch.cuda.matmul.allow_tf32"] == "True"


@pytest.mark.slow
def test_a_missing_gpu_ends_the_run_with_its_own_status(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    directory = new_run(tmp_path / "gpu", make_spec(CARTPOLE, accelerator=CUDA))
    status, errors = finish_run(directory, warm=False)
    assert (status, read(directory, contract.FAILURE)["code"]) == (4, "CAP-T105")
    assert "CUDA" in errors
    assert not (directory / contract.RESULT).exists()


@pytest.mark.slow
def test_the_programme_needs_a_directory():
    for arguments in ([], ["/nonexistent"], [".", "."]):
        done = subprocess.run(
            [sys.executable, "-m", "capsule.training", *arguments], capture_output=True, cwd=ROOT
        )
        assert done.returncode == 2


def test_a_wrong_environment_is_a_documented_failure(tmp_path):
    spec = make_spec(CARTPOLE)
    directory = new_run(tmp_path / "run", spec)
    variables = {**start_variables(spec), "PYTHONHASHSEED": "1"}
    process = start_run(directory, environment=variables)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 6
    assert read(directory, contract.FAILURE)["code"] == "CAP-T101"
    assert "PYTHONHASHSEED is '1'" in errors


@pytest.mark.parametrize(
    ("constraint", "loaded", "reason"),
    [
        ("13.0", "13.0", None),
        (">=13.0.48", "13.0", None),
        ("13.0.96", "13.0", None),
        ("!=13.0.96", "13.0", "accelerator.cuda is !=13.0.96, the image brings 13.0.96"),
        ("13.0", "12.8", "the image brings nvidia-cuda-runtime 13.0.96, but torch reports 12.8"),
    ],
)
@pytest.mark.parametrize("wheel", ["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13"])
def test_a_library_is_checked_by_its_wheel_as_in_the_lock(
    monkeypatch, wheel, constraint, loaded, reason
):
    versions = {"numpy": "2.4.6", wheel: "13.0.96"}
    wheels = [SimpleNamespace(name=name, version=version) for name, version in versions.items()]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: wheels)
    if reason is None:
        _check_library("cuda", constraint, loaded, "nvidia-cuda-runtime")
        return
    with pytest.raises(CapsuleError, match=re.escape(reason)) as caught:
        _check_library("cuda", constraint, loaded, "nvidia-cuda-runtime")
    assert caught.value.code == "CAP-T106"


@pytest.mark.gpu
def test_the_gpu_is_described_and_its_libraries_named():
    spec = make_spec(CARTPOLE, accelerator=ANY_GPU)
    code = "import json\nprint(flags.apply(spec).model_dump_json())"
    runtime = json.loads(python(code, spec, LD_LIBRARY_PATH="", PATH="/usr/bin"))
    assert runtime["device"]["kind"] == "cuda"
    assert {"cuda", "cudnn", "cublas"} <= set(runtime["libraries"])
    assert runtime["libraries"]["cublas"] != "unknown"
    _, (gpu, *_) = read_gpus(load_nvml())
    assert runtime["device"]["uuid_sha256"] == gpu.uuid_sha256
    assert runtime["flags"]["numerics.gpu_self_test"] == "as the CPU, with the same bits twice"
