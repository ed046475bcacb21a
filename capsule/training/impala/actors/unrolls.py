"""Unrolls: what the actors of an actor-learner do (Espeholt et al. 2018, section 3).

A logical actor is an environment, streams and a recurrent state of its own. For one *unroll* it
takes a fixed number of steps with one version of the policy, which is then the behaviour policy mu
of these steps; its actions are drawn from it.

*Truncation*. An episode that a time limit cuts short was going to continue, so its last frame has a
value, from which the learner bootstraps. With ``truncation="bootstrap"`` this frame therefore has a
row of its own, before the row of the next episode's first frame. Nobody acts there: the row takes a
step of the unroll, and none of the environment. With ``truncation="terminal"`` there is no such
row, and the return ends with the episode.

An actor is a value: every unroll brings a snapshot of its actor, from which any host goes on. So a
run is saved, resumed, or carried on after the loss of a host, without asking a host for anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import DeterminismSpec, EnvironmentSpec, SeedsSpec, StreamName
from capsule.experiment.trainers import Truncation
from capsule.training.acting.batching import ROWS, Batching
from capsule.training.acting.inference import request_account
from capsule.training.networks.actor_critic import ActorCriticNetwork
from capsule.training.networks.language import NO_INSTRUCTIONS, Vocabulary
from capsule.training.state.streams import Account, Stream

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
        truncation: The spec's ``trainer.truncation``.
    """

    tasks: tuple[EnvironmentSpec, ...]
    seeds: SeedsSpec
    network: ActorCriticNetwork
    length: int
    vocabulary: Vocabulary = NO_INSTRUCTIONS
    rows: int = ROWS
    determinism: DeterminismSpec = field(default_factory=DeterminismSpec)
    truncation: Truncation = "bootstrap"

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
        acted: bool ``[steps]``; False: the row shows the last frame of a truncated episode, where
            nobody acts. The action, its logarithm and the reward are 0 then.
        actions: int64 ``[steps]``.
        log_behaviour: ``ln mu(a_t|x_t)``: float32 ``[steps]``.
        rewards: float64 ``[steps]``: training rewards.
        terminals: bool ``[steps]``: nothing after the step counts for it. True where nobody acts.
        state: Recurrent, before row 0: float32 ``[*state_shape]``.
        returns: Game returns of the episodes that ended, in order.
    """

    frames: NDArray[Any]
    ages: NDArray[np.int64]
    previous_actions: NDArray[np.int64]
    previous_rewards: NDArray[np.float32]
    instructions: NDArray[np.int64]
    acted: NDArray[np.bool_]
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
