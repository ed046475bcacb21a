"""The effect of differences between two machines on a re-execution.

The rules follow measurements of CPU numerics and the guarantees of NVIDIA's libraries:

- The portable profiles hold every maths library to one code path on every x86-64 processor that has
  the instructions; ``docs/numerics.md`` has the proof and its limits. Under ``native`` each library
  chooses its code by the processor it finds.
- cuBLAS repeats its bits on GPUs of the same architecture with the same number of streaming
  multiprocessors; cuDNN does on the same architecture (their guides, "Reproducibility").

``docs/machine-fingerprint.md`` has the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.experiment.spec import CudaAccelerator, Spec, relaxations
from capsule.experiment.trainers import CommandTrainer
from capsule.machine.fingerprint import Cpu, Fingerprint
from capsule.machine.gpu import Gpu, MigPart
from capsule.machine.requirements import select_gpu, unmet_requirements

Effect = Literal["none", "recorded-only", "may differ", "gate"]
ExpectedGrade = Literal["bitwise", "statistical", "inconclusive"]
Rule = tuple[Effect, str]

_EQUAL: Rule = ("none", "equal")
_IRRELEVANT: Rule = ("recorded-only", "no influence on the bits")
_DISPATCH: Rule = ("may differ", "maths libraries choose their code by the processor")
_PINNED: Rule = ("recorded-only", "the numerics profile restricts the libraries to one code path")
_CACHES: Rule = ("may differ", "oneDNN chooses block sizes by the size of the caches")
_THREADS: Rule = ("recorded-only", "the spec fixes the number of maths threads")
_ALL_CORES: Rule = (
    "may differ",
    "determinism.threads is null, so sums are split by the number of cores",
)
_TOLD_CORES: Rule = ("recorded-only", "the spec fixes the number that programs see")
_ALL_TOLD: Rule = (
    "may differ",
    "determinism.cores is null, so programs see the machine's number",
)
_LISTED: Rule = (
    "recorded-only",
    "folders are listed in order; sizes of folders and inode numbers may matter to a program",
)
_UNSORTED: Rule = (
    "may differ",
    "determinism.sorted_listings is off, so folders are listed in the file system's order",
)
_ARRIVAL = "the answer to an actor may depend on the timing of others"
# Relaxations of the libraries of CUDA, which a run without a GPU does not use.
_OF_CUDA = ("determinism.cublas_workspace", "determinism.cudnn_benchmark")
# Relaxations with which a machine may not even repeat its own bits, and why. The others are not
# known to change one.
_RELAXED = {
    "determinism.algorithms": "operators without a fixed order of additions may be chosen",
    "determinism.batch_invariance": _ARRIVAL,
    "determinism.cublas_workspace": "cuBLAS may share workspaces between streams",
    "determinism.cudnn_benchmark": "cuDNN chooses its kernels by measured speed",
    "determinism.deterministic_routing": _ARRIVAL,
    "determinism.hash_seed": "the order of sets of strings varies",
    "determinism.request_seeds": _ARRIVAL,
    "entropy.clock": "a program that reads the time gets another one in each run",
    "entropy.address_randomization": "the addresses of objects vary",
    "entropy.mode": "the operating system's randomness varies",
}


class FactComparison(Model):
    """A fact of two machines, and the effect of its difference."""

    field: str
    recorded: str
    here: str
    effect: Effect = Field(
        description="Effect of the difference. 'gate': this machine cannot decide; 'may differ': "
        "the bits can be expected to differ; 'recorded-only': no known effect on the result; "
        "'none': the facts are equal."
    )
    reason: str


def compare(
    recorded: Fingerprint, here: Fingerprint, spec: Spec, compilers: str | None = None
) -> tuple[FactComparison, ...]:
    """Set the recorded machine beside this one, fact by fact.

    Args:
        recorded: The machine of the run.
        here: The machine that is to re-execute it.
        spec: The experiment; its accelerator decides which facts matter.
        compilers: Packages that the run imported and whose functions depend on the processor
            (:class:`~capsule.experiment.mechanisms.Interpreters`).
    """
    cpu_rows = _cpu_rows(recorded.cpu, here.cpu, spec, compilers)
    rows = [*cpu_rows, *_system_rows(recorded, here, spec)]
    if isinstance(spec.accelerator, CudaAccelerator):
        rows += _cuda_rows(recorded, here, spec.accelerator)
    rows += _relaxation_rows(spec)
    # A requirement that this machine fails outranks any difference, also between equal facts. Each
    # field that unmet_requirements() names has a row.
    gates = dict(unmet_requirements(spec, here))
    return tuple(
        row.model_copy(update={"effect": "gate", "reason": gates[row.field].message})
        if row.field in gates
        else row
        for row in rows
    )


def expected_grade(rows: Iterable[FactComparison]) -> tuple[ExpectedGrade, str]:
    """Say what a re-execution can be expected to give, and why."""
    rows = tuple(rows)
    gates = [row for row in rows if row.effect == "gate"]
    if gates:
        return "inconclusive", "; ".join(row.reason for row in gates)
    differing = [row for row in rows if row.effect == "may differ"]
    if differing:
        return "statistical", "; ".join(f"{row.field}: {row.reason}" for row in differing)
    return "bitwise", "no known difference between these machines affects the result"


def unrepeatable(spec: Spec) -> tuple[str, ...]:
    """Name each relaxation with which a machine may not repeat its own bits, and why."""
    return tuple(f"{row.field}: {row.reason}" for row in _relaxation_rows(spec))


def expected_of_unknown(
    here: Fingerprint, spec: Spec, compilers: str | None = None
) -> ExpectedGrade:
    """Say what a re-execution here can be expected to give of a run on a machine that is unknown.

    Args:
        here: The machine that re-executes it, in an engine of the same kind.
        spec: The experiment.
        compilers: As of :func:`compare`, of the re-execution.
    """
    # Every fact that matters may have been another one.
    unknown = here.model_copy(update={"cpu": Cpu(), "libc": None, "scratch": None, "gpus": ()})
    return expected_grade(compare(unknown, here, spec, compilers))[0]


def gpu_difference(recorded: Fingerprint, here: Fingerprint, spec: Spec) -> str | None:
    """Say how the GPU that a run would get differs from the recorded one, if bits may change."""
    rows = [
        row
        for row in compare(recorded, here, spec)
        if row.field.partition(".")[0] == "gpu" and row.effect in ("gate", "may differ")
    ]
    if not rows:
        return None
    facts = (f"{row.field} is {row.here} here and was {row.recorded} there" for row in rows)
    return f"the GPU of this machine may give other bits: {'; '.join(facts)}"


def _row(field: str, recorded: Any, here: Any, rule: Rule) -> FactComparison:
    """Build a row whose ``rule`` applies if the two values differ."""
    effect, reason = _EQUAL if recorded == here else rule
    return FactComparison(
        field=field, recorded=_shown(recorded), here=_shown(here), effect=effect, reason=reason
    )


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in sorted(value.items())) or "unknown"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return str(value)


# --- processor and system -----------------------------------------------------------------------


def _cpu_rows(
    recorded: Cpu, here: Cpu, spec: Spec, compilers: str | None
) -> Iterator[FactComparison]:
    pinned = spec.cpu_numerics != "native"
    code_path = _PINNED if pinned else _DISPATCH
    if compilers is not None:
        code_path = ("may differ", f"the functions of {compilers} depend on the processor")
    # Instructions that a profile needs and this machine lacks are a gate (unmet).
    for field in ("vendor", "family", "model", "flags"):
        yield _row(f"cpu.{field}", getattr(recorded, field), getattr(here, field), code_path)
    for field in ("name", "stepping"):
        yield _row(f"cpu.{field}", getattr(recorded, field), getattr(here, field), _IRRELEVANT)
    for field in ("logical_cores", "usable_cores"):
        yield _row(f"cpu.{field}", getattr(recorded, field), getattr(here, field), _cores(spec))
    yield _row("cpu.caches", recorded.caches, here.caches, _PINNED if pinned else _CACHES)


def _cores(spec: Spec) -> Rule:
    if spec.determinism.cores is not None:
        return _TOLD_CORES
    if isinstance(spec.trainer, CommandTrainer):
        return _ALL_TOLD
    return _THREADS if spec.determinism.threads is not None else _ALL_CORES


def _system_rows(recorded: Fingerprint, here: Fingerprint, spec: Spec) -> Iterator[FactComparison]:
    # One side outside of a container is enough: its C library was not that of the image.
    contained = _in_container(recorded) and _in_container(here)
    if contained:
        place: Rule = ("recorded-only", "the image brings its own C library and interpreter")
    else:
        place = ("may differ", "outside a container the host's C library is part of the numerics")
    yield _row("memory_bytes", recorded.memory_bytes, here.memory_bytes, _IRRELEVANT)
    yield _row("kernel", recorded.kernel, here.kernel, _IRRELEVANT)
    yield _row("os", recorded.os.title or None, here.os.title or None, _IRRELEVANT)
    yield _row(
        "scratch",
        recorded.scratch,
        here.scratch,
        _LISTED if spec.determinism.sorted_listings else _UNSORTED,
    )
    yield _row("libc", recorded.libc, here.libc, place)
    yield _row("engine.name", _engine(recorded, "name"), _engine(here, "name"), place)
    yield _row(
        "engine.version", _engine(recorded, "version"), _engine(here, "version"), _IRRELEVANT
    )


def _relaxation_rows(spec: Spec) -> Iterator[FactComparison]:
    """Yield the relaxations of the spec with which bits may differ even on the same machine."""
    on_gpu = isinstance(spec.accelerator, CudaAccelerator)
    for relaxation in relaxations(spec):
        field, _, value = relaxation.partition("=")
        if field in _RELAXED and (on_gpu or field not in _OF_CUDA):
            yield FactComparison(
                field=field, recorded=value, here=value, effect="may differ", reason=_RELAXED[field]
            )


def _in_container(machine: Fingerprint) -> bool:
    return _engine(machine, "name") not in (None, "process")


def _engine(machine: Fingerprint, fact: str) -> str | None:
    return (machine.engine or {}).get(fact)


# --- GPU ----------------------------------------------------------------------------------------

_GPU_KERNELS: Rule = ("may differ", "other kernels are chosen; no library promises equal bits")
_GPU_SHAPE: Rule = (
    "may differ",
    "cuBLAS and the CUDA random generators depend on the number of multiprocessors",
)
_GPU_HEALTH: Rule = ("recorded-only", "no influence while healthy; errors explain corruption")
_DRIVER: Rule = (
    "recorded-only",
    "the image brings the kernels; a driver matters only where it compiles PTX itself",
)
_GPU_RULES: dict[str, Rule] = {
    "name": ("may differ", "another model can have other caches and multiprocessors"),
    "architecture": _GPU_KERNELS,
    "compute_capability": _GPU_KERNELS,
    "cuda_cores": _GPU_SHAPE,
    "sm_count": _GPU_SHAPE,
    "mig_enabled": _GPU_SHAPE,
    "part_number": _IRRELEVANT,
    "memory_bus_bits": _IRRELEVANT,
    "vbios": _IRRELEVANT,
    "gsp_firmware": _IRRELEVANT,
    "inforom": _IRRELEVANT,
    "ecc_enabled": _GPU_HEALTH,
    "uncorrected_errors": _GPU_HEALTH,
    "power_limit_milliwatts": _IRRELEVANT,
    "max_sm_clock_mhz": _IRRELEVANT,
    "max_memory_clock_mhz": _IRRELEVANT,
    "uuid_sha256": ("recorded-only", "another card of the same model"),
}
# Facts that decide about bits: unknown on both sides is not equal.
# NVML gives the number of multiprocessors for few devices. At one compute capability, that of cores
# says the same (docs/machine-fingerprint.md).
_GPU_IDENTITY = ("name", "compute_capability", "cuda_cores")


def _cuda_rows(
    recorded: Fingerprint, here: Fingerprint, accelerator: CudaAccelerator
) -> Iterator[FactComparison]:
    then, now = (select_gpu(machine.gpus, accelerator) for machine in (recorded, here))
    if then is None or now is None:
        missing: Rule = ("may differ", "the record does not name the GPU that the spec requires")
        yield _row("gpu.name", _gpu_names(recorded), _gpu_names(here), missing)
    else:
        yield from _gpu_rows(then, now)
    yield _row("driver.version", recorded.driver.version, here.driver.version, _DRIVER)
    yield _row("driver.cuda", recorded.driver.cuda, here.driver.cuda, _DRIVER)


def _gpu_names(machine: Fingerprint) -> tuple[str, ...]:
    return tuple(gpu.name or "unknown" for gpu in machine.gpus)


def _gpu_rows(then: Gpu, now: Gpu) -> Iterator[FactComparison]:
    for field, rule in _GPU_RULES.items():
        row = _row(f"gpu.{field}", getattr(then, field), getattr(now, field), rule)
        # Two unknown values are equal as values, but they do not show that the GPUs are.
        if row.effect == "none" and row.here == "unknown" and field in _GPU_IDENTITY:
            row = _unknown(row)
        yield row
    yield _row("gpu.memory_bytes", then.memory_bytes, now.memory_bytes, _memory_rule(then, now))
    before, after = (gpu.remapped_rows and gpu.remapped_rows.model_dump() for gpu in (then, now))
    yield _row("gpu.remapped_rows", before, after, _GPU_HEALTH)
    if then.mig_enabled or now.mig_enabled:
        yield from _part_rows(then.part, now.part)


def _unknown(row: FactComparison) -> FactComparison:
    return row.model_copy(update={"effect": "may differ", "reason": "unknown on both machines"})


def _part_rows(then: MigPart | None, now: MigPart | None) -> Iterator[FactComparison]:
    """Yield what decides about bits of the parts that ran, where a GPU is in MIG mode."""
    before, after = (None if part is None else part.name for part in (then, now))
    row = _row("gpu.part", before, after, _GPU_SHAPE)
    yield _unknown(row) if then is now is None else row
    if then is not None and now is not None:
        yield _row("gpu.part.sm_count", then.sm_count, now.sm_count, _GPU_SHAPE)
        memory = _memory_rule(then, now)
        yield _row("gpu.part.memory_bytes", then.memory_bytes, now.memory_bytes, memory)


def _memory_rule(then: Gpu | MigPart, now: Gpu | MigPart) -> Rule:
    if (now.memory_bytes or 0) < (then.memory_bytes or 0):
        return "may differ", "libraries fall back to smaller workspaces when memory is short"
    return _IRRELEVANT
