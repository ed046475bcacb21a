"""What ``capsule diff --bisect`` says of the machine before it executes a side."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.machine.gpu import RemappedRows
from capsule.verification import diff
from capsule.verification.analysis.runs import ComparedRun
from tests.machine.test_compare import A100, H200, machine
from tests.verification.runs import CARTPOLE, make_lock, merged

CUDA = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9.10", "driver": ">=580"}
RECORDED = machine(gpus=(H200,))
FAULTY = A100.model_copy(
    update={
        "remapped_rows": RemappedRows(correctable=0, uncorrectable=1, pending=True, failed=False)
    }
)


@pytest.fixture
def notes(monkeypatch, tmp_path):
    """Return what is said of a side that ran on an H200, before its image is made."""

    def stop(*_, **__):
        raise CapsuleError("CAP-E003", "nothing is executed in this test", fix="None.")

    def noted(gpu, accelerator=CUDA, recorded=RECORDED):
        said = []
        monkeypatch.setattr(diff, "open_engine", lambda *_, **__: SimpleNamespace(describe=dict))
        monkeypatch.setattr(diff, "take_fingerprint", lambda _: machine(gpus=(gpu,)))
        monkeypatch.setattr(diff.execution, "prepare", stop)
        lock = make_lock(merged(CARTPOLE, {"accelerator": accelerator}))
        side = ComparedRun("one", lock.spec, None, lock=lock, fingerprint=recorded)
        request = diff.DiffRequest(Path("a"), Path("b"), True, None, (), False, "docker")
        window = contract.DenseWindow(first=1, last=2)
        with pytest.raises(CapsuleError, match="CAP-V070"):
            diff._execute(request, None, SimpleNamespace(note=said.append), side, window, tmp_path)
        return said

    return noted


def test_another_gpu_than_that_of_the_run_is_named(notes):
    (note,) = notes(A100)
    assert note.startswith("one: the GPU of this machine may give other bits: gpu.name is NVIDIA A")
    assert notes(H200) == []
    assert notes(A100, recorded=None) == []  # a bare run directory


def test_faults_of_the_gpu_are_named_as_before_a_run(notes):
    assert ["may give wrong results" in note for note in notes(FAULTY)] == [True, False]


def test_a_run_on_the_processor_asks_for_no_gpu(notes):
    assert notes(FAULTY, accelerator={"kind": "cpu"}) == []
