"""The choice of actions in evaluations: greedy, or drawn from the policy."""

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
"""A function of a policy's values, float32 ``[rows, actions]``, and of the rows to choose for.

It returns the actions of these rows, in their order.
"""


def greedy(values: NDArray[np.float32], rows: Sequence[int]) -> list[int]:
    """Return the actions with the largest values; ties go to the lowest index.

    Args:
        values: Values of all rows, float32 ``[rows, actions]``.
        rows: The rows to choose for.
    """
    best: NDArray[Any] = values.argmax(axis=1)
    return [int(best[row]) for row in rows]


class Sampled:
    """Draws actions from ``softmax(logits)``, with one uniform for each action.

    Row ``k`` draws from the stream ``evaluation-actions`` with index ``k``, whose seed is that of
    the stream ``evaluation``. The streams begin anew with each instance, so that every evaluation
    draws the same uniforms.
    """

    def __init__(self, seeds: SeedsSpec, rows: int) -> None:
        """Begin the streams of ``rows`` rows."""
        seed = seeds.root_of("evaluation")
        self._streams = [Stream("evaluation-actions", seed, row) for row in range(rows)]

    def __call__(self, logits: NDArray[np.float32], rows: Sequence[int]) -> list[int]:
        """Draw the actions of ``rows`` from logits, float32 ``[rows, actions]``.

        Raises:
            CapsuleError: CAP-T151, a probability is not finite.
        """
        chosen = torch.from_numpy(logits[list(rows)])
        # The order of the sums in torch's softmax depends on the vector width.
        probabilities = kernels.log_softmax(chosen)[1].numpy()
        require_probabilities(probabilities)
        uniforms = (self._streams[row].uniform() for row in rows)
        return [sample(*each) for each in zip(probabilities, uniforms, strict=True)]


def choice_of(spec: EvaluationSpec, seeds: SeedsSpec, rows: int) -> Choose:
    """Return the choice of actions for one evaluation.

    Args:
        spec: The spec's ``evaluation`` section.
        seeds: The spec's ``seeds`` section, with the root seed of the run.
        rows: Number of episodes, one row each.
    """
    return Sampled(seeds, rows) if spec.actions == "sampled" else greedy
