"""A host plays logical actors of an actor-learner in one process (Espeholt et al. 2018, section 3).

It plays any set of actors, and asks for the actions of all at once that unroll with the same
version of the policy. Which actors a host plays, which of them unroll together, and who answers,
changes no bit (:mod:`capsule.training.acting.inference`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training.acting.batched_actors import ActorRows, Inputs
from capsule.training.acting.batching import Tensors
from capsule.training.acting.inference import Answers, Asked, Replica, Requests, Service
from capsule.training.environments import make_environment
from capsule.training.impala.actors.unrolls import (
    Played,
    Request,
    Snapshot,
    Unroll,
    UnrollSettings,
    actor_streams,
)
from capsule.training.layers import kernels
from capsule.training.networks.actor_critic import ActorCriticNetwork
from capsule.training.networks.feedforward import Parameters


class UnrollWorker:
    """Plays some actors in this process."""

    def __init__(
        self, settings: UnrollSettings, played: Sequence[int], service: Service | None = None
    ) -> None:
        """Make the actors ``played``, which ascend, each with an episode begun.

        Args:
            settings: What makes them.
            played: Their numbers.
            service: Answers requests; None: a replica in this process does.

        Raises:
            CapsuleError: CAP-T212 to CAP-T216, the environment is not available or cannot be
                played; CAP-T242, an actor is told what the vocabulary has no numbers for.
        """
        self._network, self._length = settings.network, settings.length
        self._bootstraps = settings.truncation == "bootstrap"
        self._played = tuple(played)
        self._row_of = {actor: row for row, actor in enumerate(played)}
        self._service = service or Replica(
            played[0], self._policy, settings.batching, settings.determinism, settings.seeds
        )
        self._actors = [_Actor(settings, actor, self._service.replicas) for actor in played]
        self._rows = ActorRows(
            len(played), self._actors[0].environment, settings.network, settings.vocabulary
        )
        self._versions: dict[int, Parameters] = {}
        for row in range(len(self._actors)):
            self._begin(row)

    def unroll(
        self, requests: Iterable[Request], parameters: Mapping[int, NDArray[np.float32]], lag: int
    ) -> list[Played]:
        """Let actors unroll, those of one version together.

        Args:
            requests: At most one of each actor.
            parameters: Versions that this host has not been given before, each in the order of
                :attr:`Parameters.flat`; none where requests are answered elsewhere.
            lag: Versions older than the newest by more than this are forgotten.

        Raises:
            CapsuleError: As :meth:`Service.answer`.
        """
        for version, flat in parameters.items():
            kept = Parameters(self._network.shapes, torch.device("cpu"))
            kept.flat.copy_(torch.from_numpy(flat))
            self._versions[version] = kept
        newest = max(self._versions, default=0)
        self._versions = {v: kept for v, kept in self._versions.items() if v >= newest - lag}
        done: list[Played] = []
        ordered = sorted(requests, key=attrgetter("version", "actor"))
        for version, group in groupby(ordered, attrgetter("version")):
            done += self._together([request.actor for request in group], version)
        return done

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Bring actors back to snapshots.

        Raises:
            CapsuleError: CAP-T201 or CAP-T211, as :meth:`Environment.restore` says.
        """
        for actor, snapshot in snapshots.items():
            row = self._row_of[actor]
            document = snapshot.document
            self._actors[row].restore(document)
            self._rows.tell(row, self._actors[row].environment.instruction)
            self._rows.stacks[row] = snapshot.stack
            self._rows.states[row] = snapshot.state
            self._rows.previous_actions[row] = document["previous_action"]
            self._rows.previous_rewards[row] = float.fromhex(document["previous_reward"])

    def _together(self, actors: Sequence[int], version: int) -> list[Played]:
        """Let actors, which ascend, unroll with the same version of the policy."""
        made = {row: self._blank(row) for row in (self._row_of[actor] for actor in actors)}
        for step in range(self._length):
            self._advance(version, step, made)
        for row, unroll in made.items():
            self._see(row, self._length, unroll)
        return [
            Played(self._played[row], unroll, self._snapshot(row)) for row, unroll in made.items()
        ]

    def _advance(self, version: int, step: int, made: Mapping[int, Unroll]) -> None:
        """Fill in one step of what the actors of some rows ``made``."""
        for row, unroll in made.items():
            self._see(row, step, unroll)
        ended = {row for row in made if self._actors[row].environment.ended}
        for row in ended:
            made[row].acted[step], made[row].terminals[step] = False, True
            self._begin(row)
        acting = [row for row in made if row not in ended]
        if not acting:
            return
        answers = self._ask(version, acting)
        self._rows.states[acting] = answers.states
        chosen = answers.actions.tolist(), answers.logarithms
        for row, action, logarithm in zip(acting, *chosen, strict=True):
            self._step(row, step, made[row], action, logarithm)

    def _ask(self, version: int, rows: Sequence[int]) -> Answers:
        """Ask for the next actions of ``rows``, and keep count of how they came about."""
        requests = [self._actors[row].requests for row in rows]
        actors = np.array([self._played[row] for row in rows])
        numbers = np.array([each.account.draws for each in requests])
        answers = self._service.answer(Asked(version, actors, numbers, self._rows.inputs(rows)))
        origins = answers.words, answers.replicas, answers.sizes, answers.places
        for each, *origin in zip(requests, *(array.tolist() for array in origins), strict=True):
            each.enter(*origin)
        return answers

    def _policy(self, version: int, inputs: Tensors) -> Tensors:
        return act(self._network, self._versions[version], Inputs(*inputs))

    def _blank(self, row: int) -> Unroll:
        """Return an unroll of which only the time before is known."""
        example, steps, rows = self._actors[row].environment, self._length, self._length + 1
        stack = self._rows.stacks[row]
        shape = (len(stack) - 1 + rows, *example.frame_shape)
        made = Unroll(
            frames=np.zeros(shape, example.frame_dtype),
            ages=np.zeros(rows, np.int64),
            previous_actions=np.zeros(rows, np.int64),
            previous_rewards=np.zeros(rows, np.float32),
            instructions=np.zeros((rows, self._rows.instructions.shape[1]), np.int64),
            acted=np.ones(steps, np.bool_),
            actions=np.zeros(steps, np.int64),
            log_behaviour=np.zeros(steps, np.float32),
            rewards=np.zeros(steps),
            terminals=np.zeros(steps, np.bool_),
            state=self._rows.states[row].copy(),
            returns=[],
        )
        made.frames[: len(stack) - 1] = stack[:-1]
        return made

    def _step(self, row: int, step: int, made: Unroll, action: int, logarithm: np.float32) -> None:
        """Take one step of one actor, given its action and ``ln mu`` of it."""
        actor = self._actors[row]
        transition = actor.environment.step(action)
        terminal = transition.terminal or (transition.ended and not self._bootstraps)
        made.actions[step] = action
        made.log_behaviour[step] = logarithm
        made.rewards[step] = transition.reward
        made.terminals[step] = terminal
        actor.age += 1
        actor.episode_return += transition.game_reward
        self._rows.advance(row, action, transition.reward, transition.frame)
        self._rows.tell(row, actor.environment.instruction)
        if transition.ended:
            made.returns.append(actor.episode_return)
            if terminal:
                self._begin(row)

    def _begin(self, row: int) -> None:
        """Begin the next episode of an actor."""
        actor = self._actors[row]
        actor.age, actor.episode_return = 0, 0.0
        self._rows.begin(row, actor.environment.reset())
        self._rows.tell(row, actor.environment.instruction)

    def _see(self, row: int, step: int, made: Unroll) -> None:
        """Enter what an actor sees before a step."""
        stack = self._rows.stacks[row]
        made.frames[len(stack) - 1 + step] = stack[-1]
        made.ages[step] = self._actors[row].age
        made.previous_actions[step] = self._rows.previous_actions[row]
        made.previous_rewards[step] = self._rows.previous_rewards[row]
        made.instructions[step] = self._rows.instructions[row]

    def _snapshot(self, row: int) -> Snapshot:
        document = {
            **self._actors[row].document(),
            "previous_action": int(self._rows.previous_actions[row]),
            "previous_reward": float(self._rows.previous_rewards[row]).hex(),  # -0.0, too
        }
        return Snapshot(document, self._rows.stacks[row].copy(), self._rows.states[row].copy())


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
    observations, actions, rewards, states, instructions = inputs
    logits, _, after = network.unroll(
        parameters.views,
        observations.unsqueeze(0),
        actions.unsqueeze(0),
        rewards.unsqueeze(0),
        states,
        torch.zeros_like(actions, dtype=torch.bool).unsqueeze(0),
        instructions.unsqueeze(0),
    )
    return logits[0], after


class _Actor:
    """One logical actor, but for what is evaluated in batches.

    Attributes:
        environment: Its environment.
        streams: What its environment draws from.
        requests: What it asked for, and how it was answered.
        age: Steps of the running episode.
        episode_return: Game return of the running episode.
    """

    def __init__(self, settings: UnrollSettings, actor: int, replicas: int) -> None:
        self.streams = actor_streams(settings.seeds, actor)
        self.requests = Requests(settings.seeds, actor, settings.batching, replicas)
        task = settings.tasks[actor % len(settings.tasks)]
        self.environment = make_environment(task, self.streams, training=True)
        self.age = 0
        self.episode_return = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "environment": self.environment.state(),
            "streams": {name: stream.state() for name, stream in self.streams.items()},
            "requests": self.requests.state(),
            "age": self.age,
            "return": self.episode_return,
        }

    def restore(self, document: Mapping[str, Any]) -> None:
        self.environment.restore(document["environment"])
        for name, stream in self.streams.items():
            stream.restore(document["streams"][name])
        self.requests.restore(document["requests"])
        self.age, self.episode_return = document["age"], document["return"]
