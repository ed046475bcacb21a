"""The loss of some unrolls, and its gradient (Espeholt et al. 2018, arXiv:1802.01561, 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.impala.actors.unrolls import Unroll, stacked
from capsule.training.losses.impala import clipped_rewards, impala_losses, softmax_policy
from capsule.training.losses.v_trace import corrected_targets
from capsule.training.networks.actor_critic import ActorCriticNetwork
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.recurrent import Sequences
from capsule.training.sharded_gradient import ShardGradient, flat_gradient


class ImpalaGradient:
    """Differentiates the loss of unrolls at the current values of some parameters."""

    def __init__(
        self,
        trainer: ImpalaTrainer,
        network: ActorCriticNetwork,
        frame_stack: int,
        parameters: Parameters,
    ) -> None:
        """Begin.

        Args:
            trainer: The spec's section ``trainer``.
            network: Architecture.
            frame_stack: Frames of one observation.
            parameters: Theta; where they are, it is computed.
        """
        self._trainer, self._network, self._frame_stack = trainer, network, frame_stack
        self._device = parameters.flat.device
        self._leaves = parameters.leaves()

    def __call__(self, shard: Sequence[Unroll]) -> ShardGradient:
        """Return the loss of some unrolls and its gradient."""
        batch = self._batch(shard)
        logits, baselines, _ = self._network.unroll(self._leaves, batch.seen)
        policy = softmax_policy(logits[:-1])
        log_target, values = policy.of(batch.actions), baselines.detach()
        # Where no action is taken, a reward of the state's own value and a discount of 0 make that
        # value its target: earlier steps bootstrap from it, and it is not trained.
        rewards = torch.where(batch.acted, batch.rewards, values[:-1])
        # Targets are constants (section 4.2): they are made of numbers without a gradient.
        trajectories = rewards, batch.discounts, values
        targets = corrected_targets(
            self._trainer, log_target.detach(), batch.log_behaviour, *trajectories
        )
        loss = impala_losses(
            log_target,
            # Where no action is taken, no entropy is rewarded.
            policy.entropies * batch.acted,
            baselines[:-1],
            targets,
            baseline_cost=self._trainer.baseline_cost,
            entropy_cost=self._trainer.entropy_cost,
        ).total
        return ShardGradient(loss.detach(), flat_gradient(loss, self._leaves))

    def _batch(self, unrolls: Sequence[Unroll]) -> _Batch:
        """Put unrolls beside each other."""

        def columns(name: str) -> NDArray[Any]:
            return np.stack([getattr(unroll, name) for unroll in unrolls], 1)

        rewards = clipped_rewards(columns("rewards"), self._trainer.reward_clipping)
        discounts = np.float32(self._trainer.discount) * ~columns("terminals")
        seen = (
            stacked(unrolls, self._frame_stack),
            columns("previous_actions"),
            columns("previous_rewards"),
            np.stack([unroll.state for unroll in unrolls]),
            columns("ages") == 0,
            columns("instructions"),
        )
        taken = (
            columns("acted"),
            columns("actions"),
            columns("log_behaviour"),
            rewards,
            discounts.astype(np.float32),
        )
        return _Batch(Sequences(*self._moved(seen)), *self._moved(taken))

    def _moved(self, arrays: Iterable[NDArray[Any]]) -> Iterator[torch.Tensor]:
        """Yield arrays as tensors where the network is."""
        return (torch.from_numpy(array).to(self._device) for array in arrays)


class _Batch(NamedTuple):
    """Unrolls beside each other.

    Attributes:
        seen: What the network reads, one row more than there are steps.
        acted: bool ``[steps, unrolls]``; False: the last frame of a truncated episode.
        actions: int64 ``[steps, unrolls]``.
        log_behaviour: ``ln mu(a_t|x_t)``: float32 ``[steps, unrolls]``.
        rewards: float32 ``[steps, unrolls]``.
        discounts: float32 ``[steps, unrolls]``: 0 where the return ends.
    """

    seen: Sequences
    acted: torch.Tensor
    actions: torch.Tensor
    log_behaviour: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor
