"""IMPALA, the importance-weighted actor-learner (Espeholt et al. 2018), under a schedule.

Each *interval* is one parameter update. The learner takes the unrolls that the schedule names, lets
their actors go on, and descends the gradient of the loss at theta_k, to theta_{k+1}, which is
version ``k + 1`` of the policy. Which unrolls, in which order, and which versions they were played
with is the schedule's (:mod:`capsule.training.schedule`), and nothing else of the asynchrony
reaches a result.

Deviations from the paper:

* The lag between the policy that acts and the one that learns is bounded, in lockstep constant.
* An episode that was cut short by its limit counts as ended, as in the code that its authors
  published: nothing is bootstrapped from its last state.
* Evaluations are greedy, by Capsule's protocol for all trainers; the paper's play up to 30 no-ops
  and then sample.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment import contract
from capsule.experiment.contract import StreamProfile
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.actor_rows import Inputs
from capsule.training.checkpoint import array_document, document_array
from capsule.training.evaluation import Policy
from capsule.training.impala_loss import clipped_rewards, impala_losses, softmax_policy
from capsule.training.impala_networks import ActorCriticNetwork
from capsule.training.learned import Learned
from capsule.training.networks import Parameters, flatten, initialize
from capsule.training.recurrent_policy import RecurrentPolicy
from capsule.training.rmsprop import RmsProp, annealed
from capsule.training.schedule.executor import Executor, Item
from capsule.training.schedule.recorder import Recorder
from capsule.training.trainer import Setting
from capsule.training.unrolls import Snapshot, Unroll, logits_of, stacked, stream_profiles
from capsule.training.v_trace import Correction

RETURNS_KEPT = 100
_VERSION = "versions/{}"


class Impala:
    """The learner, the schedule of its actors, and everything their next step depends on.

    Attributes:
        step: Agent steps learned.
        episodes: Episodes finished.
        updates: Parameter updates made.
        returns: Game returns of the last 100 episodes.
        loss: Loss of the last batch, summed over it, None before the first.
        actions: Number of actions.
        network: Architecture.
        online: Parameters theta.
        optimizer: Its running means.
    """

    def __init__(
        self,
        setting: Setting,
        trainer: ImpalaTrainer,
        network: ActorCriticNetwork,
        frame_stack: int,
        executor: Executor,
        recorder: Recorder | None,
    ) -> None:
        """Draw theta.

        Args:
            setting: The run.
            trainer: The spec's section ``trainer``.
            network: Architecture.
            frame_stack: Frames of one observation.
            executor: Gives the unrolls to learn.
            recorder: Keeps the schedule, where the spec has it recorded.
        """
        self._setting, self._spec, self._trainer = setting, setting.spec, trainer
        self._streams, self._trace, self._device = setting.streams, setting.trace, setting.device
        self._frame_stack = frame_stack
        self._executor, self._recorder = executor, recorder
        self.network, self.actions = network, network.actions
        self.online = Parameters(network.shapes, self._device)
        initialize(self.online, setting.streams["initialization"])
        self.optimizer = RmsProp(
            self.online,
            epsilon=trainer.rmsprop_epsilon,
            decay=trainer.rmsprop_decay,
            momentum=trainer.rmsprop_momentum,
        )
        self._learned = Learned(
            self.online, {"square": self.optimizer.square, "step": self.optimizer.step}
        )
        self._correction = Correction(
            trainer.correction,
            trainer.rho_bar,
            trainer.c_bar,
            trainer.trace_decay,
            trainer.correction_epsilon,
        )
        self._leaves = {
            name: view.detach().requires_grad_() for name, view in self.online.views.items()
        }
        cuts = np.cumsum([0, *trainer.gradient_shards])
        self._shards = [slice(first, end) for first, end in pairwise(cuts)]
        on_cpu = self._device.type == "cpu"
        self._pool = ThreadPoolExecutor(setting.workers if on_cpu else 1, "learner")
        self._gradient = self.online.flat[:0]
        self._unrolls: dict[str, str] = {}  # those of the trace record to come, by digest
        self._published = False
        self.step = self.episodes = self.updates = 0
        self.returns: deque[float] = deque(maxlen=RETURNS_KEPT)
        self.loss: float | None = None

    @property
    def mean_return(self) -> float | None:
        """Mean game return of the last 100 episodes, None before the first."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    # The algorithm

    def interval(self) -> None:
        """Learn one batch of unrolls."""
        if not self._published:
            self._publish()
        items = self._executor.collect(self.updates)
        self._note(items)
        self._update(self._learn([item.unroll for item in items]))
        self._publish()
        self.step += self._trainer.interval_steps
        if self.step % self._spec.recording.trace_interval == 0:
            self.record()

    def exploration(self) -> None:
        """Return None: the policy is random by itself."""

    def policy(self, parameters: Parameters) -> Policy:
        """Return the greedy policy of ``parameters``, for evaluations."""

        def evaluate(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
            return logits_of(self.network, parameters, inputs)

        return RecurrentPolicy(self.network, self._spec.environment, self._device, evaluate)

    def _publish(self) -> None:
        """Let actors have theta_k."""
        flat = self.online.flat.detach().cpu().numpy().copy()
        self._executor.publish(self.updates, flat)
        self._published = True

    def _note(self, items: Sequence[Item]) -> None:
        """Trace and record what is learned now."""
        slots = np.array([(item.actor, item.version) for item in items], np.int64)
        self._trace.add("schedule", slots)
        if self._recorder is not None:
            self._recorder.append(self.updates, slots)
        for actor, number, _, unroll in items:
            self._unrolls[_name(self.updates, actor, number)] = unroll.digest()
            self._trace.add("observations", unroll.frames)
            self._trace.add("actions", unroll.actions)
            self._trace.add("rewards", unroll.rewards)
            self._trace.add("terminals", unroll.terminals)
            self.episodes += len(unroll.returns)
            self.returns.extend(unroll.returns)

    # Learning

    def _learn(self, unrolls: Sequence[Unroll]) -> list[torch.Tensor]:
        """Compute the gradient at theta_k; return the loss of each shard."""

        def shard(columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return self._differentiate(unrolls[columns])

        losses, gradients = zip(*self._pool.map(shard, self._shards), strict=True)
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        self._gradient = total
        return list(losses)

    def _differentiate(self, unrolls: Sequence[Unroll]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss of some unrolls, a scalar, and its gradient, flat."""
        batch = self._batch(unrolls)
        logits, baselines, _ = self.network.unroll(
            self._leaves,
            batch.observations,
            batch.previous_actions,
            batch.previous_rewards,
            batch.states,
            batch.resets,
        )
        policy = softmax_policy(logits[:-1])
        log_target = policy.of(batch.actions)
        targets = self._correction.targets(
            log_target.detach(),
            batch.log_behaviour,
            batch.rewards,
            batch.discounts,
            baselines.detach(),
        )
        loss = impala_losses(
            log_target,
            policy.entropies,
            baselines[:-1],
            targets,
            baseline_cost=self._trainer.baseline_cost,
            entropy_cost=self._trainer.entropy_cost,
        ).total
        gradients = torch.autograd.grad(loss, list(self._leaves.values()))
        return loss.detach(), torch.cat([flatten(gradient) for gradient in gradients])

    def _batch(self, unrolls: Sequence[Unroll]) -> _Batch:
        """Put unrolls beside each other."""

        def columns(name: str) -> NDArray[Any]:
            return np.stack([getattr(unroll, name) for unroll in unrolls], 1)

        rewards = clipped_rewards(columns("rewards"), self._trainer.reward_clipping)
        discounts = np.float32(self._trainer.discount) * ~columns("terminals")
        arrays = (
            stacked(unrolls, self._frame_stack),
            columns("previous_actions"),
            columns("previous_rewards"),
            columns("ages") == 0,
            np.stack([unroll.state for unroll in unrolls]),
            columns("actions"),
            columns("log_behaviour"),
            rewards,
            discounts.astype(np.float32),
        )
        return _Batch(*(torch.from_numpy(array).to(self._device) for array in arrays))

    def _update(self, losses: Sequence[torch.Tensor]) -> None:
        """Descend the summed gradient, theta_k to theta_{k+1}."""
        parts = [float(loss) for loss in losses]
        self._trace.add("loss", struct.pack(f"<{len(parts)}d", *parts))
        self.loss = sum(parts)
        if not math.isfinite(self.loss):
            raise CapsuleError(
                "CAP-T151",
                f"the loss is {self.loss} at step {self.step}",
                fix="Lower trainer.learning_rate or trainer.gradient_norm.",
                exit_code=ExitCode.TRAINING_FAILED,
            )
        trainer = self._trainer
        rate = trainer.learning_rate
        if trainer.annealing:
            rate = annealed(rate, self.step, trainer.total_steps)
        self.optimizer.update(self._gradient, rate, trainer.gradient_norm or math.inf)
        self.updates += 1

    # Recording

    def record(self) -> None:
        """Write one trace record, with every tensor where ``tensor_interval`` asks for it."""
        first = self._trace.records == 0
        complete = first or self.step % self._spec.recording.tensor_interval == 0
        sizes = [len(segment) for segment in self.online.segments]
        gradient = torch.split(self._gradient, sizes) if len(self._gradient) else None
        self._trace.record(
            self.step,
            self._streams,
            loss=self.loss,
            unrolls=self._unrolls,
            tensors=self._learned.digests(gradient) if complete else None,
        )
        self._unrolls = {}

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all learned state, by group and name, and older policy versions."""
        older = {
            _VERSION.format(version): flat
            for version, flat in self._executor.versions.items()
            if version < self.updates
        }
        return self._learned.tensors() | older

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot of everything but the tensors, streams and trace."""
        if self._recorder is not None:
            self._recorder.flush()
        return {
            "episodes": self.episodes,
            "updates": self.updates,
            "returns": list(self.returns),
            "loss": None if self.loss is None else self.loss.hex(),
            "unrolls": self._unrolls,
            "learned": self._executor.learned,
            "actors": [
                None if each is None else _document(each) for each in self._executor.snapshots
            ],
        }

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Continue from a snapshot; streams and trace are restored already.

        Args:
            step: Agent steps learned.
            state: What :meth:`state` returned.
            tensors: What :meth:`tensors` returned.

        Raises:
            CapsuleError: An environment does not return to it, or the schedule as recorded so far
                is gone.
        """
        self.step, self.episodes, self.updates = step, state["episodes"], state["updates"]
        self.returns = deque(state["returns"], RETURNS_KEPT)
        self.loss = None if state["loss"] is None else float.fromhex(state["loss"])
        self._unrolls = dict(state["unrolls"])
        self._learned.load(tensors)
        oldest = max(0, self.updates - self._executor.lag)
        self._executor.restore(
            [None if each is None else _snapshot(each) for each in state["actors"]],
            state["learned"],
            {version: tensors[_VERSION.format(version)] for version in range(oldest, self.updates)},
        )
        if self._recorder is not None:
            self._recorder.cut(self.updates)
        self._published = False

    def stream_profiles(self) -> list[StreamProfile]:
        """Return what the actors' streams gave out for what was learned, as ``stream/actor``."""
        played = [
            stream_profiles(self._setting.seeds, actor, snapshot)
            for actor, snapshot in enumerate(self._executor.snapshots)
            if snapshot is not None
        ]
        return list(chain.from_iterable(played))

    def artifacts(self) -> dict[str, bytes]:
        """Return the schedule log, where there is one."""
        if self._recorder is None:
            return {}
        return {contract.SCHEDULE: self._recorder.log().document()}

    def close(self) -> None:
        """End every thread and process."""
        self._pool.shutdown()
        self._executor.close()
        if self._recorder is not None:
            self._recorder.close()


class _Batch(NamedTuple):
    """Unrolls beside each other, ``rows`` one more than ``steps``.

    Attributes:
        observations: ``[rows, unrolls, frame_stack, *frame_shape]``.
        previous_actions: int64 ``[rows, unrolls]``.
        previous_rewards: float32 ``[rows, unrolls]``.
        resets: bool ``[rows, unrolls]``: an episode begins.
        states: Recurrent, before row 0: float32 ``[unrolls, *state_shape]``.
        actions: int64 ``[steps, unrolls]``.
        log_behaviour: ``ln mu(a_t|x_t)``: float32 ``[steps, unrolls]``.
        rewards: float32 ``[steps, unrolls]``.
        discounts: float32 ``[steps, unrolls]``: 0 where the return ends.
    """

    observations: torch.Tensor
    previous_actions: torch.Tensor
    previous_rewards: torch.Tensor
    resets: torch.Tensor
    states: torch.Tensor
    actions: torch.Tensor
    log_behaviour: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor


def _name(update: int, actor: int, number: int) -> str:
    return f"update {update}, actor {actor}, unroll {number}"


def _document(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "document": snapshot.document,
        "stack": array_document(snapshot.stack),
        "state": array_document(snapshot.state),
    }


def _snapshot(document: Mapping[str, Any]) -> Snapshot:
    return Snapshot(
        document["document"], document_array(document["stack"]), document_array(document["state"])
    )
