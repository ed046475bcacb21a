"""Environments: Atari, Gymnasium and MinAtar behind one deterministic step function."""

from __future__ import annotations

from collections.abc import Mapping

from capsule.experiment.spec import (
    AtariEnvironment,
    EnvironmentSpec,
    GymnasiumEnvironment,
    StreamName,
)
from capsule.training.environments.base import Environment, Frame, Transition
from capsule.training.state.streams import Stream

__all__ = ["Environment", "Frame", "Transition", "make_environment"]


def make_environment(
    spec: EnvironmentSpec, streams: Mapping[StreamName, Stream], *, training: bool
) -> Environment:
    """Make the environment that a spec names. The packages of its suite are imported only now.

    Args:
        spec: The spec's ``environment`` section.
        streams: The streams from which the environment draws: ``environment``, and ``no-op`` if
            no-ops are drawn.
        training: Whether the environment is for training. In an evaluation of an Atari game, a lost
            life does not end the return, rewards are not clipped, and episodes begin without
            no-ops; sticky actions are the same.

    Raises:
        CapsuleError: CAP-T212, CAP-T214 or CAP-T215, the environment is not available; CAP-T216,
            the spec does not fit its observations.
    """
    if isinstance(spec, AtariEnvironment):
        from capsule.training.environments.atari import AtariGame

        return AtariGame(spec, streams, training=training)
    if isinstance(spec, GymnasiumEnvironment):
        from capsule.training.environments.gymnasium import GymnasiumTask

        return GymnasiumTask(spec, streams)
    from capsule.training.environments.minatar import MinAtarGame

    return MinAtarGame(spec, streams)
