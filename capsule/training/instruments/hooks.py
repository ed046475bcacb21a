"""The instruments of ``capsule diagnose``, inside the processes of a run.

They are active only if ``CAPSULE_DIAGNOSE`` is set. In Capsule's own trainers they watch only
torch, because the trace covers the rest; in every Python process of a user program, they also watch
its lines. Processes that are made by a fork without an exec are not watched.
"""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from capsule.training.determinism.child_processes import ImportFinder
from capsule.training.instruments.report import (
    SEEDING,
    InstrumentReport,
    Location,
    TorchWarning,
    user_stack,
)

if TYPE_CHECKING:
    from capsule.training.instruments.line_trace import LineTrace
    from capsule.training.instruments.operator_reexecution import ReexecutionMode

VARIABLE = "CAPSULE_DIAGNOSE"  # folder of the reports; watched() makes it absolute
TRAINER_MODULE = "capsule.training.environments"  # imported after the flags have been read back
MAX_OPERATOR_CALLS = 100_000
MAX_PROCESSES = 1_000
MAX_WARNINGS = 100
_UNSUPPORTED = "does not have a deterministic implementation"


def install() -> None:
    """Watch this process from its start to its end.

    This is called at every start of an interpreter, and twice in a virtual environment, which reads
    its ``.pth`` files twice.
    """
    folder = os.environ.get(VARIABLE, "")
    known = any(isinstance(finder, _ImportFinder) for finder in sys.meta_path)
    # In the job's own process, python -m capsule.training, watched() does this instead, and makes
    # the folder absolute for the processes that the job starts.
    if folder.startswith("/") and not known and "capsule.training" not in sys.orig_argv:
        instruments = Instruments(Path(folder), lines=True)
        instruments.start()
        atexit.register(instruments.finish)


@contextmanager
def watched(run_directory: Path) -> Iterator[None]:
    """Watch torch in this process while the block runs, if the host has requested it.

    The variable is made absolute, for the processes that a program starts.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None:
        yield
        return
    os.environ[VARIABLE] = str(run_directory.resolve() / folder)
    instruments = Instruments(run_directory.resolve() / folder, lines=False)
    instruments.start()
    try:
        yield
    finally:
        instruments.finish()


class Instruments:
    """All instruments of one process."""

    def __init__(self, folder: Path, *, lines: bool) -> None:
        """Reserve a report in ``folder``.

        Args:
            folder: The folder of the reports of all processes, which are numbered in the order of
                their starts.
            lines: Whether to watch the lines of the program, too.
        """
        self._path = _reserve(folder)
        self._process = os.getpid()
        self._lines: LineTrace | None = None
        if lines:
            from capsule.training.instruments.line_trace import LineTrace

            self._lines = LineTrace()
        self._operators: ReexecutionMode | None = None
        self._warnings: dict[TorchWarning, None] = {}  # each once, in order
        self._warnings_truncated = False
        self._start_thread = threading.Thread.start
        self._finder = _ImportFinder("torch" if lines else TRAINER_MODULE, self._watch_torch)

    def start(self) -> None:
        """Begin to watch. Torch is watched after its import, in a trainer after its self-test."""
        if self._lines is not None:
            self._lines.start()
        sys.meta_path.insert(0, self._finder)

    def finish(self) -> None:
        """Stop watching and write the report."""
        if os.getpid() != self._process:  # a forked child that runs its parent's exit handlers
            return
        if self._lines is not None:
            self._lines.stop()
        sys.meta_path.remove(self._finder)
        if self._operators is not None:
            self._operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            threading.Thread.start = self._start_thread  # type: ignore[method-assign]
        report = self._report()
        # The reserved file is empty until it is replaced; read_reports() of the host skips it.
        temporary = self._path.with_suffix(".new")
        temporary.write_text(report.model_dump_json(by_alias=True))
        temporary.replace(self._path)

    def _watch_torch(self) -> None:
        from capsule.training.instruments.operator_reexecution import ReexecutionMode

        mode = self._operators = ReexecutionMode(limit=MAX_OPERATOR_CALLS)
        start = self._start_thread

        # A mode is active only in the thread that enters it, so later threads must enter their own.
        def start_watched(thread: threading.Thread) -> None:
            run = thread.run  # the method of its class, which may be a class of the program

            def run_watched() -> None:
                vars(thread).pop("run", None)  # removes the thread's reference to itself
                with mode.for_this_thread():
                    run()

            thread.run = run_watched  # type: ignore[method-assign]
            start(thread)

        threading.Thread.start = start_watched  # type: ignore[method-assign,assignment]
        self._watch_warnings()
        mode.__enter__()  # type: ignore[no-untyped-call]

    def _watch_warnings(self) -> None:
        """Record torch's warnings of nondeterministic operators, which are shown as before."""
        show = warnings.showwarning

        def note(message: Warning | str, *arguments: Any, **keywords: Any) -> None:
            if _UNSUPPORTED in str(message):
                text = str(message).partition(", but")[0]
                self._warnings[TorchWarning(message=text, stack=user_stack())] = None
                if len(self._warnings) > MAX_WARNINGS:
                    self._warnings.popitem()
                    self._warnings_truncated = True
            show(message, *arguments, **keywords)

        # By default, Python shows equal warnings of one line only once.
        warnings.filterwarnings("always", message=f".*{_UNSUPPORTED}")
        warnings.showwarning = note

    def _report(self) -> InstrumentReport:
        operators, lines = self._operators, self._lines
        uses = operators.uses() if operators else ()
        variables = lines.variables() if lines else ()
        sources = lines.sources() if lines else ()
        records: list[Any] = [*uses, *self._warnings, *variables, *sources]
        named = {record.where for record in records if record.where is not None}
        return InstrumentReport(
            algorithms=_algorithms() if operators else None,
            threads=sys.modules["torch"].get_num_threads() if operators else None,
            operator_calls=operators.calls if operators else 0,
            operators=uses,
            warnings=tuple(self._warnings),
            sources=sources,
            variables=variables,
            truncated=bool(
                self._warnings_truncated
                or (operators and operators.exhausted)
                or (lines and lines.truncated)
            ),
            text={**_seeding_lines(named), **{str(where): _text(where) for where in named}},
        )


class _ImportFinder(ImportFinder):
    """Calls a function after the import of a module."""

    def __init__(self, module: str, imported: Callable[[], None]) -> None:
        super().__init__(module)
        self._imported = imported

    def around(self, execute: Callable[[], None]) -> None:
        with _unhooked():  # because an import makes millions of calls
            execute()
        self._imported()


@contextmanager
def _unhooked() -> Iterator[None]:
    """Switch the trace and profile hooks of this thread off while the block runs."""
    hooks = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(hooks[1])
        sys.settrace(hooks[0])


def _reserve(folder: Path) -> Path:
    """Create the next free report, which is empty until the process ends, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(MAX_PROCESSES):
        path = folder / f"{number:03}.json"
        # Created exclusively, because processes may start at the same time.
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    # All further processes share this name, so only the report of the last one to end is kept.
    return folder / f"{MAX_PROCESSES:03}.json"


def _algorithms() -> Literal["error", "warn", "off"]:
    modes: tuple[Literal["off", "warn", "error"], ...] = ("off", "warn", "error")
    mode: int = sys.modules["torch"].get_deterministic_debug_mode()
    return modes[mode]


def _seeding_lines(named: set[Location]) -> dict[str, str]:
    """Return the lines that seed a generator, in the files of some locations, by FILE:LINE."""
    return {
        f"{file}:{number}": line.strip()
        for file in {where.file for where in named}
        for number, line in enumerate(linecache.getlines(file), 1)
        if SEEDING.search(line)
    }


def _text(where: Location) -> str:
    return linecache.getline(where.file, where.line).strip()
