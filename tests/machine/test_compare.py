"""What differences between machines mean: every rule, from the fields to the expected grade."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule.experiment.errors import ExitCode
from capsule.experiment.spec import (
    CpuAccelerator,
    CudaAccelerator,
    DeterminismSpec,
    EntropySpec,
    GymnasiumEnvironment,
    LimitsSpec,
    Spec,
)
from capsule.experiment.trainers import DqnTrainer
from capsule.host.spec_file import load_spec
from capsule.machine.compare import compare, expected_grade, expected_of_unknown, gpu_difference
from capsule.machine.fingerprint import Cpu, Fingerprint, OperatingSystem, take_fingerprint
from capsule.machine.gpu import Driver, Gpu, MigPart, RemappedRows
from capsule.machine.requirements import check_requirements, gpu_warning, select_gpu

ROOT = Path(__file__).parents[2]
CASCADE_LAKE = Cpu(
    vendor="GenuineIntel",
    name="Intel(R) Xeon(R) Processor @ 2.50GHz",
    family=6,
    model=85,
    stepping=7,
    flags=("avx", "avx2", "avx512f", "f16c", "fma", "sse4_2"),
    logical_cores=2,
    caches={"L1d": 32768, "L3": 37486592},
)
HASWELL = CASCADE_LAKE.model_copy(
    update={
        "name": "Intel(R) Core(TM) i7-4770",
        "model": 60,
        "stepping": 3,
        "flags": ("avx", "avx2", "f16c", "fma", "sse4_2"),
        "logical_cores": 8,
        "caches": {"L1d": 32768, "L3": 8388608},
    }
)
NEHALEM = HASWELL.model_copy(update={"name": "Intel Core i7-920", "flags": ("sse4_2",)})
ZEN5 = CASCADE_LAKE.model_copy(
    update={"vendor": "AuthenticAMD", "name": "AMD EPYC 9755", "family": 26, "model": 2}
)
ZEN3 = ZEN5.model_copy(update={"name": "AMD EPYC 7763", "family": 25, "flags": HASWELL.flags})

H200 = Gpu(
    index=0,
    name="NVIDIA H200",
    architecture="hopper",
    compute_capability="9.0",
    cuda_cores=16896,
    mig_enabled=False,
    mig_devices=(),
    memory_bytes=150_754_820_096,
    vbios="96.00.BC.00.01",
    ecc_enabled=True,
    uuid_sha256="a" * 64,
)
A100 = H200.model_copy(
    update={
        "name": "NVIDIA A100-SXM4-80GB",
        "architecture": "ampere",
        "compute_capability": "8.0",
        "cuda_cores": 6912,
    }
)
PENDING = RemappedRows(correctable=0, uncorrectable=1, pending=True, failed=False)


def machine(cpu=CASCADE_LAKE, gpus=(), engine="docker", version="580.95.05", **changes):
    facts = {
        "cpu": cpu,
        "memory_bytes": 64 << 30,
        "kernel": "6.1.0",
        "os": OperatingSystem(id="debian", version_id="12"),
        "libc": "glibc 2.36",
        "engine": engine and {"name": engine, "version": "1"},
        "driver": Driver(nvml="loaded", version=version, cuda="13.0")
        if gpus
        else Driver(nvml="not found"),
        "gpus": gpus,
    }
    return Fingerprint(**facts | changes)


def spec(accelerator=None, **changes):
    return Spec(
        name="test",
        accelerator=accelerator or CpuAccelerator(),
        environment=GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1"),
        trainer=DqnTrainer(algorithm="dqn", network="mlp"),
        **changes,
    )


PORTABLE = spec()
NATIVE = spec(CpuAccelerator(numerics="native"))
CUDA = spec(CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9.10", driver=">=580.65"))
UNSORTED = spec(determinism=DeterminismSpec(sorted_listings=False))
CUDA_H200 = spec(
    CudaAccelerator(
        kind="cuda",
        cuda="13.0",
        cudnn=">=9.10",
        driver=">=580.65,<590",
        gpu="NVIDIA H200",
        compute_capability="9.0",
    )
)


def unmet(experiment, here, **wheels):
    """Check a machine against the lock of an experiment with these wheels."""
    locked = [SimpleNamespace(name=name, version=version) for name, version in wheels.items()]
    lock = SimpleNamespace(spec=experiment, image=SimpleNamespace(wheels=locked))
    return check_requirements(lock, here)


def effects(recorded, here, experiment):
    return {row.field: row.effect for row in compare(recorded, here, experiment)}


def grade(recorded, here, experiment):
    return expected_grade(compare(recorded, here, experiment))[0]


@pytest.mark.parametrize("experiment", [PORTABLE, NATIVE, CUDA, CUDA_H200])
def test_a_machine_equals_itself(experiment):
    same = machine(gpus=(H200,))
    assert set(effects(same, same, experiment).values()) == {"none"}
    assert grade(same, same, experiment) == "bitwise"
    assert unmet(experiment, same) == []


def test_the_real_machine_equals_itself():
    here = take_fingerprint({"name": "docker", "version": "20.10"})
    rows = compare(here, here, NATIVE.model_copy(update={"limits": LimitsSpec(memory_mb=1)}))
    assert {row.effect for row in rows} == {"none"}


@pytest.mark.parametrize(
    ("experiment", "here", "expected"),
    [
        (PORTABLE, machine(), "bitwise"),
        (PORTABLE, machine(engine="process"), "statistical"),  # this machine's C library
        (NATIVE, machine(), "statistical"),
        (CUDA, machine(gpus=(H200,)), "statistical"),
        (CUDA_H200, machine(gpus=(H200,)), "statistical"),  # other facts may differ
        (spec(determinism=DeterminismSpec(threads=None, cores=None)), machine(), "statistical"),
        (UNSORTED, machine(scratch="ext4"), "statistical"),
    ],
)
def test_what_is_expected_of_a_run_on_an_unknown_machine(experiment, here, expected):
    assert expected_of_unknown(here, experiment) == expected


@pytest.mark.parametrize(
    ("here", "portable", "native"),
    [
        (HASWELL, "bitwise", "statistical"),
        (ZEN5, "bitwise", "statistical"),  # the maths shim: vendors are alike
    ],
)
def test_another_processor_than_a_recorded_intel_one(here, portable, native):
    recorded, there = machine(CASCADE_LAKE), machine(here)
    assert grade(recorded, there, PORTABLE) == portable
    assert grade(recorded, there, NATIVE) == native


def test_functions_that_a_run_compiled_are_those_of_its_processor():
    """As the ledger says, with every profile; see capsule.entropy.rows.computing."""
    recorded, there = machine(CASCADE_LAKE), machine(HASWELL)
    rows = compare(recorded, there, PORTABLE, "jaxlib, numba")
    expected, reason = expected_grade(rows)
    assert expected == "statistical"
    assert "cpu.model: the functions of jaxlib, numba depend on the processor" in reason
    assert expected_grade(compare(recorded, recorded, PORTABLE, "numba"))[0] == "bitwise"


@pytest.mark.parametrize(
    ("change", "portable", "native"),
    [
        ({"logical_cores": 64}, "recorded-only", "recorded-only"),
        ({"usable_cores": 1}, "recorded-only", "recorded-only"),
        ({"stepping": 5}, "recorded-only", "recorded-only"),
        ({"name": "another"}, "recorded-only", "recorded-only"),
        ({"caches": {"L3": 1}}, "recorded-only", "may differ"),
        ({"model": 106}, "recorded-only", "may differ"),
        ({"flags": ("avx2", "fma")}, "recorded-only", "may differ"),
        ({"vendor": "AuthenticAMD"}, "recorded-only", "may differ"),
    ],
)
def test_each_fact_of_a_processor(change, portable, native):
    there = machine(CASCADE_LAKE.model_copy(update=change))
    (field,) = change
    assert effects(machine(), there, PORTABLE)[f"cpu.{field}"] == portable
    assert effects(machine(), there, NATIVE)[f"cpu.{field}"] == native
    assert effects(machine(), there, CUDA)[f"cpu.{field}"] == portable
    unpinned = CUDA.accelerator.model_copy(update={"numerics": "native"})
    found = effects(machine(), there, CUDA.model_copy(update={"accelerator": unpinned}))
    assert found[f"cpu.{field}"] == native


def test_a_processor_without_avx2_decides_nothing():
    here = machine(NEHALEM)
    (error,) = unmet(PORTABLE, here)
    assert (error.code, error.exit_code) == ("CAP-M004", ExitCode.INCONCLUSIVE)
    assert "avx2 and fma" in error.message
    rows = compare(machine(), here, PORTABLE)
    assert expected_grade(rows) == ("inconclusive", error.message)
    assert [row.field for row in rows if row.effect == "gate"] == ["cpu.flags"]
    # A difference is not needed: the recorded machine cannot have run it either.
    assert grade(here, here, PORTABLE) == "inconclusive"
    assert unmet(NATIVE, here) == []


def test_memory_below_the_limit_decides_nothing():
    nominal = 16_384 << 20
    assert unmet(PORTABLE, machine(memory_bytes=int(nominal * 0.95))) == []
    here = machine(memory_bytes=nominal // 2)
    (error,) = unmet(PORTABLE, here)
    assert (error.code, error.exit_code) == ("CAP-M005", ExitCode.INCONCLUSIVE)
    assert "8192 MiB" in error.message
    assert effects(machine(), here, PORTABLE)["memory_bytes"] == "gate"


def test_the_c_library_counts_only_outside_a_container():
    other = {"libc": "glibc 2.41"}
    assert effects(machine(), machine(**other), PORTABLE)["libc"] == "recorded-only"
    plain = machine(engine="process")
    assert effects(plain, machine(engine="process", **other), PORTABLE)["libc"] == "may differ"
    assert effects(machine(), plain, PORTABLE)["engine.name"] == "may differ"
    assert effects(machine(), machine(engine=None), PORTABLE)["engine.name"] == "may differ"
    assert effects(machine(), machine(engine="podman"), PORTABLE)["engine.name"] == "recorded-only"
    assert grade(machine(), machine(kernel="6.12.1", engine="podman"), PORTABLE) == "bitwise"


def test_a_missing_gpu_decides_nothing():
    recorded, here = machine(gpus=(H200,)), machine()
    (error,) = unmet(CUDA_H200, here)
    assert (error.code, error.exit_code) == ("CAP-M001", ExitCode.INCONCLUSIVE)
    assert "NVIDIA H200 with compute capability 9.0" in error.message
    assert error.message.endswith("this machine has none (there is no NVIDIA driver library)")
    (error,) = unmet(CUDA_H200, machine(driver=Driver(nvml="loaded")))
    assert error.message.endswith("this process sees none (NVML: loaded)")
    assert "CUDA_VISIBLE_DEVICES" in error.fix
    rows = {row.field: row for row in compare(recorded, here, CUDA_H200)}
    assert rows["gpu.name"].effect == "gate"
    assert (rows["gpu.name"].recorded, rows["gpu.name"].here) == ("NVIDIA H200", "none")
    assert grade(recorded, here, CUDA_H200) == "inconclusive"
    stopped = machine(driver=Driver(nvml="NVML_ERROR_LIB_RM_VERSION_MISMATCH"))
    assert "NVML_ERROR_LIB_RM_VERSION_MISMATCH" in unmet(CUDA, stopped)[0].message


def test_another_gpu_than_the_one_asked_for_decides_nothing():
    here = machine(gpus=(A100,))
    (error,) = unmet(CUDA_H200, here)
    assert (error.code, error.exit_code) == ("CAP-M002", ExitCode.INCONCLUSIVE)
    assert "NVIDIA A100-SXM4-80GB (8.0)" in error.message
    assert grade(machine(gpus=(H200,)), here, CUDA_H200) == "inconclusive"
    assert unmet(CUDA, here) == []
    assert grade(machine(gpus=(H200,)), here, CUDA) == "statistical"


def test_the_gpu_asked_for_is_found_among_others():
    both = machine(gpus=(A100, H200.model_copy(update={"index": 1})))
    assert select_gpu(both.gpus, CUDA_H200.accelerator).index == 1
    assert select_gpu(both.gpus, CUDA.accelerator).index == 0
    assert select_gpu(machine().gpus, CUDA.accelerator) is None
    for change in ({"name": "NVIDIA H100"}, {"compute_capability": "8.0"}):
        half = machine(gpus=(H200.model_copy(update=change),))
        assert select_gpu(half.gpus, CUDA_H200.accelerator) is None
    assert unmet(CUDA_H200, both) == []
    assert grade(machine(gpus=(H200,)), both, CUDA_H200) == "bitwise"


@pytest.mark.parametrize(
    ("change", "effect"),
    [
        ({"compute_capability": "10.0"}, "may differ"),
        ({"architecture": "blackwell"}, "may differ"),
        ({"cuda_cores": 14592}, "may differ"),
        ({"sm_count": 114}, "may differ"),
        ({"name": "NVIDIA H100"}, "may differ"),
        ({"memory_bytes": 80 << 30}, "may differ"),
        ({"memory_bytes": 300 << 30}, "recorded-only"),
        ({"vbios": "96.00.BC.00.02"}, "recorded-only"),
        ({"ecc_enabled": False}, "recorded-only"),
        ({"uncorrected_errors": 3}, "recorded-only"),
        ({"power_limit_milliwatts": 500_000}, "recorded-only"),
        ({"uuid_sha256": "b" * 64}, "recorded-only"),
        ({"remapped_rows": PENDING}, "recorded-only"),
    ],
)
def test_each_fact_of_a_gpu(change, effect):
    recorded, here = machine(gpus=(H200,)), machine(gpus=(H200.model_copy(update=change),))
    (field,) = change
    found = effects(recorded, here, CUDA)
    assert found.pop(f"gpu.{field}") == effect
    assert set(found.values()) == {"none"}
    assert grade(recorded, here, CUDA) == ("statistical" if effect == "may differ" else "bitwise")


def test_a_part_of_a_gpu_is_another_one_than_the_whole():
    part = {"mig_enabled": True, "mig_devices": ("NVIDIA H200 MIG 1g.18gb",)}
    recorded, here = machine(gpus=(H200,)), machine(gpus=(H200.model_copy(update=part),))
    assert effects(recorded, here, CUDA)["gpu.mig_enabled"] == "may differ"
    undivided = machine(gpus=(H200.model_copy(update={"mig_enabled": True, "mig_devices": ()}),))
    assert grade(recorded, undivided, CUDA) == "inconclusive"  # it gives nothing to runs


SMALL = MigPart(slot=1, name="NVIDIA H200 MIG 1g.18gb", sm_count=16, memory_bytes=16 << 30)


def divided(*names, part=None):
    changes = {"mig_enabled": True, "mig_devices": names, "part": part}
    return machine(gpus=(H200.model_copy(update=changes),))


@pytest.mark.parametrize(
    ("change", "field", "effect"),
    [
        ({"slot": 4}, "part", "none"),
        ({"name": "NVIDIA H200 MIG 3g.71gb"}, "part", "may differ"),
        ({"sm_count": 60}, "part.sm_count", "may differ"),
        ({"memory_bytes": 15 << 30}, "part.memory_bytes", "may differ"),
        ({"memory_bytes": 17 << 30}, "part.memory_bytes", "recorded-only"),
    ],
)
def test_parts_are_compared_and_not_what_else_the_gpu_is_divided_into(change, field, effect):
    recorded = divided(SMALL.name, "another", part=SMALL)
    found = effects(recorded, divided("others", part=SMALL.model_copy(update=change)), CUDA)
    assert found.pop(f"gpu.{field}") == effect
    assert set(found.values()) == {"none"}


def test_a_record_that_does_not_name_its_part_promises_nothing():
    recorded, here = divided(SMALL.name), divided(SMALL.name, part=SMALL)
    assert effects(recorded, here, CUDA)["gpu.part"] == "may differ"
    assert grade(recorded, recorded, CUDA) == "statistical"


def test_a_part_is_chosen_by_its_name():
    parts = tuple(
        H200.model_copy(update={"mig_enabled": True, "part": SMALL.model_copy(update=names)})
        for names in ({}, {"slot": 2, "name": "NVIDIA H200 MIG 3g.71gb"})
    )
    wanted = CUDA.accelerator.model_copy(update={"gpu": "NVIDIA H200 MIG 3g.71gb"})
    assert select_gpu(parts, wanted).part.slot == 2
    whole = CUDA.accelerator.model_copy(update={"gpu": "NVIDIA H200"})
    assert select_gpu(parts, whole) is None
    (error,) = unmet(CUDA.model_copy(update={"accelerator": whole}), machine(gpus=parts))
    assert "NVIDIA H200 MIG 1g.18gb (9.0), NVIDIA H200 MIG 3g.71gb (9.0)" in error.message


def test_a_run_is_warned_of_faults_of_the_gpu_that_it_gets():
    faulty = H200.model_copy(update={"remapped_rows": PENDING})
    other = A100.model_copy(update={"index": 1})
    assert "GPU 0 (NVIDIA H200)" in gpu_warning(CUDA_H200, machine(gpus=(faulty, other)))
    assert gpu_warning(PORTABLE, machine(gpus=(faulty, other))) is None
    assert gpu_warning(CUDA, machine(gpus=(other, faulty))) is None
    assert gpu_warning(CUDA, machine()) is None
    sound = PENDING.model_copy(update={"pending": False})  # one that is remapped is in order
    remapped = H200.model_copy(update={"remapped_rows": sound})
    assert gpu_warning(CUDA, machine(gpus=(remapped,))) is None


def test_the_difference_of_two_gpus_is_said_if_bits_may_change():
    recorded, here = machine(gpus=(H200,)), machine(gpus=(A100,))
    said = gpu_difference(recorded, here, CUDA)
    assert "gpu.compute_capability is 8.0 here and was 9.0 there" in said
    assert "cpu." not in said
    assert "gpu.name" in gpu_difference(recorded, machine(), CUDA)
    assert "gpu.name" in gpu_difference(recorded, here, CUDA_H200)
    another = H200.model_copy(update={"uuid_sha256": "b" * 64, "vbios": "other"})
    assert gpu_difference(recorded, machine(ZEN3, (another,)), CUDA) is None
    assert gpu_difference(recorded, here, PORTABLE) is None


def test_another_processor_beside_an_equal_gpu_matters_under_native_only():
    recorded, here = machine(CASCADE_LAKE, (H200,)), machine(ZEN3, (H200,))
    unpinned = CUDA.accelerator.model_copy(update={"numerics": "native"})
    assert CUDA.cpu_numerics == "portable-v3"
    assert grade(recorded, here, CUDA) == "bitwise"
    assert grade(recorded, here, CUDA.model_copy(update={"accelerator": unpinned})) == "statistical"


def test_the_shipped_cuda_spec_declares_a_tolerance():
    shipped = load_spec(ROOT / "specs" / "dqn-breakout-cuda.yaml", [])
    assert shipped.accelerator.kind == "cuda"
    assert shipped.evaluation.tolerance is not None


def test_a_gpu_that_says_nothing_is_not_called_equal():
    silent = machine(gpus=(Gpu(index=0, name="NVIDIA H200"),))
    found = effects(silent, silent, CUDA)
    assert found["gpu.compute_capability"] == found["gpu.cuda_cores"] == "may differ"
    assert grade(silent, silent, CUDA) == "statistical"


def test_gpus_do_not_matter_to_a_cpu_experiment():
    assert not any(
        field.startswith(("gpu", "driver"))
        for field in effects(machine(gpus=(H200,)), machine(), PORTABLE)
    )


@pytest.mark.parametrize(
    ("constraint", "version", "meets"),
    [
        (">=580.65", "580.65.06", True),
        (">=580.65", "575.57.08", False),
        (">=580.65,<590", "590.10", False),
        ("580", "580.95.05", True),
        ("580.65", "580.95.05", False),
        ("580.*", "580.95.05", True),
        ("==580.95.05", "580.95.05", True),
        (">=580.65", None, False),
        (">=580.65", "not a version", False),
    ],
)
def test_the_driver_constraint(constraint, version, meets):
    accelerator = CUDA.accelerator.model_copy(update={"driver": constraint})
    here = machine(gpus=(H200,), version=version)
    findings = unmet(CUDA.model_copy(update={"accelerator": accelerator}), here)
    assert [error.code for error in findings] == ([] if meets else ["CAP-M003"])
    assert all(constraint in error.message for error in findings)


def test_a_newer_driver_that_meets_the_constraint_is_recorded_only():
    recorded = machine(gpus=(H200,))
    here = machine(gpus=(H200,), version="600.10")
    assert effects(recorded, here, CUDA)["driver.version"] == "recorded-only"
    assert grade(recorded, here, CUDA) == "bitwise"
    assert effects(recorded, here, CUDA_H200)["driver.version"] == "gate"


def test_rows_are_documents():
    rows = compare(machine(), machine(ZEN5), PORTABLE)
    for row in rows:
        assert type(row).model_validate_json(row.model_dump_json()) == row
        assert row.reason
    assert [row.here for row in rows if row.field == "cpu.caches"] == ["L1d 32768, L3 37486592"]


# --- what the spec gave up ------------------------------------------------------------------------

RELAXATIONS = [
    (DeterminismSpec(hash_seed=None), "determinism.hash_seed"),
    (DeterminismSpec(algorithms="warn"), "determinism.algorithms"),
    (DeterminismSpec(cudnn_benchmark=True), "determinism.cudnn_benchmark"),
    (DeterminismSpec(cublas_workspace=None), "determinism.cublas_workspace"),
    (DeterminismSpec(batch_invariance=False), "determinism.batch_invariance"),
    (DeterminismSpec(request_seeds=False), "determinism.request_seeds"),
    (DeterminismSpec(deterministic_routing=False), "determinism.deterministic_routing"),
    (EntropySpec(mode="system"), "entropy.mode"),
    (EntropySpec(address_randomization=True), "entropy.address_randomization"),
]


@pytest.mark.parametrize(("section", "field"), RELAXATIONS)
def test_a_relaxed_run_need_not_repeat_its_bits_even_here(section, field):
    relaxed = CUDA.model_copy(update={field.partition(".")[0]: section})
    here = machine(gpus=(H200,))
    expected, reason = expected_grade(compare(here, here, relaxed))
    assert expected == "statistical"
    assert reason.startswith(f"{field}: ")
    without_gpu = relaxed.model_copy(update={"accelerator": PORTABLE.accelerator})
    of_cuda = field in ("determinism.cudnn_benchmark", "determinism.cublas_workspace")
    assert grade(here, here, without_gpu) == ("bitwise" if of_cuda else "statistical")


@pytest.mark.parametrize(
    "section",
    [
        DeterminismSpec(tf32=True),
        DeterminismSpec(cublas_workspace=":16:8"),
        DeterminismSpec(hash_seed=7),
        DeterminismSpec(threads=2),
        EntropySpec(mode="recorded"),
        EntropySpec(supervised=False),
    ],
)
def test_other_settings_are_not_known_to_change_a_bit(section):
    name = "entropy" if isinstance(section, EntropySpec) else "determinism"
    same = PORTABLE.model_copy(update={name: section})
    assert grade(machine(), machine(), same) == "bitwise"


def test_another_file_system_matters_where_listings_are_not_sorted():
    there = machine().model_copy(update={"scratch": "xfs"})
    unsorted = PORTABLE.model_copy(update={"determinism": DeterminismSpec(sorted_listings=False)})
    assert effects(machine(), there, PORTABLE)["scratch"] == "recorded-only"
    assert effects(machine(), there, unsorted)["scratch"] == "may differ"


def test_all_cores_are_other_sums_on_other_cores():
    free = PORTABLE.model_copy(update={"determinism": DeterminismSpec(threads=None, cores=None)})
    more = machine(CASCADE_LAKE.model_copy(update={"logical_cores": 64}))
    assert grade(machine(), machine(), free) == "bitwise"
    assert grade(machine(), more, free) == "statistical"
    assert grade(machine(), more, PORTABLE) == "bitwise"


V100 = H200.model_copy(update={"name": "Tesla V100", "compute_capability": "7.0"})


@pytest.mark.parametrize(
    ("gpu", "driver", "cuda", "codes"),
    [
        (H200, "580.95.05", "13.0.96", []),
        (H200, "575.57.08", "13.0.96", ["CAP-M010"]),
        (H200, "575.57.08", "12.8.90", []),
        (V100, "580.95.05", "12.6.77", []),
        (V100, "580.95.05", "13.0.96", ["CAP-M011"]),
        (V100, "470.57.02", "13.0.96", ["CAP-M010", "CAP-M011"]),
        (V100, "470.57.02", "99.0", []),  # nothing is known of that one
        (V100, "470.57.02", "1!13.0.96", []),
        (V100, "470.57.02", "v13.0.96", []),
        (V100, "470.57.02", "13rc1", []),
        pytest.param(V100, "470.57.02", "9" * 5_000, [], id="long"),
    ],
)
@pytest.mark.parametrize("wheel", ["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"])
def test_the_cuda_of_the_lock_against_driver_and_gpu(gpu, driver, cuda, codes, wheel):
    accelerator = CUDA.accelerator.model_copy(update={"driver": ">=450"})
    experiment = CUDA.model_copy(update={"accelerator": accelerator})
    found = unmet(experiment, machine(gpus=(gpu,), version=driver), **{wheel: cuda})
    assert [error.code for error in found] == codes
    assert all(cuda in error.message and error.exit_code == 4 for error in found)
    assert unmet(experiment, machine(gpus=(gpu,), version=driver)) == []  # no such wheel


@pytest.mark.parametrize(
    ("capability", "torch", "cuda", "runs"),
    [
        ("9.0", "2.13.0", "13.0.96", True),
        ("7.5", "2.13.0+cu130", "13.0.96", True),
        ("8.9", "2.13.0", "13.0.96", True),
        ("10.3", "2.13.0", "13.0.96", True),
        ("12.1", "2.13.0", "13.2.1", True),
        ("11.0", "2.13.0", "13.0.96", False),  # Thor has wheels for ARM only
        ("13.0", "2.13.0", "13.0.96", False),  # a later GPU, and no PTX to compile for it
        ("13.0", "2.13.0", "13.2.1", True),
        ("7.0", "2.13.0", "12.6.77", True),
        ("12.0", "2.13.0", "12.6.77", False),  # newer than all of its code
        ("7.0", "2.10.0", "12.8.90", True),
        ("7.0", "2.11.0", "12.8.90", False),
        ("6.1", "2.10.0", "12.8.90", False),
        ("6.1", "2.10.0", "12.6.77", True),
        ("12.0", "2.3.0", "12.1.105", True),  # of which nothing is known but its CUDA
        ("3.7", "2.3.0", "12.1.105", False),
    ],
)
def test_the_torch_of_the_lock_against_the_gpu(capability, torch, cuda, runs):
    gpu = H200.model_copy(update={"name": "A GPU", "compute_capability": capability})
    wheels = {"torch": torch, "nvidia-cuda-runtime": cuda}
    found = unmet(CUDA, machine(gpus=(gpu,)), **wheels)
    assert [error.code for error in found] == ([] if runs else ["CAP-M011"])
    assert all(capability in error.message for error in found)


def test_the_architectures_of_the_wheel_are_named():
    volta = H200.model_copy(update={"compute_capability": "7.0", "name": "Tesla V100"})
    wheels = {"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96"}
    (error,) = unmet(CUDA, machine(gpus=(volta,)), **wheels)
    assert "torch 2.13.0 for CUDA 13.0.96 with code for sm_75, sm_80, sm_86" in error.message
    assert "image.packages" in error.fix
