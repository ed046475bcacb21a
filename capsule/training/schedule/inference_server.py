"""One process that evaluates the policy for the actors of all others (Espeholt et al. 2018, 3.1).

Hosts ask for their actors' next step and wait. The server answers whatever is there in *dynamic
batches*: what arrives while one batch is computed makes the next. It waits for nobody, so there is
no time-out to choose.

Which requests share a batch is a matter of timing, and reaches no result: batches have a fixed
shape, and a row of them depends on itself and its place, its actor's number (:mod:`~.inference`).
That is tested as the server starts (CAP-T321). The policy version that answers is the request's,
which the schedule fixed, and an actor draws its actions itself, in its own order. So nothing of the
server needs to be recorded, and an actor that evaluates the same rows by itself gets the same bits:
that is what a run does in one process, and on the nodes of a cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DeterminismSpec, Numerics
from capsule.training.actor_rows import Arrays, Inputs
from capsule.training.host_process import HostProcess, Role, stop
from capsule.training.inference import Batches, Request, Tensors, require_independent_rows
from capsule.training.networks import Parameters
from capsule.training.schedule.probes import probe
from capsule.training.unrolls import UnrollSettings, act

SERVER = Role("inference", "inference for actor", "CAP-T362")


class _Asked(NamedTuple):
    """What a host wants to know: the outputs for some actors, a row each."""

    version: int
    step: int
    actors: Sequence[int]
    inputs: Arrays


class _News(NamedTuple):
    """Policy versions: those that are new, and the numbers of all that may be asked for."""

    parameters: dict[int, NDArray[np.float32]]
    kept: frozenset[int]


class Client:
    """A host's way to the server."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        """Take one end of a pipe whose other end is the server's."""
        self._pipe = pipe

    def evaluate(self, version: int, step: int, actors: Sequence[int], inputs: Arrays) -> Arrays:
        """Ask for one step of some actors, and wait.

        Args:
            version: Of the policy.
            step: Of the unroll.
            actors: Whose rows these are.
            inputs: As :class:`Inputs` has them, a row for each actor.

        Returns:
            As :func:`act`, a row for each actor.

        Raises:
            CapsuleError: CAP-T362, the server is gone.
        """
        try:
            self._pipe.send(_Asked(version, step, actors, inputs))
            answer: Arrays = self._pipe.recv()
        except (EOFError, OSError):
            raise CapsuleError(
                SERVER.death,
                "the inference server does not answer",
                fix="See output.log for its last words. Then run again: the run goes on from its "
                "last saved state.",
                exit_code=ExitCode.TRAINING_FAILED,
            ) from None
        return answer

    def close(self) -> None:
        """Close this end."""
        self._pipe.close()


class Server:
    """Answers hosts, in the server's process."""

    def __init__(
        self,
        settings: UnrollSettings,
        determinism: DeterminismSpec,
        news: Connection[Any, Any],
        hosts: Sequence[Connection[Any, Any]],
    ) -> None:
        """Begin without a policy.

        Args:
            settings: What makes the actors.
            determinism: The spec's ``determinism`` section.
            news: Gives policy versions; its end is the end.
            hosts: A pipe to each.

        Raises:
            CapsuleError: CAP-T321, rows of a batch depend on each other on this machine.
        """
        self._network, self._news, self._hosts = settings.network, news, list(hosts)
        self._versions: dict[int, Parameters] = {}
        self._batches = Batches(self._policy, determinism, settings.rows)
        require_batch_invariance(settings, determinism)

    def serve(self) -> None:
        """Answer until there is no run any more."""
        while True:
            ready = wait([self._news, *self._hosts])
            # A version is sent before anybody asks for it, but may be seen after that.
            if not self._take_news():
                return
            asked = [each for host in ready if host in self._hosts for each in self._hear(host)]
            self._answer(asked)

    def _take_news(self) -> bool:
        """Take what versions there are; return whether there may be more."""
        while self._news.poll():
            try:
                news: _News = self._news.recv()
            except (EOFError, OSError):
                return False
            for version, flat in news.parameters.items():
                self._versions[version] = Parameters(self._network.shapes, torch.device("cpu"))
                self._versions[version].flat.copy_(torch.from_numpy(flat))
            self._versions = {v: each for v, each in self._versions.items() if v in news.kept}
        return True

    def _hear(self, host: Any) -> Iterator[tuple[Connection[Any, Any], _Asked]]:
        """Yield what a host asks, unless it has ended, which is for others to notice."""
        try:
            yield host, host.recv()
        except (EOFError, OSError):
            self._hosts.remove(host)

    def _answer(self, asked: Sequence[tuple[Connection[Any, Any], _Asked]]) -> None:
        requests = [request for _, each in asked for request in _requests(each)]
        with torch.inference_mode():
            found = {each.actor: outputs for each, outputs in self._batches.evaluate(requests)}
        for host, each in asked:
            columns = zip(*(found[actor] for actor in each.actors), strict=True)
            with contextlib.suppress(OSError):  # its host has ended
                host.send(tuple(torch.stack(column).numpy() for column in columns))

    def _policy(self, version: int, inputs: Tensors) -> Tensors:
        return act(self._network, self._versions[version], Inputs(*inputs))


class ServerProcess:
    """The server as the run has it.

    Attributes:
        clients: One for each host, to be handed over to it and closed here.
    """

    def __init__(
        self,
        settings: UnrollSettings,
        actors: int,
        hosts: int,
        determinism: DeterminismSpec,
        numerics: Numerics,
    ) -> None:
        """Start it.

        Args:
            settings: What makes the actors.
            actors: How many there are.
            hosts: How many play them.
            determinism: The spec's ``determinism`` section.
            numerics: The CPU numerics profile of the run; ``native`` if it trains on a GPU.
        """
        context = get_context("spawn")
        pairs = [context.Pipe() for _ in range(hosts)]
        theirs, self._news = context.Pipe(duplex=False)
        ends = [server for _, server in pairs]
        make = partial(Server, settings, determinism, theirs, ends)
        self._process = HostProcess(0, make, range(actors), determinism, numerics, role=SERVER)
        self._process.ask(Server.serve)
        for end in (theirs, *ends):  # so that the end of the process is the end of its pipes
            end.close()
        self.clients = [Client(host) for host, _ in pairs]
        self._known: set[int] = set()

    def publish(self, versions: Mapping[int, NDArray[np.float32]]) -> None:
        """Give it the policy versions that may be asked for from now on."""
        new = {version: flat for version, flat in versions.items() if version not in self._known}
        self._known = set(versions)
        with contextlib.suppress(OSError):  # it has died, as hosts will tell
            self._news.send(_News(new, frozenset(versions)))

    def explain(self) -> None:
        """Say why it does not answer any more.

        Raises:
            CapsuleError: CAP-T362, it died; or what it raised.
        """
        self._process.answer()

    def close(self) -> None:
        """End it, after everybody who asks."""
        self._news.close()
        stop([self._process])


def require_batch_invariance(settings: UnrollSettings, determinism: DeterminismSpec) -> None:
    """Check that the policy's batches have independent rows on this machine, if they must.

    Weights and inputs are fixed; there is one maths thread wherever actors play.

    Raises:
        CapsuleError: CAP-T321, they have not; CAP-T212 to CAP-T216, the environment cannot be had.
    """
    if not determinism.batch_invariance:
        return
    parameters, inputs, _ = probe(settings, (settings.rows,))

    def policy(_version: int, inputs: Tensors) -> Tensors:
        return act(settings.network, parameters, Inputs(*inputs))

    with torch.inference_mode():
        require_independent_rows(policy, 0, inputs)


def _requests(asked: _Asked) -> Iterator[Request]:
    """Yield a request for each actor."""
    rows = zip(*(torch.from_numpy(array).unbind() for array in asked.inputs), strict=True)
    for actor, row in zip(asked.actors, rows, strict=True):
        yield Request(actor, asked.step, asked.version, row)
