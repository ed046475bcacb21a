"""Logical actors spread over processes, and the same experience for any number of them.

The trainer says when all actors take their next steps and with which parameters, and waits for all
of them: lockstep. So timing decides nothing, and the experiences come back in the order of the
actors. Each process plays a contiguous range in a
:class:`capsule.training.r2d2.actor_worker.ActorWorker`; with one process that is the trainer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch

from capsule.experiment.contract import StreamProfile
from capsule.experiment.spec import DeterminismSpec, Numerics
from capsule.training.acting.worker_process import LocalWorker, WorkerProcess, stop
from capsule.training.r2d2.actor_worker import ActorSettings, ActorsState, ActorWorker, Experience


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
        self._hosts: list[LocalWorker | WorkerProcess]
        if len(self._shares) == 1:
            self._hosts = [LocalWorker(ActorWorker(settings, self._shares[0]))]
        else:
            self._hosts = [
                WorkerProcess(
                    number, partial(ActorWorker, settings, share), share, determinism, numerics
                )
                for number, share in enumerate(self._shares)
            ]
        # Also called at the interpreter's end, before multiprocessing waits for its processes.
        self._stop = Finalize(self, stop, (self._hosts,), exitpriority=0)
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
            host.ask(ActorWorker.act, steps, flat)
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
        parts: list[ActorsState] = self._ask_all([(ActorWorker.state,)] * len(self._hosts))
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
        self._ask_all([(ActorWorker.restore, part) for part in parts])

    def profiles(self) -> list[dict[str, StreamProfile]]:
        """Return what the streams of each actor gave out so far, by actor and name.

        Raises:
            RuntimeError: The actors act.
            CapsuleError: As :meth:`finish`.
        """
        return list(
            chain.from_iterable(self._ask_all([(ActorWorker.profiles,)] * len(self._hosts)))
        )

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
