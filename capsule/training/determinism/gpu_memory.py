"""Noticing that a GPU ran out of memory in between.

If a convolution finds too little memory for its workspace, torch does not fail. It takes another of
cuDNN's kernels, which may add in another order, although every flag says "deterministic"
(``aten/src/ATen/native/cudnn/Conv_v8.cpp``, ``try_configs`` and ``run_single_conv``). Its memory
allocator counts such failures.
"""

from __future__ import annotations

import torch

from capsule.experiment.errors import CapsuleError


def check_memory(device: torch.device) -> None:
    """Check that no allocation on a GPU has failed in this process; a CPU passes.

    Raises:
        CapsuleError: CAP-T116, one has.
    """
    if device.type != "cuda":
        return
    if failures := torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0):
        raise CapsuleError(
            "CAP-T116",
            f"the GPU had too little memory {failures} times, so that torch may have computed "
            "other bits than with enough memory",
            fix="End the other programs on this GPU, or take another one; then resume the run from "
            "its last saved state.",
        )
