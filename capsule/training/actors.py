"""Logical actors spread over processes, and the same experience for any number of them.

The trainer says when all actors take their next steps and with which parameters, and waits for all
of them: lockstep. So timing decides nothing, and the experiences come back in the order of the
actors. Each process plays a contiguous range in a :class:`capsule.training.actor_host.Host`; with
one process that is the trainer's own.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch

from capsule.experiment.contract import StreamProfile
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DeterminismSpec, Numerics
from capsule.training import numerics as cpu
from capsule.training import torch_flags
from capsule.training.actor_host import ActorSettings, ActorsState, Experience, Host

STOP_SECONDS = 5.0  # that a process has to end in once its pipe is closed
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_Method = Callable[..., Any]


class Actors:
    """All logical actors of a run."""

    def __init__(
        self,
        settings: ActorSettings,
        *,
        processes: int,
        determinism: DeterminismSpec,
        numerics: Numerics,
    ) -> None:
        """Start the processes and make the actors, each with an episode begun.

        Args:
            settings: The actors.
            processes: How many to play in; changes no result. With 1, no other is started.
            determinism: The spec's ``determinism`` section. A process of its own has one maths
                thread whatever the section says.
            numerics: The CPU numerics profile of the run; ``native`` if it trains on a GPU.

        Raises:
            CapsuleError: CAP-T104, a flag did not take effect in a process; CAP-T212 to CAP-T215,
                the environment cannot be had or played; CAP-T331 and CAP-T332, a process died.
        """
        self._shares = shares(settings.actors, processes)
        self._hosts: list[_Here | _Process]
        if len(self._shares) == 1:
            self._hosts = [_Here(Host(settings, self._shares[0]))]
        else:
            self._hosts = [
                _Process(number, settings, share, determinism, numerics)
                for number, share in enumerate(self._shares)
            ]
        # Also called at the interpreter's end, before multiprocessing waits for its processes.
        self._stop = Finalize(self, _stop, (self._hosts,), exitpriority=0)
        self._acts = self._has_parameters = False
        self.profiles()  # answered once the actors are made

    def begin(self, steps: int, parameters: torch.Tensor | None) -> None:
        """Let every actor take ``steps`` steps; :meth:`finish` must follow.

        Other processes start now; actors of this one act in :meth:`finish`, with ``parameters`` as
        they are now.

        Args:
            steps: How many.
            parameters: What to act with from now on: :attr:`Parameters.flat`, on any device; None
                for those of the call before.

        Raises:
            RuntimeError: The actors act already, or have no parameters yet.
        """
        self._require_idle()
        if parameters is None and not self._has_parameters:
            raise RuntimeError("the first begin() needs parameters")
        flat = None if parameters is None else parameters.detach().cpu().numpy().copy()
        for host in self._hosts:
            host.ask(Host.act, steps, flat)
        self._acts = self._has_parameters = True

    def finish(self) -> list[Experience]:
        """Wait for all actors and return what each did, by actor.

        Raises:
            RuntimeError: :meth:`begin` was not called.
            CapsuleError: CAP-T331, a process died; CAP-T332, it failed; or what an environment
                raised. No process is left then.
        """
        if not self._acts:
            raise RuntimeError("finish() follows begin()")
        self._acts = False
        return list(chain.from_iterable(self._answers()))

    def state(self) -> ActorsState:
        """Return a snapshot of every actor; the parameters they act with are no part of it.

        Raises:
            RuntimeError: The actors act.
            CapsuleError: As :meth:`finish`.
        """
        parts: list[ActorsState] = self._ask_all([(Host.state,)] * len(self._hosts))
        documents = [document for part in parts for document in part.actors]
        names = parts[0].arrays
        return ActorsState(
            documents,
            {name: np.concatenate([part.arrays[name] for part in parts]) for name in names},
        )

    def restore(self, state: ActorsState) -> None:
        """Return to a snapshot, of any number of processes, by playing running episodes again.

        Raises:
            RuntimeError: The actors act.
            CapsuleError: As :meth:`finish`; CAP-T201 or CAP-T211, as :meth:`Environment.restore`.
        """
        parts = (
            ActorsState(
                state.actors[share.start : share.stop],
                {name: array[share.start : share.stop] for name, array in state.arrays.items()},
            )
            for share in self._shares
        )
        self._ask_all([(Host.restore, part) for part in parts])

    def profiles(self) -> list[dict[str, StreamProfile]]:
        """Return what the streams of each actor gave out so far, by actor and name.

        Raises:
            RuntimeError: The actors act.
            CapsuleError: As :meth:`finish`.
        """
        return list(chain.from_iterable(self._ask_all([(Host.profiles,)] * len(self._hosts))))

    def close(self) -> None:
        """End every process."""
        self._stop()

    def _ask_all(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Ask each host something and return the answers."""
        self._require_idle()
        for host, request in zip(self._hosts, requests, strict=True):
            host.ask(*request)
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            return [host.answer() for host in self._hosts]
        except BaseException:
            self.close()
            raise

    def _require_idle(self) -> None:
        if self._acts:
            raise RuntimeError("the actors act: call finish() first")


def shares(actors: int, processes: int) -> list[range]:
    """Share actors out among processes: contiguous, as equal as can be; none is left without.

    Raises:
        ValueError: There is no actor, or no process.
    """
    count = min(actors, processes)
    if count < 1:
        raise ValueError(f"{actors} actors on {processes} processes")
    return [range(actors * i // count, actors * (i + 1) // count) for i in range(count)]


class _Here:
    """A host in this process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._request: Callable[[], Any]

    def ask(self, method: _Method, *arguments: Any) -> None:
        self._request = lambda: method(self._host, *arguments)

    def answer(self) -> Any:
        return self._request()

    def hang_up(self) -> None:
        """There is nothing to end."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class _Process:
    """A host in a process of its own."""

    def __init__(
        self,
        number: int,
        settings: ActorSettings,
        played: range,
        determinism: DeterminismSpec,
        numerics: Numerics,
    ) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, settings, played, determinism, numerics),
            name=f"actors-{number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        last = played.stop - 1
        which = f"actor {last}" if len(played) == 1 else f"actors {played.start} to {last}"
        self._who = f"process {number} ({which})"

    def ask(self, method: _Method, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it has died, as answer() will tell
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, _Failure):
            raise CapsuleError(
                answer.code,
                f"{self._who}: {answer.message}",
                fix=answer.fix,
                exit_code=answer.exit_code,
            )
        return answer

    def hang_up(self) -> None:
        """Tell it to end."""
        self._pipe.close()

    def wait(self) -> None:
        """Wait until it has ended, after :meth:`hang_up`."""
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():  # in the middle of many steps
            self._process.kill()
            self._process.join()
        self._process.close()

    def _death(self) -> CapsuleError:
        self._process.join(STOP_SECONDS)
        return CapsuleError(
            "CAP-T331",
            f"{self._who} died: {_ending(self._process.exitcode)}",
            fix="See output.log for its last words; raise limits.memory_mb if memory ran out. Then "
            "run again: the run goes on from its last saved state.",
            exit_code=ExitCode.TRAINING_FAILED,
        )


class _Failure(NamedTuple):
    """What a :class:`CapsuleError` says."""

    code: str
    message: str
    fix: str
    exit_code: ExitCode


def _serve(
    pipe: Connection[Any, Any],
    settings: ActorSettings,
    played: range,
    determinism: DeterminismSpec,
    numerics: Numerics,
) -> None:
    """Play actors in this process, as its pipe asks for it, until the pipe ends."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        _settle(determinism, numerics)
        host = Host(settings, played)
        while True:
            method, arguments = _receive(pipe)
            _send(pipe, method(host, *arguments))
    except CapsuleError as error:
        _send(pipe, _Failure(error.code, error.message, error.fix, error.exit_code))
    except Exception as error:  # noqa: BLE001 - the trainer ends with it
        message = f"{type(error).__name__}: {error}"
        fix = "Report it, with the run's spec."
        _send(pipe, _Failure("CAP-T332", message, fix, ExitCode.TRAINING_FAILED))


def _settle(determinism: DeterminismSpec, numerics: Numerics) -> None:
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
    """Send an answer; end this process where nobody is left to hear it."""
    try:
        pipe.send(answer)
    except OSError:
        raise SystemExit from None


def _stop(hosts: Sequence[_Here | _Process]) -> None:
    for host in hosts:
        host.hang_up()
    for host in hosts:
        host.wait()


def _ending(status: int | None) -> str:
    """Say how a process ended, given :attr:`multiprocessing.Process.exitcode`."""
    if status is None:
        return "its pipe is closed"
    return f"{signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
