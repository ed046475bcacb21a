"""A host plays logical actors in one process (Horgan et al. 2018; Kapturowski et al. 2019).

A logical actor is an environment, streams, a recurrent state and an exploration rate of its own.
A host steps its actors in turn and evaluates the network for many of them at once; how actors are
spread over hosts changes no bit all the same (:mod:`capsule.training.acting.batching`).

An *episode* is what the agent takes for one: where it begins, the recurrent state and the frame
stack are zero, and there is no previous action or reward. It ends with the environment's episode;
with ``life_loss="reset"`` it also ends where a lost life ends the return, while the game goes on
(Kapturowski et al. 2019, appendix: the ablations "reset" and "roll").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import EnvironmentSpec, SeedsSpec, StreamName
from capsule.training.acting.batched_actors import ActorRows, Inputs
from capsule.training.acting.batching import Batching, Tensors
from capsule.training.environments import Environment, Frame, Transition, make_environment
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.recurrent import RecurrentNetwork
from capsule.training.r2d2.replay import SequenceLayout
from capsule.training.state.streams import Stream

LifeLoss = Literal["roll", "reset"]
ActorStream = Literal["environment", "no-op", "exploration"]


@dataclass(frozen=True)
class ActorSettings:
    """What makes the actors of a run; all of it can be handed to another process.

    Attributes:
        environment: The spec's ``environment`` section.
        seeds: The spec's ``seeds`` section, with the root seed that holds.
        network: What chooses actions.
        batching: How it is evaluated for many actors at once.
        layout: How episodes are cut into sequences, and so which recurrent states are needed.
        actors: Number of logical actors.
        life_loss: What a lost life that ends the return does to the recurrent state: ``roll``
            leaves it alone, ``reset`` begins anew.
        exploration_base: Exploration rate of actor 0.
        exploration_exponent: How much smaller the others' are; see :func:`exploration_ladder`.
    """

    environment: EnvironmentSpec
    seeds: SeedsSpec
    network: RecurrentNetwork
    batching: Batching
    layout: SequenceLayout
    actors: int
    life_loss: LifeLoss
    exploration_base: float
    exploration_exponent: float


class Experience(NamedTuple):
    """What one actor did in a number of steps.

    Attributes:
        frames: ``[steps, *frame_shape]``: the newest frame before each action.
        actions: int64 ``[steps]``.
        rewards: float64 ``[steps]``: training rewards.
        game_rewards: float64 ``[steps]``: as the game gives them.
        terminals: bool ``[steps]``: whether the return ends after the step.
        ended: bool ``[steps]``: whether the episode does; without ``terminals`` it was truncated.
        values: float32 ``[steps, 2]``: Q-value of the action taken, and the largest one.
        states: Step to the recurrent state before it, float32 ``[*state_shape]``, for the steps at
            which a sequence may begin.
        last_frames: Step that was truncated to the frame it led to, which nobody acted on.
        last_values: Step that was truncated to the largest Q-value of that frame.
        returns: Game returns of the environment's episodes that ended, in order.
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


class ActorsState(NamedTuple):
    """Snapshot of actors.

    Attributes:
        actors: JSON-safe, one document per actor.
        arrays: ``recurrent_states``, float32 ``[actors, *state_shape]``, and ``stacks``, ``[actors,
            frame_stack, *frame_shape]``.
    """

    actors: list[dict[str, Any]]
    arrays: dict[str, NDArray[Any]]


def exploration_ladder(actors: int, base: float, exponent: float) -> list[float]:
    """Return each actor's epsilon: ``base^(1 + exponent i / (actors - 1))``; ``base`` for one.

    Horgan et al. 2018, section 4.1; the paper has 0.4 and 7.
    """
    highest = max(1, actors - 1)
    return [base ** (1.0 + exponent * actor / highest) for actor in range(actors)]


def actor_streams(seeds: SeedsSpec, actor: int) -> dict[StreamName, Stream]:
    """Return the streams of one actor: those of its name, with the actor as index.

    Streams:
        environment, no-op: as the environment draws them.
        exploration: two draws per step, whichever is used: a uniform, which decides whether to
            explore, and an action.
    """
    names: tuple[ActorStream, ...] = get_args(ActorStream)
    return {name: Stream(name, seeds.streams.get(name, seeds.root), actor) for name in names}


def q_values(
    network: RecurrentNetwork, parameters: Parameters, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q-values of one step, float32 ``[rows, actions]``, and the states after it."""
    observations, actions, rewards, states, _ = inputs
    values, after = network.unroll(
        parameters.views,
        observations.unsqueeze(0),
        actions.unsqueeze(0),
        rewards.unsqueeze(0),
        states,
        torch.ones_like(actions, dtype=torch.bool).unsqueeze(0),
    )
    return values[0], after


class ActorWorker:
    """Plays a range of actors in this process; it needs parameters before it can act."""

    def __init__(self, settings: ActorSettings, played: range) -> None:
        """Make the actors ``played``, each with an episode begun.

        Raises:
            CapsuleError: CAP-T212 to CAP-T215, the environment cannot be had or played.
        """
        self._network = settings.network
        self._resets = settings.life_loss == "reset"
        self._parameters = Parameters(settings.network.shapes, torch.device("cpu"))
        ladder = exploration_ladder(
            settings.actors, settings.exploration_base, settings.exploration_exponent
        )
        self._actors = [_Actor(settings, actor, ladder[actor]) for actor in played]
        example = self._actors[0].environment
        self._played, self._batching = played, settings.batching
        self._rows = ActorRows(len(played), example, settings.network)
        for row, actor in enumerate(self._actors):
            self._begin(row, actor.environment.reset())

    def act(self, steps: int, parameters: NDArray[np.float32] | None) -> list[Experience]:
        """Take ``steps`` steps of each actor, epsilon-greedily; ties go to the lowest action.

        Args:
            steps: How many.
            parameters: What to act with from now on, in the order of :attr:`Parameters.flat`; None
                for those of the call before.

        Returns:
            What each actor did.
        """
        if parameters is not None:
            self._parameters.flat.copy_(torch.from_numpy(parameters))
        made = [Experience.blank(steps, actor.environment) for actor in self._actors]
        for step in range(steps):
            self._step(step, made)
        return made

    def state(self) -> ActorsState:
        """Return a snapshot; the parameters are no part of it."""
        documents = [
            {
                **actor.state(),
                "previous_action": int(self._rows.previous_actions[row]),
                "previous_reward": float(self._rows.previous_rewards[row]).hex(),
            }
            for row, actor in enumerate(self._actors)
        ]
        arrays = {"recurrent_states": self._rows.states.copy(), "stacks": self._rows.stacks.copy()}
        return ActorsState(documents, arrays)

    def restore(self, state: ActorsState) -> None:
        """Return to a snapshot by playing every running episode again.

        Raises:
            CapsuleError: CAP-T201 or CAP-T211, as :meth:`Environment.restore` says.
        """
        for row, (actor, saved) in enumerate(zip(self._actors, state.actors, strict=True)):
            actor.restore(saved)
            self._rows.previous_actions[row] = saved["previous_action"]
            self._rows.previous_rewards[row] = float.fromhex(saved["previous_reward"])
        self._rows.states[:] = state.arrays["recurrent_states"]
        self._rows.stacks[:] = state.arrays["stacks"]

    def profiles(self) -> list[dict[str, StreamProfile]]:
        """Return what the streams of each actor gave out so far, by name."""
        return [
            {name: stream.profile() for name, stream in actor.streams.items()}
            for actor in self._actors
        ]

    def _step(self, step: int, made: Sequence[Experience]) -> None:
        """Take one step of every actor, and enter it into what they ``made``."""
        values, after = self._evaluate(range(len(made)))
        transitions = [
            self._act(row, step, values[row], experience) for row, experience in enumerate(made)
        ]
        self._rows.states[:] = after
        cut_off = [row for row, end in enumerate(transitions) if end.ended and not end.terminal]
        self._close(cut_off, step, made)
        for row, (transition, experience) in enumerate(zip(transitions, made, strict=True)):
            if transition.ended:
                self._begin(row, self._finish(row, experience))
            elif experience.ended[step]:
                self._begin(row, transition.frame)

    def _act(
        self, row: int, step: int, values: NDArray[np.float32], experience: Experience
    ) -> Transition:
        """Take one step of one actor, given its Q-values, ``[actions]``."""
        actor = self._actors[row]
        if actor.may_begin_sequence():
            experience.states[step] = self._rows.states[row].copy()
        experience.frames[step] = self._rows.stacks[row, -1]
        action = actor.choose(values)
        transition = actor.step(action)
        experience.actions[step] = action
        experience.rewards[step] = transition.reward
        experience.game_rewards[step] = transition.game_reward
        experience.terminals[step] = transition.terminal
        experience.ended[step] = transition.ended or (self._resets and transition.terminal)
        experience.values[step] = values[action], values.max()
        self._rows.advance(row, action, transition.reward, transition.frame)
        return transition

    def _close(self, rows: list[int], step: int, made: Sequence[Experience]) -> None:
        """Enter what the actors of ``rows``, whose episodes were truncated, see last."""
        if not rows:
            return
        values, _ = self._evaluate(rows)
        for row, largest in zip(rows, values.max(axis=1).tolist(), strict=True):
            made[row].last_frames[step] = self._rows.stacks[row, -1].copy()
            made[row].last_values[step] = largest

    def _evaluate(self, rows: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return Q-values, ``[rows, actions]``, and recurrent states after what ``rows`` see."""

        def evaluate(inputs: Tensors) -> Tensors:
            return q_values(self._network, self._parameters, Inputs(*inputs))

        actors = [self._played[row] for row in rows]
        values, after = self._batching.evaluate(evaluate, actors, self._rows.inputs(rows)).outputs
        return values, after

    def _finish(self, row: int, experience: Experience) -> Frame:
        """End an episode of the environment and return the first frame of the next one."""
        actor = self._actors[row]
        experience.returns.append(actor.episode_return)
        actor.episode_return = 0.0
        return actor.environment.reset()

    def _begin(self, row: int, frame: Frame) -> None:
        """Begin an episode of the agent with ``frame``."""
        self._actors[row].steps = 0
        self._rows.begin(row, frame)


class _Actor:
    """One logical actor, but for what is evaluated in batches.

    Attributes:
        environment: Its environment.
        streams: What it draws from.
        steps: Steps of the running episode of the agent.
        episode_return: Game return of the running episode of the environment.
    """

    def __init__(self, settings: ActorSettings, actor: int, epsilon: float) -> None:
        self.streams = actor_streams(settings.seeds, actor)
        self.environment = make_environment(settings.environment, self.streams, training=True)
        self.steps = 0
        self.episode_return = 0.0
        self._layout = settings.layout
        self._epsilon = epsilon

    def may_begin_sequence(self) -> bool:
        """Tell whether the replay memory wants the recurrent state before the next step.

        It does at the first step of an episode, where sequences padded in front begin, and then
        ``burn_in`` steps before each multiple of ``period``.
        """
        return self._layout.begins(self.steps)

    def choose(self, values: NDArray[np.float32]) -> int:
        stream = self.streams["exploration"]
        uniform, random_action = stream.uniform(), stream.integer(self.environment.actions)
        return random_action if uniform < self._epsilon else int(values.argmax())

    def step(self, action: int) -> Transition:
        transition = self.environment.step(action)
        self.steps += 1
        self.episode_return += transition.game_reward
        return transition

    def state(self) -> dict[str, Any]:
        return {
            "environment": self.environment.state(),
            "exploration": self.streams["exploration"].state(),
            "steps": self.steps,
            "return": self.episode_return,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.environment.restore(state["environment"])
        self.streams["exploration"].restore(state["exploration"])
        self.steps = state["steps"]
        self.episode_return = state["return"]
