"""The arrival log of a finished program, made from the lines that its processes wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from capsule.experiment import contract
from capsule.experiment.arrival_log import (
    ENTRIES_OF_WAIT,
    LINES,
    MAX_ENTRIES,
    MAX_LOG_BYTES,
    NOTHING,
    ArrivalLog,
    Completions,
    Messages,
    Wait,
    parse_arrivals,
)
from capsule.experiment.beneath import clear
from capsule.experiment.errors import CapsuleError
from capsule.training.arrivals.standstill import Standstill
from capsule.training.state.run_directory import write_document, write_file


def begin_arrivals(directory: Path, *, resumed: bool) -> None:
    """Remove the files of an interrupted attempt, as the program starts over.

    Raises:
        CapsuleError: CAP-T384, the program is resumed instead. Its log could not be repeated,
            because a repetition is not interrupted and has other waits.
    """
    folder = directory / contract.ARRIVALS_FOLDER
    if resumed and folder.exists():
        raise CapsuleError(
            "CAP-T384",
            "the run records the order of arrival and was interrupted; such a run cannot be "
            "resumed",
            fix="Start a new run, or set trainer.resumable: false.",
        )
    clear(folder)


class ArrivalWatch:
    """Detects, while a program runs, that its arrivals prevent it from finishing."""

    def __init__(self, directory: Path) -> None:
        """Watch the program of a run directory."""
        self._directory = directory
        repeats = (directory / contract.ARRIVALS_REPLAY).exists()
        # While an order is recorded, only limits.minutes ends a program that waits forever.
        self._standstill = Standstill() if repeats else None

    def failed(self) -> bool:
        """Return whether a process has left an error, or all processes wait forever."""
        if not _failure(self._directory).exists():
            if self._standstill is None or not self._standstill.reached():
                return False
            waits = ", ".join(_unfinished(self._directory)) or "it waits for more than was recorded"
            leave_error(self._directory, not_repeated(f"none of its threads can continue: {waits}"))
        return True


def check_arrivals(directory: Path) -> None:
    """Check that no process of the program left an error.

    Raises:
        CapsuleError: The error of the process: CAP-T131, or CAP-T381 to CAP-T383.
    """
    path = _failure(directory)
    if not path.exists():
        return
    failure = contract.Failure.parse(path.read_bytes())
    raise CapsuleError(failure.code, failure.message, fix=failure.fix)


def not_repeated(how: str) -> CapsuleError:
    """Return the error of a program that differs from its recorded run."""
    return CapsuleError(
        "CAP-T381",
        f"the program does not repeat the recorded run: {how}",
        fix="Let what the program does depend only on its inputs, its randomness and the order of "
        "arrivals, and let each reader of an inbox end by itself, such as after a last message; "
        "'capsule diagnose' looks for other causes.",
    )


def leave_error(directory: Path, error: CapsuleError) -> None:
    """Write an error for Capsule's own process, unless there is one: the first one counts."""
    path = _failure(directory)
    # If two processes do this at the same time, the file has the complete error of one of them.
    if not path.exists():
        failure = contract.Failure(code=error.code, message=error.message, fix=error.fix)
        write_document(path, failure)


def _failure(directory: Path) -> Path:
    return directory / contract.ARRIVALS_FOLDER / contract.FAILURE


def _unfinished(directory: Path) -> Iterator[str]:
    """Describe the waits that have begun and have not had all their recorded arrivals."""
    recorded = parse_arrivals((directory / contract.ARRIVALS_REPLAY).read_bytes()).waits
    begun, taken = _read_back(directory)
    for name in sorted(begun):
        wait, given = recorded[name], len(taken.get(name, []))
        if given < len(wait.order):
            wanted = _wanted(wait, wait.order[given])
            yield f"{name!r} waits for {wanted} after {given:,} of {len(wait.order):,} arrivals"


def _wanted(wait: Wait, place: int) -> str:
    if isinstance(wait, Completions):
        return f"the result of task {place}"
    # Where nothing had come, a coroutine was cancelled.
    return "its cancellation" if place == NOTHING else f"a message of {wait.sources[place]!r}"


def too_many() -> CapsuleError:
    """Return the error of a program with more arrivals than a log can contain."""
    return CapsuleError(
        "CAP-T383",
        f"the program has more arrivals than a log can contain: {MAX_ENTRIES:,}, where a wait "
        f"counts as {ENTRIES_OF_WAIT} more and a source as one more, in at most "
        f"{MAX_LOG_BYTES >> 20} MiB",
        fix="Let each result or message carry more work.",
    )


def arrival_lost(reason: str) -> CapsuleError:
    """Return the error of a program whose arrivals could not be recorded."""
    return CapsuleError(
        "CAP-T131",
        f"an arrival could not be written down: {reason}",
        fix="Free disk space or raise limits.disk_mb, then start a new run.",
    )


def collect_arrivals(directory: Path) -> None:
    """Write the arrival log of a program that has ended, if it had any waits.

    Raises:
        CapsuleError: CAP-T383, there are more arrivals than a log can contain; CAP-T131, a line was
            not written completely.
    """
    begun, taken = _read_back(directory)
    if ENTRIES_OF_WAIT * len(begun) + sum(map(len, taken.values())) > MAX_ENTRIES:
        raise too_many()
    if not begun:
        return
    waits = {name: _wait(*facts, taken.get(name, [])) for name, facts in begun.items()}
    document = ArrivalLog(waits=waits).document()
    # Readers also limit the size of the log, and the number of all sources.
    try:
        parse_arrivals(document)
    except CapsuleError as error:
        raise too_many() from error
    write_file(directory / contract.ARRIVALS, document)


def _read_back(directory: Path) -> tuple[dict[str, tuple[str, int | None]], dict[str, list[Any]]]:
    """Return the facts of the waits that were begun, and the arrivals of each, by name."""
    begun: dict[str, tuple[str, int | None]] = {}
    taken: dict[str, list[Any]] = {}
    for name, *facts in _lines(sorted((directory / contract.ARRIVALS_FOLDER).glob(LINES))):
        # The line of a wait is [name, kind, tasks], and that of an arrival is [name, label]. The
        # arrivals of a wait are in order, because one process writes all of them (Wait.due).
        if len(facts) == 1:
            taken.setdefault(name, []).extend(facts)
        else:
            begun[name] = (facts[0], facts[1])
    return begun, taken


def _lines(files: Iterable[Path]) -> Iterator[list[Any]]:
    """Yield every complete line; a process that is killed may leave an incomplete last line."""
    for path in files:
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                yield json.loads(line)
            except ValueError as error:
                # On a full disk, the process could not write its error either.
                raise arrival_lost(f"{path.name} has an incomplete line") from error


def _wait(kind: str, tasks: int | None, taken: list[Any]) -> Wait:
    if kind == "completions":
        return Completions(tasks=tasks, order=tuple(taken))
    sources = {source: place for place, source in enumerate(_senders(taken))}
    order = (NOTHING if source is None else sources[source] for source in taken)
    return Messages(sources=tuple(sources), order=tuple(order))


def _senders(taken: list[str | None]) -> list[str]:
    """Return the sources of messages, by their first arrival."""
    return [source for source in dict.fromkeys(taken) if source is not None]
