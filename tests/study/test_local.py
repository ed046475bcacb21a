"""Members on this machine."""

import pytest

from capsule.experiment.spec import CudaAccelerator
from capsule.host.errors import CapsuleError
from capsule.machine.devices import Device
from capsule.study import local
from capsule.study.local import Local
from capsule.study.running import MemberBatch


@pytest.mark.parametrize(
    ("chosen", "cores", "wanted", "notes"),
    [
        (None, 1, 8, []),
        (None, 3, 2, []),
        (None, 16, 1, []),
        (2, 4, 2, []),
        (
            3,
            3,
            3,
            ["3 members at a time need 9 cores (resources.cores: 3), and this machine has 8"],
        ),
        (
            9,
            4,
            9,
            ["4 members at a time need 16 cores (resources.cores: 4), and this machine has 8"],
        ),
    ],
)
def test_as_many_members_run_as_the_cores_of_the_study_allow(
    directory, monkeypatch, chosen, cores, wanted, notes
):
    ran = []
    monkeypatch.setattr(local, "run_locally", lambda *given: ran.append(given[1]))
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))
    resources = directory.lock.study.resources.model_copy(update={"cores": cores})
    study = directory.lock.study.model_copy(update={"resources": resources})
    directory.lock = directory.lock.model_copy(update={"study": study})
    names, said = [member.name for member in directory.lock.members], []
    Local(chosen, said.append).run(MemberBatch(directory, names, None), lambda: None)
    assert ran == [wanted]
    assert said == [f"  {note}" for note in notes]


H200 = [Device(index, str(index), f"GPU-{index}", "NVIDIA H200", "9.0", 3) for index in (0, 1)]
OTHER = Device(2, "2", "GPU-2", "NVIDIA L4", "8.9", 3)


@pytest.fixture
def on_gpus(directory, monkeypatch):
    """Return a function that runs members which need an H200, on a machine with these devices.

    It returns how many members run at a time, and on which GPUs.
    """
    cuda = CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9", driver=">=580", gpu="NVIDIA H200")
    specs = tuple(spec.model_copy(update={"accelerator": cuda}) for spec in directory.lock.specs)
    directory.lock = directory.lock.model_copy(update={"specs": specs})
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))

    def run(chosen, devices, visible=None):
        ran = []
        monkeypatch.setattr(local, "run_locally", lambda *given: ran.append((given[1], given[3])))
        monkeypatch.setattr(local, "read_devices", lambda _nvml: tuple(devices))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names = [member.name for member in directory.lock.members]
        Local(chosen).run(MemberBatch(directory, names, None), lambda: None)
        return ran[0]

    return run


def test_members_that_run_at_a_time_have_a_gpu_each(on_gpus):
    assert on_gpus(None, [*H200, OTHER]) == (2, ("GPU-0", "GPU-1"))
    assert on_gpus(2, [*H200, OTHER]) == (2, ("GPU-0", "GPU-1"))
    assert on_gpus(1, H200) == (1, ("GPU-0", "GPU-1"))
    assert on_gpus(None, H200, visible="GPU-1") == (1, ("GPU-1",))
    assert on_gpus(None, []) == (1, ())  # the engine may have one, or the member says what lacks


@pytest.mark.parametrize(
    ("chosen", "devices", "most"), [(3, [*H200, OTHER], 2), (2, H200[:1], 1), (2, [OTHER], 1)]
)
def test_more_members_than_gpus_are_refused(on_gpus, chosen, devices, most):
    with pytest.raises(CapsuleError, match="CAP-Y028") as refused:
        on_gpus(chosen, devices)
    assert f"--on local:{most}" in refused.value.fix
    suitable = sum(device in H200 for device in devices)
    visible = "1 suitable GPU is" if suitable == 1 else f"{suitable} suitable GPUs are"
    assert refused.value.message.endswith(f"each needs a GPU, and {visible} visible")
