"""Setting every determinism flag, and reading back what took effect.

:func:`prepare` runs before torch is imported and checks what only the parent process can set.
:func:`apply` imports torch, sets the rest, and asks each library what it will really do: a flag
that is accepted and ignored stops the run.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule.experiment.contract import Runtime
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import CpuAccelerator, CudaAccelerator, Spec, environment_variables

if TYPE_CHECKING:
    import torch

_SUITE_PACKAGES = {"atari": "ale_py", "gymnasium": "gymnasium", "minatar": "minatar"}
_MKL_BRANCHES = {  # mkl_cbwr_get(): constants of oneMKL's mkl_service.h
    0: "OFF",
    1: "BRANCH_OFF",
    2: "AUTO",
    3: "COMPATIBLE",
    4: "SSE2",
    5: "SSE3",
    6: "SSSE3",
    7: "SSE4_1",
    8: "SSE4_2",
    9: "AVX",
    10: "AVX2",
    12: "AVX512",
    14: "AVX512_E1",
}
_CUBLAS_VERSION_PARTS = (0, 1, 2)  # libraryPropertyType: MAJOR, MINOR, PATCH


def prepare(spec: Spec) -> None:
    """Check what must have been settled before this interpreter started.

    Raises:
        CapsuleError: CAP-T101, an environment variable is missing or differs; CAP-T102, torch is
            imported already or the interpreter ignores its environment; CAP-T103, this CPU lacks
            what the numerics profile needs.
    """
    at_start = _environment_at_start()
    for name, expected in environment_variables(spec).items():
        for found in (at_start.get(name), os.environ.get(name)):
            if found != expected:
                _fail(
                    "CAP-T101",
                    f"environment variable {name} is {found!r}; the spec needs {expected!r} before "
                    "the interpreter starts",
                    "Start the run with 'capsule run', which sets it.",
                )
    if sys.flags.ignore_environment or sys.flags.hash_randomization != bool(
        spec.determinism.hash_seed
    ):
        _fail(
            "CAP-T102",
            f"the interpreter ignores PYTHONHASHSEED={spec.determinism.hash_seed}",
            "Start it without -E, -I or -R.",
        )
    if "torch" in sys.modules:
        _fail(
            "CAP-T102",
            "torch was imported before its determinism flags were checked",
            "Start the run as 'python -m capsule.training RUN_DIRECTORY'.",
        )
    if isinstance(spec.accelerator, CpuAccelerator) and spec.accelerator.numerics == "avx2":
        _require_avx2()


def apply(spec: Spec) -> Runtime:
    """Import torch, set every flag of ``spec``, and return what was read back.

    Raises:
        CapsuleError: CAP-T104, a flag did not take effect; CAP-T105, the GPU asked for is not here
            (exit status 4); CAP-T106, a CUDA library has another version than the spec asks for.
    """
    import torch

    settings, backends = spec.determinism, _backends()
    torch.set_num_threads(settings.threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.set_flush_denormal(False)  # torch's default; IEEE 754 gradual underflow
    torch.use_deterministic_algorithms(
        settings.algorithms != "off", warn_only=settings.algorithms == "warn"
    )
    fresh_memory: Any = torch.utils.deterministic
    fresh_memory.fill_uninitialized_memory = settings.fill_uninitialized_memory
    backends.cudnn.benchmark = settings.cudnn_benchmark
    backends.cudnn.deterministic = settings.algorithms != "off"
    _set_tf32(allowed=settings.tf32)
    flags = {
        f"environment.{name}": os.environ.get(name, "") for name in environment_variables(spec)
    }
    flags |= _expect(_torch_flags(spec), "torch")
    flags |= _expect(_cpu_flags(spec), "library")
    device = _cuda_device(spec.accelerator) if spec.accelerator.kind == "cuda" else _cpu_device()
    return Runtime(flags=dict(sorted(flags.items())), libraries=_libraries(spec), device=device)


def device_of(spec: Spec) -> torch.device:
    """Return the device that ``spec`` trains on."""
    import torch

    return torch.device("cuda", 0) if spec.accelerator.kind == "cuda" else torch.device("cpu")


def _torch_flags(spec: Spec) -> dict[str, tuple[Any, Any]]:
    """Return flag name to (value read back, value wanted)."""
    import torch

    settings, backends = spec.determinism, _backends()
    modes = {"off": 0, "warn": 1, "error": 2}
    precision = "tf32" if settings.tf32 else "ieee"
    return {
        "torch.deterministic_debug_mode": (
            torch.get_deterministic_debug_mode(),
            modes[settings.algorithms],
        ),
        "torch.fill_uninitialized_memory": (_fills_memory(), _fills(spec)),
        "torch.num_threads": (torch.get_num_threads(), settings.threads),
        "torch.num_interop_threads": (torch.get_num_interop_threads(), 1),
        "torch.flush_denormal": (_flushes_denormals(), False),
        "torch.cudnn.benchmark": (backends.cudnn.benchmark, settings.cudnn_benchmark),
        "torch.cudnn.deterministic": (
            backends.cudnn.deterministic,
            settings.algorithms != "off",
        ),
        "torch.cuda.matmul.fp32_precision": (backends.cuda.matmul.fp32_precision, precision),
        "torch.cuda.matmul.allow_tf32": (backends.cuda.matmul.allow_tf32, settings.tf32),
        "torch.cudnn.conv.fp32_precision": (backends.cudnn.conv.fp32_precision, precision),
        "torch.cudnn.allow_tf32": (backends.cudnn.allow_tf32, settings.tf32),
        "torch.mkldnn.conv.fp32_precision": (backends.mkldnn.conv.fp32_precision, "ieee"),
        "torch.mkldnn.matmul.fp32_precision": (backends.mkldnn.matmul.fp32_precision, "ieee"),
    }


def _cpu_flags(spec: Spec) -> dict[str, tuple[Any, Any]]:
    """Return what the CPU libraries say they use, and what the numerics profile wants."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    found = {
        "torch.cpu_capability": capability,
        "mkl.threads": _call("libtorch_cpu.so", "mkl_get_max_threads"),
        "mkl.branch": _mkl_branch(),
        "onednn.isa": _onednn_isa(),
        "openblas.core": _openblas_core(),
        "numpy.cpu_features": ",".join(_numpy_dispatch()),
    }
    wanted = dict(found)
    if found["mkl.threads"] is not None:
        wanted["mkl.threads"] = spec.determinism.threads
    if isinstance(spec.accelerator, CpuAccelerator) and spec.accelerator.numerics == "avx2":
        wanted["torch.cpu_capability"] = "AVX2"
        if _vendor() == "GenuineIntel":  # elsewhere oneMKL turns every branch but two into AUTO
            wanted["mkl.branch"] = "AVX2"
        wanted["onednn.isa"] = "Intel AVX2"
        if found["openblas.core"] is not None:
            wanted["openblas.core"] = "Haswell"
        wanted["numpy.cpu_features"] = ",".join(
            name for name in _numpy_dispatch() if name not in {"X86_V4", "AVX512_ICL"}
        )
    return {name: (found[name], wanted[name]) for name in found}


def _expect(flags: dict[str, tuple[Any, Any]], kind: str) -> dict[str, str]:
    """Return every flag as text, or name the first one that did not take effect."""
    for name, (found, wanted) in flags.items():
        if found != wanted:
            _fail(
                "CAP-T104",
                f"{kind} flag {name} reads back as {found!r} after it was set to {wanted!r}",
                "Use the packages that the spec pins; this build ignores the setting.",
            )
    return {name: "absent" if found is None else str(found) for name, (found, _) in flags.items()}


def _set_tf32(*, allowed: bool) -> None:
    """Set TensorFloat-32 through the old interface and the new one, so that neither disagrees."""
    backends = _backends()
    precision = "tf32" if allowed else "ieee"
    backends.fp32_precision = precision
    backends.cuda.matmul.fp32_precision = precision
    backends.cudnn.conv.fp32_precision = precision
    backends.cudnn.rnn.fp32_precision = precision
    backends.cuda.matmul.allow_tf32 = allowed
    backends.cudnn.allow_tf32 = allowed
    backends.mkldnn.conv.fp32_precision = "ieee"
    backends.mkldnn.matmul.fp32_precision = "ieee"


def _backends() -> Any:
    """Return ``torch.backends``, whose attributes its type stubs do not know."""
    import torch

    return torch.backends


def _fills(spec: Spec) -> bool:
    """Return whether fresh memory must be filled: torch does it only in deterministic mode."""
    return spec.determinism.fill_uninitialized_memory and spec.determinism.algorithms != "off"


def _fills_memory() -> bool:
    """Find out whether fresh float memory really is filled (with NaN)."""
    import torch

    torch.zeros(4096)  # leaves zeros behind for the next allocation of this size
    return bool(torch.empty(4096).isnan().all())


def _flushes_denormals() -> bool:
    import torch

    smallest = torch.tensor([math.ldexp(1.0, -149)], dtype=torch.float32)
    return bool((smallest * 1.0 == 0.0).item())


def _onednn_isa() -> str | None:
    """Ask oneDNN for its instruction set: its verbose mode is the only place that tells.

    Returns:
        e.g. "Intel AVX2", or None where torch has no oneDNN.
    """
    import torch

    mkldnn = _backends().mkldnn
    if not mkldnn.is_available():
        return None
    with tempfile.TemporaryFile() as capture:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(capture.fileno(), 1)
        try:
            with mkldnn.verbose(mkldnn.VERBOSE_ON):
                torch.nn.functional.conv2d(torch.zeros(2, 16, 8, 8), torch.zeros(16, 16, 3, 3))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        capture.seek(0)
        text = capture.read().decode(errors="replace")
    found = re.search(r"info,cpu,isa:(.*)", text)
    return found[1] if found else _isa_of_kernel(text)


def _isa_of_kernel(verbose: str) -> str | None:
    """Name the instruction set by the kernel that ran: the header is printed once per process."""
    if "convolution,jit:avx512" in verbose:
        return "Intel AVX-512"
    return "Intel AVX2" if "convolution,jit:avx2," in verbose else None


def _mkl_branch() -> str | None:
    branch = _call("libtorch_cpu.so", "mkl_serv_cbwr_get", -1)
    return None if branch is None else _MKL_BRANCHES.get(branch, str(branch))


def _openblas_core() -> str | None:
    import numpy  # noqa: ICN001, F401

    path = _loaded("openblas")
    if path is None:
        return None
    function = getattr(ctypes.CDLL(path), "scipy_openblas_get_corename64_", None)
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


def _numpy_dispatch() -> list[str]:
    """Return the CPU features numpy chooses kernels by, as enabled now."""
    core: Any = importlib.import_module("numpy._core._multiarray_umath")
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]


def _call(library: str, function: str, *arguments: int) -> int | None:
    """Call an integer function of a loaded library; None where there is none."""
    path = _loaded(library)
    entry: Callable[..., int] | None = getattr(ctypes.CDLL(path), function, None) if path else None
    return None if entry is None else entry(*arguments)


def _loaded(part: str) -> str | None:
    """Return the path of a shared library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if part in path.rpartition("/")[2]:
            return f"/{path}"
    return None


def _environment_at_start() -> dict[str, str]:
    """Return the environment this process was started with, whatever was set since."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def _cpu_facts() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _vendor() -> str:
    return _cpu_facts().get("vendor_id", "unknown")


def _require_avx2() -> None:
    present = set(_cpu_facts().get("flags", "").split())
    missing = sorted({"avx2", "fma"} - present)
    if missing:
        _fail(
            "CAP-T103",
            f"accelerator.numerics 'avx2' needs CPU features that are missing: "
            f"{', '.join(missing)}",
            "Run on an x86-64 CPU with AVX2 and FMA, or lock a spec with numerics 'native'.",
            ExitCode.INCONCLUSIVE,
        )


def _cpu_device() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    return {"kind": "cpu", "name": _cpu_facts().get("model name", "unknown"), "cores": cores}


def _libraries(spec: Spec) -> dict[str, str]:
    """Return the versions of what is loaded, each as the library itself tells it."""
    import torch

    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "numpy", "safetensors", _SUITE_PACKAGES[spec.environment.suite]):
        try:
            module = importlib.import_module(name)
            versions[name.replace("_", "-")] = module.__version__
        except AttributeError:
            versions[name] = importlib.metadata.version(name)
        except ModuleNotFoundError as error:
            _fail(
                "CAP-T107",
                f"package {name!r} is not in the image: {error}",
                "Add it to image.packages and lock again.",
            )
    if spec.accelerator.kind == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = _cudnn_version()
        versions["cublas"] = _cublas_version() or "unknown"
    return versions


def _cuda_device(wanted: CudaAccelerator) -> dict[str, Any]:
    """Check the GPU against the spec and describe it; there is no fall-back to the CPU."""
    import torch

    if not torch.cuda.is_available():
        _no_gpu("no CUDA device is available to torch", "Make the GPU visible to the container.")
    facts = torch.cuda.get_device_properties(0)
    capability = f"{facts.major}.{facts.minor}"
    driver = _driver_version()
    if wanted.gpu not in (None, facts.name):
        _no_gpu(f"accelerator.gpu is {wanted.gpu!r}, here is {facts.name!r}", "Use that GPU.")
    if wanted.compute_capability not in (None, capability):
        _no_gpu(
            f"accelerator.compute_capability is {wanted.compute_capability}, here is {capability}",
            "Use a GPU of that compute capability.",
        )
    if driver is None or not _satisfies(driver, wanted.driver):
        _no_gpu(f"accelerator.driver is {wanted.driver}, here is {driver}", "Install that driver.")
    for name, found, constraint in (
        ("cuda", str(torch.version.cuda), wanted.cuda),
        ("cudnn", _cudnn_version(), wanted.cudnn),
    ):
        if not _satisfies(found, constraint):
            _fail(
                "CAP-T106",
                f"accelerator.{name} is {constraint}, the image brings {found}",
                "Pin packages that bring that version, and lock again.",
            )
    return {
        "kind": "cuda",
        "name": facts.name,
        "compute_capability": capability,
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "driver": driver,
    }


def _cudnn_version() -> str:
    number = _backends().cudnn.version() or 0  # 9.10.2 is 91002
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cublas_version() -> str | None:
    """Ask the cuBLAS that torch loaded; it loads on the first matrix product."""
    import torch

    torch.ones(1, 1, device="cuda") @ torch.ones(1, 1, device="cuda")
    path = _loaded("libcublas.so")
    if path is None:
        return None
    library = ctypes.CDLL(path)
    numbers = []
    for part in _CUBLAS_VERSION_PARTS:
        number = ctypes.c_int()
        if library.cublasGetProperty(part, ctypes.byref(number)) != 0:
            return None
        numbers.append(str(number.value))
    return ".".join(numbers)


def _driver_version() -> str | None:
    """Ask NVML, which the driver itself brings."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        status = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    finally:
        nvml.nvmlShutdown()
    return text.value.decode() if status == 0 else None


def _satisfies(version: str, constraint: str) -> bool:
    """Say whether ``version`` meets every clause of ``constraint``.

    A clause is an operator of PEP 440 and a version; without an operator, or with trailing ``.*``,
    it is a prefix: '13.0' and '==13.0.*' admit 13.0.2.
    """
    return all(_meets(version, clause.strip()) for clause in constraint.split(","))


def _meets(version: str, clause: str) -> bool:
    found = re.fullmatch(r"(==|>=|<=|~=|>|<)?\s*([0-9]+(?:\.[0-9]+)*)(\.\*)?", clause)
    if found is None:
        return False
    operator, bound = found[1] or "prefix", [int(part) for part in found[2].split(".")]
    have = [int(part) for part in re.findall(r"[0-9]+", version)]
    size = max(len(have), len(bound))
    left, right = (parts + [0] * (size - len(parts)) for parts in (have, bound))
    if operator == "prefix" or found[3]:
        return have[: len(bound)] == bound
    if operator == "~=":
        return left >= right and have[: len(bound) - 1] == bound[:-1]
    checks = {"==": left == right, ">=": left >= right, "<=": left <= right}
    return (checks | {">": left > right, "<": left < right})[operator]


def _no_gpu(message: str, fix: str) -> None:
    _fail("CAP-T105", message, fix, ExitCode.INCONCLUSIVE)


def _fail(
    code: str, message: str, fix: str, exit_code: ExitCode = ExitCode.TRAINING_FAILED
) -> None:
    raise CapsuleError(code, message, fix=fix, exit_code=exit_code)
