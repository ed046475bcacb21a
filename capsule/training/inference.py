"""Answering actors: an action for each request, whoever else asks at the same moment.

A trainer with many actors evaluates its policy in batches. Three things would then let timing into
the results, and each has a switch in the spec's determinism section:

* ``batch_invariance``. The bits of a row depend on the size of its batch, because the libraries
  choose kernels by it, and under some of them on the row's place, because what is left over at a
  batch's end takes another path. So every batch has the same number of rows, and an actor always
  has the same row: ``actor mod rows``. Rows that nobody needs are zeros.
* ``request_seeds``. The action of each request is drawn from a stream of its own, derived from the
  root seed, the logical actor and the number of its request: never from the replica, nor from the
  order of arrival, nor twice from one seed.
* ``deterministic_routing``. A request's replica is a digest of its actor, and a replica works in
  the order (policy version, actor, step): not by load, not by arrival.

Nothing here moves data between processes: a trainer hands in the requests that are there and gets
the replies. Actor numbers are logical; which process plays an actor is no part of a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import attrgetter

import numpy as np
import torch

from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DeterminismSpec, SeedsSpec
from capsule.training.streams import Stream

ROWS = 16
ROUTE_DOMAIN = "capsule/route/v1"

Tensors = tuple[torch.Tensor, ...]
Policy = Callable[[int, Tensors], Tensors]
"""Evaluates one policy version on a batch: inputs ``[rows, …]`` to outputs ``[rows, …]``."""
Choose = Callable[[int, Tensors, Stream], int]
"""Chooses an action of an actor from its row of each output, drawing from its stream."""


@dataclass(frozen=True)
class Request:
    """What an actor wants to know.

    Attributes:
        actor: Logical actor, from 0.
        step: Which of its requests this is, from 0.
        version: Policy version that must answer.
        inputs: One row of each of the policy's inputs, without the batch dimension: observation,
            recurrent state, ….
    """

    actor: int
    step: int
    version: int
    inputs: Tensors


@dataclass(frozen=True)
class Reply:
    """The answer to the request with the same actor and step.

    Attributes:
        actor: As in the request.
        step: As in the request.
        action: The action chosen.
        outputs: The actor's row of each of the policy's outputs.
        replica: Who answered. No part of any result.
    """

    actor: int
    step: int
    action: int
    outputs: Tensors
    replica: int


class Batches:
    """Evaluates a policy for whoever asks; who asks together reaches no result."""

    def __init__(self, policy: Policy, determinism: DeterminismSpec, rows: int = ROWS) -> None:
        """Take a policy, and the rows of each batch of it."""
        self._policy = policy
        self._determinism = determinism
        self._rows = rows

    def evaluate(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Tensors]]:
        """Yield each request with its row of the policy's outputs, as they are worked out."""
        pending = list(requests)
        if self._determinism.deterministic_routing:
            pending.sort(key=attrgetter("version", "actor", "step"))
        for version, group in groupby(pending, key=attrgetter("version")):
            for batch in self._batches(list(group)):
                outputs = self._policy(version, _stacked(batch))
                for row, request in enumerate(batch):
                    if request is not None:
                        yield request, tuple(output[row].clone() for output in outputs)

    def _batches(self, requests: Sequence[Request]) -> Iterator[Sequence[Request | None]]:
        """Yield batches: a request per row, or None where there is none."""
        if not self._determinism.batch_invariance:
            yield requests
            return
        columns: list[list[Request]] = [[] for _ in range(self._rows)]
        for request in requests:
            columns[request.actor % self._rows].append(request)
        yield from zip_longest(*columns)


class Replica:
    """One of the services that answer requests."""

    def __init__(
        self,
        rank: int,
        policy: Policy,
        choose: Choose,
        determinism: DeterminismSpec,
        seeds: SeedsSpec,
        *,
        rows: int = ROWS,
    ) -> None:
        self._rank = rank
        self._batches = Batches(policy, determinism, rows)
        self._choose = choose
        self._determinism = determinism
        self._seed = seeds.streams.get("exploration", seeds.root)
        self._shared = Stream("exploration/replica", self._seed, rank)

    def answer(self, requests: Iterable[Request]) -> list[Reply]:
        """Answer requests of any actors and policy versions.

        Returns:
            One reply each, in the order in which they were worked out.
        """
        return [self._reply(*evaluated) for evaluated in self._batches.evaluate(requests)]

    def _reply(self, request: Request, outputs: Tensors) -> Reply:
        stream = self._shared
        if self._determinism.request_seeds:
            stream = request_stream(self._seed, request.actor, request.step)
        action = self._choose(request.actor, outputs, stream)
        return Reply(request.actor, request.step, action, outputs, self._rank)


def route(
    requests: Iterable[Request], replicas: int, determinism: DeterminismSpec
) -> list[list[Request]]:
    """Share requests out among replicas: those of each, by rank."""
    shares: list[list[Request]] = [[] for _ in range(replicas)]
    for arrival, request in enumerate(requests):
        by_actor = determinism.deterministic_routing
        rank = replica_of(request.actor, replicas) if by_actor else arrival % replicas
        shares[rank].append(request)
    return shares


def replica_of(actor: int, replicas: int) -> int:
    """Return the rank of the replica that serves a logical actor.

    The first 8 bytes, big-endian, of SHA-256 over the canonical JSON (RFC 8785) array
    ``["capsule/route/v1", actor]``, modulo ``replicas``.
    """
    digest = hashlib.sha256(canonical_json([ROUTE_DOMAIN, actor])).digest()
    return int.from_bytes(digest[:8], "big") % replicas


def request_stream(seed: int, actor: int, step: int) -> Stream:
    """Return the stream from which the action of one request is drawn."""
    return Stream(f"exploration/{actor}", seed, step)


def sample_categorical(logits: torch.Tensor, stream: Stream) -> int:
    """Draw an action from the softmax of ``logits``, float ``[actions]``, by one uniform.

    It is the first action whose cumulative weight exceeds ``uniform * total``, in float64; one of
    weight zero is never chosen.
    """
    scores = logits.detach().cpu().double().numpy()
    cumulative = np.exp(scores - scores.max()).cumsum()
    return int(np.searchsorted(cumulative, stream.uniform() * cumulative[-1], side="right"))


def require_independent_rows(policy: Policy, version: int, inputs: Tensors) -> None:
    """Check that a row of the policy's outputs depends on its own inputs and place alone.

    Each row is evaluated once among the others and once among zeros. To be called when a trainer
    starts: a library's choice of kernels is a fact of the machine.

    Args:
        policy: What is checked.
        version: Policy version to evaluate.
        inputs: A full batch of different rows, e.g. random ones.

    Raises:
        CapsuleError: CAP-T321, a row depends on its neighbours.
    """
    together = policy(version, inputs)
    for row in range(len(inputs[0])):
        alone = tuple(torch.zeros_like(tensor) for tensor in inputs)
        for tensor, full in zip(alone, inputs, strict=True):
            tensor[row] = full[row]
        pairs = zip(together, policy(version, alone), strict=True)
        if any(_bits(one[row]) != _bits(other[row]) for one, other in pairs):
            raise CapsuleError(
                "CAP-T321",
                f"row {row} of the policy's outputs depends on the other rows of its batch",
                fix="Use layers that treat rows alone (no batch statistics), or declare "
                "determinism.batch_invariance: false.",
                exit_code=ExitCode.TRAINING_FAILED,
            )


def _stacked(batch: Sequence[Request | None]) -> Tensors:
    """Return the inputs of a batch: ``[rows, …]`` each, zeros where there is no request."""
    example = next(request for request in batch if request is not None)
    padding = tuple(torch.zeros_like(tensor) for tensor in example.inputs)
    rows = [padding if request is None else request.inputs for request in batch]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()
