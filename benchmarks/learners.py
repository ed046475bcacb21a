"""Capsule's DQN, ready to train, as a segment of a benchmark wants it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from capsule.training import determinism

if TYPE_CHECKING:
    from capsule.experiment.spec import TrainingSpec
    from capsule.training.dqn import DeepQLearning


def make_learner(spec: TrainingSpec, *, workers: int, traced: bool = True) -> DeepQLearning:
    """Return the trainer of a spec; the process's determinism has been applied.

    Args:
        spec: What to train.
        workers: Threads to use.
        traced: Write the trace, as a run does.
    """
    from capsule.training.dqn import DeepQLearning
    from capsule.training.environments import make_environment
    from capsule.training.replay import ReplayMemory
    from capsule.training.streams import make_streams
    from capsule.training.trace import Trace

    directory = Path(tempfile.mkdtemp(prefix="capsule-benchmark-"))
    trace = Trace(directory / "trace.jsonl")
    if not traced:
        trace.add = trace.record = lambda *_a, **_k: None  # type: ignore[assignment,method-assign]
    streams = make_streams(spec.seeds)
    environment = make_environment(spec.environment, streams, training=True)
    replay = ReplayMemory(
        directory,
        capacity=spec.trainer.replay_capacity,
        slack=1_000,
        frame_shape=environment.frame_shape,
        frame_dtype=environment.frame_dtype,
        frame_stack=environment.frame_stack,
    )
    device = determinism.device_of(spec)
    return DeepQLearning(spec, streams, environment, replay, trace, device=device, workers=workers)
