"""The self-test of a GPU: whether it agrees with the CPU, and computes the same bits twice.

There are no golden answers for the trainings, because every GPU model gives other bits. Instead,
the sample trainings (:mod:`capsule.training.determinism.sample_trainings`), whose operators are
those of Capsule's trainers, are computed twice on the device, and their losses are compared with
those of the CPU.

Products and convolutions of integers have known answers: if every partial sum is below 2^24, they
are exact in float32, in whatever order a library adds. Their factors have 12 significant bits, of
which TensorFloat-32 keeps 11, so the answers differ if it is used without being allowed. If the
spec allows it, the factors have 11 bits, and the answers are exact as well. The convolution has a
stride, because cuDNN's transforms (Winograd, FFT), whose results are rounded, require a stride of 1
(*cuDNN API Reference*, ``cudnnConvolutionForward``).

``python -m capsule.training.determinism.gpu_test`` tests torch's first GPU, and prints the result
as JSON (``capsule doctor --gpu``).
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DeterminismSpec
from capsule.training.determinism import cpu, torch_flags
from capsule.training.determinism.operator_sweep import integers
from capsule.training.determinism.sample_trainings import UPDATES, trainings
from capsule.training.determinism.self_test import digest

# Relative tolerance of a loss. Rounding causes a difference of 1e-6, TensorFloat-32 one of 1e-3.
MOST, MOST_TF32 = 1e-4, 1e-2
BITS, BITS_TF32 = 12, 11  # significant bits of the integers with known products
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def gpu_test(device: torch.device, *, repeats: bool, tf32: bool = False) -> str:
    """Compare a device with the CPU, and with itself.

    Args:
        device: The device.
        repeats: Whether it must compute the same bits twice.
        tf32: Whether TensorFloat-32 is allowed.

    Returns:
        The result, for the flags of a run.

    Raises:
        CapsuleError: CAP-T110, an answer is wrong or not repeated; CAP-T114, this version of torch
            does not multiply matrices on the device under the flags.
    """
    try:
        _test_integers(device, tf32=tf32)
        for name in trainings():
            _test_training(name, device, repeats=repeats, most=MOST_TF32 if tf32 else MOST)
    except RuntimeError as error:
        # Before https://github.com/pytorch/pytorch/pull/161749, torch required the variable.
        if _WORKSPACE not in str(error):
            raise
        raise CapsuleError(
            "CAP-T114",
            f"torch {torch.__version__} multiplies no matrices on a GPU without {_WORKSPACE} while "
            "determinism.algorithms is 'error'",
            fix="Set determinism.cublas_workspace to ':4096:8', or pin a later version of torch.",
        ) from error
    return "as the CPU" + (", with the same bits twice" if repeats else "")


def _test_integers(device: torch.device, *, tf32: bool) -> None:
    """Compare products of integers with their exact values."""
    bits = BITS_TF32 if tf32 else BITS
    with cpu.one_thread():
        expected = _integer_products(torch.device("cpu"), torch.float64, bits)
    found = _integer_products(device, torch.float32, bits)
    for name, exact in expected.items():
        if not torch.equal(found[name].cpu().double(), exact):
            cause = "" if tf32 else ", which they are not in TensorFloat-32"
            raise _wrong(
                device,
                f"{name} of integers of {bits} bits is not exact, as it is in float32{cause}",
            )


def _integer_products(
    device: torch.device, dtype: torch.dtype, bits: int
) -> dict[str, torch.Tensor]:
    """Return products of integers by name, with partial sums below 2^24."""

    def wide(*shape: int) -> torch.Tensor:
        """Return odd numbers of exactly ``bits`` bits."""
        top = 1 << (bits - 1)
        return placed(top + 1 + 2 * integers(*shape, bits=bits - 2))

    def small(*shape: int) -> torch.Tensor:
        return placed(integers(*shape, key=1, bits=2) - 2)

    def placed(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(dtype).to(device)

    # Every sum below consists of 256 products of a number below 2^12 and a number of magnitude at
    # most 2, so its magnitude is below 2^21.
    images, filters = wide(4, 4, 36, 36), small(8, 4, 8, 8).requires_grad_()
    maps = functional.conv2d(images, filters, stride=4)
    (gradient,) = torch.autograd.grad(maps, filters, small(*maps.shape))
    return {
        "a product": wide(64, 256) @ small(256, 48),
        "a product, the other way round,": small(64, 256) @ wide(256, 48),
        "a convolution": maps.detach(),
        "the gradient of a convolution": gradient,
    }


def _test_training(name: str, device: torch.device, *, repeats: bool, most: float) -> None:
    train = trainings()[name]
    with cpu.one_thread():
        expected = _losses(train())
    # Within this block, the inputs of the sweep and torch's modules are made on the device.
    with torch.device(device):
        first, second = ([tensor.cpu() for tensor in train()] for _ in range(2))
    found = _losses(first)
    if not all(map(partial(math.isclose, rel_tol=most), found, expected)):
        raise _wrong(device, f"the losses of {name} are {found}, and {expected} on the CPU")
    if repeats and digest(first) != digest(second):
        raise _wrong(device, f"{name}, repeated, has other bits")


def _losses(answer: list[torch.Tensor]) -> list[float]:
    return [float(loss) for loss in answer[:UPDATES]]


def _wrong(device: torch.device, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-T110",
        f"the device {device} fails its self-test: {what}",
        fix="Run 'capsule doctor --gpu'; check the GPU's memory errors with 'nvidia-smi -q', and "
        "use another GPU. Under determinism.algorithms 'off' repeated bits are not required.",
    )


def _compare() -> dict[str, Any]:
    """Test torch's first GPU under the default determinism flags of specs."""
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
    """Print the result; return the exit status."""
    try:
        document = _compare()
    except CapsuleError as error:
        sys.stderr.write(f"{error}\n{error.fix}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(document) + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
