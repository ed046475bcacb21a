"""The environment variables that follow from a spec. They are set before the interpreter starts.

They pin the code that the CPU's maths libraries choose, and settings that libraries read only once.
"""

from __future__ import annotations

from capsule.experiment.canonical import canonical_json
from capsule.experiment.spec import Numerics, Spec
from capsule.experiment.trainers import CommandTrainer

# The code that the maths libraries may choose, by profile; docs/numerics.md gives the reasons.
_AVX2_PINS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    # This pin changes no known answer, and is kept for later versions of the C library.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",
}
_SSE_PINS = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "SSE4_2",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,"
    "-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",
}
_NUMERICS_PINS: dict[Numerics, dict[str, str]] = {
    "portable-v3": _AVX2_PINS,
    "portable-v3-strict": _AVX2_PINS,
    "portable-v2": _SSE_PINS,
    "native": {},
}

# Learners fill the same big buffers at every update. glibc would hand each one back to the kernel
# and get new pages, zeroed, for the next: a seventh of R2D2's time (benchmarks/README.md). Memory
# is mapped only beyond the first threshold (replays are), and the heap is never trimmed; bytes.
_KEEP_BUFFERS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


def maths_variables(numerics: Numerics, threads: int | None) -> dict[str, str]:
    """Return the variables that determine how the CPU's maths libraries compute.

    Args:
        numerics: The profile. Portable profiles also require the preloaded ``libcapsule-math.so``.
        threads: Threads of each library call; None leaves the number to the libraries.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    counts = {} if threads is None else dict.fromkeys(names, str(threads))
    # Otherwise the libraries may use fewer threads than configured when the machine is loaded.
    fixed = {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE"}
    return fixed | counts | _NUMERICS_PINS[numerics]


def environment_variables(spec: Spec) -> dict[str, str]:
    """Return the variables that must be set before the interpreter starts, for all processes.

    Both the image's configuration and the plain-process engine contain them, so that no setting
    that affects the result is made by a call in ``main``.
    """
    settings = spec.determinism
    variables = {
        "PYTHONHASHSEED": "random" if settings.hash_seed is None else str(settings.hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUTF8": "1",
        "TZ": "UTC",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        # The compiler of torch otherwise chooses by timing.
        "TORCHINDUCTOR_DETERMINISTIC": "0" if settings.algorithms == "off" else "1",
    }
    if not isinstance(spec.trainer, CommandTrainer):
        variables |= _KEEP_BUFFERS
    variables |= maths_variables(spec.cpu_numerics, settings.threads)
    if spec.accelerator.kind == "cuda":
        if not settings.tf32:
            variables["NVIDIA_TF32_OVERRIDE"] = "0"  # NVIDIA documents no other value
        variables |= {
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            # CUDA's own default numbers the GPUs by its guess of their speed.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        if settings.algorithms != "off":
            # For the attention in your own programs, whose backward pass otherwise adds in
            # any order: read by Hugging Face's transformers and by NVIDIA's Transformer Engine.
            variables |= {
                "FLASH_ATTENTION_DETERMINISTIC": "1",
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            }
        if settings.cublas_workspace is not None:
            variables["CUBLAS_WORKSPACE_CONFIG"] = settings.cublas_workspace
    if settings.propagation:  # see capsule/training/determinism/child_processes.py
        # With a GPU, and without a promise about the CPU, no profile is determined.
        promised = spec.accelerator.kind == "cpu" or spec.cpu_numerics != "native"
        document = {
            "determinism": settings.model_dump(),
            "numerics": spec.cpu_numerics if promised else None,
            "environment": variables,
        }
        variables["CAPSULE_DETERMINISM"] = canonical_json(document).decode()
    return variables
