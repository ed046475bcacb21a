"""Kinds of machine: coarse, and the same for machines that compute alike."""

import pytest

from capsule.machine.fingerprint import Cpu, OperatingSystem
from capsule.machine.gpu import MigPart
from capsule.machine.kind import machine_kind
from tests.machine.test_compare import A100, CASCADE_LAKE, CUDA, H200, PORTABLE, ZEN3, machine


def test_a_kind_says_processor_system_and_engine():
    kind = machine_kind(machine(), PORTABLE)
    assert kind.processor == "GenuineIntel 6/85"
    assert kind.processor_name == CASCADE_LAKE.name
    assert (kind.gpu, kind.system, kind.engine) == (None, "debian 12", "docker")


def test_a_gpu_counts_where_one_trains():
    assert machine_kind(machine(gpus=(H200,)), CUDA).gpu == "NVIDIA H200 (9.0)"
    assert machine_kind(machine(gpus=(H200,)), PORTABLE).gpu is None
    part = MigPart(slot=0, name="NVIDIA H200 MIG 1g.18gb")
    divided = machine(gpus=(H200.model_copy(update={"mig_enabled": True, "part": part}),))
    assert machine_kind(divided, CUDA).gpu == "NVIDIA H200 MIG 1g.18gb (9.0)"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (machine(kernel="6.12.1", memory_bytes=1 << 36), True),
        (machine(CASCADE_LAKE.model_copy(update={"logical_cores": 96, "stepping": 5})), True),
        (machine(engine="podman"), True),
        (machine(gpus=(A100,)), False),
        (machine(ZEN3), False),
    ],
)
def test_machines_that_compute_alike_are_of_one_kind(other, same):
    gpu = other.gpus or (H200,)
    other = other.model_copy(update={"gpus": gpu})
    found = machine_kind(other, CUDA).key == machine_kind(machine(gpus=(H200,)), CUDA).key
    assert found == same


def test_what_a_machine_does_not_tell_is_unknown():
    kind = machine_kind(machine(Cpu(), engine=None, os=OperatingSystem()), PORTABLE)
    assert (kind.processor, kind.processor_name) == ("unknown ?/?", "unknown")
    assert (kind.system, kind.engine) == ("unknown", "process")
