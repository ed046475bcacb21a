"""A GPU's self-test, on a stand-in device that is sound, computes something else, or varies."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.checkup import gpu_check
from capsule.cli import main
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.machine.self_test import GpuSelfTest
from capsule.training.determinism import flags
from tests.training.conftest import ANY_GPU, CARTPOLE, make_spec

ROOT = Path(__file__).parents[3]
# Results of ``addmm`` are multiplied by factors, which may change from call to call, or every
# product rounds what it multiplies to the 11 bits of TensorFloat-32.
SCRIPT = """
import itertools, sys, torch
from torch.utils._pytree import tree_map_only
from capsule.experiment.errors import CapsuleError
from capsule.training.determinism.gpu_test import gpu_test
from tests.training import stand_in_device as place

aten = torch.ops.aten

execute = place._execute
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.convolution, aten.convolution_backward)

def tf32(value):
    # To the nearest number of 10 bits behind the leading one; ties away from zero, as cvt.rna.
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

def faulty(operator, args, kwargs):
    there = any(isinstance(each, place.Elsewhere) for each in args)
    if there and rounds and operator.overloadpacket in PRODUCTS:
        inner = [tf32(each.inner) if isinstance(each, place.Elsewhere) else each for each in args]
        return tree_map_only(torch.Tensor, place.Elsewhere, operator(*inner, **kwargs))
    found = execute(operator, args, kwargs)
    if operator.overloadpacket is aten.addmm and isinstance(found, place.Elsewhere):
        found.inner.mul_(next(factors))
    return found

torch.set_num_threads(1)  # one thread more would be another order of sums
with place.stand_in_device():
    place._execute = faulty
    for case in sys.argv[1:]:
        values, *options = case.split("; ")
        rounds, factors = values == "tf32", itertools.repeat(1.0)
        if not rounds:
            factors = eval(values)
        try:
            print(gpu_test(place.DEVICE, repeats="repeats" in options, tf32="tf32" in options))
        except CapsuleError as error:
            print(str(error).replace("\\n", " "))
"""
VARIES = "itertools.cycle([1.0] * 4 + [1.000001])"
CASES = {
    "itertools.repeat(1.0); repeats": "as the CPU, with the same bits twice",
    "itertools.repeat(1.0); repeats; tf32": "as the CPU, with the same bits twice",
    "itertools.repeat(1.0)": "as the CPU",
    "itertools.repeat(1.0005); repeats": "the losses of training.convolutional are",
    "itertools.repeat(float('nan')); repeats": "[nan, nan, nan]",
    f"{VARIES}; repeats": "has other bits",
    VARIES: "as the CPU",
    "tf32; repeats": "of integers of 12 bits is not exact",
    "tf32; repeats; tf32": "as the CPU, with the same bits twice",
}


@pytest.mark.slow
def test_what_a_device_computes():
    command = [sys.executable, "-c", SCRIPT, *CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, (case, found) in zip(done.stdout.splitlines(), CASES.items(), strict=True):
        assert found in line, case
        assert line.startswith("CAP-T110") is (found[:2] != "as"), case


@pytest.mark.slow
def test_an_older_torch_that_needs_a_workspace_says_so(monkeypatch):
    import torch

    from capsule.training.determinism import gpu_test

    def refuse():
        if torch.get_default_device().type == "meta":
            raise RuntimeError("you must set CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8")
        return [torch.ones(1)] * 8

    monkeypatch.setattr(gpu_test, "trainings", lambda: {"training": refuse})
    monkeypatch.setattr(gpu_test, "_test_integers", lambda *_, **__: None)
    with pytest.raises(CapsuleError) as failure:
        gpu_test.gpu_test(torch.device("meta"), repeats=True)
    assert failure.value.code == "CAP-T114"
    assert failure.value.exit_code == ExitCode.INCONCLUSIVE
    assert ":4096:8" in failure.value.fix


@pytest.mark.slow
def test_the_doctor_says_that_this_torch_has_no_gpu(tmp_path, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main.app, ["doctor", "--profile", "none", "--gpu"])
    assert done.exit_code == 4
    assert "problem    GPU numerics: CAP-T105" in done.output


def test_a_sound_gpu_is_described():
    document = (
        '{"gpu": "NVIDIA H200", "compute_capability": "9.0", '
        '"libraries": {"torch": "2.13.0"}, "found": "as the CPU, with the same bits twice"}'
    )
    check = gpu_check(GpuSelfTest.model_validate_json(document))
    assert check.status == "ok"
    assert check.found == (
        "NVIDIA H200 (9.0) computes as the CPU, with the same bits twice; torch 2.13.0"
    )


def test_a_run_on_a_gpu_is_not_resumed_on_another_whatever_its_cpu_promises():
    assert flags.is_portable(make_spec(CARTPOLE))
    assert not flags.is_portable(make_spec(CARTPOLE, accelerator=ANY_GPU))
