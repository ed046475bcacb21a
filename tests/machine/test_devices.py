"""Which GPU a run gets, asked through NVIDIA's own binding on machines that a stand-in plays."""

import pytest

from capsule.experiment.spec import CudaAccelerator
from capsule.host.errors import CapsuleError
from capsule.machine.devices import (
    Device,
    choose_devices,
    find_device,
    visible_devices,
)
from tests.machine.conftest import MACHINES

READ = """
import json
from capsule.machine.devices import read_devices
from capsule.machine.gpu import load_nvml
print(json.dumps(read_devices(load_nvml())))
"""
FIRST, SECOND = (device["uuid"] for device in MACHINES["two-equal"]["devices"])
BIG, SMALL = (part["uuid"] for part in MACHINES["a100-mig"]["devices"][0]["slots"].values())


@pytest.fixture
def devices(on_machine):
    return lambda name: tuple(Device(*facts) for facts in on_machine(name, READ))


def places(devices):
    return [device.place for device in devices]


def asked(**facts):
    return CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9", driver=">=580", **facts)


def test_each_gpu_is_a_device(devices):
    first, second = devices("two-different")
    assert first == Device(
        0,
        "0",
        "GPU-33333333-0000-4000-8000-000000000003",
        "NVIDIA GeForce RTX 4090",
        "8.9",
        2,
    )
    assert (second.gpu, second.place, second.name) == (1, "1", "NVIDIA H100 80GB HBM3")
    assert {device.among for device in devices("failing-handle")} == {2}


@pytest.mark.parametrize("name", ["a100-mig", "a100-mig-invalid-slots"])
def test_a_gpu_in_mig_mode_is_its_parts(devices, name):
    big, small = devices(name)
    assert (big.gpu, big.place, big.uuid) == (0, "0:1", BIG)
    assert (small.gpu, small.place, small.uuid) == (0, "0:2", SMALL)
    assert {big.compute_capability, small.compute_capability} == {"8.0"}


@pytest.mark.parametrize(
    ("name", "found"), [("failing-handle", ["1"]), ("lost-at-once", []), ("none", [])]
)
def test_a_gpu_that_does_not_answer_is_no_device(devices, name, found):
    assert places(devices(name)) == found


@pytest.mark.parametrize("name", ["no-driver", "mismatch", "no-count"])
def test_a_machine_without_a_working_driver_has_no_devices(devices, name):
    assert devices(name) == ()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        (" 0 , 1 ", ["0", "1"]),
        (SECOND, ["1"]),
        (SECOND[:-1], ["1"]),
        ("GPU-1111", []),  # both begin so
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["0"]),  # an invalid word hides what follows it
        ("0,0", []),  # of a repetition CUDA shows nothing at all
        ("0,1,0", []),
        (f"{FIRST},{FIRST}", []),
        (f"{FIRST},{FIRST[:-1]}", []),  # the same GPU by two of its names, of which one is invalid
        (f"0,{SECOND}", ["0"]),  # words of one kind only
        (f"{SECOND},0", ["1"]),
        ("0,-1,0", ["0"]),
        ("2", []),
    ],
)
def test_what_cuda_visible_devices_leaves(devices, value, found):
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert places(visible_devices(devices("two-equal"), variables)) == found


def test_an_index_among_different_models_is_refused_unless_the_order_is_known(devices):
    both = devices("two-different")
    with pytest.raises(CapsuleError, match="CAP-M008") as caught:
        visible_devices(both, {"CUDA_VISIBLE_DEVICES": "1"})
    assert caught.value.exit_code == 4
    ordered = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert places(visible_devices(both, ordered)) == ["1"]
    named = {"CUDA_VISIBLE_DEVICES": both[1].uuid}
    assert places(visible_devices(both, named)) == ["1"]


def test_a_part_is_visible_by_its_uuid_only(devices):
    parts = devices("a100-mig")
    assert places(visible_devices(parts, {"CUDA_VISIBLE_DEVICES": SMALL})) == ["0:2"]
    assert visible_devices(parts, {"CUDA_VISIBLE_DEVICES": "0"}) == ()


@pytest.mark.parametrize(
    ("name", "wanted", "place"),
    [
        ("two-equal", "1", "1"),
        ("two-equal", FIRST, "0"),
        ("a100-mig", "0:2", "0:2"),
        ("a100-mig", BIG, "0:1"),
    ],
)
def test_a_user_names_a_device_by_index_or_uuid(devices, name, wanted, place):
    assert find_device(devices(name), wanted).place == place


@pytest.mark.parametrize("wanted", ["2", "", "GPU-1111", "0:1", "h100"])
def test_a_name_of_no_device_or_of_several_is_refused(devices, wanted):
    with pytest.raises(CapsuleError, match=r"CAP-M009.*1 \(NVIDIA H100 80GB HBM3, GPU-1111") as e:
        find_device(devices("two-equal"), wanted)
    assert e.value.exit_code == 4


def test_the_first_device_that_the_spec_accepts_is_chosen(devices):
    both, parts = devices("two-different"), devices("a100-mig")
    for choice, accelerator, chosen in (
        (both, asked(), ["0"]),
        (both, asked(gpu="NVIDIA H100 80GB HBM3"), ["1"]),
        (both, asked(compute_capability="9.0"), ["1"]),
        (both, asked(gpu="NVIDIA H200"), []),
        (parts, asked(gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb"), ["0:2"]),
        (parts, asked(gpu="NVIDIA A100-SXM4-40GB"), []),
    ):
        assert places(choose_devices(choice, accelerator)) == chosen


FINGERPRINT = """
import json
from capsule.machine.fingerprint import take_fingerprint
from tests.machine.test_compare import unmet
from tests.machine.test_devices import asked, spec_of
here = take_fingerprint(None)
errors = [str(error) for error in unmet(spec_of(asked()), here)]
print(json.dumps([[gpu.index for gpu in here.gpus], errors]))
"""
PARTS = """
import json
from capsule.machine.requirements import select_gpu
from capsule.machine.fingerprint import take_fingerprint
from tests.machine.test_devices import asked
found = take_fingerprint(None).gpus
small = asked(gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
chosen = select_gpu(found, small)
parts = [gpu.part and gpu.part.model_dump() for gpu in found]
print(json.dumps([parts, chosen and chosen.part.slot]))
"""


CHOSEN = """
import json
from capsule.machine.requirements import select_gpu
from capsule.machine.devices import devices_for
from capsule.machine.fingerprint import take_fingerprint
from tests.machine.test_devices import asked
listed = take_fingerprint(None).gpus
(given,) = devices_for(asked())
print(json.dumps([[gpu.index for gpu in listed], select_gpu(listed, asked()).index, given.gpu]))
"""


@pytest.mark.parametrize("name", ["failing-handle", "failing-uuid"])
def test_the_gpu_of_a_fingerprint_is_the_one_that_a_run_gets(on_machine, name):
    assert on_machine(name, CHOSEN) == [[1, 0], 1, 1]


def spec_of(accelerator):
    from tests.machine.test_compare import CUDA

    return CUDA.model_copy(update={"accelerator": accelerator})


@pytest.mark.parametrize(
    ("name", "visible", "gpus", "code"),
    [
        ("two-equal", "1", [1], None),
        ("two-equal", f"{SECOND},{FIRST}", [1, 0], None),
        ("two-equal", "", [], "CAP-M001"),
        ("a100-mig", SMALL, [0], None),
        ("a100-mig", "0", [], "CAP-M001"),
        ("failing-handle", "1", [1], None),
        ("old-driver", "0", [0], "CAP-M003"),
    ],
)
def test_a_fingerprint_has_the_gpus_that_are_left_to_runs(on_machine, name, visible, gpus, code):
    found, unmet = on_machine(name, FINGERPRINT, CUDA_VISIBLE_DEVICES=visible)
    assert found == gpus
    assert [error.split()[0] for error in unmet] == ([] if code is None else [code])


LARGE_PART = {
    "slot": 1,
    "name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "sm_count": 42,
    "memory_bytes": 19_968 << 20,
}
SMALL_PART = {
    "slot": 2,
    "name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "sm_count": 14,
    "memory_bytes": 4_864 << 20,
}


@pytest.mark.parametrize(
    ("name", "visible", "parts", "slot"),
    [
        ("a100-mig", None, [LARGE_PART, SMALL_PART], 2),
        ("a100-mig", SMALL, [SMALL_PART], 2),
        ("a100-mig", BIG, [LARGE_PART], None),
        ("two-equal", None, [None, None], None),
        ("failing-handle", None, [None, None], None),
    ],
)
def test_a_fingerprint_has_the_parts_that_are_left_to_runs(on_machine, name, visible, parts, slot):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert on_machine(name, PARTS, **variables) == [parts, slot]


USE = """
import json, os, sys
from capsule.cli.common import use_gpu
from capsule.host.errors import CapsuleError
from capsule.machine.devices import devices_for
from tests.machine.test_devices import asked
try:
    use_gpu(os.environ.get("WANTED"))
    learners = int(os.environ.get("LEARNERS", "1"))
    print(json.dumps(",".join(device.uuid for device in devices_for(asked(), learners))))
except CapsuleError as error:
    print(json.dumps(error.code))
"""


@pytest.mark.parametrize(
    ("name", "variables", "found"),
    [
        ("two-equal", {}, FIRST),
        ("two-equal", {"WANTED": "1"}, SECOND),
        ("two-equal", {"WANTED": SECOND, "CUDA_VISIBLE_DEVICES": "0,1"}, SECOND),
        ("two-equal", {"WANTED": "1", "CUDA_VISIBLE_DEVICES": "0"}, "CAP-M009"),
        ("two-equal", {"CUDA_VISIBLE_DEVICES": ""}, "CAP-M002"),
        ("two-different", {"CUDA_VISIBLE_DEVICES": "0"}, "CAP-M008"),
        ("a100-mig", {"WANTED": "0:2"}, SMALL),
        ("two-equal", {"LEARNERS": "2"}, f"{FIRST},{SECOND}"),
        ("two-equal", {"LEARNERS": "3", "WANTED": "1,0"}, f"{FIRST},{SECOND}"),
        ("two-equal", {"LEARNERS": "2", "WANTED": "1"}, SECOND),
        ("a100-mig", {"LEARNERS": "2"}, BIG),  # CUDA shows a process one part only
        ("two-different", {"LEARNERS": "2"}, "GPU-33333333-0000-4000-8000-000000000003"),
        ("no-driver", {}, "0"),  # an engine elsewhere may have one
    ],
)
def test_a_run_gets_the_gpu_that_the_user_and_the_scheduler_leave_it(
    on_machine, name, variables, found
):
    assert on_machine(name, USE, **variables) == found
