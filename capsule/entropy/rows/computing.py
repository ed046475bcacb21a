"""Rows on arithmetic: torch's flags in each process that imported it, libraries, devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from capsule.entropy.evidence import Evidence, Judgement, LedgerSource, Treatment
from capsule.host.wording import agreeing, counted

_ISA_FLAGS = ("torch.cpu_capability", "onednn.isa", "mkl.branch")
_SELF_TEST = "numerics.self_test"


def _in_torch(
    evidence: Evidence, wanted: Mapping[str, str], treatment: Treatment, otherwise: Treatment
) -> Judgement:
    """Judge by flags of torch: a treatment if every process that imported it has them as wanted."""
    if unknown := _unwatched(evidence):
        return "assumed", unknown
    if not evidence.torch:
        return None
    matches = True
    processes: Counter[str] = Counter()
    for group in evidence.torch:
        shown = ", ".join(f"{name}={group.flags.get(name, 'absent')}" for name in wanted)
        processes[shown] += group.processes
        matches &= all(group.flags.get(name) == value for name, value in wanted.items())
    texts = (f"{shown} in {counted(n, 'process', 'processes')}" for shown, n in processes.items())
    return (treatment if matches else otherwise), f"read back: {'; '.join(texts)}"


def _unwatched(evidence: Evidence) -> str | None:
    """Say why it is not known which flags torch had, if that is so."""
    told = evidence.mechanisms.interpreters
    if evidence.untold is not None or told is None:
        return evidence.untold
    if evidence.is_program and told.unwatched:
        processes = counted(told.unwatched, "Python process", "Python processes")
        return f"{processes} did not set them: determinism.propagation is off"
    return None


def _algorithms(evidence: Evidence) -> Judgement:
    name = "torch.deterministic_debug_mode"
    modes = {group.flags.get(name) for group in evidence.torch}
    # torch's numbers: 0 allows every operator, 1 warns of one that is not deterministic, and 2
    # rejects it.
    if modes and modes <= {"1", "2"} and modes != {"2"}:
        return "assumed", "read back: torch only warns"
    return _in_torch(evidence, {name: "2"}, "eliminated", "unsupported")


def _fresh_memory(evidence: Evidence) -> Judgement:
    wanted = {"torch.fill_uninitialized_memory": "True"}
    return _in_torch(evidence, wanted, "eliminated", "assumed")


def _threads(evidence: Evidence) -> Judgement:
    threads = evidence.runtime.flags.get("environment.OMP_NUM_THREADS")
    if threads is None:
        return (
            "unsupported",
            "OMP_NUM_THREADS is not set, so there are as many threads as the machine has cores",
        )
    judgement = _in_torch(evidence, {"torch.num_threads": threads}, "ordered", "unsupported")
    if judgement is None:
        return "assumed", f"OMP_NUM_THREADS={threads} is set, but no library was queried"
    return judgement


def _dispatch(evidence: Evidence) -> Judgement:
    flags, told = evidence.runtime.flags, evidence.mechanisms.interpreters
    if told is not None and told.compilers is not None:
        were = "were" if "," in told.compilers else "was"
        return "assumed", (
            f"{told.compilers} {were} imported, whose functions are compiled or chosen for the "
            "processor on which they run"
        )
    if not evidence.torch or not all(name in flags for name in _ISA_FLAGS):
        return "assumed", "no library was queried in this run"
    shown = ", ".join(f"{name}={flags[name]}" for name in _ISA_FLAGS)
    test = flags.get(_SELF_TEST, "none")
    # That a setting was read back does not show what a library computes with it. The known answers
    # of the self-test do.
    proven = test.endswith("as expected")
    return ("eliminated" if proven else "assumed"), f"read back: {shown}; self-test: {test}"


def _device(evidence: Evidence) -> Judgement:
    trainer, gpus = evidence.mechanisms.trainer, evidence.mechanisms.surroundings.gpus
    if trainer is not None:
        if trainer.device == "cpu":
            return "eliminated", "the networks were computed on the CPU"
        name = evidence.runtime.device.get("name", "unknown")
        return "assumed", f"{trainer.device} ({name}): equal bits need this model and its libraries"
    if gpus:
        return "assumed", f"the program could use {', '.join(gpus)}"
    return "eliminated", "the program saw no GPU"


def _may_use_gpu(evidence: Evidence) -> bool:
    trainer = evidence.mechanisms.trainer
    if trainer is None:
        return bool(evidence.mechanisms.surroundings.gpus)
    return trainer.device != "cpu"


def _autotuning(evidence: Evidence) -> Judgement:
    if not _may_use_gpu(evidence):
        return None
    return _in_torch(evidence, {"torch.cudnn.benchmark": "False"}, "eliminated", "unsupported")


def _workspace(evidence: Evidence) -> Judgement:
    if not _may_use_gpu(evidence):
        return None
    workspace = evidence.runtime.flags.get("environment.CUBLAS_WORKSPACE_CONFIG")
    if workspace is None:
        return "unsupported", "CUBLAS_WORKSPACE_CONFIG is not set"
    return "ordered", f"read back: CUBLAS_WORKSPACE_CONFIG={workspace}"


def _reduced_precision(evidence: Evidence) -> Judgement:
    if not _may_use_gpu(evidence):
        return None
    wanted = {"torch.cuda.matmul.allow_tf32": "False", "torch.cudnn.allow_tf32": "False"}
    return _in_torch(evidence, wanted, "eliminated", "assumed")


def _child_processes(evidence: Evidence) -> Judgement:
    told = evidence.mechanisms.interpreters
    unknown = _unwatched(evidence)
    if unknown is not None or told is None:
        return "assumed", str(unknown)
    # Of these processes, the trainer is the run itself. Beside a program, Capsule's own interpreter
    # is not counted (Interpreters).
    children = told.started - (0 if evidence.is_program else 1)
    if not children or not evidence.torch:
        return None
    if told.unwatched:
        processes = counted(told.started, "process", "processes")
        whose = agreeing(told.unwatched, "its", "their")
        return "assumed", f"{told.unwatched:,} of {processes} did not set {whose} flags"
    torch = sum(group.processes for group in evidence.torch)
    # A fork of one of these processes may import torch, so this can be the larger number.
    return "eliminated", (
        f"{counted(told.started, 'Python process was', 'Python processes were')} started; torch "
        f"was imported in {torch:,}, forked ones included; each set its flags and read them back"
    )


SOURCES = (
    LedgerSource("Torch operators", _algorithms, "custom operators that torch does not know"),
    LedgerSource("Uninitialised memory", _fresh_memory, "extensions with their own allocator"),
    LedgerSource("Maths threads", _threads, "a library that ignores the environment variables"),
    LedgerSource("CPU instruction sets", _dispatch, "a library with its own dispatch"),
    LedgerSource("Compute device", _device, "another GPU model, driver branch or library"),
    LedgerSource("cuDNN autotuning", _autotuning, "other code that chooses kernels by timing"),
    LedgerSource("cuBLAS workspace", _workspace, "several CUDA streams at once"),
    LedgerSource("Reduced GPU precision", _reduced_precision, "a library with its own switch"),
    LedgerSource(
        "Child processes",
        _child_processes,
        "another Python interpreter, without these packages",
    ),
)
