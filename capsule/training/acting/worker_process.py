"""An object in another process: asked, waited for, and never left behind.

Processes are spawned, and inherit the environment variables of the run. What torch itself has
switches for they set and read back again. They take no orders to stop but the end of their pipe: a
signal to the whole process group leaves it to the trainer to finish the interval and save its
state, and none outlives a trainer that was killed.

Everything goes through pipes, pickled. At 16 actors x 25 steps of 84x84 that takes 2 ms, and shared
memory 0.5 ms, of an interval of more than 200 ms.
"""

from __future__ import annotations

import contextlib
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

STOP_SECONDS = 5.0  # that a process has to end in once its pipe is closed
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Method = Callable[..., Any]


class Role(NamedTuple):
    """The purpose of a process, as messages name it.

    Attributes:
        name: Name of the process, for the operating system.
        part: What it has one or more of.
        death: Code of its death.
    """

    name: str
    part: str
    death: str


ACTORS = Role("actors", "actor", "CAP-T331")


class WorkerProcess:
    """An object in a process of its own, asked one thing at a time."""

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
            number: Its number, for messages.
            make: Makes the object there; to be pickled.
            parts: Actors that it plays, or what else it has, for messages.
            determinism: The spec's ``determinism`` section. The process has one maths thread
                whatever the section says.
            numerics: The CPU numerics profile of the run.
            role: What it is for.
        """
        # A fork would have copies of locks that threads of this process hold, and no threads that
        # release them; nor can CUDA be used after one.
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
        # Called if the start of a later process fails, before anything can stop() this one: at its
        # end, the interpreter would wait for ever for a process whose pipe is still open.
        self._abandon = Finalize(self, self._process.kill, exitpriority=0)
        theirs.close()  # so that the end of the process is the end of the pipe
        self._who = f"process {number} ({which(parts, role.part)})"
        self._death_code = role.death

    def fileno(self) -> int:
        """Return what :func:`multiprocessing.connection.wait` waits on until it has answered."""
        return self._pipe.fileno()

    def ask(self, method: Method, *arguments: Any) -> None:
        """Call ``method`` with the object and ``arguments``; :meth:`answer` must follow."""
        with contextlib.suppress(OSError):  # it has died, as answer() will tell
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Wait for what the method returned.

        Raises:
            CapsuleError: CAP-T331, or what the role has, the process died; CAP-T332, it failed;
                or what it raised.
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
        """End it in the middle of a request; :meth:`answer` then raises."""
        self._process.kill()

    def hang_up(self) -> None:
        """Tell it to end; no other thread may wait in :meth:`answer`."""
        self._pipe.close()

    def wait(self) -> None:
        """Wait until it has ended, after :meth:`hang_up`."""
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():  # in the middle of many steps
            self._process.kill()
            self._process.join()
        self._abandon.cancel()
        self._process.close()


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block orders to stop, also in a process that is started here, until it ignores them."""
    resource_tracker.ensure_running()  # multiprocessing would unblock signals as it starts this
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
    """Make the object in this process, and call it as its pipe asks for, until the pipe ends."""
    # Both are blocked since the start (_stop_signals_blocked), so none comes before this.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        settle(determinism, numerics)
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
    """Set in this process what no child inherits, and read it back.

    Raises:
        CapsuleError: CAP-T104, a flag did not take effect.
    """
    flags = torch_flags.TorchFlags.of(determinism.model_dump())
    torch_flags.apply(replace(flags, threads=1))
    cpu.settle(numerics)
    torch_flags.expect(cpu.read_back(numerics, threads=1), "library")


def _receive(pipe: Connection[Any, Any]) -> Any:
    """Return the next request; end this process where the trainer has closed the pipe or died."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise SystemExit from None


def _send(pipe: Connection[Any, Any], answer: Any) -> None:
    """Send an answer; end this process where the trainer has gone."""
    try:
        pipe.send(answer)
    except OSError:
        raise SystemExit from None


def stop(processes: Sequence[WorkerProcess]) -> None:
    """End processes."""
    # All are told before one is waited for, so that their times to end pass together.
    for process in processes:
        process.hang_up()
    for process in processes:
        process.wait()


def which(numbers: Sequence[int], part: str = ACTORS.part) -> str:
    """Name parts: ``actor 3``, ``actors 0 to 3``, ``actors 1 and 4``, ``actors 0, 2, …, 6``."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"{part} {first}"
    if last - first == len(numbers) - 1:
        return f"{part}s {first} to {last}"
    if len(numbers) == 2:
        return f"{part}s {first} and {last}"
    return f"{part}s {first}, {numbers[1]}, …, {last}"


def _ending(status: int | None) -> str:
    """Say how a process ended, given :attr:`multiprocessing.Process.exitcode`."""
    if status is None:
        return "its pipe is closed"
    return f"{signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
