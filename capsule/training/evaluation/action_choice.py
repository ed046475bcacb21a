"""How evaluated networks choose actions: the best one, or one drawn from the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.evaluation import EvaluationSpec
from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.inference import require_probabilities, sample
from capsule.training.layers import kernels
from capsule.training.state.streams import Stream

Choose = Callable[[NDArray[np.float32], Sequence[int]], list[int]]
"""Returns the actions of some rows of a policy's values, float32 ``[rows, actions]``."""


def greedy(values: NDArray[np.float32], rows: Sequence[int]) -> list[int]:
    """Choose the actions of the largest values; ties go to the lowest index.

    Args:
        values: float32 ``[rows, actions]``, of all rows.
        rows: Those to choose for.
    """
    best: NDArray[Any] = values.argmax(axis=1)
    return [int(best[row]) for row in rows]


class Sampled:
    """Draws actions from ``softmax(logits)``, one uniform an action.

    Row ``k`` has a stream of its own, ``evaluation-actions`` with index ``k``, from the seed of the
    stream ``evaluation``. A new instance begins it anew, so that every evaluation draws the same
    uniforms.
    """

    def __init__(self, seeds: SeedsSpec, rows: int) -> None:
        """Begin the streams of ``rows`` rows."""
        seed = seeds.root_of("evaluation")
        self._streams = [Stream("evaluation-actions", seed, row) for row in range(rows)]

    def __call__(self, logits: NDArray[np.float32], rows: Sequence[int]) -> list[int]:
        """Draw the actions of ``rows``.

        Raises:
            CapsuleError: CAP-T151, the policy is no distribution.
        """
        chosen = torch.from_numpy(logits[list(rows)])
        # Not torch's softmax, which adds up in the vectors of the processor.
        probabilities = kernels.log_softmax(chosen)[1].numpy()
        require_probabilities(probabilities)
        uniforms = (self._streams[row].uniform() for row in rows)
        return [sample(*each) for each in zip(probabilities, uniforms, strict=True)]


def choice_of(spec: EvaluationSpec, seeds: SeedsSpec, rows: int) -> Choose:
    """Return how one evaluation of ``rows`` episodes chooses actions.

    Args:
        spec: The spec's ``evaluation`` section.
        seeds: The spec's ``seeds`` section, with the root seed that holds.
        rows: Episodes, one row each.
    """
    return Sampled(seeds, rows) if spec.actions == "sampled" else greedy
