"""Setting torch's determinism flags, and reading them back.

The flags are global to a process and are not inherited by its children, so every process sets its
own: a trainer in :mod:`capsule.training.determinism.flags`, any other process in
:mod:`capsule.training.determinism.child_processes`. This module imports nothing that takes long,
because every child process imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from capsule.experiment.errors import CapsuleError

_DEBUG_MODES = {"off": 0, "warn": 1, "error": 2}  # as torch.set_deterministic_debug_mode() has them


@dataclass(frozen=True)
class TorchFlags:
    """The fields of a spec's determinism section that concern torch.

    Attributes:
        algorithms: Whether nondeterministic operators raise an error, warn, or run.
        fill_uninitialized_memory: Whether fresh memory is filled with NaN.
        cudnn_benchmark: Whether cuDNN chooses algorithms by timing them.
        tf32: Whether CUDA may round float32 factors to TensorFloat-32.
        threads: Number of maths threads; None for torch's default.
    """

    algorithms: Literal["error", "warn", "off"]
    fill_uninitialized_memory: bool
    cudnn_benchmark: bool
    tf32: bool
    threads: int | None

    @classmethod
    def of(cls, determinism: Mapping[str, Any]) -> TorchFlags:
        """Return the flags of a determinism section that is given as a mapping."""
        return cls(**{field.name: determinism[field.name] for field in fields(cls)})


def apply(flags: TorchFlags) -> dict[str, str]:
    """Set every flag in this process, and return what was read back: name to value.

    Raises:
        CapsuleError: CAP-T104, a flag did not take effect.
    """
    import torch

    settings = backends()
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    # torch raises an error if this number is set a second time in a process.
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.set_flush_denormal(False)  # torch's default; IEEE 754 gradual underflow
    # use_deterministic_algorithms() sets the same flag, but also imports torch's compiler, which
    # takes seconds in each process. The compiler reads an environment variable of the run instead.
    torch.set_deterministic_debug_mode(_DEBUG_MODES[flags.algorithms])
    fresh_memory: Any = torch.utils.deterministic
    fresh_memory.fill_uninitialized_memory = flags.fill_uninitialized_memory
    settings.cudnn.benchmark = flags.cudnn_benchmark
    # The debug mode does not set this flag.
    settings.cudnn.deterministic = flags.algorithms != "off"
    _set_tf32(allowed=flags.tf32)
    return expect(_read_back(flags), "torch")


def expect(flags: Mapping[str, tuple[Any, Any]], kind: str) -> dict[str, str]:
    """Return every flag as text, by name, if all have the required values.

    Args:
        flags: Name to (value read back, value wanted).
        kind: Adjective for the flags in the message.

    Raises:
        CapsuleError: CAP-T104, a flag reads back otherwise than it was set.
    """
    for name, (found, wanted) in flags.items():
        if found != wanted:
            raise CapsuleError(
                "CAP-T104",
                f"{kind} flag {name} reads back as {found!r} after it was set to {wanted!r}",
                fix="Use the packages that the spec pins; this build ignores the setting.",
            )
    return {name: "absent" if found is None else str(found) for name, (found, _) in flags.items()}


def _read_back(flags: TorchFlags) -> dict[str, tuple[Any, Any]]:
    """Return flag name to (value read back, value wanted)."""
    import torch

    settings = backends()
    precision = "tf32" if flags.tf32 else "ieee"
    threads = torch.get_num_threads()
    strict = flags.algorithms != "off"
    fills = flags.fill_uninitialized_memory and strict  # torch fills in deterministic mode only
    return {
        "torch.deterministic_debug_mode": (
            torch.get_deterministic_debug_mode(),
            _DEBUG_MODES[flags.algorithms],
        ),
        "torch.fill_uninitialized_memory": (_fills_memory(), fills),
        "torch.num_threads": (threads, threads if flags.threads is None else flags.threads),
        "torch.num_interop_threads": (torch.get_num_interop_threads(), 1),
        "torch.flush_denormal": (_flushes_denormals(), False),
        "torch.cudnn.benchmark": (settings.cudnn.benchmark, flags.cudnn_benchmark),
        "torch.cudnn.deterministic": (settings.cudnn.deterministic, strict),
        "torch.cuda.matmul.fp32_precision": (settings.cuda.matmul.fp32_precision, precision),
        "torch.cuda.matmul.allow_tf32": (settings.cuda.matmul.allow_tf32, flags.tf32),
        "torch.cudnn.conv.fp32_precision": (settings.cudnn.conv.fp32_precision, precision),
        "torch.cudnn.allow_tf32": (settings.cudnn.allow_tf32, flags.tf32),
        "torch.mkldnn.conv.fp32_precision": (settings.mkldnn.conv.fp32_precision, "ieee"),
        "torch.mkldnn.matmul.fp32_precision": (settings.mkldnn.matmul.fp32_precision, "ieee"),
        "torch.mkldnn.rnn.fp32_precision": (settings.mkldnn.rnn.fp32_precision, "ieee"),
    }


def _set_tf32(*, allowed: bool) -> None:
    """Set TensorFloat-32 through torch's old and its new interface, which must agree."""
    settings = backends()
    precision = "tf32" if allowed else "ieee"
    settings.fp32_precision = precision
    settings.cuda.matmul.fp32_precision = precision
    settings.cudnn.conv.fp32_precision = precision
    settings.cudnn.rnn.fp32_precision = precision
    settings.cuda.matmul.allow_tf32 = allowed
    settings.cudnn.allow_tf32 = allowed
    settings.mkldnn.conv.fp32_precision = "ieee"
    settings.mkldnn.matmul.fp32_precision = "ieee"
    settings.mkldnn.rnn.fp32_precision = "ieee"


def backends() -> Any:
    """Return ``torch.backends`` without a type, because its stubs lack some attributes."""
    import torch

    return torch.backends


def _fills_memory() -> bool:
    """Return whether fresh memory is filled with NaN, by looking at some."""
    import torch

    torch.zeros(4096)  # its memory, with zeros, is used for the next allocation of this size
    return bool(torch.empty(4096).isnan().all())


def _flushes_denormals() -> bool:
    import torch

    # torch has a function to set this flag, and none to read it.
    smallest = torch.tensor([math.ldexp(1.0, -149)], dtype=torch.float32)
    return bool((smallest * 1.0 == 0.0).item())
