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
from tests.training.conftest import CARTPOLE, make_spec

ROOT = Path(__file__).parents[3]
GPU = {"kind": "cuda", "cuda": ">=12", "cudnn": ">=9", "driver": ">=500"}
# The results of all matrix products are multiplied by a factor, which may change from call to call.
SCRIPT = """
import itertools, sys, torch
from capsule.experiment.errors import CapsuleError
from capsule.training.determinism.gpu_test import gpu_test
from tests.training import stand_in_device as place

execute = place._execute

def faulty(operator, args, kwargs):
    found = execute(operator, args, kwargs)
    if operator.overloadpacket is torch.ops.aten.addmm and isinstance(found, place.Elsewhere):
        found.inner.mul_(next(factors))
    return found

torch.set_num_threads(1)  # one thread more would be another order of sums
with place.stand_in_device():
    place._execute = faulty
    for case in sys.argv[1:]:
        values, repeats = case.rsplit(" ", 1)
        factors = eval(values)
        try:
            print(gpu_test(place.DEVICE, repeats=repeats == "repeats"))
        except CapsuleError as error:
            print(str(error).replace("\\n", " "))
"""
CASES = {
    "itertools.repeat(1.0) repeats": "as the CPU, with the same bits twice",
    "itertools.repeat(1.0) varies": "as the CPU",
    "itertools.repeat(1.1) repeats": "the losses of a training are",
    "itertools.repeat(float('nan')) repeats": "[nan, nan, nan]",
    "itertools.cycle([1.0, 1.0, 1.0, 1.0, 1.000001]) repeats": "has other bits",
    "itertools.cycle([1.0, 1.0, 1.0, 1.0, 1.000001]) varies": "as the CPU",
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

    monkeypatch.setattr(gpu_test, "convolutional", refuse)
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
    assert not flags.is_portable(make_spec(CARTPOLE, accelerator=GPU))
