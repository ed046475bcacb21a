"""Choosing an engine."""

from __future__ import annotations

from typing import Literal

from capsule.engine.connection import connect
from capsule.engine.containers import ContainerEngine
from capsule.engine.interface import Engine, Progress
from capsule.engine.process import ProcessEngine
from capsule.experiment.errors import CapsuleError
from capsule.experiment.owner import remove_abandoned

EngineChoice = Literal["auto", "docker", "podman", "process"]


def open_engine(choice: EngineChoice, *, progress: Progress) -> Engine:
    """Open the engine to run on, and remove what a Capsule left that was killed.

    Args:
        choice: One engine, or ``auto``: Docker, else Podman, else a plain process.
        progress: Told which one it is, and why when it is the last resort.

    Raises:
        CapsuleError: CAP-E001 or CAP-E002, the chosen engine is not there.
    """
    engine = _opened(choice, progress)
    if isinstance(engine, ContainerEngine):
        engine.remove_abandoned(progress=progress)
    remove_abandoned()  # folders, in which no container writes any more
    return engine


def _opened(choice: EngineChoice, progress: Progress) -> Engine:
    if choice == "process":
        return ProcessEngine()
    if choice != "auto":
        return ContainerEngine(connect(choice))
    reasons = []
    for name in ("docker", "podman"):
        try:
            engine = ContainerEngine(connect(name))
        except CapsuleError as error:
            reasons.append(error.message)
            continue
        progress(f"engine: {name} {engine.describe()['version']}")
        return engine
    progress(
        "engine: plain process, because " + " and ".join(reasons) + ". The run is not isolated "
        "and uses this machine's system libraries: a declared relaxation (engine=process)"
    )
    return ProcessEngine()
