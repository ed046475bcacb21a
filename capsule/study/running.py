"""Running members: each is an ordinary 'capsule run' in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from capsule.experiment.files import write_atomic
from capsule.experiment.spec import Spec
from capsule.host.errors import ExitCode
from capsule.host.locks import PATIENCE_SECONDS
from capsule.study.directory import CONSOLE, OUTCOME, Outcome, StudyDirectory
from capsule.study.gpu_pool import GpuPool

POLL_SECONDS = 1.0
# This is longer than the engine gives a run before it kills it (30 s, GRACE_SECONDS of
# capsule.engine.supervise).
STOP_SECONDS = 60.0  # for a run to write its state down after it was interrupted


@dataclass(frozen=True)
class RunOptions:
    """Options of 'capsule run' for every member.

    Attributes:
        key: The private key that signs the bundles.
        passphrase_file: As of 'capsule run'.
        engine: As of 'capsule run'.
        gpu: As of 'capsule run'.
    """

    key: Path
    passphrase_file: Path | None = None
    engine: str = "auto"
    gpu: str | None = None

    def arguments(self) -> list[str]:
        """Return the options as arguments; paths are absolute, for other machines' folders."""
        words = ["--key", str(self.key.absolute()), "--engine", self.engine]
        if self.passphrase_file is not None:
            words += ["--passphrase-file", str(self.passphrase_file.absolute())]
        if self.gpu is not None:
            words += ["--gpu", self.gpu]
        return words


@dataclass(frozen=True)
class MemberBatch:
    """Members of a study that are run together.

    Attributes:
        study: The folder of the study.
        names: The members.
        options: Options of each run.
    """

    study: StudyDirectory
    names: Sequence[str]
    options: RunOptions

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of the members, each once."""
        numbers = {self.study.member(name).spec for name in self.names}
        return tuple(self.study.lock.specs[number] for number in sorted(numbers))


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Have SIGTERM and SIGHUP interrupt this process as SIGINT does, in a block of its main thread.

    Members would continue without it otherwise.
    """
    handlers = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Runs:
    """The runs that this process has started. Leaving the context interrupts them.

    Within it, SIGTERM and SIGHUP interrupt this process, too. It has to be entered in the main
    thread.
    """

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._guard = threading.Lock()
        self._stopping = False
        self._signals = stop_signals_interrupt()

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # A thread either has registered its process by now, or will find that it must start none.
        with self._guard:
            self._stopping = True
            running = list(self._processes)
        for process in running:
            process.send_signal(signal.SIGINT)
        # All have been interrupted before the first is waited for, so they save their states at the
        # same time.
        for process in running:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._signals.__exit__(*error)

    def run(
        self,
        study: StudyDirectory,
        name: str,
        options: RunOptions,
        patience: float = PATIENCE_SECONDS,
    ) -> Outcome | None:
        """Run a member, and write down how it ended.

        Args:
            study: The study.
            name: The member.
            options: Options of its run.
            patience: Seconds to wait for another process that runs it.

        Returns:
            How it ended; None if it was interrupted, and can be resumed.

        Raises:
            CapsuleError: CAP-Y009, another process runs the member.
        """
        with study.held(name, patience) as (folder, hold):
            done = study.outcome(name)
            if done is not None and done.bundle is not None:  # by the process that was waited for
                return done
            # An earlier failure must not pass for the outcome of this attempt.
            (folder / OUTCOME).unlink(missing_ok=True)
            outcome = self.run_folder(folder, options, hold)
            if outcome is not None:
                write_atomic(folder / OUTCOME, outcome.document())
            return outcome

    def run_folder(self, folder: Path, options: RunOptions, *hold: int) -> Outcome | None:
        """Run, or resume, the experiment whose lock is in a folder.

        Args:
            folder: The run directory; what the run prints goes there, too.
            options: Options of the run.
            hold: Descriptors that the run keeps open.

        Returns:
            How it ended; None if it was interrupted, and can be resumed.
        """
        # A folder with a lock and nothing else is begun by --resume, too.
        command = [sys.executable, "-m", "capsule", "run", "--resume", str(folder.absolute())]
        command += [*options.arguments(), "--json", "--quiet"]
        with (folder / CONSOLE).open("wb") as console:
            process = self._started(command, console.fileno(), hold)
            if process is None:
                return None
            # Standard error goes to a file, so no pipe but this one can fill up.
            printed, _ = process.communicate()
        with self._guard:
            self._processes.discard(process)
        return outcome_of(process.returncode, printed, folder / CONSOLE)

    def _started(
        self, command: list[str], console: int, hold: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        with self._guard:
            if self._stopping:
                return None
            # A session of its own: the terminal's interrupt comes once, through this process. The
            # run inherits the hold on its folder, and keeps it if this process is killed.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=console,
                start_new_session=True,
                pass_fds=hold,
            )
            self._processes.add(process)
            return process


def outcome_of(status: int, printed: bytes, console: Path) -> Outcome | None:
    """Return how a run ended, as it said itself; None if it was interrupted."""
    # A run that was stopped or killed from outside has not failed: --resume continues it.
    if status in (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL):
        return None
    try:
        said = json.loads(printed)
        if status == 0:
            return Outcome(bundle=Path(said["bundle"]).name, claim_id=said["claim_id"])
        return Outcome(code=said["code"], message=said["message"], fix=said["fix"])
    except (ValueError, KeyError, TypeError):
        return Outcome(
            code="CAP-Y011",
            message=f"'capsule run' ended with status {status} and printed no reason",
            fix=f"See {console}.",
        )


def run_locally(
    batch: MemberBatch,
    processes: int,
    on_poll: Callable[[], None],
    gpus: Sequence[str] = (),
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Run members on this machine, so many at a time; none stops the others.

    Args:
        batch: The members.
        processes: Number of members at a time.
        on_poll: Called meanwhile.
        gpus: UUIDs of GPUs, at least as many as processes, of which each member has one while it
            runs; none leave the choice to each run. One that fails is not used again, and members
            that have not begun when none is left are not started.
        note: Called with a message about each GPU that is not used again.

    Raises:
        KeyboardInterrupt: It was interrupted; the runs have been, too, and can be resumed.
        CapsuleError: All other members have ended, and another process runs one (CAP-Y009).
    """
    errors = []
    shared = GpuPool(gpus, note)
    study, options = batch.study, batch.options

    def run(name: str) -> Outcome | None:
        if not gpus:
            return runs.run(study, name, options)
        pins = study.member(name).pins
        return shared.run(name, pins, lambda gpu: runs.run(study, name, replace(options, gpu=gpu)))

    # Runs is left first: it interrupts the runs for which the threads of the pool wait.
    with ThreadPoolExecutor(processes) as pool, Runs() as runs:
        waiting = {pool.submit(run, name) for name in batch.names}
        try:
            while waiting:
                ended, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                errors += [error for future in ended if (error := future.exception())]
                on_poll()
        finally:
            # This affects only members that have not begun; Runs interrupts the others.
            for future in waiting:
                future.cancel()
    if errors:
        raise errors[0]
