"""Detecting that a GPU ran out of memory during a run.

If there is too little memory for the workspace of a convolution, torch does not fail, but uses
another kernel of cuDNN. This may add in another order, even if every determinism flag is set
(``aten/src/ATen/native/cudnn/Conv_v8.cpp``, ``try_configs`` and ``run_single_conv``). Torch's
memory allocator counts such failures.
"""

from __future__ import annotations

import torch

from capsule.experiment.errors import CapsuleError


def check_memory(device: torch.device) -> None:
    """Check that no allocation on a GPU has failed in this process; on a CPU, do nothing.

    Raises:
        CapsuleError: CAP-T116, an allocation has failed.
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
