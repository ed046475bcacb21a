"""torch's determinism flags: set, read back, and in effect."""

import json
import sys

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.training.determinism.torch_flags import TorchFlags, expect
from tests.training.conftest import CARTPOLE, make_spec, start_variables
from tests.training.determinism.conftest import run, spec_with
from tests.training.determinism.test_flags import CUDA

FLAGS = """
import json, sys, warnings
import torch
from capsule.training.determinism import child_processes, torch_flags

def put():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        except RuntimeError as error:
            return "error"
    return "warn" if warned else "off"

results = []
for determinism in json.loads(sys.argv[1]):
    flags = torch_flags.apply(torch_flags.TorchFlags.of(determinism))
    torch.zeros(4096)
    results.append([flags, put(), bool(torch.empty(4096).isnan().all())])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def flags():
    """Apply settings one after the other: what reads back, what put_ does, whether memory fills."""
    names = {
        "strict": {},
        "warn": {"algorithms": "warn"},
        "off": {"algorithms": "off"},
        "unfilled": {"fill_uninitialized_memory": False},
        "benchmark": {"cudnn_benchmark": True},
        "tf32": {"tf32": True},
        "two threads": {"threads": 2},
        "free": {"threads": None},
    }
    tried = [spec_with(**changes).determinism.model_dump() for changes in names.values()]
    variables = start_variables(spec_with(propagation=False))
    results = run(sys.executable, FLAGS, variables, arguments=[json.dumps(tried)])
    return dict(zip(names, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "put", "fills"),
    [
        ("strict", "2", "error", True),
        ("warn", "1", "warn", True),
        ("off", "0", "off", False),
        ("unfilled", "2", "error", False),
    ],
)
def test_a_nondeterministic_operator_fails_warns_or_runs(flags, name, mode, put, fills):
    read, did, filled = flags[name]
    assert read["torch.deterministic_debug_mode"] == mode
    assert read["torch.fill_uninitialized_memory"] == str(fills)
    assert (did, filled) == (put, fills)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("off", {"torch.cudnn.deterministic": "False"}),
        ("benchmark", {"torch.cudnn.benchmark": "True"}),
        (
            "tf32",
            {
                "torch.cuda.matmul.allow_tf32": "True",
                "torch.cuda.matmul.fp32_precision": "tf32",
                "torch.cudnn.allow_tf32": "True",
                "torch.cudnn.conv.fp32_precision": "tf32",
            },
        ),
    ],
)
@pytest.mark.slow
def test_flags_of_the_gpu_read_back_as_set(flags, name, changed):
    strict, weaker = flags["strict"][0], flags[name][0]
    assert strict.keys() == weaker.keys()
    assert {key: value for key, value in weaker.items() if value != strict[key]}.items() >= (
        changed.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "threads"), [("strict", "1"), ("two threads", "2"), ("free", "2")]
)
def test_the_number_of_threads_is_set_or_left_as_it_is(flags, name, threads):
    read, _, _ = flags[name]
    assert read["torch.num_threads"] == threads
    assert read["torch.num_interop_threads"] == "1"


@pytest.mark.slow
def test_denormals_and_the_precision_of_the_cpu_belong_to_no_switch(flags):
    for read, _, _ in flags.values():
        assert read["torch.flush_denormal"] == "False"
        for operators in ("conv", "matmul", "rnn"):
            assert read[f"torch.mkldnn.{operators}.fp32_precision"] == "ieee"
        assert read["torch.mkldnn.matmul.fp32_precision"] == "ieee"


def test_the_flags_are_taken_from_a_determinism_section():
    section = spec_with(threads=3, tf32=True).determinism.model_dump()
    assert TorchFlags.of(section) == TorchFlags(
        algorithms="error",
        fill_uninitialized_memory=True,
        cudnn_benchmark=False,
        tf32=True,
        threads=3,
    )
    del section["tf32"]
    with pytest.raises(KeyError, match="tf32"):
        TorchFlags.of(section)


def test_flags_that_took_effect_are_told_as_text():
    found = expect({"one": (1, 1), "off": (False, False), "none": (None, None)}, "torch")
    assert found == {"one": "1", "off": "False", "none": "absent"}
    assert expect({}, "torch") == {}


def test_the_first_flag_that_did_not_take_effect_is_named():
    flags = {"a": (1, 1), "b": ("AVX2", "AVX512"), "c": (None, True)}
    with pytest.raises(CapsuleError) as refused:
        expect(flags, "library")
    assert refused.value.code == "CAP-T104"
    assert refused.value.message == (
        "library flag b reads back as 'AVX2' after it was set to 'AVX512'"
    )
    assert "the spec pins" in refused.value.fix


GPU = """
import json, sys, warnings
import torch
from capsule.training.determinism import child_processes, torch_flags

def overwrite():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            x = torch.ones(4, device="cuda")
            x.put_(torch.zeros(2, dtype=torch.long, device="cuda"), torch.ones(2, device="cuda"))
        except RuntimeError:
            return "error"
    return "warn" if warned else "off"

factors = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).cuda()
results = []
for determinism in json.loads(sys.argv[1]):
    torch_flags.apply(torch_flags.TorchFlags.of(determinism))
    results.append([overwrite(), (factors @ factors).cpu().double().sum().item().hex()])
print(json.dumps(results))
"""


@pytest.mark.gpu
def test_on_a_gpu_the_flags_take_effect():
    settings = [{}, {"algorithms": "warn"}, {"algorithms": "off"}, {"tf32": True}]
    tried = [spec_with(**changes).determinism.model_dump() for changes in settings]
    spec = make_spec(CARTPOLE, accelerator=CUDA, determinism={"propagation": False})
    variables = start_variables(spec)
    del variables["NVIDIA_TF32_OVERRIDE"]  # it would overrule the flag that is tried here
    strict, warn, off, tf32 = run(sys.executable, GPU, variables, arguments=[json.dumps(tried)])
    assert [strict[0], warn[0], off[0]] == ["error", "warn", "off"]
    assert strict[1] == warn[1] == off[1] != tf32[1]
