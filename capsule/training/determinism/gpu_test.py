"""The self-test of a GPU: it computes what the CPU computes, and the same bits twice.

No golden answers can be shipped, because another GPU model gives other bits. So a sample training
(:func:`capsule.training.determinism.sample_trainings.convolutional`) is computed twice on the
device, and its losses are compared with the CPU's. Its operators are those of Capsule's trainers.

``python -m capsule.training.determinism.gpu_test`` does so with torch's first GPU, and prints what
it found as JSON (``capsule doctor --gpu``).
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DeterminismSpec
from capsule.training.determinism import cpu, torch_flags
from capsule.training.determinism.sample_trainings import UPDATES, convolutional
from capsule.training.determinism.self_test import digest

# Relative tolerance of a loss. Rounding makes a difference of 1e-6, TensorFloat-32 one of 1e-3.
MOST = 1e-2
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def gpu_test(device: torch.device, *, repeats: bool) -> str:
    """Compare a device with the CPU, and with itself.

    Args:
        device: Where to compute.
        repeats: Whether it must give the same bits twice.

    Returns:
        What was found, for the flags of a run.

    Raises:
        CapsuleError: CAP-T110, an answer is wrong or not repeated; CAP-T114, this torch multiplies
            no matrices there under the flags.
    """
    with cpu.one_thread():
        expected = _losses(convolutional())
    try:
        with torch.device(device):
            first, second = ([tensor.cpu() for tensor in convolutional()] for _ in range(2))
    except RuntimeError as error:
        # Before https://github.com/pytorch/pytorch/pull/161749 torch looked for the variable.
        if _WORKSPACE not in str(error):
            raise
        raise CapsuleError(
            "CAP-T114",
            f"torch {torch.__version__} multiplies no matrices on a GPU without {_WORKSPACE} while "
            "determinism.algorithms is 'error'",
            fix="Set determinism.cublas_workspace to ':4096:8', or pin a later version of torch.",
        ) from error
    found = _losses(first)
    if not all(map(_close, found, expected)):
        raise _wrong(device, f"the losses of a training are {found}, and {expected} on the CPU")
    if repeats and digest(first) != digest(second):
        raise _wrong(device, "a training that is repeated has other bits")
    return "as the CPU" + (", with the same bits twice" if repeats else "")


def _losses(answer: list[torch.Tensor]) -> list[float]:
    return [float(loss) for loss in answer[:UPDATES]]


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=MOST)


def _wrong(device: torch.device, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-T110",
        f"the device {device} fails its self-test: {what}",
        fix="Run 'capsule doctor --gpu'; check the GPU's memory errors with 'nvidia-smi -q', and "
        "use another GPU. Under determinism.algorithms 'off' repeated bits are not required.",
    )


def _compare() -> dict[str, Any]:
    """Test torch's first GPU under the determinism flags that specs have by default."""
    if not torch.cuda.is_available():
        raise CapsuleError(
            "CAP-T105",
            f"torch {torch.__version__} finds no CUDA device",
            fix="Install a build of torch for CUDA, and NVIDIA's driver.",
        )
    torch_flags.apply(torch_flags.TorchFlags.of(DeterminismSpec().model_dump()))
    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "libraries": {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        "found": gpu_test(torch.device("cuda", 0), repeats=True),
    }


def main() -> int:
    """Print what was found; return the exit status."""
    try:
        document = _compare()
    except CapsuleError as error:
        sys.stderr.write(f"{error}\n{error.fix}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(document) + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
