"""Unrolls: what the actors of an actor-learner do (Espeholt et al. 2018, section 3).

A logical actor is an environment, streams and a recurrent state of its own. For one *unroll* it
takes a fixed number of steps with one version of the policy, which is then the behaviour policy mu
of these steps; its actions are drawn from it. A host plays any set of actors in one process, and
asks for the actions of all at once that unroll with the same version; which actors a host plays,
which of them unroll together, and who answers, changes no bit (:mod:`capsule.training.inference`).

An actor is a value: every unroll brings a snapshot of its actor, from which any host goes on. So a
run is saved, resumed, or carried on after the loss of a host, without asking a host for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import DeterminismSpec, EnvironmentSpec, SeedsSpec, StreamName
from capsule.training import kernels
from capsule.training.actor_rows import ActorRows, Inputs
from capsule.training.batching import ROWS, Batching, Tensors
from capsule.training.environments import make_environment
from capsule.training.impala_networks import ActorCriticNetwork
from capsule.training.inference import Answers, Asked, Replica, Requests, Service, request_account
from capsule.training.language import NO_INSTRUCTIONS, Vocabulary
from capsule.training.networks import Parameters
from capsule.training.streams import Account, Stream

_OWN_STREAMS: tuple[StreamName, ...] = ("environment", "no-op")


@dataclass(frozen=True)
class UnrollSettings:
    """What makes the actors of a run; all of it can be handed to another process.

    Attributes:
        tasks: The spec's ``environment`` section for each task; actor ``i`` plays task ``i`` modulo
            their number.
        seeds: The spec's ``seeds`` section, with the root seed that holds.
        network: The policy.
        length: Steps of an unroll.
        vocabulary: What instructions are made of.
        rows: Of each batch that the policy is evaluated in, where that matters.
        determinism: The spec's ``determinism`` section.
    """

    tasks: tuple[EnvironmentSpec, ...]
    seeds: SeedsSpec
    network: ActorCriticNetwork
    length: int
    vocabulary: Vocabulary = NO_INSTRUCTIONS
    rows: int = ROWS
    determinism: DeterminismSpec = field(default_factory=DeterminismSpec)

    @property
    def batching(self) -> Batching:
        """How the policy is evaluated for many actors at once."""
        return Batching.of(self.determinism, self.network.products, self.rows)


class Request(NamedTuple):
    """An actor's next unroll, with a version of the policy."""

    actor: int
    version: int


class Snapshot(NamedTuple):
    """An actor between two unrolls.

    Attributes:
        document: JSON-safe: the environment, the streams, the requests, and what was done last.
        stack: The last frames, ``[frame_stack, *frame_shape]``.
        state: Recurrent, float32 ``[*state_shape]``.
    """

    document: dict[str, Any]
    stack: NDArray[Any]
    state: NDArray[np.float32]


class Unroll(NamedTuple):
    """What one actor did in one unroll; a row for each step, and one for what came of the last.

    Attributes:
        frames: ``[frame_stack - 1 + steps + 1, *frame_shape]``: those before the first row's, then
            the newest of each row.
        ages: int64 ``[steps + 1]``: steps of the episode before each row; 0: it begins.
        previous_actions: int64 ``[steps + 1]``; -1 for none.
        previous_rewards: float32 ``[steps + 1]``.
        instructions: int64 ``[steps + 1, words]``.
        actions: int64 ``[steps]``.
        log_behaviour: ``ln mu(a_t|x_t)``: float32 ``[steps]``.
        rewards: float64 ``[steps]``: training rewards.
        terminals: bool ``[steps]``: nothing after the step counts for it.
        state: Recurrent, before row 0: float32 ``[*state_shape]``.
        returns: Game returns of the episodes that ended, in order.
    """

    frames: NDArray[Any]
    ages: NDArray[np.int64]
    previous_actions: NDArray[np.int64]
    previous_rewards: NDArray[np.float32]
    instructions: NDArray[np.int64]
    actions: NDArray[np.int64]
    log_behaviour: NDArray[np.float32]
    rewards: NDArray[np.float64]
    terminals: NDArray[np.bool_]
    state: NDArray[np.float32]
    returns: list[float]

    def digest(self) -> str:
        """Return the XXH3-64 of all of it, hexadecimal."""
        digest = xxhash.xxh3_64()
        for part in self:
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class Played(NamedTuple):
    """An unroll that is finished.

    Attributes:
        actor: Whose.
        unroll: What it did.
        after: The actor then.
    """

    actor: int
    unroll: Unroll
    after: Snapshot


def actor_streams(seeds: SeedsSpec, actor: int) -> dict[StreamName, Stream]:
    """Return the streams that one actor's environment draws from, with the actor as index."""
    return {name: Stream(name, seeds.streams.get(name, seeds.root), actor) for name in _OWN_STREAMS}


def stream_profiles(seeds: SeedsSpec, actor: int, snapshot: Snapshot) -> list[StreamProfile]:
    """Return what the streams of an actor gave out up to a snapshot, named ``stream/actor``.

    That of ``exploration`` is among them if every request was answered from it.
    """
    requests = snapshot.document["requests"]
    accounts: list[tuple[Account, dict[str, Any]]] = [
        (stream, snapshot.document["streams"][name])
        for name, stream in actor_streams(seeds, actor).items()
    ]
    if requests["own_stream"] == requests["draws"]:
        accounts.append((request_account(seeds, actor), requests))
    profiles = []
    for account, state in sorted(accounts, key=lambda pair: pair[0].name):
        account.restore(state)
        profiles.append(account.profile().model_copy(update={"name": f"{account.name}/{actor}"}))
    return profiles


class UnrollHost:
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
            CapsuleError: CAP-T212 to CAP-T216, the environment cannot be had or played; CAP-T242,
                an actor is told what the vocabulary has no numbers for.
        """
        self._network, self._length = settings.network, settings.length
        self._row_of = {actor: row for row, actor in enumerate(played)}
        self._service = service or Replica(
            played[0], self._policy, settings.batching, settings.determinism, settings.seeds
        )
        self._actors = [_Actor(settings, actor, self._service.replicas) for actor in played]
        self._rows = ActorRows(
            len(played), self._actors[0].environment, settings.network, settings.vocabulary
        )
        self._versions: dict[int, Parameters] = {}
        for row, actor in enumerate(self._actors):
            self._rows.begin(row, actor.environment.reset())
            self._rows.tell(row, actor.environment.instruction)

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
        rows = [self._row_of[actor] for actor in actors]
        made = [self._blank(row) for row in rows]
        for step in range(self._length):
            answers = self._ask(version, rows, actors)
            self._rows.states[rows] = answers.states
            chosen = answers.actions.tolist(), answers.logarithms
            for row, unroll, action, logarithm in zip(rows, made, *chosen, strict=True):
                self._step(row, step, unroll, action, logarithm)
        for row, unroll in zip(rows, made, strict=True):
            self._see(row, self._length, unroll)
        snapshots = map(self._snapshot, rows)
        return [Played(*each) for each in zip(actors, made, snapshots, strict=True)]

    def _ask(self, version: int, rows: Sequence[int], actors: Sequence[int]) -> Answers:
        """Ask for the next action of ``actors``, and keep count of how it came about."""
        requests = [self._actors[row].requests for row in rows]
        numbers = np.array([each.account.draws for each in requests])
        asked = Asked(version, np.array(actors), numbers, self._rows.inputs(rows))
        answers = self._service.answer(asked)
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
        self._see(row, step, made)
        transition = actor.environment.step(action)
        made.actions[step] = action
        made.log_behaviour[step] = logarithm
        made.rewards[step] = transition.reward
        made.terminals[step] = transition.terminal or transition.ended
        actor.age += 1
        actor.episode_return += transition.game_reward
        self._rows.advance(row, action, transition.reward, transition.frame)
        if transition.ended:
            made.returns.append(actor.episode_return)
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


def stacked(unrolls: Sequence[Unroll], frame_stack: int) -> NDArray[Any]:
    """Return observations, ``[steps + 1, unrolls, frame_stack, *frame_shape]``, newest frame last.

    Frames of an earlier episode are zeros.
    """
    rows = len(unrolls[0].ages)
    frame = unrolls[0].frames
    observations = np.zeros((rows, len(unrolls), frame_stack, *frame.shape[1:]), frame.dtype)
    for column, unroll in enumerate(unrolls):
        for place in range(frame_stack):
            seen = unroll.ages >= frame_stack - 1 - place
            observations[seen, column, place] = unroll.frames[place : place + rows][seen]
    return observations


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
