"""An object in another process, whose methods are called through a pipe.

Processes are spawned, and inherit the environment variables of the run. They set torch's flags
themselves, and read them back. They ignore signals to stop, and end when their pipe is closed.
After a signal to the whole process group, the trainer can therefore finish the interval and save
its state, and no process outlives a trainer that was killed.

All data is pickled and sent through pipes. For 16 actors and 25 steps of 84x84 this took 2 ms of an
interval of more than 200 ms; shared memory took 0.5 ms.
"""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec, Numerics
from capsule.training.determinism import cpu, torch_flags

STOP_SECONDS = 5.0  # time in which a process must end after its pipe was closed
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Method = Callable[..., Any]


class Role(NamedTuple):
    """The purpose of a process, as messages name it.

    Attributes:
        name: Name of the process, for the operating system.
        part: Noun for one of its parts, such as an actor, in the singular.
        death: Code of the error when it dies.
    """

    name: str
    part: str
    death: str


ACTORS = Role("actors", "actor", "CAP-T331")


class WorkerProcess:
    """An object in another process. One of its methods can be called at a time."""

    def __init__(
        self,
        number: int,
        make: Callable[[], Any],
        parts: Sequence[int],
        determinism: DeterminismSpec,
        numerics: Numerics,
        *,
        role: Role = ACTORS,
    ) -> None:
        """Start the process.

        Args:
            number: Number of the process, for messages.
            make: Makes the object in the new process; it is pickled.
            parts: Numbers of its parts, for messages.
            determinism: The spec's ``determinism`` section. The process has one maths thread,
                whatever the section says.
            numerics: The CPU numerics profile of the run.
            role: The purpose of the process.
        """
        # A forked process would have copies of locks that threads of this process hold, without the
        # threads that release them; and CUDA cannot be used after a fork.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, make, determinism, numerics),
            name=f"{role.name}-{number}",
            daemon=True,
        )
        with _stop_signals_blocked():
            self._process.start()
        # This is called if stop() is not, for example because the start of a later process failed.
        # Otherwise the interpreter would wait at its end for a process whose pipe is still open.
        self._abandon = Finalize(self, self._process.kill, exitpriority=0)
        theirs.close()  # so that the end of the process is the end of the pipe
        self._who = f"process {number} ({which(parts, role.part)})"
        self._death_code = role.death

    def fileno(self) -> int:
        """Return the descriptor on which :func:`multiprocessing.connection.wait` can wait."""
        return self._pipe.fileno()

    def ask(self, method: Method, *arguments: Any) -> None:
        """Call ``method`` with the object and ``arguments``; :meth:`answer` must follow."""
        with contextlib.suppress(OSError):  # the process has died, which answer() will report
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Wait for the result of the method that was called.

        Raises:
            CapsuleError: The code of the role, CAP-T331 for actors: the process died; CAP-T332, the
                method failed; or the error that it raised.
        """
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            # The pipe may end before the process has the exit status that the message names.
            self._process.join(STOP_SECONDS)
            raise CapsuleError(
                self._death_code,
                f"{self._who} died: {_ending(self._process.exitcode)}",
                fix="See the end of output.log; raise limits.memory_mb if memory ran out. Then "
                "run again: the run resumes from its last saved state.",
            ) from None
        if isinstance(answer, CapsuleError):
            raise answer.within(self._who)
        return answer

    def kill(self) -> None:
        """Kill the process, also during a call; :meth:`answer` then raises an error."""
        self._process.kill()

    def close_pipe(self) -> None:
        """Close the pipe, at which the process ends. No thread may be waiting in :meth:`answer`."""
        self._pipe.close()

    def wait(self) -> None:
        """Wait for the process to end, after :meth:`close_pipe`; kill it if that takes long."""
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():  # it is in the middle of a long call
            self._process.kill()
            self._process.join()
        self._abandon.cancel()
        self._process.close()


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block signals to stop in this process, and in one started here until it ignores them."""
    resource_tracker.ensure_running()  # multiprocessing would unblock signals when it starts this
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    pipe: Connection[Any, Any],
    make: Callable[[], Any],
    determinism: DeterminismSpec,
    numerics: Numerics,
) -> None:
    """Make the object in this process, and call its methods as requested, until the pipe ends."""
    # These signals have been blocked since the start (_stop_signals_blocked), so none is lost.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        settle(determinism, numerics)
        gc.freeze()  # as in the trainer's process, see flags.apply()
        made = make()
        while True:
            method, arguments = _receive(pipe)
            _send(pipe, method(made, *arguments))
    except CapsuleError as error:
        _send(pipe, error)
    except Exception as error:  # noqa: BLE001 - the trainer ends with it
        message = f"{type(error).__name__}: {error}"
        _send(pipe, CapsuleError("CAP-T332", message, fix="Report it, with the run's spec."))


def settle(determinism: DeterminismSpec, numerics: Numerics) -> None:
    """Set the flags that a child process does not inherit, and read them back.

    Raises:
        CapsuleError: CAP-T104, a flag did not take effect.
    """
    flags = torch_flags.TorchFlags.of(determinism.model_dump())
    torch_flags.apply(replace(flags, threads=1))
    cpu.settle(numerics)
    torch_flags.expect(cpu.read_back(numerics, threads=1), "library")


def _receive(pipe: Connection[Any, Any]) -> Any:
    """Return the next request; end this process if the trainer has closed the pipe or died."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise SystemExit from None


def _send(pipe: Connection[Any, Any], answer: Any) -> None:
    """Send an answer; end this process if the trainer has died."""
    try:
        pipe.send(answer)
    except OSError:
        raise SystemExit from None


def stop(processes: Sequence[WorkerProcess]) -> None:
    """End processes, and wait for them."""
    # All pipes are closed before one process is waited for, so that the processes end in parallel.
    for process in processes:
        process.close_pipe()
    for process in processes:
        process.wait()


def which(numbers: Sequence[int], part: str = ACTORS.part) -> str:
    """Return a name for parts: ``actor 3``, ``actors 0 to 3`` or ``actors 0, 2, …, 6``.

    Args:
        numbers: Numbers of the parts, ascending with a constant step, at least one.
        part: Noun for a part, in the singular.
    """
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"{part} {first}"
    if last - first == len(numbers) - 1:
        return f"{part}s {first} to {last}"
    if len(numbers) == 2:
        return f"{part}s {first} and {last}"
    return f"{part}s {first}, {numbers[1]}, …, {last}"


def _ending(status: int | None) -> str:
    """Describe how a process ended, given :attr:`multiprocessing.Process.exitcode`."""
    if status is None:
        return "its pipe is closed"
    return f"{signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
