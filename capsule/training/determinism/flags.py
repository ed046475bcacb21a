"""Setting every determinism flag, and reading back what took effect.

:func:`prepare` runs before torch is imported, and checks what only the parent process can set.
:func:`apply` imports torch, sets the other flags, and reads back the settings of each library.
A flag that a library accepts and ignores stops the run.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from capsule.experiment.architectures import runs_on
from capsule.experiment.contract import Runtime, gpu_identity
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import CudaAccelerator, Spec
from capsule.experiment.variables import environment_variables
from capsule.experiment.versions import satisfies
from capsule.training.determinism import cpu, self_test, torch_flags
from capsule.training.determinism.child_processes import check_start, environment_of

if TYPE_CHECKING:
    import torch

_SUITE_PACKAGES = {"atari": "ale_py", "gymnasium": "gymnasium", "minatar": "minatar"}
_STATUS = Path("/proc/thread-self/status")
_CUBLAS_VERSION_PARTS = (0, 1, 2)  # libraryPropertyType: MAJOR, MINOR, PATCH


def prepare(spec: Spec) -> None:
    """Check what must be set before an interpreter starts.

    Raises:
        CapsuleError: CAP-T101, an environment variable is missing or differs; CAP-T102, torch is
            imported already or the interpreter ignores its environment; CAP-T103, this CPU lacks
            what the numerics profile needs; CAP-T108, the maths shim is not preloaded.
    """
    expected = environment_variables(spec)
    # Both the environment at the start and the current one, which may have been changed since.
    for environment in (environment_of("self"), os.environ):
        check_start(environment, expected)
    if "torch" in sys.modules:
        raise CapsuleError(
            "CAP-T102",
            "torch was imported before its determinism flags were checked",
            fix="Start the run as 'python -m capsule.training RUN_DIRECTORY'.",
        )
    cpu.require(spec.cpu_numerics)


def apply(spec: Spec) -> Runtime:
    """Import torch, set every flag of ``spec``, and return what was read back.

    Raises:
        CapsuleError: CAP-T104, a flag did not take effect; CAP-T105, the required GPU is not
            available (exit status 4); CAP-T106, a CUDA library has another version than the spec
            requires; CAP-T107, a package is missing; CAP-T109, this machine computes other bits
            than the numerics profile promises; CAP-T110 or CAP-T114, the GPU fails its self-test;
            CAP-T115, torch has no code for the GPU.
    """
    flags = {
        f"environment.{name}": os.environ.get(name, "") for name in environment_variables(spec)
    }
    if importlib.util.find_spec("torch") is None:
        if spec.accelerator.kind == "cuda":
            _no_package("torch", "with accelerator.kind: cuda, torch checks the GPU")
        # A user program may not need torch; _libraries() raises an error for any other run.
        return Runtime(flags=flags, libraries=_libraries(spec), device=_cpu_device())
    # In this order: the settings of torch, what the libraries report, and what they compute. A
    # setting without effect is therefore reported by its name, and not as an operator with other
    # bits.
    flags |= torch_flags.apply(torch_flags.TorchFlags.of(spec.determinism.model_dump()))
    cpu.settle(spec.cpu_numerics)
    found = cpu.read_back(spec.cpu_numerics, spec.determinism.threads)
    flags |= torch_flags.expect(found, "library")
    flags["numerics.self_test"] = self_test.start_up_test(spec.cpu_numerics)
    if spec.accelerator.kind == "cuda":
        from capsule.training.determinism.gpu_test import gpu_test  # it imports torch

        device = _cuda_device(spec.accelerator)
        strict = spec.determinism.algorithms != "off"
        flags["numerics.gpu_self_test"] = gpu_test(
            device_of(spec), repeats=strict, tf32=spec.determinism.tf32
        )
    else:
        device = _cpu_device()
    libraries = _libraries(spec)
    # The objects of the libraries last until the process ends. The garbage collector need not visit
    # them, which takes half a second at the end alone.
    gc.freeze()
    return Runtime(flags=dict(sorted(flags.items())), libraries=libraries, device=device)


def is_portable(spec: Spec) -> bool:
    """Return whether a run promises the same bits on other processors; on a GPU it never does."""
    return spec.accelerator.kind == "cpu" and cpu.is_portable(spec.cpu_numerics)


def device_of(spec: Spec) -> torch.device:
    """Return the device that ``spec`` trains on."""
    import torch

    return torch.device("cuda", 0) if spec.accelerator.kind == "cuda" else torch.device("cpu")


def usable_cores() -> int:
    """Return how many processors this process may use, whatever ``determinism.cores`` is."""
    # Read from the kernel, because the interposer answers sched_getaffinity() with
    # determinism.cores.
    (allowed,) = re.findall(r"^Cpus_allowed:\s*([0-9a-f,]+)$", _STATUS.read_text(), re.MULTILINE)
    return int(allowed.replace(",", ""), 16).bit_count()


def _cpu_device() -> dict[str, Any]:
    cores = usable_cores()
    name = cpu.cpu_facts().get("model name", "unknown")
    return {"kind": "cpu", "name": name, "cores": cores}


def _libraries(spec: Spec) -> dict[str, str]:
    """Return the versions of the loaded libraries, as they report them.

    The version of CUDA is the one for which torch was built.
    """
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    if spec.environment is None:
        versions |= _requested_versions(spec.image.packages)
        names: tuple[str, ...] = ()
    else:
        names = ("torch", "numpy", "safetensors", _SUITE_PACKAGES[spec.environment.suite])
    for name in names:
        try:
            module = importlib.import_module(name)
            versions[name.replace("_", "-")] = module.__version__
        # Some modules, such as MinAtar, have no __version__.
        except AttributeError:
            versions[name] = importlib.metadata.version(name)
        except ModuleNotFoundError as error:
            _no_package(name, str(error))
    if spec.accelerator.kind == "cuda":
        import torch

        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = _cudnn_version()
        versions["cublas"] = _cublas_version() or "unknown"
    return versions


def _requested_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package that a spec requires, sorted by name."""
    versions = {}
    for requirement in requirements:
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
        if match is None:
            continue
        try:
            versions[match[0]] = importlib.metadata.version(match[0])
        except importlib.metadata.PackageNotFoundError as error:
            # An environment marker, such as "; python_version < '3.11'", may exclude the package.
            if ";" not in requirement:
                _no_package(match[0], str(error))
    return dict(sorted(versions.items()))


def _cuda_device(wanted: CudaAccelerator) -> dict[str, Any]:
    """Check the GPU against the spec and describe it; there is no fallback to the CPU."""
    import torch

    if not torch.cuda.is_available():
        _no_gpu("no CUDA device is available to torch", "Make the GPU visible to the container.")
    facts = torch.cuda.get_device_properties(0)
    capability = f"{facts.major}.{facts.minor}"
    check_architectures(torch.cuda.get_arch_list(), capability, facts.name)
    driver = _driver_version()
    if wanted.gpu not in (None, facts.name):
        _no_gpu(f"accelerator.gpu is {wanted.gpu!r}, here is {facts.name!r}", "Use that GPU.")
    if wanted.compute_capability not in (None, capability):
        _no_gpu(
            f"accelerator.compute_capability is {wanted.compute_capability}, here is {capability}",
            "Use a GPU of that compute capability.",
        )
    if driver is None or not satisfies(driver, wanted.driver):
        _no_gpu(f"accelerator.driver is {wanted.driver}, here is {driver}", "Install that driver.")
    _check_library("cuda", wanted.cuda, str(torch.version.cuda), "nvidia-cuda-runtime")
    _check_library("cudnn", wanted.cudnn, _cudnn_version(), "nvidia-cudnn")
    return {
        "kind": "cuda",
        "name": facts.name,
        "compute_capability": capability,
        "multiprocessors": facts.multi_processor_count,
        "uuid_sha256": gpu_identity(f"GPU-{facts.uuid}"),
        "memory_bytes": facts.total_memory,
        "driver": driver,
    }


def check_architectures(built: Iterable[str], capability: str, name: str) -> None:
    """Check that torch has code for a GPU, because its first kernel would fail without a reason.

    Args:
        built: The architectures for which torch is built, as it names them.
        capability: The GPU's compute capability, such as ``9.0``.
        name: The GPU's name.

    Raises:
        CapsuleError: CAP-T115, torch has no code for the GPU.
    """
    built = list(built)
    if not runs_on(built, capability):
        raise CapsuleError(
            "CAP-T115",
            f"torch is built for {', '.join(built) or 'no GPU'}, and not for {name}, whose compute "
            f"capability is {capability}",
            fix="Use a GPU of one of these, or pin a torch in image.packages that is built for "
            "this one, and lock again.",
        )


def _check_library(field: str, constraint: str, loaded: str, distribution: str) -> None:
    """Check the version of a library's wheel, as the lock does, and that torch has loaded it.

    Args:
        field: Field of the spec's section ``accelerator``.
        constraint: The value of the field.
        loaded: The version that torch loaded or, for CUDA, the one for which torch was built. It
            has fewer parts than the version of the wheel.
        distribution: Name of the wheel; a suffix such as ``-cu12`` may follow.

    Raises:
        CapsuleError: CAP-T106, the wheel has another version, or torch loaded another library.
    """
    names = re.compile(rf"{distribution}(-cu[0-9]+)?")
    wheels = (each for each in importlib.metadata.distributions() if names.fullmatch(each.name))
    brought = next((wheel.version for wheel in wheels), loaded)
    if not satisfies(brought, constraint):
        reason = f"accelerator.{field} is {constraint}, the image brings {brought}"
    elif not satisfies(brought, loaded):
        reason = f"the image brings {distribution} {brought}, but torch reports {loaded}"
    else:
        return
    raise CapsuleError(
        "CAP-T106", reason, fix="Pin packages that bring that version, and lock again."
    )


def _cudnn_version() -> str:
    number = torch_flags.backends().cudnn.version() or 0  # 9.10.2 is 91002
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cublas_version() -> str | None:
    """Return the version of the cuBLAS that torch loaded, which it does for a matrix product."""
    import torch

    torch.ones(1, 1, device="cuda") @ torch.ones(1, 1, device="cuda")
    path = cpu.loaded_library("libcublas.so")
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
    """Return the version of the driver, from its own library NVML; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    # NVML writes at most NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE bytes, which is 80.
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        status = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    finally:
        nvml.nvmlShutdown()
    return text.value.decode() if status == 0 else None


def _no_package(name: str, reason: str) -> NoReturn:
    raise CapsuleError(
        "CAP-T107",
        f"package {name!r} is not in the image: {reason}",
        fix="Add it to image.packages and lock again.",
    )


def _no_gpu(message: str, fix: str) -> NoReturn:
    raise CapsuleError("CAP-T105", message, fix=fix)
