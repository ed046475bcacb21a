"""Choosing an engine, and what is known to be wrong with the one that was chosen.

The engines themselves are imported when one is opened: they use what only Linux has, and commands
that execute nothing work on other systems, too.
"""

from __future__ import annotations

from typing import Literal

from capsule.engine.connection import CONTAINER_ENGINES, connect
from capsule.engine.gpu import outdated
from capsule.engine.interface import ENGINES_WITHOUT_DAEMON, ChangedEngine, Engine, EngineName
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.owner import remove_abandoned
from capsule.host.platform import require_execution
from capsule.host.reporter import Progress

EngineChoice = Literal["auto", EngineName]


def open_engine(choice: EngineChoice, *, strange: bool = False, progress: Progress) -> Engine:
    """Open the engine to run on, and remove what a Capsule left that was killed.

    Args:
        choice: One engine, or ``auto``: Docker, else Podman, else a plain process.
        strange: The run is untrusted. ``auto`` then never becomes a plain process,
            which would give that person's code everything that the caller may do.
        progress: Told which one it is, and why when it is the last resort.

    Raises:
        CapsuleError: CAP-E001 the chosen engine, or for an untrusted run any container engine,
            does not answer; CAP-E002 another engine than the chosen one does; CAP-E019 this
            platform executes nothing.
    """
    require_execution()
    from capsule.engine.containers import ContainerEngine

    engine = _opened(choice, strange=strange, progress=progress)
    if isinstance(engine, ContainerEngine):
        engine.remove_abandoned(progress=progress)
    remove_abandoned()  # folders, in which no container writes any more
    return engine


def _opened(choice: EngineChoice, *, strange: bool, progress: Progress) -> Engine:
    from capsule.engine.apptainer import ApptainerEngine
    from capsule.engine.bubblewrap import BubblewrapEngine
    from capsule.engine.containers import ContainerEngine
    from capsule.engine.process import ProcessEngine

    if choice == "process":
        return ProcessEngine()
    if choice == "bwrap":
        return BubblewrapEngine()
    if choice == "apptainer":
        return ApptainerEngine()
    if choice != "auto":
        return ContainerEngine(connect(choice))
    reasons = []
    for name in CONTAINER_ENGINES:
        try:
            engine = ContainerEngine(connect(name))
        except CapsuleError as error:
            reasons.append(error.message)
            continue
        progress(f"engine: {name} {engine.describe()['version']}")
        return engine
    if strange:
        raise CapsuleError(
            "CAP-E001",
            "nothing was executed, because a bundle's code runs in a container and "
            + " and ".join(reasons),
            fix=f"Start Docker or Podman. {ENGINES_WITHOUT_DAEMON} --engine process would execute "
            "the bundle's code without a container, with all permissions of your account.",
        )
    progress(
        "engine: plain process, because " + " and ".join(reasons) + ". The run is not isolated "
        "and uses this machine's system libraries: a declared relaxation (engine=process). "
        "--engine bwrap and --engine apptainer isolate it without a daemon"
    )
    return ProcessEngine()


def host_flaws(lock: Lock, engine: Engine) -> list[str]:
    """Name the parts of an engine by which a container with a GPU could break out, with a remedy.

    Args:
        lock: What is going to run; there is nothing to say of one without a GPU.
        engine: Where. Only container engines have such parts.
    """
    if lock.spec.accelerator.kind != "cuda":
        return []
    from capsule.engine.containers import ContainerEngine

    while isinstance(engine, ChangedEngine):
        engine = engine.engine
    return outdated(engine.components()) if isinstance(engine, ContainerEngine) else []
