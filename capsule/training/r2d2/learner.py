"""R2D2 under a lockstep schedule (Kapturowski et al. 2019, OpenReview r1lyTjAqYX).

The run advances in *intervals*. In each, every logical actor takes ``update_interval`` steps while
the learner makes one update::

    actors:   act with theta_a                                 | insert, actor by actor
    learner:  draw a minibatch, its gradient at theta_k        | new priorities, theta_{k+1}

The minibatch is drawn from the memory as it is before the interval's steps. Acting and learning
therefore depend only on the state before the interval, and neither timing nor the number of
processes and threads affects the result. The actors' parameters theta_a are copied from theta every
``actor_update_interval`` steps of an actor. The schedule also fixes the replay ratio, which in an
asynchronous R2D2 depends on the hardware.

A sequence is trained on as in the paper's section 3: both networks are unrolled from the recurrent
state that is stored with it, or from zero, over ``burn_in`` steps without a gradient, and then over
the trained steps. Priorities of new sequences come from the actors' own Q-values, as in Ape-X
(Horgan et al. 2018, arXiv:1803.00933).

Deviations from the paper (docs/papers/kapturowski2019.md compares every value):

* Actors and learner, asynchronous in the paper, run in lockstep, as above. An ``update_interval``
  of 25 gives the paper's replay ratio of 0.8, or less where episodes are shorter than sequences;
  its 260 steps per second of each actor would give more steps per update.
* An n-step target near the end of a sequence bootstraps from one of the ``n_step`` states after the
  trained ones; near the end of an episode, from its last state, with fewer steps.
* Initial priorities bootstrap from ``max_a Q`` of the actor's parameters, because an actor has no
  target network.
* The first sequences of an episode are padded in front, so that its first ``burn_in`` steps are
  trained on, although in fewer sequences than later steps; the paper does not describe this case.
* If a time limit ends an episode, its last steps bootstrap from its last state; the paper, whose
  episodes are limited to 30 minutes, does not describe this case.
* The replay memory keeps the newest entries of each actor, in equal shares, instead of the newest
  of all.

The modules of the replay memory, the losses and the network list further choices that the paper
leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.errors import CapsuleError
from capsule.experiment.mechanisms import TrainerUse
from capsule.experiment.spec import EnvironmentSpec
from capsule.experiment.trainers import R2d2Trainer
from capsule.training.base_trainer import BaseTrainer
from capsule.training.determinism.cuda_graph import FixedTensors, Region
from capsule.training.evaluation.protocol import EvaluatedPolicy
from capsule.training.evaluation.recurrent_policy import RecurrentPolicy
from capsule.training.losses.r2d2 import (
    clip_rewards,
    double_q_targets,
    importance_weights,
    sequence_loss,
    sequence_priorities,
    td_errors,
)
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.recurrent import RecurrentNetwork, Sequences
from capsule.training.optimizers.adam import Adam
from capsule.training.r2d2.actor_worker import Experience, exploration_ladder, q_values
from capsule.training.r2d2.actors import Actors
from capsule.training.r2d2.replay import SequenceBatch, SequenceReplay
from capsule.training.sharded_gradient import Threads, added, flat_gradient, split
from capsule.training.train_state import TrainState
from capsule.training.trainer import TrainerContext

_NO_STATE = np.zeros(0, np.float32)
_DIVERGED = "Lower trainer.learning_rate or trainer.max_gradient_norm."


class R2D2(BaseTrainer):
    """The learner, its actors and its replay memory.

    Attributes:
        updates: Parameter updates made.
        actions: Number of actions.
        network: The architecture of the Q-network.
        target: The target network's parameters theta^-.
        acting: The actors' parameters theta_a.
        optimizer: Adam, with its running means.
    """

    def __init__(
        self,
        context: TrainerContext,
        trainer: R2d2Trainer,
        network: RecurrentNetwork,
        actors: Actors,
        replay: SequenceReplay,
    ) -> None:
        """Draw theta, and copy it into theta^- and theta_a.

        Args:
            context: The run.
            trainer: The spec's section ``trainer``.
            network: The architecture of the Q-network.
            actors: All actors, each at the beginning of an episode.
            replay: An empty memory.
        """
        super().__init__(context, network.shapes, network.torso.modules)
        self._trainer, self._actors, self._replay = trainer, actors, replay
        self._stores = trainer.recurrent_state == "stored"
        self.network, self.actions = network, network.actions
        self.target, self.acting = self.online.copy(), self.online.copy()
        self.optimizer = Adam(
            self.online, learning_rate=trainer.learning_rate, epsilon=trainer.adam_epsilon
        )
        self._train_state = TrainState(
            self.online,
            {"mean": self.optimizer.mean, "square": self.optimizer.square},
            target=self.target,
            others={"acting": self.acting},
        )
        self._leaves = self.online.leaves()
        self._threads = Threads(context.workers if self._device.type == "cpu" else 1)
        self._fixed = [FixedTensors(self._device) for _ in trainer.micro_batches]
        self._inputs: dict[int, _Inputs] = {}  # by shard
        graph = context.graphed
        self._differentiation = Region(self._differentiate, self._device, graph=graph)
        self._descent = Region(self._descend, self._device, graph=graph)
        self._sent = False  # whether theta_a was sent to the actors
        self.updates = 0

    # The algorithm

    def train_step(self) -> None:
        """Take ``update_interval`` steps of each actor and, once learning has started, update."""
        self._begin_acting()
        learns = self.step >= self._trainer.replay_start
        if learns:
            indices, shards = self._learn()
        # Collected only now, so that nothing enters the memory before the minibatch has been
        # gathered, however fast the actors are.
        experiences = self._actors.finish()
        if learns:
            # On a GPU this waits for the gradient, and therefore comes after finish().
            found = [self._priorities(shard.errors, shard.valid) for shard in shards]
            self._replay.update_priorities(indices, np.concatenate(found))
        for actor, experience in enumerate(experiences):
            self._insert(actor, experience)
        if learns:
            self._update(shards)
        self.step += self._trainer.interval_steps
        if self.step % self._spec.recording.trace_interval == 0:
            self.record()

    def exploration(self) -> float:
        """Return the mean epsilon of the actors."""
        trainer = self._trainer
        ladder = exploration_ladder(
            trainer.actors, trainer.exploration_base, trainer.exploration_exponent
        )
        return math.fsum(ladder) / len(ladder)

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations."""
        return network_policy(self.network, parameters, self._spec.environment)

    def _begin_acting(self) -> None:
        due = self.step // self._trainer.actors % self._trainer.actor_update_interval == 0
        if due:
            self.acting.copy_from(self.online)
        # The workers of a resumed run have no parameters yet, even if no copy is due.
        parameters = self.acting.flat if due or not self._sent else None
        self._actors.begin(parameters)
        self._sent = True

    def _insert(self, actor: int, experience: Experience) -> None:
        """Append an actor's steps to the memory, and give new sequences their first priorities."""
        self._trace.add("observations", experience.frames)
        self._trace.add("actions", experience.actions)
        self._trace.add("rewards", np.stack((experience.rewards, experience.game_rewards)))
        self._trace.add("terminals", np.stack((experience.terminals, experience.ended)))
        finished: list[int] = []
        for step in range(len(experience.actions)):
            terminal, ended = bool(experience.terminals[step]), bool(experience.ended[step])
            finished += self._replay.append(
                actor,
                experience.frames[step],
                int(experience.actions[step]),
                float(experience.rewards[step]),
                terminal,
                ended=ended and terminal,
                state=experience.states.get(step) if self._stores else _NO_STATE,
                values=experience.values[step],
            )
            if step in experience.last_frames:
                finished += self._replay.end_episode(
                    actor, experience.last_frames[step], experience.last_values[step]
                )
        if finished:
            self._prioritize(np.array(finished, np.int64))
        self._count_episodes(experience.returns)

    def _prioritize(self, indices: NDArray[np.int64]) -> None:
        """Give new sequences priorities by the TD errors of the actors' own Q-values."""
        batch = self._replay.gather(indices, frames=False)
        values = torch.from_numpy(batch.values[self._trainer.burn_in :]).to(self._device)
        taken, largest = values.unbind(2)
        best = largest.unsqueeze(2)  # the only action to select from
        window = _Window(*(each.to(self._device) for each in self._window(batch)))
        trained = self._trainer.sequence_length
        # Selection and evaluation both use the actor's own values, as it has no target network.
        errors = self._targets(window, best, best) - taken[:trained]
        priorities = self._priorities(errors, window.valid[:trained])
        self._replay.update_priorities(indices, priorities)

    # Learning

    def _learn(self) -> tuple[NDArray[np.int64], Sequence[_Shard]]:
        """Draw a minibatch and compute its gradient at theta_k.

        Returns:
            The sequences' indices, int64 ``[batch_size]``, and the result of each shard.
        """
        trainer = self._trainer
        draw = self._replay.sample(self._streams["minibatch"], trainer.batch_size)
        self._trace.add("indices", draw.indices)
        # For the whole minibatch at once, because weights are divided by the largest one of the
        # minibatch, which need not be in every shard.
        weights = torch.from_numpy(
            importance_weights(draw.probabilities, trainer.importance_exponent)
        )
        sizes = trainer.micro_batches
        parts = list(
            zip(range(len(sizes)), split(draw.indices, sizes), split(weights, sizes), strict=True)
        )
        shards: Sequence[_Shard]
        if self._device.type == "cpu":
            pairs = self._threads.map(self._gather_and_differentiate, parts)
            self._minibatch, shards = zip(*pairs, strict=True)
            self._gradient = added(shard.gradient for shard in shards)
        else:
            self._minibatch = [self._gather(*part) for part in parts]
            shards, self._gradient = self._differentiation()
        return draw.indices, shards

    def _gather(
        self, number: int, indices: NDArray[np.int64], weights: torch.Tensor
    ) -> SequenceBatch:
        """Gather one shard of the minibatch, and copy it to the network's device.

        Args:
            number: Number of the shard.
            indices: Indices of its sequences, int64 ``[sequences]``.
            weights: Their importance weights, float32 ``[sequences]``.

        Returns:
            The shard as the replay memory gave it, on the CPU.
        """
        batch = self._replay.gather(indices)
        rows = (
            torch.from_numpy(batch.observations),
            torch.from_numpy(batch.previous_actions),
            torch.from_numpy(batch.previous_rewards),
            self._initial_states(batch),
            torch.from_numpy(batch.resets),
        )
        *filled, moved = self._fixed[number].fill(*rows, *self._window(batch), weights)
        first = len(rows)
        self._inputs[number] = _Inputs(Sequences(*filled[:first]), _Window(*filled[first:]), moved)
        return batch

    def _gather_and_differentiate(
        self, part: tuple[int, NDArray[np.int64], torch.Tensor]
    ) -> tuple[SequenceBatch, _Shard]:
        batch = self._gather(*part)
        return batch, self._differentiate_shard(self._inputs[part[0]])

    def _differentiate(self) -> tuple[list[_Shard], torch.Tensor]:
        """Return each shard's result at theta_k, and the summed gradient, float32 ``[size]``."""
        shards = [self._differentiate_shard(self._inputs[n]) for n in range(len(self._fixed))]
        return shards, added(shard.gradient for shard in shards)

    def _differentiate_shard(self, inputs: _Inputs) -> _Shard:
        """Return the loss of some sequences, its gradient, and their TD errors."""
        trainer = self._trainer
        rows, window, weights = inputs
        first, end = trainer.burn_in, trainer.burn_in + trainer.sequence_length
        unroll = self.network.unroll
        with torch.no_grad():
            start = self._burn_in(self.target.views, rows)
            target_values, _ = unroll(self.target.views, _part(rows, slice(first, None), start))
            # The prefix only produces a start state, without a gradient; the network is updated on
            # the rest of the sequence alone (section 3).
            start = self._burn_in(self._leaves, rows)
        values, after = unroll(self._leaves, _part(rows, slice(first, end), start))
        with torch.no_grad():  # the states that are only bootstrapped from
            others, _ = unroll(self._leaves, _part(rows, slice(end, None), after))
            online_values = torch.cat((values, others))
        trained = trainer.sequence_length
        actions, valid = window.actions[:trained], window.valid[:trained]
        targets = self._targets(window, online_values, target_values)
        errors = td_errors(values, actions, targets)
        loss = sequence_loss(errors, valid, weights, trainer.batch_size)
        gradient = flat_gradient(loss, self._leaves)
        return _Shard(loss.detach(), gradient, errors.detach(), valid)

    def _burn_in(self, parameters: Mapping[str, torch.Tensor], rows: Sequences) -> torch.Tensor:
        """Return the recurrent states before the trained steps, float32 ``[batch, *state_shape]``.

        They result from unrolling the prefix from the states before the sequences.
        """
        steps, states = self._trainer.burn_in, rows.states
        if not (steps and self._trainer.recurrent_units):
            return states
        _, after = self.network.remember(parameters, _part(rows, slice(steps), states))
        # If the first trained row is a reset, the whole prefix is padding, and training starts from
        # the state before the sequence.
        fresh = rows.resets[steps].view(-1, *[1] * (states.dim() - 1))
        return torch.where(fresh, states, after)

    def _window(self, batch: SequenceBatch) -> _Window:
        """Return the part of a batch that follows the prefix, on the CPU."""
        first = self._trainer.burn_in
        received = batch.rewards[first:]
        if self._trainer.asymmetric_clipping:
            # Its tanh is computed in float64 and then rounded to float32, which removes nearly all
            # differences between mathematical libraries.
            received = clip_rewards(received.astype(np.float64))
        arrays = (
            received,
            batch.terminals[first:],
            batch.valid[first:],
            batch.actions[first:],
        )
        return _Window(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))

    def _targets(
        self, window: _Window, online_values: torch.Tensor, target_values: torch.Tensor
    ) -> torch.Tensor:
        """Return the n-step double-Q targets of the trained steps, float32 ``[trained, batch]``.

        Q-values are float32 ``[trained + n_step, batch, actions]``.
        """
        targets = double_q_targets(
            window.rewards,
            self._trainer.discount * (~window.terminals).to(torch.float32),
            online_values,
            target_values,
            window.valid.sum(0),
            steps=self._trainer.n_step,
            epsilon=self._trainer.rescaling_epsilon,
        )
        return targets[: self._trainer.sequence_length]

    def _priorities(self, errors: torch.Tensor, valid: torch.Tensor) -> NDArray[np.float64]:
        """Return the priorities of sequences by their TD errors, ``[trained, batch]``.

        Raises:
            CapsuleError: CAP-T151, an error is not a finite number.
        """
        priorities = sequence_priorities(errors, valid, self._trainer.priority_maximum_share)
        # The check of the loss comes later, and does not cover the actors' own values.
        if not np.isfinite(priorities).all():
            raise CapsuleError(
                "CAP-T151",
                f"a temporal difference is not finite at step {self.step}",
                fix=_DIVERGED,
            )
        return priorities

    def _initial_states(self, batch: SequenceBatch) -> torch.Tensor:
        if self._stores:
            return torch.from_numpy(batch.states)
        return torch.zeros(batch.resets.shape[1], *self.network.state_shape)

    def _update(self, shards: Sequence[_Shard]) -> None:
        """Descend the summed gradient, theta_k to theta_{k+1}."""
        self._take_loss([shard.loss for shard in shards], fix=_DIVERGED)
        # Outside the region, because a CUDA graph repeats the host's numbers as they were when it
        # was captured.
        self.optimizer.advance()
        self._descent()
        self.updates += 1
        if self.updates % self._trainer.target_interval == 0:
            self.target.copy_from(self.online)

    def _descend(self) -> None:
        self.optimizer.descend(self._gradient, self._trainer.max_gradient_norm)

    # Recording

    def state(self) -> dict[str, Any]:
        """See :meth:`BaseTrainer.state`."""
        return {
            **super().state(),
            "updates": self.updates,
            "actors": self._actors.state(),
            "replay": self._replay.state(),
        }

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """See :meth:`BaseTrainer.restore`."""
        self._actors.restore(state["actors"])
        self._replay.restore(state["replay"])
        super().restore(step, state, tensors)
        self.updates = self.optimizer.updates = state["updates"]
        self._sent = False

    def stream_profiles(self) -> list[StreamProfile]:
        """Return the profiles of the actors' streams, named ``stream/actor``."""
        return self._actors.profiles()

    def use(self) -> TrainerUse:
        """Return the device of the network, the number of actors, and their schedule."""
        device = str(self.online.flat.device)
        return TrainerUse(device=device, actors=self._actors.count, schedule="lockstep")

    def close(self) -> None:
        """End every thread and process."""
        self._threads.close()
        self._actors.close()


def network_policy(
    network: RecurrentNetwork, parameters: Parameters, environment: EnvironmentSpec
) -> EvaluatedPolicy:
    """Return the policy of a network with these parameters, for evaluations."""
    evaluate = partial(q_values, network, parameters)
    return RecurrentPolicy(network, environment, parameters.flat.device, evaluate)


class _Shard(NamedTuple):
    """The result of a shard of a minibatch.

    Attributes:
        loss: float32 scalar.
        gradient: float32 ``[size]``, in the memory order of the parameters.
        errors: TD errors, float32 ``[trained, sequences]``.
        valid: bool ``[trained, sequences]``: False for padding, whose errors mean nothing.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    errors: torch.Tensor
    valid: torch.Tensor


class _Window(NamedTuple):
    """The steps of a batch after its prefix: the trained ones, and those only n-step targets need.

    ``time`` is ``trained + n_step - 1``.

    Attributes:
        rewards: float32 ``[time, batch]``.
        terminals: bool ``[time, batch]``: whether the return ends after the step.
        valid: bool ``[time, batch]``: False for padding.
        actions: int64 ``[time, batch]``.
    """

    rewards: torch.Tensor
    terminals: torch.Tensor
    valid: torch.Tensor
    actions: torch.Tensor


class _Inputs(NamedTuple):
    """The sequences of a shard, on the network's device.

    Attributes:
        rows: The network's inputs, the prefix included.
        window: The steps after the prefix.
        weights: Importance weights, float32 ``[sequences]``.
    """

    rows: Sequences
    window: _Window
    weights: torch.Tensor


def _part(seen: Sequences, rows: slice, states: torch.Tensor) -> Sequences:
    """Return some rows of sequences, with ``states`` as the recurrent states before them."""
    observations, actions, rewards, _, resets, _ = seen
    return Sequences(observations[rows], actions[rows], rewards[rows], states, resets[rows])
