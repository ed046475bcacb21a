"""All logical actors of R2D2 in lockstep: the same experience however many processes run them.

The trainer decides when all actors take their next steps and with which parameters, and waits for
all of them. Timing therefore has no effect, and experiences are returned in the order of the
actors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from capsule.experiment.contract import StreamProfile
from capsule.training.acting.actor_worker import ActorRequest, Snapshot
from capsule.training.acting.transports import Transport
from capsule.training.r2d2.actor_worker import ActorSettings, Experience, stream_profiles


class Actors:
    """All logical actors of a run.

    Attributes:
        count: Number of actors.
    """

    def __init__(self, settings: ActorSettings, transport: Transport) -> None:
        """Take over the actors of a transport, each at the beginning of an episode."""
        self.count = settings.actors
        self._seeds, self._transport = settings.seeds, transport
        self._version = -1
        self._acts = False
        self._snapshots: dict[int, Snapshot] = {}

    def begin(self, parameters: torch.Tensor | None) -> None:
        """Let every actor take its next steps; :meth:`finish` must follow.

        Actors of other processes start now; those of this process act in :meth:`finish`.

        Args:
            parameters: The actors' parameters from now on: :attr:`Parameters.flat`, on any device,
                of which a copy is made; None for those of the last call.

        Raises:
            RuntimeError: The actors are acting already, or have no parameters yet.
        """
        self._require_idle()
        if parameters is not None:
            # Version numbers begin anew in each attempt. They only tell workers which parameters to
            # use, and are not part of any result.
            self._version += 1
            flat = parameters.detach().cpu().numpy().copy()
            self._transport.publish({self._version: flat})
        if self._version < 0:
            raise RuntimeError("the first begin() needs parameters")
        self._transport.begin([ActorRequest(actor, self._version) for actor in range(self.count)])
        self._acts = True

    def finish(self) -> list[Experience]:
        """Wait for all actors and return the experience of each, in the order of the actors.

        Raises:
            RuntimeError: :meth:`begin` was not called.
            CapsuleError: As :meth:`Transport.finished`.
        """
        if not self._acts:
            raise RuntimeError("finish() follows begin()")
        self._acts = False
        made: dict[int, Experience] = {}
        while len(made) < self.count:
            for played in self._transport.finished():
                made[played.actor] = played.experience
                self._snapshots[played.actor] = played.after
        return [made[actor] for actor in range(self.count)]

    def state(self) -> list[dict[str, Any]]:
        """Return a JSON-safe snapshot of every actor, without the parameters they act with.

        Raises:
            RuntimeError: The actors are acting, or have not acted yet.
        """
        return [snapshot.saved() for snapshot in self._in_order()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Return to a snapshot by playing running episodes again; new parameters must follow.

        Raises:
            RuntimeError: The actors are acting.
            CapsuleError: As :meth:`Transport.restore`.
        """
        self._require_idle()
        self._snapshots = {actor: Snapshot.of(saved) for actor, saved in enumerate(state)}
        self._transport.restore(self._snapshots)

    def profiles(self) -> list[StreamProfile]:
        """Return the profiles of the actors' streams so far, named ``stream/actor``.

        Raises:
            RuntimeError: The actors are acting, or have not acted yet.
        """
        profiles = (
            stream_profiles(self._seeds, actor, snapshot)
            for actor, snapshot in enumerate(self._in_order())
        )
        return list(chain.from_iterable(profiles))

    def close(self) -> None:
        """End every process."""
        self._transport.close()

    def _in_order(self) -> list[Snapshot]:
        self._require_idle()
        if not self._snapshots:
            raise RuntimeError("the actors have not acted yet")
        return [self._snapshots[actor] for actor in range(self.count)]

    def _require_idle(self) -> None:
        if self._acts:
            raise RuntimeError("the actors act: call finish() first")
