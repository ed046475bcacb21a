"""The loss of unrolls and its gradient (Espeholt et al. 2018, arXiv:1802.01561, section 4.2)."""

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
        """Refer to parameters, which are read at every call.

        Args:
            trainer: The spec's section ``trainer``.
            network: The architecture.
            frame_stack: Frames of one observation.
            parameters: Theta. Everything is computed on its device.
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
        # Where no action is taken, the reward is the state's own value and the discount is 0. The
        # target of the state is therefore its value: earlier steps bootstrap from it, and its own
        # error is 0.
        rewards = torch.where(batch.acted, batch.rewards, values[:-1])
        # Targets are constants (section 4.2), so all their inputs are detached.
        trajectories = rewards, batch.discounts, values
        targets = corrected_targets(
            self._trainer, log_target.detach(), batch.log_behaviour, *trajectories
        )
        loss = impala_losses(
            log_target,
            # Where no action is taken, the entropy does not count.
            policy.entropies * batch.acted,
            baselines[:-1],
            targets,
            baseline_cost=self._trainer.baseline_cost,
            entropy_cost=self._trainer.entropy_cost,
        ).total
        return ShardGradient(loss.detach(), flat_gradient(loss, self._leaves))

    def _batch(self, unrolls: Sequence[Unroll]) -> _Batch:
        """Return unrolls as a time-major batch on the network's device."""

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
        """Yield arrays as tensors on the network's device."""
        return (torch.from_numpy(array).to(self._device) for array in arrays)


class _Batch(NamedTuple):
    """A time-major batch of unrolls.

    Attributes:
        seen: The network's inputs, with one row more than there are steps.
        acted: bool ``[steps, unrolls]``; False for the last frame of a truncated episode.
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
