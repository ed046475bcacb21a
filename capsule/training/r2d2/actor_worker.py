"""R2D2's actors.

The sources are Kapturowski et al. 2019, OpenReview r1lyTjAqYX, and Horgan et al. 2018,
arXiv:1803.00933.

An actor chooses actions epsilon-greedily, with its own epsilon, and returns its steps with
the Q-values from which priorities are computed and the recurrent states with which sequences begin.

An *episode* here is one of the agent: at its beginning, the recurrent state and the frame stack are
zero, and there is no previous action or reward. It ends with the environment's episode; with
``life_loss="reset"`` it also ends where a lost life ends the return, while the game continues
(Kapturowski et al. 2019, appendix: the ablations "reset" and "roll").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import SeedsSpec, StreamName
from capsule.training.acting.actor_worker import (
    ENVIRONMENT_STREAMS,
    Actor,
    ActorWorker,
    Snapshot,
    WorkerSettings,
    actor_streams,
    profiles_of,
)
from capsule.training.acting.batched_actors import Inputs
from capsule.training.acting.batching import Tensors
from capsule.training.acting.inference import Service
from capsule.training.environments import Environment, Frame
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.recurrent import RecurrentNetwork
from capsule.training.r2d2.cutting import SequenceLayout

LifeLoss = Literal["roll", "reset"]


@dataclass(frozen=True, kw_only=True)
class ActorSettings(WorkerSettings):
    """The settings of the actors of a run, which can be sent to another process.

    Attributes:
        layout: How episodes are cut into sequences, which determines the recurrent states that are
            needed.
        actors: Number of logical actors.
        life_loss: Whether a lost life that ends the return also sets the recurrent state to zero
            (``reset``) or does not (``roll``).
        exploration_base: Epsilon of actor 0.
        exploration_exponent: The exponent of :func:`exploration_ladder`.
    """

    network: RecurrentNetwork
    layout: SequenceLayout
    actors: int
    life_loss: LifeLoss
    exploration_base: float
    exploration_exponent: float

    def make_worker(
        self,
        played: Sequence[int],
        service: Service | None = None,  # noqa: ARG002 - R2D2's actors choose actions themselves
    ) -> SequenceWorker:
        """See :meth:`WorkerSettings.make_worker`."""
        return SequenceWorker(self, played)


class Experience(NamedTuple):
    """The experience of one actor in a number of steps.

    Attributes:
        frames: ``[steps, *frame_shape]``: the newest frame before each action.
        actions: int64 ``[steps]``.
        rewards: float64 ``[steps]``: training rewards.
        game_rewards: float64 ``[steps]``: the game's own rewards.
        terminals: bool ``[steps]``: whether the return ends after the step.
        ended: bool ``[steps]``: whether the episode ends after the step; without ``terminals`` it
            was truncated.
        values: float32 ``[steps, 2]``: the Q-value of the action taken, and the largest Q-value.
        states: The recurrent state before a step, float32 ``[*state_shape]``, by the steps at which
            sequences may begin.
        last_frames: The last frame of a truncated episode, by its last step.
        last_values: The largest Q-value of that frame, by the same step.
        returns: Episode returns of the environment's episodes that ended, in order.
    """

    frames: NDArray[Any]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float64]
    game_rewards: NDArray[np.float64]
    terminals: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    values: NDArray[np.float32]
    states: dict[int, NDArray[np.float32]]
    last_frames: dict[int, Frame]
    last_values: dict[int, float]
    returns: list[float]

    @classmethod
    def blank(cls, steps: int, environment: Environment) -> Experience:
        """Return zeros for ``steps`` steps in ``environment``, to be filled in."""
        return cls(
            frames=np.zeros((steps, *environment.frame_shape), environment.frame_dtype),
            actions=np.zeros(steps, np.int64),
            rewards=np.zeros(steps),
            game_rewards=np.zeros(steps),
            terminals=np.zeros(steps, np.bool_),
            ended=np.zeros(steps, np.bool_),
            values=np.zeros((steps, 2), np.float32),
            states={},
            last_frames={},
            last_values={},
            returns=[],
        )


def exploration_ladder(actors: int, base: float, exponent: float) -> list[float]:
    """Return each actor's epsilon: ``base^(1 + exponent i / (actors - 1))``; ``base`` for one.

    The source is Horgan et al. 2018, section 4.1, with a base of 0.4 and an exponent of 7.
    """
    highest = max(1, actors - 1)
    return [base ** (1.0 + exponent * actor / highest) for actor in range(actors)]


def q_values(
    network: RecurrentNetwork, parameters: Parameters, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q-values of one step, float32 ``[rows, actions]``, and the states after it."""
    # The first row of RecurrentNetwork.unroll() is always a reset to the given states.
    values, after = network.unroll(parameters.views, inputs.step(reset=True))
    return values[0], after


def stream_profiles(seeds: SeedsSpec, actor: int, snapshot: Snapshot) -> list[StreamProfile]:
    """Return the profiles of an actor's streams up to a snapshot, named ``stream/actor``."""
    own = actor_streams(seeds, actor, ("exploration",))["exploration"]
    return profiles_of(seeds, actor, snapshot, (own, snapshot.document["exploration"]))


class EpsilonGreedyActor(Actor):
    """One logical actor.

    At each step it draws twice from its stream ``exploration``: a uniform, which decides whether to
    explore, and an action. Both are drawn whichever is used, so that the position of the stream
    depends on the number of steps alone.
    """

    drawn: ClassVar[tuple[StreamName, ...]] = (*ENVIRONMENT_STREAMS, "exploration")

    def __init__(self, settings: ActorSettings, number: int, epsilon: float) -> None:
        """Make actor ``number``, which explores with probability ``epsilon``."""
        super().__init__(settings, number)
        self._epsilon = epsilon

    def choose(self, values: NDArray[np.float32]) -> int:
        """Return an action, given the Q-values, ``[actions]``; ties go to the lowest action."""
        stream = self.streams["exploration"]
        uniform, random_action = stream.uniform(), stream.integer(self.environment.actions)
        return random_action if uniform < self._epsilon else int(values.argmax())

    def document(self) -> dict[str, Any]:
        """See :meth:`Actor.document`."""
        return super().document() | {"exploration": self.streams["exploration"].state()}

    def restore(self, document: Mapping[str, Any]) -> None:
        """See :meth:`Actor.restore`."""
        super().restore(document)
        self.streams["exploration"].restore(document["exploration"])


class SequenceWorker(ActorWorker[EpsilonGreedyActor, Experience]):
    """Runs some of R2D2's actors in this process."""

    def __init__(self, settings: ActorSettings, played: Sequence[int]) -> None:
        """Make the actors ``played``; see :meth:`WorkerSettings.make_worker`."""
        ladder = exploration_ladder(
            settings.actors, settings.exploration_base, settings.exploration_exponent
        )
        actors = [EpsilonGreedyActor(settings, number, ladder[number]) for number in played]
        super().__init__(settings, played, actors)
        self._network, self._batching = settings.network, settings.batching
        self._layout, self._resets = settings.layout, settings.life_loss == "reset"

    def _play_together(self, rows: Sequence[int], version: int) -> Iterable[Experience]:
        made = {row: Experience.blank(self._length, self._actors[row].environment) for row in rows}
        for step in range(self._length):
            self._advance(version, step, made)
        return made.values()

    def _advance(self, version: int, step: int, made: Mapping[int, Experience]) -> None:
        """Take one step of every actor of some rows, and enter it into their experience."""
        rows = list(made)
        values, after = self._evaluate(version, rows)
        for row, seen in zip(rows, values, strict=True):
            self._act(row, step, made[row], seen)
        # Set after _act(), which keeps the states before the step if a sequence begins.
        self._rows.states[rows] = after
        # Closed before the next episodes begin, because the value of a truncated episode's last
        # frame depends on the recurrent state after its last step.
        cut_off = [row for row in rows if made[row].ended[step] and not made[row].terminals[step]]
        self._close(version, step, {row: made[row] for row in cut_off})
        for row, experience in made.items():
            actor = self._actors[row]
            if actor.environment.ended:
                experience.returns.append(actor.episode_return)
                self._begin_episode(row)
            elif experience.ended[step]:  # a lost life ended the episode; the game continues
                self._begin(row, self._rows.stacks[row, -1].copy())

    def _act(
        self, row: int, step: int, experience: Experience, values: NDArray[np.float32]
    ) -> None:
        """Take one step of one actor, given its Q-values, ``[actions]``."""
        actor = self._actors[row]
        if self._layout.begins(actor.age):
            # A copy, because _advance() overwrites this row.
            experience.states[step] = self._rows.states[row].copy()
        experience.frames[step] = self._rows.stacks[row, -1]
        action = actor.choose(values)
        transition = self._step(row, action)
        experience.actions[step] = action
        experience.rewards[step] = transition.reward
        experience.game_rewards[step] = transition.game_reward
        experience.terminals[step] = transition.terminal
        experience.ended[step] = transition.ended or (self._resets and transition.terminal)
        experience.values[step] = values[action], values.max()

    def _close(self, version: int, step: int, made: Mapping[int, Experience]) -> None:
        """Enter the last frames of truncated episodes, and their values."""
        if not made:
            return
        values, _ = self._evaluate(version, list(made))
        for row, largest in zip(made, values.max(axis=1).tolist(), strict=True):
            made[row].last_frames[step] = self._rows.stacks[row, -1].copy()
            made[row].last_values[step] = largest

    def _evaluate(
        self, version: int, rows: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return Q-values, ``[rows, actions]``, and the recurrent states after this step."""

        def evaluate(inputs: Tensors) -> Tensors:
            return q_values(self._network, self._versions[version], Inputs(*inputs))

        actors = [self._played[row] for row in rows]
        values, after = self._batching.evaluate(evaluate, actors, self._rows.inputs(rows)).outputs
        return values, after
