"""Unrolls, which actors send to the learner (Espeholt et al. 2018, arXiv:1802.01561, section 3).

For one *unroll* an actor takes a fixed number of steps with one version of the policy, from which
its actions are drawn: it is the behaviour policy mu of these steps.

*Truncation*. An episode that a time limit cuts short would have continued, so the learner
bootstraps from the value of its last frame. With ``truncation="bootstrap"`` this frame therefore
has a row of its own, before the row of the next episode's first frame. No action is taken there:
the row takes a step of the unroll, and none of the environment. With ``truncation="terminal"``
there is no such row, and the return ends with the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.actor_worker import Snapshot, profiles_of
from capsule.training.acting.inference import request_account
from capsule.training.environments import Environment
from capsule.training.networks.actor_critic import ActorCriticNetwork


class Unroll(NamedTuple):
    """One unroll of one actor: a row for each step, and one for the state after the last step.

    Attributes:
        frames: ``[frame_stack - 1 + steps + 1, *frame_shape]``: the frames before the first row,
            then the newest frame of each row.
        ages: int64 ``[steps + 1]``: steps of the episode before each row; 0 where it begins.
        previous_actions: int64 ``[steps + 1]``; -1 for none.
        previous_rewards: float32 ``[steps + 1]``.
        instructions: int64 ``[steps + 1, words]``, as :meth:`Vocabulary.encode` numbers words.
        acted: bool ``[steps]``; False where the row has the last frame of a truncated episode, and
            no action is taken. The action, its logarithm and the reward are 0 there.
        actions: int64 ``[steps]``.
        log_behaviour: ``ln mu(a_t|x_t)``, float32 ``[steps]``.
        rewards: float64 ``[steps]``: training rewards.
        terminals: bool ``[steps]``: whether the return ends after the step; True where no action is
            taken.
        state: The recurrent state before row 0, float32 ``[*state_shape]``.
        returns: Episode returns of the episodes that ended, in order.
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

    @classmethod
    def blank(cls, steps: int, example: Environment, network: ActorCriticNetwork) -> Unroll:
        """Return an unroll of zeros for ``steps`` steps, each with an action, to be filled in."""
        rows = steps + 1
        shape = (example.frame_stack - 1 + rows, *example.frame_shape)
        return cls(
            frames=np.zeros(shape, example.frame_dtype),
            ages=np.zeros(rows, np.int64),
            previous_actions=np.zeros(rows, np.int64),
            previous_rewards=np.zeros(rows, np.float32),
            instructions=np.zeros((rows, network.words), np.int64),
            acted=np.ones(steps, np.bool_),
            actions=np.zeros(steps, np.int64),
            log_behaviour=np.zeros(steps, np.float32),
            rewards=np.zeros(steps),
            terminals=np.zeros(steps, np.bool_),
            state=np.zeros(network.state_shape, np.float32),
            returns=[],
        )

    def digest(self) -> str:
        """Return the XXH3-64 of all fields, hexadecimal."""
        digest = xxhash.xxh3_64()
        for part in self:
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def stream_profiles(seeds: SeedsSpec, actor: int, snapshot: Snapshot) -> list[StreamProfile]:
    """Return the profiles of an actor's streams up to a snapshot, named ``stream/actor``.

    The stream ``exploration`` is among them if every request of the actor was answered from it.
    """
    requests = snapshot.document["requests"]
    # Otherwise some words came from streams of replicas, of which there is no account.
    known = requests["own_stream"] == requests["draws"]
    own = [(request_account(seeds, actor), requests)] if known else []
    return profiles_of(seeds, actor, snapshot, *own)


def stacked(unrolls: Sequence[Unroll], frame_stack: int) -> NDArray[Any]:
    """Return observations, ``[steps + 1, unrolls, frame_stack, *frame_shape]``, newest frame last.

    Frames from before an episode are zeros.
    """
    rows = len(unrolls[0].ages)
    frame = unrolls[0].frames
    observations = np.zeros((rows, len(unrolls), frame_stack, *frame.shape[1:]), frame.dtype)
    for column, unroll in enumerate(unrolls):
        for place in range(frame_stack):
            # An observation contains an older frame only if its episode had begun by then.
            seen = unroll.ages >= frame_stack - 1 - place
            observations[seen, column, place] = unroll.frames[place : place + rows][seen]
    return observations
