"""Inference: choosing actions so that they depend neither on the batch nor on the replica.

A *replica* evaluates the policy for requests of any actors and draws their actions. Timing could
affect the results in three ways, each of which a field of the spec's ``determinism`` section
prevents:

* ``batch_invariance``: an answer does not depend on its batch
  (:mod:`capsule.training.acting.batching`).
* ``request_seeds``: the action of request ``n`` of an actor is drawn with block ``n`` of the words
  of that actor's stream ``exploration`` (:class:`~capsule.training.state.streams.RequestWords`). It
  therefore depends on the root seed, the actor and ``n``, and neither on the replica nor on the
  order of arrival. If the field is off, each replica draws all its actions from one stream.
* ``deterministic_routing``: actor ``i`` is answered by replica ``i`` modulo their number, and a
  replica processes requests in the order of policy version, actor and request. If the field is off,
  requests are distributed over the replicas, and processed, in the order of arrival.

An answer contains the facts about its computation, which the actor counts
(:class:`RequestCounts`). The ledger uses the actors' counts, and not the fields of the spec.

This module does not move data between processes. Actor numbers are logical: the process that runs
an actor does not affect a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec, SeedsSpec, StreamName
from capsule.training.acting.batching import Arrays, Batching, Tensors
from capsule.training.state.streams import Account, RequestWords, Stream, uniform_of

_STREAM: StreamName = "exploration"
_COUNTS = ("own_stream", "own_row", "misrouted")

Policy = Callable[[int, Tensors], Tensors]
"""A function of a policy version and the inputs of a batch.

It returns ``ln mu`` and ``mu``, float32 ``[rows, actions]``, and the recurrent states after the
step, float32 ``[rows, *state_shape]``.
"""


class RequestBatch(NamedTuple):
    """One request each of some actors, with the same version of the policy.

    Attributes:
        version: Version of the policy that must answer.
        actors: int64 ``[requests]``.
        numbers: int64 ``[requests]``: number of each among the requests of its actor, from 0.
        inputs: Inputs of the policy, ``[requests, …]`` each.
    """

    version: int
    actors: NDArray[np.int64]
    numbers: NDArray[np.int64]
    inputs: Arrays


class Answers(NamedTuple):
    """The answers to some requests, a row for each.

    Attributes:
        actions: int64 ``[requests]``: the actions drawn.
        logarithms: float32 ``[requests]``: ``ln mu`` of these actions.
        states: float32 ``[requests, *state_shape]``: recurrent states after the step.
        words: uint64 ``[requests]``: the random word with which each action was drawn.
        replicas: int64 ``[requests]``: rank of the replica that answered.
        sizes: int64 ``[requests]``: number of rows of the batch of the policy.
        places: int64 ``[requests]``: the request's row in that batch.
    """

    actions: NDArray[np.int64]
    logarithms: NDArray[np.float32]
    states: NDArray[np.float32]
    words: NDArray[np.uint64]
    replicas: NDArray[np.int64]
    sizes: NDArray[np.int64]
    places: NDArray[np.int64]

    def rows(self, rows: NDArray[np.int64] | slice) -> Answers:
        """Return some of the answers."""
        columns: Arrays = self
        return Answers(*(column[rows] for column in columns))


class Service(Protocol):
    """A service that answers requests.

    Attributes:
        replicas: Number of replicas that share the requests; 0 if the service is in the process
            that sends them.
    """

    replicas: int

    def answer(self, batch: RequestBatch) -> Answers:
        """Answer one request each of some actors.

        Raises:
            CapsuleError: CAP-T151, a probability is not finite; CAP-T362, a replica has died.
        """


class InferenceReplica:
    """Computes the answers to requests. It can be the :class:`Service` of its own process."""

    replicas = 0

    def __init__(
        self,
        rank: int,
        policy: Policy,
        batching: Batching,
        determinism: DeterminismSpec,
        seeds: SeedsSpec,
    ) -> None:
        """Prepare to answer with a policy.

        Args:
            rank: The replica's number.
            policy: The policy.
            batching: How batches are made.
            determinism: The spec's ``determinism`` section.
            seeds: The spec's ``seeds`` section, with the root seed of the run.
        """
        self._rank, self._policy, self._batching = rank, policy, batching
        self._determinism = determinism
        self._seeds = seeds
        self._words: dict[int, RequestWords] = {}
        self._shared: Stream | None = None

    def answer(self, batch: RequestBatch) -> Answers:
        """See :class:`Service`."""
        return self.answer_all([batch])[0]

    def answer_all(self, batches: Sequence[RequestBatch]) -> list[Answers]:
        """Answer the requests of several workers, which may share batches.

        Raises:
            CapsuleError: CAP-T151, a probability is not finite.
        """
        # The requests of all workers are joined, so that they can share batches. At the end the
        # answers are split again.
        lengths = [len(each.actors) for each in batches]
        versions = np.repeat([each.version for each in batches], lengths)
        rows = ((each.actors, each.numbers, *each.inputs) for each in batches)
        columns = versions, *map(_joined, zip(*rows, strict=True))
        order = np.arange(len(versions))
        if self._determinism.deterministic_routing:
            # In the order of version, actor and number, so that the batches do not depend on the
            # order of arrival. (The last key of lexsort is the primary one.)
            order = np.lexsort((columns[2], columns[1], versions))
        parts = [self._answer(each) for each in _by_version(_arranged(columns, order))]
        # This restores the order in which the requests came.
        answers = Answers(*map(_joined, zip(*parts, strict=True))).rows(np.argsort(order))
        ends = np.cumsum(lengths)
        return [answers.rows(slice(end - n, end)) for n, end in zip(lengths, ends, strict=True)]

    def _answer(self, batch: RequestBatch) -> Answers:
        """Answer requests of one policy version, in their order."""
        evaluated = self._batching.evaluate(
            lambda inputs: self._policy(batch.version, inputs), batch.actors.tolist(), batch.inputs
        )
        logarithms, probabilities, states = evaluated.outputs
        # With a NaN among the probabilities, sample() would return an action that does not exist.
        require_probabilities(probabilities)
        requests = zip(batch.actors.tolist(), batch.numbers.tolist(), strict=True)
        words = [self._word(batch.version, *request) for request in requests]
        actions = np.array(
            [sample(mu, uniform_of(word)) for mu, word in zip(probabilities, words, strict=True)]
        )
        return Answers(
            actions,
            logarithms[np.arange(len(actions)), actions],
            states,
            np.array(words, np.uint64),
            np.full(len(actions), self._rank),
            evaluated.sizes,
            evaluated.places,
        )

    def _word(self, version: int, actor: int, number: int) -> int:
        """Draw the word of a request."""
        if not self._determinism.request_seeds:
            return self._shared_word(version)
        # Kept for each actor, because the generator need not be advanced while its requests come in
        # their order.
        if actor not in self._words:
            self._words[actor] = RequestWords(request_account(self._seeds, actor).key)
        return self._words[actor].word(number)

    def _shared_word(self, version: int) -> int:
        if self._shared is None:
            # The index is the first version that it answers, or a resumed run would draw the same
            # words again.
            name = f"{_STREAM}/replica-{self._rank}"
            self._shared = Stream(name, self._seeds.root_of(_STREAM), version)
        return self._shared.word()


class RequestCounts:
    """Counts of the requests of one actor, and of how they were answered.

    Attributes:
        account: The account of the words with which its actions were drawn.
    """

    def __init__(self, seeds: SeedsSpec, actor: int, batching: Batching, replicas: int) -> None:
        """Begin with no request.

        Args:
            seeds: The spec's ``seeds`` section, with the root seed of the run.
            actor: Number of the actor.
            batching: How batches should be made.
            replicas: Number of replicas of the service.
        """
        self.account = request_account(seeds, actor)
        self._actor, self._batching, self._replicas = actor, batching, replicas
        self._own = RequestWords(self.account.key)
        self._counts = dict.fromkeys(_COUNTS, 0)

    def enter(self, word: int, replica: int, size: int, place: int) -> None:
        """Count how the next request was answered; :class:`Answers` describes the arguments."""
        counts, batching = self._counts, self._batching
        # The actor computes the word of its request itself, and does not rely on the statement of
        # the replica.
        counts["own_stream"] += word == self._own.word(self.account.draws)
        if batching.fixed:
            own = batching.rows, self._actor % batching.rows
            counts["own_row"] += (size, place) == own
        if self._replicas:
            counts["misrouted"] += replica != replica_of(self._actor, self._replicas)
        self.account.enter(word)

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot."""
        return {**self.account.state(), **self._counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot.

        Raises:
            CapsuleError: CAP-T201, it is of another actor or seed.
        """
        self.account.restore(state)
        self._counts = {name: state[name] for name in _COUNTS}


def counted(states: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Add up the counts of actors, from the :meth:`RequestCounts.state` of each.

    Returns:
        The counts of :class:`capsule.experiment.contract.Inference`, by field.
    """
    totals = {name: sum(state[name] for state in states) for name in _COUNTS}
    return {"requests": sum(state["draws"] for state in states), **totals}


def request_account(seeds: SeedsSpec, actor: int) -> Account:
    """Return an empty account of the words with which the actions of an actor are drawn."""
    return Account(_STREAM, seeds.root_of(_STREAM), actor)


def replica_of(actor: int, replicas: int) -> int:
    """Return the rank of the replica that answers a logical actor."""
    return actor % replicas


def sample(probabilities: NDArray[np.float32], uniform: float) -> int:
    """Return the action at which the cumulative distribution exceeds ``uniform``.

    Args:
        probabilities: float32 ``[actions]``, which are added in float64, in order.
        uniform: In ``[0, 1)``, relative to their sum.
    """
    # The order of a cumulative sum is fixed, while np.sum chooses one by the layout in memory. The
    # last sum need not be exactly 1: without multiplication by it, a uniform near 1 could be beyond
    # the last action.
    cumulated = np.cumsum(probabilities, dtype=np.float64)
    # side="right", so that an action of probability 0 is not drawn even with a uniform of 0.
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the concatenation of arrays; a single array is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _arranged(arrays: Arrays, order: NDArray[np.int64]) -> Arrays:
    """Return arrays with their rows in an order; arrays that have it already are not copied."""
    if (np.diff(order) == 1).all():
        return arrays
    return tuple(array[order] for array in arrays)


def _by_version(columns: Arrays) -> Iterator[RequestBatch]:
    """Split versions, actors, numbers and inputs, row by row, where the version changes."""
    versions = columns[0]
    # Without deterministic routing, requests stay in the order of arrival, so a version may occur
    # in several places, each of which is a batch of its own.
    borders = np.flatnonzero(np.diff(versions)) + 1
    for start, end in pairwise([0, *borders.tolist(), len(versions)]):
        actors, numbers, *inputs = (column[start:end] for column in columns[1:])
        yield RequestBatch(int(versions[start]), actors, numbers, tuple(inputs))


def require_probabilities(probabilities: NDArray[np.float32]) -> None:
    """Check the distributions from which actions are drawn.

    Args:
        probabilities: float32 ``[rows, actions]``.

    Raises:
        CapsuleError: CAP-T151, a probability is not finite, because training has diverged.
    """
    if not np.isfinite(probabilities).all():
        raise CapsuleError(
            "CAP-T151",
            "the policy has a probability of nan for an action",
            fix="Lower trainer.learning_rate or trainer.max_gradient_norm.",
        )
