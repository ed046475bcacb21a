"""IMPALA's actors, which unroll the policy (Espeholt et al. 2018, arXiv:1802.01561, section 3).

A worker requests the actions of all its actors that use the same version of the policy at once.
Which process answers does not change a bit (:mod:`capsule.training.acting.inference`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from capsule.experiment.trainers import Truncation
from capsule.training.acting.actor_worker import Actor, ActorWorker, WorkerSettings
from capsule.training.acting.batched_actors import Inputs
from capsule.training.acting.batching import Tensors
from capsule.training.acting.inference import (
    Answers,
    InferenceReplica,
    RequestBatch,
    RequestCounts,
    Service,
)
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.layers import kernels
from capsule.training.networks.actor_critic import ActorCriticNetwork
from capsule.training.networks.feedforward import Parameters


@dataclass(frozen=True)
class UnrollSettings(WorkerSettings):
    """The settings of the actors of a run, which can be sent to another process.

    Attributes:
        truncation: The spec's ``trainer.truncation``.
    """

    network: ActorCriticNetwork
    truncation: Truncation = "bootstrap"

    def make_worker(self, played: Sequence[int], service: Service | None = None) -> UnrollWorker:
        """See :meth:`WorkerSettings.make_worker`."""
        return UnrollWorker(self, played, service)


class RequestingActor(Actor):
    """One logical actor, whose actions an inference service chooses.

    Attributes:
        requests: Its requests, and how they were answered.
    """

    def __init__(self, settings: UnrollSettings, number: int, replicas: int) -> None:
        """Make actor ``number``.

        Args:
            settings: The settings of the actors.
            number: Number of the actor.
            replicas: Number of inference replicas; 0 if its own process answers.
        """
        super().__init__(settings, number)
        self.requests = RequestCounts(settings.seeds, number, settings.batching, replicas)

    def document(self) -> dict[str, Any]:
        """See :meth:`Actor.document`."""
        return super().document() | {"requests": self.requests.state()}

    def restore(self, document: Mapping[str, Any]) -> None:
        """See :meth:`Actor.restore`."""
        super().restore(document)
        self.requests.restore(document["requests"])


class UnrollWorker(ActorWorker[RequestingActor, Unroll]):
    """Runs some of IMPALA's actors in this process."""

    def __init__(
        self, settings: UnrollSettings, played: Sequence[int], service: Service | None = None
    ) -> None:
        """Make the actors ``played``; see :meth:`WorkerSettings.make_worker`."""
        self._network = settings.network
        self._bootstraps = settings.truncation == "bootstrap"
        self._service = service or InferenceReplica(
            played[0], self._policy, settings.batching, settings.determinism, settings.seeds
        )
        replicas = self._service.replicas
        actors = [RequestingActor(settings, number, replicas) for number in played]
        super().__init__(settings, played, actors)

    def _play_together(self, rows: Sequence[int], version: int) -> Iterable[Unroll]:
        made = {row: self._blank(row) for row in rows}
        for step in range(self._length):
            self._advance(version, step, made)
        for row, unroll in made.items():
            # The state after the last step, from whose value the return is bootstrapped
            # (section 4.1).
            self._see(row, self._length, unroll)
        return made.values()

    def _advance(self, version: int, step: int, made: Mapping[int, Unroll]) -> None:
        """Fill in one step of the unrolls of some rows."""
        for row, unroll in made.items():
            self._see(row, step, unroll)
        # The last frame of an episode that a time limit has ended takes a step without an action,
        # so that the learner can bootstrap from its value.
        ended = {row for row in made if self._actors[row].environment.ended}
        for row in ended:
            made[row].acted[step], made[row].terminals[step] = False, True
            self._begin_episode(row)
        acting = [row for row in made if row not in ended]
        if not acting:
            return
        answers = self._ask(version, acting)
        self._rows.states[acting] = answers.states
        chosen = answers.actions.tolist(), answers.logarithms
        for row, action, logarithm in zip(acting, *chosen, strict=True):
            self._act(row, step, made[row], action, logarithm)

    def _ask(self, version: int, rows: Sequence[int]) -> Answers:
        """Request the next actions of ``rows``, and count how they were chosen."""
        requests = [self._actors[row].requests for row in rows]
        actors = np.array([self._played[row] for row in rows])
        # Each answered request draws one word, so the number of words drawn is the number of the
        # next request, also after a resumption.
        numbers = np.array([each.account.draws for each in requests])
        batch = RequestBatch(version, actors, numbers, self._rows.inputs(rows))
        answers = self._service.answer(batch)
        origins = answers.words, answers.replicas, answers.sizes, answers.places
        for each, *origin in zip(requests, *(array.tolist() for array in origins), strict=True):
            each.enter(*origin)
        return answers

    def _policy(self, version: int, inputs: Tensors) -> Tensors:
        return act(self._network, self._versions[version], Inputs(*inputs))

    def _blank(self, row: int) -> Unroll:
        """Return an unroll with only the earlier frames and the recurrent state filled in."""
        made = Unroll.blank(self._length, self._actors[row].environment, self._network)
        # Each frame is stored once; the first observations also contain frames from before the
        # unroll.
        stack = self._rows.stacks[row]
        made.frames[: len(stack) - 1] = stack[:-1]
        made.state[:] = self._rows.states[row]
        return made

    def _act(self, row: int, step: int, made: Unroll, action: int, logarithm: np.float32) -> None:
        """Take one step of one actor, given its action and the logarithm ``ln mu`` of it."""
        transition = self._step(row, action)
        terminal = transition.terminal or (transition.ended and not self._bootstraps)
        made.actions[step] = action
        made.log_behaviour[step] = logarithm
        made.rewards[step] = transition.reward
        made.terminals[step] = terminal
        if transition.ended:
            made.returns.append(self._actors[row].episode_return)
            # A truncated episode is left as it is until the next step, whose row has its last
            # frame.
            if terminal:
                self._begin_episode(row)

    def _see(self, row: int, step: int, made: Unroll) -> None:
        """Enter the network's inputs of an actor before a step."""
        stack = self._rows.stacks[row]
        made.frames[len(stack) - 1 + step] = stack[-1]
        made.ages[step] = self._actors[row].age
        made.previous_actions[step] = self._rows.previous_actions[row]
        made.previous_rewards[step] = self._rows.previous_rewards[row]
        made.instructions[step] = self._rows.instructions[row]


def act(
    network: ActorCriticNetwork, parameters: Parameters, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``ln mu`` and ``mu``, float32 ``[rows, actions]``, and the states after the step."""
    logits, after = logits_of(network, parameters, inputs)
    logarithms, probabilities, _ = kernels.log_softmax(logits.contiguous())
    return logarithms, probabilities, after


def logits_of(
    network: ActorCriticNetwork, parameters: Parameters, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of one step, float32 ``[rows, actions]``, and the states after it."""
    # No reset is needed: ActorRows.begin() sets the state of a new episode to zero.
    logits, _, after = network.unroll(parameters.views, inputs.step(reset=False))
    return logits[0], after


def baselines_of(
    network: ActorCriticNetwork, parameters: Parameters, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the baseline of each row, float32 ``[rows, 1]``, and the states after the step."""
    _, baselines, after = network.unroll(parameters.views, inputs.step(reset=False))
    return baselines[0].unsqueeze(1), after
