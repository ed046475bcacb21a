"""The arrival log of a finished program, made from what its processes wrote down."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from capsule.experiment import contract
from capsule.experiment.arrival_log import (
    ENTRIES_OF_WAIT,
    LINES,
    MAX_ENTRIES,
    NOTHING,
    ArrivalLog,
    Completions,
    Messages,
    Wait,
)
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.training.job import write_file


def begin_arrivals(directory: Path, *, resumed: bool) -> None:
    """Remove what an interrupted attempt left, as the program starts over.

    Raises:
        CapsuleError: CAP-T384, the program resumes instead. A run that is repeated is not
            interrupted, so it does not wait where the program waited after its interruption.
    """
    folder = directory / contract.ARRIVALS_FOLDER
    if resumed and folder.exists():
        raise CapsuleError(
            "CAP-T384",
            "the run records the order of arrival and was interrupted; such a run cannot be "
            "resumed",
            fix="Start it anew, or set trainer.resumable: false.",
            exit_code=ExitCode.USAGE,
        )
    if folder.exists():
        shutil.rmtree(folder)


def arrivals_failed(directory: Path) -> bool:
    """Tell whether a process of the program left an error; others of it may wait for ever."""
    return _failure(directory).exists()


def check_arrivals(directory: Path) -> None:
    """Check that no process of the program left an error.

    Raises:
        CapsuleError: That error: CAP-T381 to CAP-T383.
    """
    if not arrivals_failed(directory):
        return
    failure = contract.Failure.model_validate_json(_failure(directory).read_bytes())
    status = ExitCode.DIFFERS if failure.code == "CAP-T381" else ExitCode.TRAINING_FAILED
    raise CapsuleError(failure.code, failure.message, fix=failure.fix, exit_code=status)


def _failure(directory: Path) -> Path:
    return directory / contract.ARRIVALS_FOLDER / contract.FAILURE


def too_many() -> CapsuleError:
    """Return the error of a program with more arrivals than a log holds."""
    return CapsuleError(
        "CAP-T383",
        f"the program has more arrivals than a log holds: {MAX_ENTRIES:,}, where a wait counts as "
        f"{ENTRIES_OF_WAIT} more",
        fix="Let each result or message carry more work.",
        exit_code=ExitCode.TRAINING_FAILED,
    )


def collect_arrivals(directory: Path) -> None:
    """Write the arrival log of a program that has ended; none if it did not wait for anything.

    Raises:
        CapsuleError: CAP-T383, there are more arrivals than a log holds.
    """
    files = sorted((directory / contract.ARRIVALS_FOLDER).glob(LINES))
    begun: dict[str, tuple[str, int | None]] = {}
    taken: dict[str, list[Any]] = {}
    for name, *facts in _lines(files):
        if len(facts) == 1:
            taken.setdefault(name, []).extend(facts)
        else:
            begun[name] = (facts[0], facts[1])
    if ENTRIES_OF_WAIT * len(begun) + sum(map(len, taken.values())) > MAX_ENTRIES:
        raise too_many()
    if begun:
        waits = {name: _wait(*facts, taken.get(name, [])) for name, facts in begun.items()}
        write_file(directory / contract.ARRIVALS, ArrivalLog(waits=waits).document())


def _lines(files: Iterable[Path]) -> Iterator[list[Any]]:
    """Yield every whole line; a process that is killed may leave one unfinished."""
    for path in files:
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)


def _wait(kind: str, tasks: int | None, taken: list[Any]) -> Wait:
    if kind == "completions":
        return Completions(tasks=tasks, order=tuple(taken))
    sources = {source: place for place, source in enumerate(_senders(taken))}
    order = (NOTHING if source is None else sources[source] for source in taken)
    return Messages(sources=tuple(sources), order=tuple(order))


def _senders(taken: list[str | None]) -> list[str]:
    """Return the sources of messages, by their first arrival."""
    return [source for source in dict.fromkeys(taken) if source is not None]
