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
    """Make the environment a spec names, drawing from ``streams``; its suite is imported only now.

    Args:
        spec: The spec's ``environment`` section.
        streams: ``environment``, and ``no-op`` where no-ops are drawn.
        training: Outside training a lost life does not end the return, rewards are not clipped and
            episodes begin without no-ops; sticky actions stay.

    Raises:
        CapsuleError: CAP-T212 to CAP-T215, the environment is not available.
    """
    if isinstance(spec, AtariEnvironment):
        from capsule.training.environments.atari import AtariGame

        return AtariGame(spec, streams, training=training)
    if isinstance(spec, GymnasiumEnvironment):
        from capsule.training.environments.gymnasium import GymnasiumTask

        return GymnasiumTask(spec, streams)
    from capsule.training.environments.minatar import MinAtarGame

    return MinAtarGame(spec, streams)
