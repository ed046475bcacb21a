"""One of Capsule's trainers, ready to train segments of a benchmark."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from capsule.training.determinism import flags

if TYPE_CHECKING:
    from capsule.experiment.spec import TrainingSpec
    from capsule.training.trainer import Trainer, TrainerContext


def make_learner(spec: TrainingSpec, *, workers: int, traced: bool = True) -> Trainer:
    """Return the trainer of a spec; the process's determinism has been applied.

    Args:
        spec: The spec.
        workers: Number of threads.
        traced: Whether to write the trace, as a run does.
    """
    from capsule.training.registry import make_trainer

    return make_trainer(make_context(spec, workers=workers, traced=traced))


def make_context(spec: TrainingSpec, *, workers: int, traced: bool = True) -> TrainerContext:
    """Return the trainer's context, in a directory that exists until this process ends."""
    from capsule.training.state.streams import make_streams
    from capsule.training.state.trace import Trace
    from capsule.training.trainer import TrainerContext

    directory = Path(tempfile.mkdtemp(prefix="capsule-benchmark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    trace = Trace(directory / "trace.jsonl")
    if not traced:
        trace.add = trace.record = lambda *_a, **_k: None  # type: ignore[assignment,method-assign]
        trace.records = 1  # the first record digests every tensor
    streams = make_streams(spec.seeds)
    device = flags.device_of(spec)
    return TrainerContext(directory, spec, spec.seeds, streams, trace, device, workers)
