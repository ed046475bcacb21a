"""CPU numerics: setting and reading back which code each maths library runs.

A profile has three parts. Environment variables restrict every library to one instruction set
(:func:`capsule.experiment.variables.environment_variables`); the preloaded ``libcapsule-math.so``
controls the parts of oneMKL that no variable affects; :func:`settle` switches off the libraries of
torch that choose their blocks by the size of the caches. ``docs/numerics.md`` gives the reasons and
the evidence.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule.experiment.errors import CapsuleError
from capsule.training.determinism.torch_flags import backends

if TYPE_CHECKING:  # every child process that imports torch pays for what is imported here
    from capsule.experiment.spec import Numerics

SHIM = "libcapsule-math.so"
_CPU_FEATURES = {  # as /proc/cpuinfo names them
    "portable-v3": {"avx2", "fma"},
    "portable-v3-strict": {"avx2", "fma"},
    # numpy's wheels need these.
    "portable-v2": {"sse4_2", "popcnt"},
    "native": set(),
}
# oneDNN divides its work by the sizes of the caches. In tests, a convolution of its SSE4.1 path
# depended on them, and no result of its AVX2 path did.
_ONEDNN_OFF = {"portable-v3-strict", "portable-v2"}
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


def is_portable(numerics: Numerics) -> bool:
    """Return whether a profile promises the same bits on other processors."""
    return numerics.startswith("portable-")


def require(numerics: Numerics) -> None:
    """Check that this processor and this process have what the profile requires.

    Raises:
        CapsuleError: CAP-T103, the processor lacks instructions; CAP-T108, the maths shim was not
            preloaded.
    """
    missing = sorted(_CPU_FEATURES[numerics] - set(cpu_facts().get("flags", "").split()))
    if missing:
        raise CapsuleError(
            "CAP-T103",
            f"accelerator.numerics {numerics!r} needs CPU features that are missing: "
            f"{', '.join(missing)}",
            fix="Run on another x86-64 CPU, or lock a spec with numerics 'portable-v2' or "
            "'native'.",
        )
    if is_portable(numerics) and loaded_library(SHIM) is None:
        raise CapsuleError(
            "CAP-T108",
            f"{SHIM} is not loaded, without which accelerator.numerics {numerics!r} depends on the "
            "processor's vendor",
            fix="Start the run with 'capsule run'; by hand, put the library's path into LD_PRELOAD "
            "before the interpreter starts.",
        )


def settle(numerics: Numerics) -> None:
    """Set torch's own switches of the profile, and let oneMKL choose its vector functions.

    oneMKL stores this choice in two steps at the first call, and a call of another thread in
    between uses less accurate functions (pytorch issue 188792). The first call is therefore made
    here, while there is only one thread.
    """
    import torch

    if is_portable(numerics):
        backends().nnpack.set_flags(False)  # it chooses its blocks by the cache size
        backends().mkldnn.set_flags(numerics not in _ONEDNN_OFF)
    with _one_torch_thread():
        torch.exp(torch.zeros(64))


@contextmanager
def one_thread() -> Generator[None]:
    """Limit torch, and numpy's OpenBLAS if it is loaded, to one thread while the block runs."""
    threads_of, set_threads = _openblas("get_num_threads"), _openblas("set_num_threads")
    with ExitStack() as stack:
        stack.enter_context(_one_torch_thread())
        if threads_of is not None and set_threads is not None:
            stack.callback(set_threads, threads_of())
            set_threads(1)
        yield


@contextmanager
def _one_torch_thread() -> Generator[None]:
    import torch

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def read_back(numerics: Numerics, threads: int | None) -> dict[str, tuple[Any, Any]]:
    """Return what the CPU libraries report that they use, and what the profile requires.

    Args:
        numerics: The profile.
        threads: Maths threads; None for any number.

    Returns:
        Flag name to (value read back, value wanted).
    """
    import torch

    found: dict[str, Any] = {
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl.threads": _call("libtorch_cpu.so", "mkl_get_max_threads"),
        "mkl.branch": _mkl_branch(),
        "mkl.vendor_check": _mkl_vendor_check(),
        "onednn.isa": _onednn_isa(),
        "nnpack.enabled": bool(getattr(torch, "_C")._get_nnpack_enabled()),  # noqa: B009, SLF001
        "openblas.core": None,
        "numpy.cpu_features": None,
    }
    if importlib.util.find_spec("numpy"):  # torch also works without numpy
        found |= {"openblas.core": _openblas_core(), "numpy.cpu_features": _numpy_dispatch()}
    wanted = found | _wanted(numerics, found)
    if found["mkl.threads"] is not None and threads is not None:
        wanted["mkl.threads"] = threads
    return {name: (found[name], wanted[name]) for name in found}


def _wanted(numerics: Numerics, found: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the profile requires, without those of absent libraries."""
    if numerics == "native":
        return {}
    sse = numerics == "portable-v2"
    wanted: dict[str, Any] = {
        "torch.cpu_capability": "DEFAULT" if sse else "AVX2",
        "onednn.isa": "off" if numerics in _ONEDNN_OFF else "Intel AVX2",
        "openblas.core": "Nehalem" if sse else "Haswell",
    }
    if found["numpy.cpu_features"]:
        features = found["numpy.cpu_features"].split(",")
        # The features of numpy 2.4 are levels of the architecture, such as X86_V4, and further sets
        # of instructions, such as AVX512_ICL. Those of earlier versions are sets only.
        wide = ("X86_V3", "X86_V4", "AVX", "F16C", "FMA") if sse else ("X86_V4", "AVX512")
        wanted["numpy.cpu_features"] = ",".join(f for f in features if not f.startswith(wide))
    if is_portable(numerics):
        wanted |= {
            "mkl.branch": "SSE4_2" if sse else "AVX2",
            "mkl.vendor_check": SHIM,
            "nnpack.enabled": False,
        }
    elif cpu_facts().get("vendor_id") == "GenuineIntel":
        # On other processors, oneMKL replaces every branch except two with AUTO.
        wanted["mkl.branch"] = "AVX2"
    return {name: value for name, value in wanted.items() if found[name] is not None}


def cpu_facts() -> dict[str, str]:
    """Return the facts of the first processor in ``/proc/cpuinfo``."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    # Every processor has the same names. Read backwards, those of the first processor come last,
    # and replace the others.
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def loaded_library(part: str) -> str | None:
    """Return the path of a loaded shared library, by a part of its name; None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # The fields before the path (addresses, permissions, offset, device, inode) contain no
        # slash.
        path = line.partition("/")[2]
        if part in path.rpartition("/")[2]:
            return f"/{path}"
    return None


def _onednn_isa() -> str | None:
    """Return the instruction set of oneDNN, which only its verbose mode reports.

    Returns:
        Such as "Intel AVX2"; "off" if oneDNN is switched off, None if torch has no oneDNN.
    """
    import torch

    mkldnn = backends().mkldnn
    if not mkldnn.is_available():
        return None
    with tempfile.TemporaryFile() as capture:
        # oneDNN does not use Python's buffer, which is emptied so that it is not captured as well.
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
    # The flag alone does not suffice: oneDNN is off only if it has also executed nothing.
    if not mkldnn.enabled and ",exec," not in text:
        return "off"
    found = re.search(r"info,cpu,isa:(.*)", text)
    return found[1] if found else _isa_of_kernel(text)


def _isa_of_kernel(verbose: str) -> str | None:
    """Return the instruction set of the kernel that ran.

    The header, which names it, is printed only once in a process.
    """
    if "convolution,jit:avx512" in verbose:
        return "Intel AVX-512"
    return "Intel AVX2" if "convolution,jit:avx2," in verbose else None


def _mkl_branch() -> str | None:
    # -1 is MKL_CBWR_ALL of mkl_service.h: the branch with its options.
    branch = _call("libtorch_cpu.so", "mkl_serv_cbwr_get", -1)
    return None if branch is None else _MKL_BRANCHES.get(branch, str(branch))


class _SymbolInformation(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _mkl_vendor_check() -> str | None:
    """Return the name of the library whose vendor check oneMKL calls; None without oneMKL."""
    torch_library = loaded_library("libtorch_cpu.so")
    if torch_library is None:
        return None
    program = ctypes.CDLL(None)  # searches as the dynamic linker does, preloaded libraries first
    for scope in (program, ctypes.CDLL(torch_library)):
        function = getattr(scope, "mkl_serv_intel_cpu_true", None)
        if function is not None:
            found = _SymbolInformation()
            program.dladdr(function, ctypes.byref(found))
            return Path(os.fsdecode(found.file)).name
    return None


def _openblas_core() -> str | None:
    import numpy  # noqa: ICN001, F401

    function = _openblas("get_corename")
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


def _numpy_dispatch() -> str:
    """Return the enabled CPU features by which numpy chooses its kernels."""
    folder = "_core" if importlib.util.find_spec("numpy._core") else "core"  # "core" before 1.26
    core: Any = importlib.import_module(f"numpy.{folder}._multiarray_umath")
    return ",".join(name for name in core.__cpu_dispatch__ if core.__cpu_features__[name])


def _call(library: str, name: str, *arguments: int) -> int | None:
    """Return the result of an integer function of a loaded library; None if there is none."""
    function: Callable[..., int] | None = _function(library, name)
    return None if function is None else function(*arguments)


def _openblas(name: str) -> Any:
    """Return a function of numpy's OpenBLAS; None if there is none."""
    # Every symbol of numpy's wheels has this suffix, and since numpy 2.0 also the prefix.
    names = (f"scipy_openblas_{name}64_", f"openblas_{name}64_")
    found = (_function("openblas", each) for each in names)
    return next((each for each in found if each is not None), None)


def _function(library: str, name: str) -> Any:
    """Return a function of a loaded library; None if there is none."""
    path = loaded_library(library)
    return None if path is None else getattr(ctypes.CDLL(path), name, None)
