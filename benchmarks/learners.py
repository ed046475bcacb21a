"""A trainer of Capsule's, ready to train, as a segment of a benchmark wants it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from capsule.training import determinism

if TYPE_CHECKING:
    from capsule.experiment.spec import TrainingSpec
    from capsule.training.trainer import Setting, Trainer


def make_learner(spec: TrainingSpec, *, workers: int, traced: bool = True) -> Trainer:
    """Return the trainer of a spec; the process's determinism has been applied.

    Args:
        spec: What to train.
        workers: Threads to use.
        traced: Write the trace, as a run does.
    """
    from capsule.training.trainer import make_trainer

    return make_trainer(make_setting(spec, workers=workers, traced=traced))


def make_setting(spec: TrainingSpec, *, workers: int, traced: bool = True) -> Setting:
    """Return what :func:`make_learner` gives its trainer, in a directory until the process ends."""
    from capsule.training.streams import make_streams
    from capsule.training.trace import Trace
    from capsule.training.trainer import Setting

    directory = Path(tempfile.mkdtemp(prefix="capsule-benchmark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    trace = Trace(directory / "trace.jsonl")
    if not traced:
        trace.add = trace.record = lambda *_a, **_k: None  # type: ignore[assignment,method-assign]
        trace.records = 1  # the first record digests every tensor
    streams = make_streams(spec.seeds)
    device = determinism.device_of(spec)
    return Setting(directory, spec, spec.seeds, streams, trace, device, workers)
