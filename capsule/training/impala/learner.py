"""IMPALA under a schedule (Espeholt et al. 2018, arXiv:1802.01561).

Each *interval* is one parameter update. The learner takes the unrolls that the schedule names, lets
their actors continue, and descends the gradient of the loss at theta_k, to theta_{k+1}, which is
version ``k + 1`` of the policy. The schedule (:mod:`capsule.training.impala.schedule`) determines
which unrolls an update takes, their order, and the policy versions with which they were played.
Nothing else of the asynchrony affects a result.

Deviations from the paper (docs/papers/espeholt2018.md compares every value):

* The lag between the policy that acts and the one that learns is bounded; in lockstep it is
  constant.
* ``network: nature`` has the sizes of Mnih et al. 2015, doi:10.1038/nature14236. Section 5.3.2 says
  of the shallow network of Atari only that it has three convolutions, and that it is the one of
  Mnih et al. 2016, arXiv:1602.01783, which has two.
* The first step of an episode has no previous action and a previous reward of 0; the LSTM of the
  authors' code reads those of the previous episode. The LSTM here reads rewards as the environment
  clips them, and not always clipped to [-1, 1].
* The recurrent state, the frame stack, and the previous action and reward are kept when a lost life
  ends the return. (The paper has no LSTM on Atari.)
* If a time limit ends an episode, the return is bootstrapped from the value of its last frame by
  default, and this frame takes one step of the unroll. The authors' code ends the return there, as
  ``truncation: terminal`` does.
* Evaluations are greedy by default; the authors' code draws actions from the policy, as
  ``evaluation.actions: sampled`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.experiment import contract
from capsule.experiment.contract import StreamProfile
from capsule.experiment.inference import Inference
from capsule.experiment.mechanisms import TrainerUse
from capsule.experiment.spec import EnvironmentSpec
from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.acting.actor_worker import Snapshot
from capsule.training.acting.inference import counted
from capsule.training.base_trainer import BaseTrainer
from capsule.training.evaluation.protocol import EvaluatedPolicy
from capsule.training.evaluation.recurrent_policy import RecurrentPolicy
from capsule.training.impala.actors.actor_worker import baselines_of, logits_of
from capsule.training.impala.actors.unrolls import Unroll, stream_profiles
from capsule.training.impala.replay import UnrollReplay
from capsule.training.impala.schedule.executor import Executor, Item
from capsule.training.impala.schedule.recorder import ScheduleRecorder
from capsule.training.networks.actor_critic import ActorCriticNetwork
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.language import make_vocabulary
from capsule.training.optimizers.rmsprop import RmsProp, annealed
from capsule.training.sharded_gradient import Learners, added, split
from capsule.training.train_state import TrainState
from capsule.training.trainer import TrainerContext

_VERSION = "versions/{}"

MakeLearners = Callable[[ImpalaTrainer, Parameters], Learners]
"""Makes what computes gradients at parameters, with the costs of a spec's section ``trainer``."""


class Impala(BaseTrainer):
    """The learner, the schedule of its actors, and its replay memory, if it has one.

    Attributes:
        step: Agent steps trained on.
        updates: Parameter updates made.
        loss: Loss of the last batch, summed over it, None before the first.
        actions: Number of actions.
        network: The architecture.
        optimizer: RMSProp, with its running means.
    """

    def __init__(
        self,
        context: TrainerContext,
        trainer: ImpalaTrainer,
        network: ActorCriticNetwork,
        make_learners: MakeLearners,
        executor: Executor,
        recorder: ScheduleRecorder | None,
        replay: UnrollReplay | None,
        inference: Inference,
    ) -> None:
        """Draw theta.

        Args:
            context: The run.
            trainer: The spec's section ``trainer``.
            network: The architecture.
            make_learners: Makes what computes the gradients.
            executor: Gives the unrolls to train on.
            recorder: Records the schedule; None unless the spec asks for it.
            replay: The replay memory; None unless the spec asks for one.
            inference: The facts about inference for the actors, with counts of 0.
        """
        super().__init__(context, network.shapes, network.torso.modules, trainer.initialization)
        self._trainer, self._inference = trainer, inference
        self._executor, self._recorder, self._replay = executor, recorder, replay
        self.network, self.actions = network, network.actions
        self.optimizer = RmsProp(
            self.online,
            epsilon=trainer.rmsprop_epsilon,
            decay=trainer.rmsprop_decay,
            momentum=trainer.rmsprop_momentum,
        )
        self._train_state = TrainState(
            self.online, {"square": self.optimizer.square, "step": self.optimizer.step}
        )
        self._make_learners = make_learners
        self._learners = make_learners(trainer, self.online)
        self._unrolls: dict[str, str] = {}  # name to digest, for the next trace record
        self._published = False
        self.updates = 0

    # The algorithm

    def train_step(self) -> None:
        """Train on one batch of unrolls."""
        # This has an effect only after a start or a resumption, because otherwise the interval
        # before has published theta_k.
        self.publish()
        self.learn()
        # Published before the trace record and a state are written, so that actors play meanwhile.
        self.publish()
        if self.step % self._spec.recording.trace_interval == 0:
            self.record()

    def publish(self) -> None:
        """Publish theta_k to the actors, unless it was published already."""
        if self._published:
            return
        # A copy, because on a CPU the array shares the memory that the optimizer changes in place
        # while actors play.
        flat = self.online.flat.detach().cpu().numpy().copy()
        self._executor.publish(self.updates, flat)
        self._published = True

    def learn(self) -> list[tuple[int, float]]:
        """Train on one batch of unrolls, to theta_{k+1}, which is not published yet.

        Returns:
            The actor and the episode return of each episode that ended, in order.
        """
        items = self._executor.collect(self.updates)
        self._note(items)
        fresh = [item.unroll for item in items]
        self._update([*fresh, *self._replayed(fresh)])
        self._published = False
        self.step += self._trainer.interval_steps
        return [(item.actor, each) for item in items for each in item.unroll.returns]

    def adopt(
        self, values: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Continue with other hyper-parameters, and with the trained tensors of another learner.

        Args:
            values: Some or all of ``entropy_cost``, ``learning_rate``, ``rmsprop_epsilon`` and
                ``max_gradient_norm``, by name.
            tensors: The other's :meth:`tensors`; None: continue with its own.
        """
        self._trainer = self._trainer.model_copy(update=dict(values))
        self.optimizer.epsilon = self._trainer.rmsprop_epsilon
        # The processes of the learners have copies of the previous values.
        self._learners.close()
        self._learners = self._make_learners(self._trainer, self.online)
        if tensors is not None:
            self._train_state.load(tensors)
            self._published = False

    def exploration(self) -> None:
        """Return None: the policy itself is stochastic."""

    def policy(self, parameters: Parameters) -> EvaluatedPolicy:
        """Return the policy of ``parameters``, for evaluations, which choose by its logits."""
        return network_policy(self.network, parameters, self._spec.environment, self._trainer)

    def _note(self, items: Sequence[Item]) -> None:
        """Trace and record the unrolls of this update."""
        slots = np.array([(item.actor, item.version) for item in items], np.int64)
        self._trace.add("schedule", slots)
        if self._recorder is not None:
            self._recorder.append(self.updates, slots)
        for actor, number, _, unroll in items:
            name = f"update {self.updates}, actor {actor}, unroll {number}"
            self._unrolls[name] = unroll.digest()
            self._trace.add("observations", unroll.frames)
            self._trace.add("actions", unroll.actions)
            self._trace.add("rewards", unroll.rewards)
            self._trace.add("terminals", unroll.terminals)
            self._count_episodes(unroll.returns)

    # Learning

    def _replayed(self, fresh: Sequence[Unroll]) -> list[Unroll]:
        """Add the fresh unrolls to the replay memory, and draw the rest of the batch from it."""
        if self._replay is None:
            return []
        self._replay.append(fresh)
        count = self._trainer.batch_size - len(fresh)
        indices, drawn = self._replay.sample(self._streams["minibatch"], count)
        self._trace.add("indices", indices)
        return drawn

    def _update(self, batch: Sequence[Unroll]) -> None:
        """Descend the gradient of a batch at theta_k, to theta_{k+1}."""
        trainer = self._trainer
        parts = self._learners.differentiate(split(batch, trainer.micro_batches))
        self._gradient = added(part.gradient for part in parts)
        fix = "Lower trainer.learning_rate or trainer.max_gradient_norm."
        self._take_loss([part.loss for part in parts], fix=fix)
        rate = trainer.learning_rate
        if trainer.anneals:
            # ``step`` does not count this batch yet, so the first update has the full rate.
            rate = annealed(rate, self.step, trainer.total_steps)
        self.optimizer.update(self._gradient, rate, trainer.max_gradient_norm)
        self.updates += 1

    # Recording

    def take_unrolls(self) -> dict[str, str]:
        """Return name to digest of the unrolls trained on since the last call."""
        unrolls, self._unrolls = self._unrolls, {}
        return unrolls

    def tensor_names(self) -> list[str]:
        """Return the names at the last update, when the numbers of policy versions are longest."""
        last = -(-self._spec.trainer.total_steps // self._trainer.interval_steps)
        return [*super().tensor_names(), *map(_VERSION.format, self._older(last))]

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all trained tensors, as ``group/name``, and of older policy versions."""
        # The unrolls of the next updates are played with older versions, so a resumed run needs
        # them.
        versions = self._executor.versions
        older = {
            _VERSION.format(version): versions[version] for version in self._older(self.updates)
        }
        return super().tensors() | older

    def state(self) -> dict[str, Any]:
        """See :meth:`BaseTrainer.state`."""
        if self._recorder is not None:
            self._recorder.flush()
        return {
            **super().state(),
            "updates": self.updates,
            "unrolls": list(self._unrolls.items()),  # in their order, as a mapping would not be
            "learned": list(self._executor.trained),
            "replay": None if self._replay is None else self._replay.state(),
            "actors": [None if each is None else each.saved() for each in self._executor.snapshots],
        }

    def restore(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """See :meth:`BaseTrainer.restore`."""
        super().restore(step, state, tensors)
        self.updates = state["updates"]
        self._unrolls = dict(state["unrolls"])
        self._executor.restore(
            [None if each is None else Snapshot.of(each) for each in state["actors"]],
            state["learned"],
            {version: tensors[_VERSION.format(version)] for version in self._older(self.updates)},
        )
        if self._recorder is not None:
            # Updates recorded after the state was saved are made again, perhaps in another order.
            self._recorder.cut(self.updates)
        if self._replay is not None:
            self._replay.restore(state["replay"])
        self._published = False

    def _answered(self) -> Inference:
        """Return how the actors' requests were answered, for all unrolls trained on."""
        snapshots = (each for each in self._executor.snapshots if each is not None)
        counts = counted([each.document["requests"] for each in snapshots])
        return self._inference.model_copy(update=counts)

    def _older(self, updates: int) -> range:
        """Return the policy versions before theta_k with which future unrolls may be played."""
        return range(max(0, updates - self._executor.lag), updates)

    def stream_profiles(self) -> list[StreamProfile]:
        """Return the profiles of the actors' streams, named ``stream/actor``.

        They cover the unrolls that were trained on, and not those that were played since.
        """
        played = [
            stream_profiles(self._context.seeds, actor, snapshot)
            for actor, snapshot in enumerate(self._executor.snapshots)
            if snapshot is not None
        ]
        return list(chain.from_iterable(played))

    def use(self) -> TrainerUse:
        """Return the network's device, the schedule, and how the actors' requests were answered."""
        source = self._executor.schedule
        # A run that follows a log records its schedule, too, but the log determined the order.
        kept = source == "live" and self._recorder is not None
        return TrainerUse(
            device=str(self.online.flat.device),
            actors=len(self._executor.snapshots),
            schedule="recorded" if kept else source,
            inference=self._answered(),
        )

    def artifacts(self) -> dict[str, bytes]:
        """Return the schedule log, if the schedule is recorded."""
        if self._recorder is None:
            return {}
        return {contract.SCHEDULE: self._recorder.log().document()}

    def close(self) -> None:
        """End every thread and process."""
        self._learners.close()
        self._executor.close()
        if self._recorder is not None:
            self._recorder.close()


def network_policy(
    network: ActorCriticNetwork,
    parameters: Parameters,
    environment: EnvironmentSpec,
    trainer: ImpalaTrainer,
) -> EvaluatedPolicy:
    """Return the policy of a network with these parameters, for evaluations."""
    evaluate, value = (partial(each, network, parameters) for each in (logits_of, baselines_of))
    vocabulary = make_vocabulary(trainer.language)
    device = parameters.flat.device
    return RecurrentPolicy(network, environment, device, evaluate, vocabulary, value)
