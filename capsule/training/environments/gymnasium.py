"""Gymnasium environments with a flat float32 observation and discrete actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import GymnasiumEnvironment, StreamName
from capsule.training.environments.base import Environment, Frame, Transition
from capsule.training.streams import Stream


class GymnasiumTask(Environment):
    """One Gymnasium environment; an observation is one frame.

    Streams:
        environment: one 32-bit seed per episode, for the environment's own generator.

    Raises:
        CapsuleError: CAP-T214, no such environment, or spaces of another kind.
    """

    def __init__(self, spec: GymnasiumEnvironment, streams: Mapping[StreamName, Stream]) -> None:
        super().__init__({"environment": streams["environment"]})
        self._task = _make(spec)
        observations, actions = self._task.observation_space, self._task.action_space
        if not (
            isinstance(observations, gymnasium.spaces.Box)
            and observations.dtype == np.float32
            and len(observations.shape) == 1
            and isinstance(actions, gymnasium.spaces.Discrete)
            and actions.start == 0
        ):
            raise _unusable(
                spec.id, f"observations {observations} and actions {actions} are not supported"
            )
        self.actions = int(actions.n)
        self.frame_shape = observations.shape
        self.frame_dtype = np.dtype(np.float32)

    def _begin(self) -> Frame:
        observation, _ = self._task.reset(seed=self._streams["environment"].below(2**32))
        return np.array(observation, self.frame_dtype)

    def _advance(self, action: int) -> Transition:
        observation, reward, terminated, truncated, _ = self._task.step(action)
        return Transition(
            frame=np.array(observation, self.frame_dtype),
            reward=float(reward),
            game_reward=float(reward),
            terminal=bool(terminated),
            ended=bool(terminated or truncated),
        )


def _make(spec: GymnasiumEnvironment) -> gymnasium.Env[Any, Any]:
    try:
        return gymnasium.make(
            spec.id, max_episode_steps=spec.max_episode_steps, disable_env_checker=True
        )
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _unusable(spec.id, str(error)) from error


def _unusable(identifier: str, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-T214",
        f"environment.id {identifier!r} cannot be used: {reason}",
        fix="name a registered environment with a flat float32 Box observation and Discrete "
        "actions from 0, such as 'CartPole-v1'",
        exit_code=ExitCode.TRAINING_FAILED,
    )
