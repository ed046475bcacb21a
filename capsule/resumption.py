"""Resuming a run: what is kept of it in its directory, and what may have changed since it began."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from capsule import execution
from capsule.bundle.claims import read_document
from capsule.engine.connection import CONTAINER_ENGINES
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice, open_engine
from capsule.engine.supervise import exclusive
from capsule.experiment.contract import LEDGER, RESULT
from capsule.experiment.files import write_atomic
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.host.run_directory import FINGERPRINT, LOCK, STARTED, WORK, started
from capsule.host.spec_file import parse_spec
from capsule.image.lockfile import read_lock, write_lock
from capsule.machine.fingerprint import Fingerprint


def lock_of_run(directory: Path) -> Lock:
    """Return the lock of a run that is to be resumed.

    Raises:
        CapsuleError: CAP-S012, its folder is not a run directory; those of :func:`read_lock`.
    """
    if not (directory / LOCK).is_file():
        raise CapsuleError(
            "CAP-S012",
            f"--resume {directory} is not a run directory: {directory / LOCK} does not exist",
            fix="Name the folder that 'capsule run' made; 'capsule list' shows them.",
        )
    return read_lock(directory / LOCK)


def lock_to_resume(directory: Path, overrides: Sequence[str]) -> Lock:
    """Return the lock with which a run is resumed, and write it if the overrides change it.

    Raises:
        CapsuleError: CAP-E008, another process executes the run; CAP-S006, the overrides would make
            it another experiment, or its outputs were listed without them.
    """
    if (directory / WORK).is_dir():
        # execute() holds the folder itself. Before that, the lock and metrics are written.
        with exclusive(directory / WORK):
            pass
    lock = lock_of_run(directory)
    if overrides and (changed := _with_other_outputs(lock, overrides)) != lock:
        # Outputs are not listed again, so the bundle would claim those of the other choice.
        if (directory / WORK / RESULT).exists():
            raise _not_overridden(overrides, f"the run in {directory}, which has finished")
        lock = changed
        write_lock(directory / LOCK, lock)
    return lock


def _with_other_outputs(lock: Lock, overrides: Sequence[str]) -> Lock:
    """Return the lock of a resumed run with another choice of the files to claim.

    The choice does not affect the program, which may have ended already.
    """
    document = lock.spec.model_dump_json(by_alias=True).encode()
    spec = parse_spec(document, LOCK, overrides)
    trainer = lock.spec.trainer
    if isinstance(trainer, CommandTrainer) and isinstance(spec.trainer, CommandTrainer):
        trainer = trainer.model_copy(update={"outputs": spec.trainer.outputs})
    # Under any other setting, the states in the folder would be those of another experiment.
    if spec != lock.spec.model_copy(update={"trainer": trainer}):
        raise _not_overridden(
            overrides,
            "a run that is resumed, where only trainer.outputs of a program may change",
        )
    return lock.model_copy(update={"spec": spec})


def _not_overridden(overrides: Sequence[str], what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-S006",
        f"--set {' '.join(overrides)} is not supported for {what}",
        fix="Start a new run, without --resume.",
    )


def reopen_engine(directory: Path, wanted: EngineChoice, progress: Progress) -> Engine:
    """Open the engine on which a run is resumed: that of its beginning, unless another is wanted.

    In the other engine, a container of the run could still write to its directory, and is removed.

    Raises:
        CapsuleError: Those of :func:`open_engine`; CAP-E006, the other engine stopped answering.
    """
    earlier = _earlier_engine(directory)
    chosen = open_engine((earlier or wanted) if wanted == "auto" else wanted, progress=progress)
    # In the chosen engine, nothing is left: opening an engine removes the containers of killed
    # Capsules.
    if earlier is not None and earlier != chosen.name and earlier in CONTAINER_ENGINES:
        _remove_containers(earlier, progress)
    return chosen


def _earlier_engine(directory: Path) -> EngineChoice | None:
    """Return the engine with which a run began; None for a run that has not begun."""
    if (began := _began(directory)) is None:
        return None
    names: dict[str, EngineChoice] = {name: name for name in get_args(EngineChoice)}
    return names.get(_name(began))


def _remove_containers(earlier: EngineChoice, progress: Progress) -> None:
    """Remove what a killed Capsule left in the engine with which a run began."""
    try:
        open_engine(earlier, progress=progress)
    except CapsuleError as error:
        if error.code != "CAP-E001":
            raise
        # On another machine than that of its beginning, the engine may not be installed.
        progress(
            f"the run began with {earlier}, which does not answer; if a container of the run is "
            "still running there, stop it"
        )


def keep_fingerprint(directory: Path, here: Fingerprint) -> Fingerprint:
    """Keep the fingerprint of the machine that executes a run in its directory, and return it.

    The first execution also keeps when the directory was made. A run that has ended, and only has
    to be listed or packed, has the fingerprint of the machine on which it ended.

    Raises:
        CapsuleError: CAP-E050, the run began in a container and would continue without one, or the
            reverse. The bundle would say that all of it ran where its end did. CAP-E008, another
            process, which may be of another machine, executes it.
    """
    began = _began(directory)
    if began is not None and (_name(began) == "process") != (_name(here) == "process"):
        raise CapsuleError(
            "CAP-E050",
            f"the run in {directory} began with the engine {_name(began)}, and cannot be resumed "
            f"with the engine {_name(here)}: one is a plain process, and the other a container",
            fix=f"Add --engine {_name(began)}.",
        )
    if began is not None and has_ended(directory):
        return began
    with exclusive(directory / WORK):
        write_atomic(directory / FINGERPRINT, here.document())
        if not (directory / STARTED).exists():
            write_atomic(directory / STARTED, started(directory).isoformat().encode())
    return here


def has_ended(directory: Path) -> bool:
    """Tell whether a run has ended, so that it only has to be listed or packed."""
    work = directory / WORK
    # The launcher's report, by which execution.has_ended() knows, goes when the ledger has been
    # written.
    return (work / LEDGER).exists() or execution.has_ended(work)


def _began(directory: Path) -> Fingerprint | None:
    """Return the fingerprint that is kept in a run directory; None if it has not been executed."""
    path = directory / FINGERPRINT
    return read_document(path, Fingerprint) if path.exists() else None


def _name(fingerprint: Fingerprint) -> str:
    return (fingerprint.engine or {}).get("name", "")
