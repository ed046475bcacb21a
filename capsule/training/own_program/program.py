"""Running a user program in a copy of its source tree, and recording its outputs by digest.

Capsule's interpreter stays the parent of the program, because it hashes the outputs at the end. It
starts two processes, always in this order, so that each has the same place in the process tree in
every run: one that reads back the flags of the image's libraries, and then the program. Signals to
stop are passed on. All processes that the program leaves behind are ended before anything is
hashed.
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

LEFTOVER_SECONDS = 5.0  # time in which helper processes may end after the program

_ANSWER = {contract.NUMBERS_SIGNAL}  # sent by the launcher when it has prepared a process number
_HELPER_FOLDER = "outputs"
_POLL_SECONDS = 0.1
_CHUNK = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run_program(directory: Path, job: Job, trainer: CommandTrainer) -> None:
    """Run the command in ``directory`` to its end, and record its outputs.

    After an interruption, a resumable program resumes from its state folder; any other starts over
    in a new copy of its source tree. A program that has ended successfully is not run again: only
    its outputs are listed.

    Raises:
        Interrupted: The run was asked to stop; it can be started again.
        CapsuleError: A determinism flag is not in effect (:func:`flags.apply`), or CAP-T304, the
            check of the flags crashed; CAP-T301, the command cannot be started; CAP-T302, it
            failed; CAP-T303, an output cannot be claimed; CAP-T305, the source tree is not the
            locked one; CAP-T131, a file cannot be written; CAP-T381 to CAP-T384, the order of
            arrival cannot be recorded or repeated.
    """
    # An absolute path, because the program has another working folder, and gets the path in its
    # variables.
    directory = directory.absolute()
    events, ended = directory / contract.EVENTS, directory / contract.ENDED
    drop_partial_line(events)
    if not ended.exists():
        started = time.monotonic()
        _run_to_its_end(directory, job, trainer)
        # From now on the program is not run again: if an output cannot be claimed below, only the
        # listing is repeated.
        write_document(ended, Ended(seconds=time.monotonic() - started))
    outputs = collect_outputs(directory, job.tree, trainer)
    write_document(directory / contract.OUTPUTS, outputs)
    files = len(outputs.files)
    _report(events, "finish", f"{files} {'file' if files == 1 else 'files'} written")
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
        _report(directory / contract.EVENTS, "resume" if resumed else "start", command)
        watch = Watch(directory, job.tree, trainer)
        begin_arrivals(directory, resumed=resumed)
        if not resumed:
            # The lines of an earlier attempt do not count, because the program starts over.
            (directory / contract.INTERPRETERS).unlink(missing_ok=True)
        process = _execute(directory, spec, trainer, resumed=resumed, stop=stop, watch=watch)
    collect_arrivals(directory)
    record_mechanisms(directory, None, process=process)


def _check_flags(directory: Path, spec: Spec, *, resumed: bool) -> None:
    """Read back the flags of the image's libraries, in a child process.

    In this process, torch would stay loaded, and would occupy memory of the program's GPU.

    Raises:
        CapsuleError: A flag is not in effect; CAP-T304, the child ended otherwise.
    """
    child = os.fork()
    if child == 0:
        # sys.exit() would run the exit handlers of this process in the child.
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
    """Write ``runtime.json``; return an exit status, also after an exception."""
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
    """Run the command until it and all its descendants have ended; return its process id."""
    _adopt_orphans()
    arrivals, path = ArrivalWatch(directory), directory / contract.STANDARD_OUTPUT
    reading, writing = os.pipe()
    # Threads inherit the mask. The launcher's answer would end the process if a thread did not
    # block the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWER)
    reader, writer = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
    with reader, ThreadPoolExecutor(1, "output") as pool:
        # All threads of this process start before the program, which gets the next process number.
        copying = pool.submit(_copy_output, reader, path, append=resumed)
        # Closed when the program has its copy, so that the pipe ends with the last process that has
        # one.
        with writer:
            process = _start(directory, spec, trainer, writer, resumed=resumed)
        status = _await(process, copying, stop, lambda: watch.exceeded() or arrivals.failed())
        # Done before waiting for the copying, because a remaining process may keep the pipe open.
        _end_leftovers()
        _finished(copying, path)
    # If this process has ended the program, the reason is more important than the exit status.
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
        # Standard error is that of this process, which the engine keeps in output.log.
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
    """Let the launcher set the process number of the program.

    Afterwards, the next process or thread that this process starts has the number
    :data:`contract.PROGRAM_PROCESS`, if the launcher has its own namespace of process ids.
    """
    launcher = os.environ.get(contract.LAUNCHER_VARIABLE)
    if launcher is not None:
        os.kill(int(launcher), contract.NUMBERS_SIGNAL)
        signal.sigwait(_ANSWER)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ANSWER)  # the program inherits the mask


def _copy_output(stream: IO[bytes], path: Path, *, append: bool) -> None:
    """Write the program's standard output to a file, and pass it on."""
    with path.open("ab" if append else "wb") as kept:
        while chunk := os.read(stream.fileno(), _CHUNK):
            kept.write(chunk)
            try:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            except OSError:
                # Only the file is an output of the run. Standard output is replaced, because the
                # rest of its buffer would fail again when the interpreter ends.
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _await(
    process: subprocess.Popen[bytes],
    copying: Future[None],
    stop: Flag,
    has_failed: Callable[[], bool],
) -> int:
    """Wait for the program; pass on a signal to stop; kill it if its run cannot succeed."""
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
    """Make this process the parent of every process that the program leaves behind."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _end_leftovers() -> None:
    """Wait :data:`LEFTOVER_SECONDS` for processes that the program left behind, then kill them."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            continue
        if time.monotonic() > deadline:
            # Repeated in every round, because the children of a killed process become children of
            # this one.
            for child in _children():
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 10)


def _children() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        _, parent = state_and_parent(folder)
        if parent == os.getpid():
            yield int(folder.name)


def _report(events: Path, kind: Literal["start", "resume", "finish"], message: str) -> None:
    append_event(events, Event(time=time.time(), kind=kind, step=0, message=message))


def _command(spec: Spec, trainer: CommandTrainer) -> list[str]:
    return [word.replace("{seed}", str(spec.seeds.root)) for word in trainer.command]
