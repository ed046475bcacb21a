"""Actor workers: each runs logical actors in one process (Horgan et al. 2018, arXiv:1803.00933).

A logical actor consists of an environment, random streams and a recurrent state. An actor worker
runs any set of a run's actors and evaluates the network for many of them at once. The distribution
of actors over workers, and the batches in which they act, do not change a bit
(:mod:`capsule.training.acting.batching`). Each algorithm derives its worker from
:class:`ActorWorker`, and defines how actions are chosen and what is returned to the learner.

Every answer of a worker contains a snapshot of the actor, from which any worker can continue. A run
is therefore saved, resumed, or continued after the loss of a worker, without further requests to
the workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import DeterminismSpec, EnvironmentSpec, SeedsSpec, StreamName
from capsule.training.acting.batched_actors import ActorRows
from capsule.training.acting.batching import ROWS, Batching
from capsule.training.acting.inference import Service
from capsule.training.environments import Frame, Transition, make_environment
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.language import NO_INSTRUCTIONS, Vocabulary
from capsule.training.networks.recurrent import Architecture
from capsule.training.state.checkpoint import array_document, document_array
from capsule.training.state.streams import Account, Stream

ENVIRONMENT_STREAMS: tuple[StreamName, ...] = ("environment", "no-op")


class ActorRequest(NamedTuple):
    """A request for an actor's next steps, with a version of the policy."""

    actor: int
    version: int


class Snapshot(NamedTuple):
    """An actor between two requests.

    Attributes:
        document: JSON-safe: the environment, the streams, and the previous action and reward.
        stack: The last frames, ``[frame_stack, *frame_shape]``.
        state: The recurrent state, float32 ``[*state_shape]``.
    """

    document: dict[str, Any]
    stack: NDArray[Any]
    state: NDArray[np.float32]

    def saved(self) -> dict[str, Any]:
        """Return the snapshot as a JSON-safe document."""
        arrays = {"stack": array_document(self.stack), "state": array_document(self.state)}
        return {"document": self.document, **arrays}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot of a document that :meth:`saved` returned."""
        stack, state = document_array(saved["stack"]), document_array(saved["state"])
        return cls(saved["document"], stack, state)


ExperienceT = TypeVar("ExperienceT")


class ActorResult(NamedTuple, Generic[ExperienceT]):
    """The answer to a request.

    Attributes:
        actor: Number of the actor.
        experience: The experience of the actor.
        after: The actor after it.
    """

    actor: int
    experience: ExperienceT
    after: Snapshot


@dataclass(frozen=True)
class WorkerSettings(ABC):
    """The settings of the actors of a run, which can be sent to another process.

    Attributes:
        tasks: The spec's ``environment`` section for each task; actor ``i`` plays task ``i`` modulo
            their number.
        seeds: The spec's ``seeds`` section, with the root seed of the run.
        network: The network, without parameters.
        steps: Steps that an actor takes for one request.
        vocabulary: The words of instructions.
        rows: Number of rows of a batch of fixed size.
        determinism: The spec's ``determinism`` section.
    """

    tasks: tuple[EnvironmentSpec, ...]
    seeds: SeedsSpec
    network: Architecture
    steps: int
    vocabulary: Vocabulary = NO_INSTRUCTIONS
    rows: int = ROWS
    determinism: DeterminismSpec = field(default_factory=DeterminismSpec)

    @property
    def batching(self) -> Batching:
        """The way in which the network is evaluated for many actors at once."""
        return Batching.of(self.determinism, self.network.products, self.rows)

    @abstractmethod
    def make_worker(
        self, played: Sequence[int], service: Service | None = None
    ) -> ActorWorker[Any, Any]:
        """Make a worker in this process.

        Args:
            played: The actors that it runs, ascending.
            service: The service that chooses their actions; None if the worker itself does.

        Raises:
            CapsuleError: CAP-T212 to CAP-T216, the environment is not available or cannot be
                played; CAP-T242, as :meth:`Vocabulary.encode`.
        """


class Actor:
    """One logical actor, without the inputs of the network (:class:`ActorRows`).

    Attributes:
        streams: Its random streams.
        environment: Its environment.
        age: Steps of the agent's current episode.
        episode_return: Return of the environment's current episode so far.
    """

    drawn: ClassVar[tuple[StreamName, ...]] = ENVIRONMENT_STREAMS

    def __init__(self, settings: WorkerSettings, number: int) -> None:
        """Make actor ``number``, before its first episode."""
        self.streams = actor_streams(settings.seeds, number, self.drawn)
        task = settings.tasks[number % len(settings.tasks)]
        self.environment = make_environment(task, self.streams, training=True)
        self.age = 0
        self.episode_return = 0.0

    def document(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot."""
        environment = self.environment.state()
        return {"environment": environment, "age": self.age, "return": self.episode_return}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Continue from a snapshot by playing the running episode again.

        Raises:
            CapsuleError: CAP-T201 or CAP-T211, as :meth:`Environment.restore`.
        """
        self.environment.restore(document["environment"])
        self.age, self.episode_return = document["age"], document["return"]


AnyActor = TypeVar("AnyActor", bound=Actor)


class ActorWorker(ABC, Generic[AnyActor, ExperienceT]):
    """Runs some actors in this process."""

    def __init__(
        self, settings: WorkerSettings, played: Sequence[int], actors: Sequence[AnyActor]
    ) -> None:
        """Begin an episode of each actor.

        Args:
            settings: The settings with which the actors were made.
            played: Numbers of the actors, ascending.
            actors: The actors.
        """
        self._shapes, self._length = settings.network.shapes, settings.steps
        self._played, self._actors = tuple(played), actors
        self._row_of = {actor: row for row, actor in enumerate(played)}
        self._rows = ActorRows(
            len(played), actors[0].environment, settings.network, settings.vocabulary
        )
        self._versions: dict[int, Parameters] = {}
        for row in range(len(actors)):
            self._begin_episode(row)

    def play(
        self,
        requests: Iterable[ActorRequest],
        parameters: Mapping[int, NDArray[np.float32]],
        lag: int,
    ) -> list[ActorResult[ExperienceT]]:
        """Let actors act, those with the same version of the policy together.

        Args:
            requests: At most one for each actor.
            parameters: Versions that this worker has not been given before, each in the order of
                :attr:`Parameters.flat`; none if a service chooses actions.
            lag: Versions that are more than this number before the newest are dropped.

        Raises:
            CapsuleError: As :meth:`Service.answer`.
        """
        for version, flat in parameters.items():
            kept = Parameters(self._shapes, torch.device("cpu"))
            kept.flat.copy_(torch.from_numpy(flat))
            self._versions[version] = kept
        newest = max(self._versions, default=0)
        self._versions = {v: kept for v, kept in self._versions.items() if v >= newest - lag}
        done: list[ActorResult[ExperienceT]] = []
        # groupby() joins neighbours only. With the actors in ascending order, a batch does not
        # depend on the order of the requests.
        ordered = sorted(requests, key=attrgetter("version", "actor"))
        for version, group in groupby(ordered, attrgetter("version")):
            rows = [self._row_of[request.actor] for request in group]
            for row, made in zip(rows, self._play_together(rows, version), strict=True):
                done.append(ActorResult(self._played[row], made, self._snapshot(row)))
        return done

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Restore actors from snapshots.

        Raises:
            CapsuleError: As :meth:`Actor.restore`.
        """
        for actor, snapshot in snapshots.items():
            row, document = self._row_of[actor], snapshot.document
            # First, because the current instruction is known only when the episode has been played
            # again.
            self._actors[row].restore(document)
            self._rows.instruct(row, self._actors[row].environment.instruction)
            self._rows.stacks[row] = snapshot.stack
            self._rows.states[row] = snapshot.state
            self._rows.previous_actions[row] = document["previous_action"]
            self._rows.previous_rewards[row] = float.fromhex(document["previous_reward"])

    @abstractmethod
    def _play_together(self, rows: Sequence[int], version: int) -> Iterable[ExperienceT]:
        """Let the actors of ``rows`` act with the same version; return the experience of each."""

    def _step(self, row: int, action: int) -> Transition:
        """Take one step of the environment of one actor, and update its row."""
        actor = self._actors[row]
        transition = actor.environment.step(action)
        actor.age += 1
        # The episode return sums the game's own rewards; the network reads the training reward.
        actor.episode_return += transition.game_reward
        self._rows.advance(row, action, transition.reward, transition.frame)
        self._rows.instruct(row, actor.environment.instruction)
        return transition

    def _begin_episode(self, row: int) -> None:
        """Begin the next episode of an actor's environment."""
        actor = self._actors[row]
        actor.episode_return = 0.0
        # The reset comes before instruct(), because it determines the instruction.
        self._begin(row, actor.environment.reset())
        self._rows.instruct(row, actor.environment.instruction)

    def _begin(self, row: int, frame: Frame) -> None:
        """Begin an episode of the agent with ``frame``."""
        self._actors[row].age = 0
        self._rows.begin(row, frame)

    def _snapshot(self, row: int) -> Snapshot:
        document = {
            **self._actors[row].document(),
            "previous_action": int(self._rows.previous_actions[row]),
            "previous_reward": float(self._rows.previous_rewards[row]).hex(),  # -0.0, too
        }
        # Copies, because Serial passes them on within this process, and the next step changes the
        # rows.
        return Snapshot(document, self._rows.stacks[row].copy(), self._rows.states[row].copy())


def actor_streams(
    seeds: SeedsSpec, actor: int, names: Sequence[StreamName] = ENVIRONMENT_STREAMS
) -> dict[StreamName, Stream]:
    """Return streams of one actor, with the actor as index."""
    return {name: Stream(name, seeds.root_of(name), actor) for name in names}


def profiles_of(
    seeds: SeedsSpec, actor: int, snapshot: Snapshot, *others: tuple[Account, Mapping[str, Any]]
) -> list[StreamProfile]:
    """Return the profiles of an actor's streams up to a snapshot, named ``stream/actor``.

    Args:
        seeds: The spec's ``seeds`` section, with the root seed of the run.
        actor: Number of the actor.
        snapshot: The snapshot, with the states of the environment's streams.
        others: Further streams, or accounts of them, each with its saved state.

    Raises:
        CapsuleError: CAP-T201, a state is of another stream or seed.
    """
    # This lacks the streams from which the environment does not draw; they have their first state.
    drawn = snapshot.document["environment"]["streams"]
    streams = actor_streams(seeds, actor).values()
    accounts = [*((each, drawn.get(each.name, each.state())) for each in streams), *others]
    profiles = []
    for account, state in sorted(accounts, key=lambda pair: pair[0].name):
        account.restore(state)
        profiles.append(account.profile().model_copy(update={"name": f"{account.name}/{actor}"}))
    return profiles
