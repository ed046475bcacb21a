"""Deep Q-learning, deterministic.

The algorithm is Algorithm 1 of Mnih et al. 2015, doi:10.1038/nature14236; it is made deterministic
as in Nagarajan et al. 2019, arXiv:1809.05676.

The run advances in *intervals* of ``update_interval`` steps, each followed by one update (or by
several: ``updates``). Every random number comes from a named stream, and every sum is computed in a
fixed order, so the number of threads changes only the speed.

Schedule. With ``concurrent`` the minibatch is drawn first, from the memory as it is before the
interval's steps. Acting and learning then both depend on theta_k alone, and can overlap::

    thread 1:  act, act, act, act with theta_k  |  gradient of shard 2
    thread 2:  gradient of shard 1 at theta_k       ...                 |  theta_{k+1}

On a GPU, which computes the gradient on a CUDA stream of its own, one thread launches it and then
acts.

Without ``concurrent`` the order is that of Algorithm 1: act, then draw, then update.

Deviations from Mnih et al. 2015, Extended Data Table 1 (M), the authors' own code (C) and the code
of Nagarajan et al. 2019 (N, github.com/prabhatnagarajan/repro_dqn); docs/papers/nagarajan2019.md
compares every value:

* Network: C pads the frames by 1 before the first convolution; N and Capsule do not.
* Minibatch: without ``concurrent`` the newest transition cannot be drawn, unless it is terminal,
  because its next frame is stored with the following step; with ``concurrent`` the newest
  ``update_interval`` + 1 cannot. C also excludes the newest one, and draws 512 transitions at once
  for 16 minibatches, so that the last of these lacks 60 more. N excludes the first four transitions
  of every episode and, until the memory is full, the newest one.
* Replay start size: M counts 50,000 frames; C, N and Capsule count agent steps.
* Target network update frequency: M counts 10,000 parameter updates; C, N and Capsule count agent
  steps.
* Final exploration frame: M and the paper of N name the first million frames. In C, N and Capsule
  epsilon falls over 1,000,000 agent steps (4,000,000 emulator frames at a frame skip of 4), counted
  from the end of the random play.
* Loss: summed over the minibatch, with errors clipped to [-1, 1], as in C; M leaves the scale open,
  and N takes the mean.
* Greedy action: ties go to the lowest index, as in N; C breaks them at random.
* Optimizer: centred RMSProp as in M. N's RMSProp is not centred and adds the minimum squared
  gradient after the root. ``optimizer: adam`` (Kingma and Ba 2015, arXiv:1412.6980) is Capsule's
  addition; it descends the mean over the minibatch, not the sum.
* Rewards: C also divides them by the largest reward seen, which is 1 once they are clipped.
* Frames: two screens are converted to grey before their maximum is taken; M, C and N take the
  maximum of each colour first. The resize averages areas; C and N interpolate; M leaves it open.
* No-ops: 1 to 30 emulator frames at the start of a game; C and N also have them after a lost life.
* Time limits: if a limit ends an episode, the last transition bootstraps from the last frame; M and
  the paper of N mention no limit in training.
* Evaluation: N ends the running episode for it; here it comes after training, and training is the
  same with and without it. Unless the spec pins a start set, a run ranks its start sequences with
  its own final network; the paper ranks once for all runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.mechanisms import TrainerUse
from capsule.experiment.spec import CpuAccelerator, CudaAccelerator
from capsule.experiment.trainers import DqnTrainer
from capsule.training.base_trainer import BaseTrainer
from capsule.training.determinism.cuda_graph import FixedTensors, Region
from capsule.training.dqn.gradient import FactoredGradient, FactoredShard
from capsule.training.dqn.replay import Batch, ReplayMemory
from capsule.training.environments import Environment, make_environment
from capsule.training.evaluation.protocol import EvaluatedPolicy, QValues, Reactive
from capsule.training.layers.backends import backend_for
from capsule.training.losses.q_learning import (
    bootstrap_targets,
    clipped_error_loss,
    clipped_errors,
    exploration_rate,
)
from capsule.training.networks.feedforward import (
    WIDE,
    Network,
    Parameters,
    flatten,
    make_network,
)
from capsule.training.networks.passes import ForwardPass, GradientPass, PassesOfAnySize, has_passes
from capsule.training.optimizers.adam import Adam
from capsule.training.optimizers.centred_rmsprop import CentredRmsProp
from capsule.training.sharded_gradient import Threads, split
from capsule.training.train_state import TrainState
from capsule.training.trainer import TrainerContext, state_interval

# With fewer parameters, handing work to another thread takes longer than doing it.
WORTH_A_THREAD = 200_000


class DeepQLearning(BaseTrainer):
    """The DQN agent with its environment, replay memory, networks and optimizer.

    Attributes:
        actions: Number of actions.
        network: The architecture of the Q-network.
        target: The target network's parameters theta^-.
        optimizer: Centred RMSProp or Adam, with its running means.
    """

    def __init__(
        self,
        context: TrainerContext,
        trainer: DqnTrainer,
        environment: Environment,
        replay: ReplayMemory,
    ) -> None:
        """Draw theta, copy it into theta^-, and begin the first episode.

        Args:
            context: The run. One thread computes all gradients on a GPU, and those of a network
                with fewer than :data:`WORTH_A_THREAD` parameters.
            trainer: The spec's section ``trainer``.
            environment: The training environment.
            replay: An empty memory.
        """
        self.network = make_q_network(trainer, environment, context.spec.accelerator)
        super().__init__(context, self.network.shapes, self.network.modules)
        self._trainer, self._environment, self._replay = trainer, environment, replay
        self.actions = environment.actions
        self.target = self.online.copy()
        self.optimizer = _make_optimizer(trainer, self.online)
        self._train_state = TrainState(
            self.online,
            {"mean": self.optimizer.mean, "square": self.optimizer.square},
            target=self.target,
        )
        overlaps = self._device.type == "cpu" and self.online.flat.numel() >= WORTH_A_THREAD
        self._threads = Threads(context.workers if overlaps else 1)
        self._leaves = self.online.leaves()
        del self._leaves[WIDE]  # its gradient is never written out
        self._windows = self._make_windows()
        # A dense record is compared with others operator by operator, and not every run can
        # compute by passes.
        by_passes = has_passes(self.network) and not context.dense
        self._passes = self._make_passes() if by_passes else []
        self._values = value_function(self.network, self.online, by_passes=by_passes)
        self._fixed = [FixedTensors(self._device) for _ in self._windows]
        self._inputs: dict[int, _Inputs] = {}  # by shard
        graph = context.graphed
        self._differentiation = Region(self._differentiate, self._device, graph=graph)
        self._descent = Region(self._descend, self._device, graph=graph)
        self._factored: FactoredGradient | None = None
        self._return = 0.0
        self._frame = environment.reset()

    # The algorithm

    def train_step(self) -> None:
        """Take ``update_interval`` steps and, once learning has started, make the updates."""
        learns = self.step >= self._trainer.replay_start
        if learns and self._trainer.concurrent:
            # The calling thread acts, so only this thread uses the environment and the streams.
            self._update(self._draw_minibatch(), beside=self._act)
        else:
            self._act()
            for _ in range(self._trainer.updates if learns else 0):
                self._update(self._draw_minibatch())
        if self.step % self._trainer.target_interval == 0:
            self.target.copy_from(self.online)
        if self.step % self._spec.recording.trace_interval == 0:
            self.record()

    def exploration(self) -> float:
        """Return epsilon at the current step: 1 before learning starts, then as the spec says."""
        if self.step < self._trainer.replay_start:
            return 1.0
        return exploration_rate(
            self.step - self._trainer.replay_start,
            initial=self._trainer.exploration_initial,
            final=self._trainer.exploration_final,
            steps=self._trainer.exploration_steps,
        )

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations."""
        return network_policy(self.network, parameters)

    def _act(self) -> None:
        for _ in range(self._trainer.update_interval):
            self._act_once()

    def _act_once(self) -> None:
        frame, action = self._frame, self._choose_action()
        transition = self._environment.step(action)
        self._replay.append(frame, action, transition.reward, transition.terminal)
        self._trace.add("observations", frame)
        self._trace.add("actions", struct.pack("<i", action))
        # The game's own reward is traced beside the training reward, because two runs that differ
        # in it can have the same clipped reward.
        self._trace.add("rewards", struct.pack("<dd", transition.reward, transition.game_reward))
        self._trace.add("terminals", struct.pack("<??", transition.terminal, transition.ended))
        self.step += 1
        self._return += transition.game_reward
        self._frame = transition.frame
        if transition.ended:
            if not transition.terminal:
                self._replay.end_episode(transition.frame)
            self._count_episodes([self._return])
            self._return = 0.0
            self._frame = self._environment.reset()

    def _choose_action(self) -> int:
        """Return an epsilon-greedy action. Both random numbers are drawn whichever is used."""
        # The position of the stream therefore depends on the number of steps alone, and not on
        # epsilon.
        stream = self._streams["exploration"]
        uniform, random_action = stream.uniform(), stream.integer(self._environment.actions)
        if uniform < self.exploration():
            return random_action
        return int(self._values(self._replay.stack(self._frame)[None]).argmax())

    # Learning

    def _draw_minibatch(self) -> NDArray[np.int64]:
        indices = self._replay.sample_indices(self._streams["minibatch"], self._trainer.batch_size)
        self._trace.add("indices", indices)
        return indices

    def _update(self, indices: NDArray[np.int64], beside: Callable[[], None] | None = None) -> None:
        """Descend the gradient of a minibatch, theta_k to theta_{k+1}.

        Args:
            indices: Indices of its transitions, int64 ``[batch_size]``.
            beside: Called once while the gradient is computed.
        """
        shards = list(enumerate(split(indices, self._trainer.micro_batches)))
        if self._device.type == "cpu":
            parts = self._threads.map(self._gather_and_differentiate, shards, beside=beside)
            self._minibatch, found = zip(*parts, strict=True)
            gradient = FactoredGradient(found, self.online, self.network.products)
        else:
            self._minibatch = [self._gather(*shard) for shard in shards]
            gradient = self._differentiation.launch()
            if beside is not None:
                beside()
            self._differentiation.join()
        self._factored = gradient
        self._take_loss(
            gradient.losses, share=self._trainer.batch_size, fix="Lower trainer.learning_rate."
        )
        if isinstance(self.optimizer, Adam):
            # Outside the region, because a CUDA graph repeats the host's numbers as they were when
            # it was captured.
            self.optimizer.advance()
        # Theta changes only here, when the actor and all shards have read theta_k.
        self._descent()

    def _descend(self) -> None:
        """Descend the last gradient, from theta_k to theta_{k+1}."""
        gradient, optimizer = self._factored, self.optimizer
        if gradient is None:
            raise AssertionError("a gradient comes before its descent")
        if isinstance(optimizer, Adam):  # it clips by the norm of the whole gradient
            mean = gradient.whole() / self._trainer.batch_size
            optimizer.descend(mean, self._trainer.max_gradient_norm)
            return

        def descend(part: int) -> None:
            for piece in gradient.pieces(part, self._threads.count):
                optimizer.update(piece)

        self._threads.map(descend, range(self._threads.count))

    def _gather(self, number: int, indices: NDArray[np.int64]) -> Batch:
        """Gather one shard of the minibatch, and copy it to the network's device.

        Args:
            number: Number of the shard.
            indices: Indices of its transitions, int64 ``[rows]``.

        Returns:
            The shard as the replay memory gave it, on the CPU.
        """
        # A GPU reads the pinned windows asynchronously, but before the next update fills them
        # again, because _take_loss() waits for the gradient.
        batch = self._replay.gather(indices, out=self._windows[number].numpy())
        arrays = (batch.actions, batch.rewards, batch.terminals)
        sources = self._windows[number], *map(torch.from_numpy, arrays)
        self._inputs[number] = _Inputs(*self._fixed[number].fill(*sources))
        return batch

    def _gather_and_differentiate(
        self, shard: tuple[int, NDArray[np.int64]]
    ) -> tuple[Batch, FactoredShard]:
        return self._gather(*shard), self._differentiate_shard(shard[0])

    def _differentiate(self) -> FactoredGradient:
        """Return the gradient of all shards at theta_k."""
        shards = [self._differentiate_shard(number) for number in range(len(self._windows))]
        return FactoredGradient(shards, self.online, self.network.products)

    def _differentiate_shard(self, number: int) -> FactoredShard:
        """Return loss and gradient of one shard of the minibatch at theta_k."""
        if self._passes:
            return self._differentiate_by_passes(self._inputs[number], *self._passes[number])
        windows, actions, rewards, terminals = self._inputs[number]
        with torch.no_grad():
            next_values = self.network.values(self.target.views, windows[:, 1:])
            targets = bootstrap_targets(rewards, terminals, next_values, self._trainer.discount)
        # Only the wide weights are not a leaf of autograd: the gradient passes through them to the
        # convolutions, and their own is not computed here.
        views = {**self.online.views, **self._leaves}
        features = self.network.features(views, windows[:, :-1])
        outputs = self.network.wide(views, features)
        values = self.network.head(views, outputs)
        loss = clipped_error_loss(values, actions, targets)
        *small, returned = torch.autograd.grad(loss, [*self._leaves.values(), outputs])
        flat = torch.cat([flatten(each) for each in small])
        return FactoredShard(loss.detach(), flat, features.detach(), returned)

    @torch.no_grad()
    def _differentiate_by_passes(
        self, inputs: _Inputs, online: GradientPass, target: ForwardPass
    ) -> FactoredShard:
        """Return what :meth:`_differentiate_shard` returns, with the same bits, in less time."""
        windows, actions, rewards, terminals = inputs
        next_values = target.values(windows[:, 1:])
        targets = bootstrap_targets(rewards, terminals, next_values, self._trainer.discount)
        values = online.values(windows[:, :-1])
        loss = clipped_error_loss(values, actions, targets)
        online.differentiate(clipped_errors(values, actions, targets))
        return FactoredShard(loss, online.small.flat, online.features, online.returned)

    def _make_passes(self) -> list[tuple[GradientPass, ForwardPass]]:
        """Return for each shard a pass through theta and one through theta^-."""
        return [
            (
                GradientPass(self.network, self.online, rows),
                ForwardPass(self.network, self.target, rows),
            )
            for rows in self._trainer.micro_batches
        ]

    def _make_windows(self) -> list[torch.Tensor]:
        """Return a buffer ``[rows, frame_stack + 1, *frame_shape]`` for the frames of each shard.

        Buffers for a GPU are in pinned memory, from which it copies asynchronously.
        """
        shape = (self._environment.frame_stack + 1, *self._environment.frame_shape)
        buffers = [
            torch.from_numpy(np.zeros((rows, *shape), self._environment.frame_dtype))
            for rows in self._trainer.micro_batches
        ]
        if self._device.type == "cuda":
            return [buffer.pin_memory() for buffer in buffers]
        return buffers

    # Recording

    def _gradient_tensors(self) -> Sequence[torch.Tensor] | None:
        return None if self._factored is None else self.online.split(self._factored.whole())

    def state(self) -> dict[str, Any]:
        """See :meth:`BaseTrainer.state`."""
        return {
            **super().state(),
            "return": self._return,
            "updates": self.optimizer.updates if isinstance(self.optimizer, Adam) else None,
            "environment": self._environment.state(),
            "replay": self._replay.state(),
        }

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """See :meth:`BaseTrainer.restore`."""
        frame = self._environment.restore(state["environment"])
        if frame is None:
            raise AssertionError("a saved environment always has an episode")
        self._frame = frame
        self._replay.restore(state["replay"])
        super().restore(step, state, tensors)
        self._return = state["return"]
        if isinstance(self.optimizer, Adam):
            self.optimizer.updates = state["updates"]

    def use(self) -> TrainerUse:
        """Return the device of the network, and the schedule of one actor and one learner."""
        return TrainerUse(device=str(self.online.flat.device), actors=1, schedule="serial")

    def close(self) -> None:
        """End every thread."""
        self._threads.close()


class _Inputs(NamedTuple):
    """The transitions of a shard, on the network's device.

    Attributes:
        windows: ``[rows, frame_stack + 1, *frame_shape]``: the frames of ``s``, then the newest
            frame of ``s'``.
        actions: int64 ``[rows]``.
        rewards: float32 ``[rows]``.
        terminals: bool ``[rows]``.
    """

    windows: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminals: torch.Tensor


def make_q_network(
    trainer: DqnTrainer, environment: Environment, accelerator: CpuAccelerator | CudaAccelerator
) -> Network:
    """Return the Q-network for an environment, with the accelerator's arithmetic."""
    return make_network(
        trainer.network,
        frame_stack=environment.frame_stack,
        layout=environment.layout,
        actions=environment.actions,
        hidden_units=trainer.hidden_units,
        products=backend_for(accelerator, trainer.network),
    )


def value_function(network: Network, parameters: Parameters, *, by_passes: bool) -> QValues:
    """Return a function of observations that gives Q-values at the parameters' current values.

    Args:
        network: The architecture.
        parameters: Its parameters, which are read at every call.
        by_passes: Compute without autograd (:mod:`capsule.training.networks.passes`); the network
            must have passes.
    """
    if by_passes:
        return PassesOfAnySize(network, parameters)

    def values(observations: NDArray[Any]) -> NDArray[np.float32]:
        with torch.inference_mode():
            seen = torch.from_numpy(observations).to(parameters.flat.device)
            found: NDArray[np.float32] = network.values(parameters.views, seen).cpu().numpy()
        return found

    return values


def network_policy(network: Network, parameters: Parameters) -> EvaluatedPolicy:
    """Return the policy of a network with these parameters, for evaluations."""
    return Reactive(value_function(network, parameters, by_passes=has_passes(network)))


def _make_optimizer(trainer: DqnTrainer, parameters: Parameters) -> Adam | CentredRmsProp:
    if trainer.optimizer == "adam":
        return Adam(parameters, learning_rate=trainer.learning_rate, epsilon=trainer.adam_epsilon)
    return CentredRmsProp(
        parameters,
        learning_rate=trainer.learning_rate,
        gradient_momentum=trainer.gradient_momentum,
        squared_gradient_momentum=trainer.squared_gradient_momentum,
        min_squared_gradient=trainer.min_squared_gradient,
    )


def make_dqn(context: TrainerContext, trainer: DqnTrainer) -> DeepQLearning:
    """Make the trainer with its environment and its replay memory.

    Raises:
        CapsuleError: CAP-T212 to CAP-T216, the environment is not available; CAP-T221, there is no
            room for the replay memory; CAP-T243 or CAP-T244, the network does not fit the frames,
            or a user module cannot be used.
    """
    spec = context.spec
    environment = make_environment(spec.environment, context.streams, training=True)
    # A step adds one entry, and a second one where it truncates an episode. One more interval is
    # added because a minibatch is gathered while the steps of its interval overwrite entries.
    replay = ReplayMemory(
        context.directory / "replay",
        capacity=trainer.replay_capacity,
        slack=2 * (state_interval(spec) + trainer.update_interval),
        frame_shape=environment.frame_shape,
        frame_dtype=environment.frame_dtype,
        frame_stack=environment.frame_stack,
    )
    return DeepQLearning(context, trainer, environment, replay)
