"""A user program: run in a copy of its source tree, and what it wrote by digest.

Capsule's interpreter stays the parent of the program, because outputs are hashed when it has ended.
It starts two processes, always in this order, so that each has the same place in the process tree
every time: one that reads back what the libraries of the image really do, then the program. Orders
to stop are passed on. Whatever the program leaves behind is ended before anything is hashed.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from typing import IO, Literal

from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import Ended, Event, Job, ProgramResult
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import Spec
from capsule.experiment.trainers import CommandTrainer
from capsule.training.accounts import record_mechanisms
from capsule.training.arrivals.files import (
    ArrivalWatch,
    begin_arrivals,
    check_arrivals,
    collect_arrivals,
)
from capsule.training.arrivals.standstill import state_and_parent
from capsule.training.determinism import flags
from capsule.training.own_program.outputs import Watch, collect_outputs, is_resumed, make_workspace
from capsule.training.state.run_directory import (
    Interrupted,
    append_event,
    drop_partial_line,
    record_failure,
    record_runtime,
    stop_signals,
    write_document,
)

LEFTOVER_SECONDS = 5.0  # for helper processes to notice that the program has ended

_ANSWER = {contract.NUMBERS_SIGNAL}  # of the launcher, when it has prepared a process number
_HELPER_FOLDER = "outputs"
_POLL_SECONDS = 0.1
_CHUNK = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run_program(directory: Path, job: Job, trainer: CommandTrainer) -> None:
    """Run the command in ``directory`` to its end, and record what it wrote.

    After an interruption a resumable program resumes from its state folder; any other starts over
    in a fresh copy of its source tree. A program that has ended well is not run again: only what it
    wrote is listed.

    Raises:
        Interrupted: The run was asked to stop; it can be started again.
        CapsuleError: CAP-T1… a determinism flag, CAP-T301 the command cannot be started, CAP-T302
            it failed, CAP-T303 an output cannot be claimed, CAP-T305 the source tree is not the
            locked one.
    """
    # The program has another working folder, and finds this one by its variables.
    directory = directory.absolute()
    events, ended = directory / contract.EVENTS, directory / contract.ENDED
    drop_partial_line(events)
    if not ended.exists():
        started = time.monotonic()
        _run_to_its_end(directory, job, trainer)
        # From here on the program is not executed again: if an output below cannot be claimed, only
        # the listing is repeated.
        write_document(ended, Ended(seconds=time.monotonic() - started))
    outputs = collect_outputs(directory, job.tree, trainer)
    write_document(directory / contract.OUTPUTS, outputs)
    _tell(events, "finish", f"{len(outputs.files)} files written")
    digest = sha256_hex(outputs.document())
    seconds = Ended.parse(ended.read_bytes()).seconds
    write_document(directory / contract.RESULT, ProgramResult(outputs=digest, seconds=seconds))


def _run_to_its_end(directory: Path, job: Job, trainer: CommandTrainer) -> None:
    spec = job.spec
    flags.prepare(spec)
    with stop_signals() as stop:
        _check_flags(directory, spec, resumed=is_resumed(directory, trainer))
        resumed = make_workspace(directory, job, trainer)
        command = shlex.join(_command(spec, trainer))
        _tell(directory / contract.EVENTS, "resume" if resumed else "start", command)
        watch = Watch(directory, job.tree, trainer)
        begin_arrivals(directory, resumed=resumed)
        if not resumed:
            # Its lines are those of an attempt that is started over.
            (directory / contract.INTERPRETERS).unlink(missing_ok=True)
        process = _execute(directory, spec, trainer, resumed=resumed, stop=stop, watch=watch)
    collect_arrivals(directory)
    record_mechanisms(directory, None, process=process)


def _check_flags(directory: Path, spec: Spec, *, resumed: bool) -> None:
    """Read back what the image's libraries really do, in a child that ends.

    In this process torch would stay, and on a GPU hold memory that belongs to the program.
    """
    child = os.fork()
    if child == 0:
        # Not sys.exit(): what this process has registered for its own end must not run in the
        # child.
        os._exit(_flags_recorded(directory, spec, resumed=resumed))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not status:
        return
    if not (directory / contract.FAILURE).exists():
        raise CapsuleError(
            "CAP-T304",
            f"the check of the libraries' flags ended with status {status}",
            fix="See output.log: a package of the image does not load.",
        )
    failure = contract.Failure.parse((directory / contract.FAILURE).read_bytes())
    raise CapsuleError(failure.code, failure.message, fix=failure.fix)


def _flags_recorded(directory: Path, spec: Spec, *, resumed: bool) -> int:
    """Write ``runtime.json``; return an exit status, whatever happens."""
    try:
        runtime = flags.apply(spec)
        portable = flags.is_portable(spec)
        record_runtime(directory, runtime, portable=portable, resumed=resumed)
    except CapsuleError as error:
        record_failure(directory, error)
        return error.exit_code
    except BaseException:  # noqa: BLE001 - a forked child must end here
        traceback.print_exc()
        return ExitCode.INTERNAL
    return ExitCode.OK


def _execute(
    directory: Path,
    spec: Spec,
    trainer: CommandTrainer,
    *,
    resumed: bool,
    stop: Flag,
    watch: Watch,
) -> int:
    """Run the command until it and all that it started have ended; return its process id."""
    _adopt_orphans()
    arrivals, path = ArrivalWatch(directory), directory / contract.STANDARD_OUTPUT
    reading, writing = os.pipe()
    # Threads inherit the mask: the launcher's answer would end one that does not block it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWER)
    reader, writer = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
    with reader, ThreadPoolExecutor(1, "output") as pool:
        # Every thread of this process starts before the program, which gets the next number.
        copying = pool.submit(_copy_output, reader, path, append=resumed)
        # Closed once the program has its copy, so that the pipe ends with the last process that
        # holds one.
        with writer:
            process = _start(directory, spec, trainer, writer, resumed=resumed)
        status = _await(process, copying, stop, lambda: watch.exceeded() or arrivals.failed())
        # Before the copying is waited for: a process that is left over may hold the pipe open.
        _end_leftovers()
        _finished(copying, path)
    # The reasons for which this process ended the program come before the status that its end gave
    # it.
    if watch.error is not None:
        raise watch.error
    check_arrivals(directory)
    if stop.is_set():
        raise Interrupted
    if status:
        how = f"with status {status}" if status > 0 else f"by signal {-status}"
        raise CapsuleError(
            "CAP-T302",
            f"the program ended {how}: {shlex.join(_command(spec, trainer))}",
            fix="See output.log in the run directory, and correct the program.",
        )
    return process.pid


def _start(
    directory: Path, spec: Spec, trainer: CommandTrainer, output: IO[bytes], *, resumed: bool
) -> subprocess.Popen[bytes]:
    workspace = directory / contract.WORKSPACE
    own = {
        contract.OUTPUT_VARIABLE: str(workspace / _HELPER_FOLDER),
        contract.STATE_VARIABLE: str(directory / contract.STATE),
        contract.RESUMED_VARIABLE: "1" if resumed else "0",
        contract.SEED_VARIABLE: str(spec.seeds.root),
        contract.RUN_VARIABLE: str(directory),
    }
    command = _command(spec, trainer)
    _await_number()
    try:
        # Standard error stays that of this process, whose engine keeps it in output.log.
        return subprocess.Popen(
            command,
            cwd=workspace,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
        )
    except OSError as error:
        raise CapsuleError(
            "CAP-T301",
            f"trainer.command {command[0]!r} cannot be started: {error.strerror}",
            fix="Name a program of the image, or an executable file of the source tree as ./FILE, "
            "whose first line names a program of the image. The image contains python and sh, but "
            "not bash or env: run a script as [sh, FILE], and set variables as in "
            "[sh, -c, 'NAME=value exec python FILE']. Packages in image.debian add other programs.",
        ) from error


def _await_number() -> None:
    """Have the launcher bring the counter of process numbers to where the program starts.

    Afterwards the next task that this process starts has the number
    :data:`contract.PROGRAM_PROCESS`, if the launcher has a process id namespace of its own.
    """
    launcher = os.environ.get(contract.LAUNCHER_VARIABLE)
    if launcher is not None:
        os.kill(int(launcher), contract.NUMBERS_SIGNAL)
        signal.sigwait(_ANSWER)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ANSWER)  # the program inherits the mask


def _copy_output(stream: IO[bytes], path: Path, *, append: bool) -> None:
    """Keep what the program prints, and show it."""
    with path.open("ab" if append else "wb") as kept:
        while chunk := os.read(stream.fileno(), _CHUNK):
            kept.write(chunk)
            try:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            except OSError:
                # Only the kept copy is an output of the run. What is left in the buffer would fail
                # again when the interpreter ends.
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _await(
    process: subprocess.Popen[bytes],
    copying: Future[None],
    stop: Flag,
    has_failed: Callable[[], bool],
) -> int:
    """Wait for the program; pass on an order to stop; end it if its run cannot succeed."""
    terminated = False
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if (copying.done() and copying.exception()) or has_failed():
                process.kill()
            elif stop.is_set() and not terminated:
                process.terminate()
                terminated = True


def _finished(copying: Future[None], path: Path) -> None:
    try:
        copying.result()
    except OSError as error:
        raise CapsuleError(
            "CAP-T131",
            f"{path.name} cannot be written: {error.strerror}",
            fix="Free disk space or raise limits.disk_mb, then run again.",
        ) from error


def _adopt_orphans() -> None:
    """Become the parent of every process that the program leaves behind."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _end_leftovers() -> None:
    """Wait a little for what the program left behind to end by itself, then kill it."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            continue
        if time.monotonic() > deadline:
            # In every round, because the children of a killed process become those of this one.
            for child in _children():
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 10)


def _children() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        _, parent = state_and_parent(folder)
        if parent == os.getpid():
            yield int(folder.name)


def _tell(events: Path, kind: Literal["start", "resume", "finish"], message: str) -> None:
    append_event(events, Event(time=time.time(), kind=kind, step=0, message=message))


def _command(spec: Spec, trainer: CommandTrainer) -> list[str]:
    return [word.replace("{seed}", str(spec.seeds.root)) for word in trainer.command]
