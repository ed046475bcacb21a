"""Inference: an action for each request, whatever else is in its batch and whichever answers.

A *replica* evaluates the policy for requests of any actors and draws their actions. Three things
would let timing into the results, and each has a switch in the spec's ``determinism`` section:

* ``batch_invariance``: an answer does not depend on its batch
  (:mod:`capsule.training.acting.batching`).
* ``request_seeds``: the action of request ``n`` of an actor is drawn from block ``n`` of the words
  of that actor's stream ``exploration`` (:class:`~capsule.training.state.streams.RequestWords`). So
  it depends on the root seed, the actor and ``n``; not on the replica, nor on the order of arrival.
  Without it a replica draws for all from one stream of its own.
* ``deterministic_routing``: actor ``i`` is answered by replica ``i`` modulo their number, and a
  replica works in the order (policy version, actor, request). Without it requests are dealt out to
  the replicas, and worked on, in the order of their arrival.

Every answer says how it came about, and the actor keeps count (:class:`Requests`): the ledger
judges by what the actors counted, not by the switches.

Nothing here moves data between processes. Actor numbers are logical; which process plays an actor
is no part of a result.
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
"""Evaluates a version of the policy on a batch: its inputs to ``ln mu`` and ``mu``, float32
``[rows, actions]``, and the recurrent states after the step, ``[rows, *state_shape]``."""


class Asked(NamedTuple):
    """One request each of some actors, with the same version of the policy.

    Attributes:
        version: Version of the policy that must answer.
        actors: int64 ``[requests]``.
        numbers: int64 ``[requests]``: which request of its actor each is, from 0.
        inputs: What the policy takes, ``[requests, …]`` each.
    """

    version: int
    actors: NDArray[np.int64]
    numbers: NDArray[np.int64]
    inputs: Arrays


class Answers(NamedTuple):
    """The answers to some requests, a row for each.

    Attributes:
        actions: int64: the actions drawn.
        logarithms: float32: ``ln mu`` of them.
        states: float32 ``[requests, *state_shape]``: recurrent, after the step.
        words: uint64: what each action was drawn by.
        replicas: int64: who answered.
        sizes: int64: rows of the batch that the policy was evaluated in.
        places: int64: the request's row in it.
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
        replicas: How many requests are shared among; 0: they are answered where they are asked.
    """

    replicas: int

    def answer(self, asked: Asked) -> Answers:
        """Answer one request each of some actors.

        Raises:
            CapsuleError: CAP-T151, the policy is no distribution; CAP-T362, a replica is gone.
        """


class InferenceReplica:
    """Answers requests; as a :class:`Service`, those of its own process."""

    replicas = 0

    def __init__(
        self,
        rank: int,
        policy: Policy,
        batching: Batching,
        determinism: DeterminismSpec,
        seeds: SeedsSpec,
    ) -> None:
        """Take a policy.

        Args:
            rank: The replica's number.
            policy: What answers.
            batching: How batches are made.
            determinism: The spec's ``determinism`` section.
            seeds: The spec's ``seeds`` section, with the root seed that holds.
        """
        self._rank, self._policy, self._batching = rank, policy, batching
        self._determinism = determinism
        self._seeds = seeds
        self._words: dict[int, RequestWords] = {}
        self._shared: Stream | None = None

    def answer(self, asked: Asked) -> Answers:
        """See :class:`Service`."""
        return self.answer_all([asked])[0]

    def answer_all(self, asked: Sequence[Asked]) -> list[Answers]:
        """Answer everything that is there, in batches that several may share.

        Raises:
            CapsuleError: CAP-T151, the policy is no distribution.
        """
        # The requests of all who ask become one table, so that they can share batches. The end
        # takes the answers apart again.
        lengths = [len(each.actors) for each in asked]
        versions = np.repeat([each.version for each in asked], lengths)
        rows = ((each.actors, each.numbers, *each.inputs) for each in asked)
        columns = versions, *map(_joined, zip(*rows, strict=True))
        order = np.arange(len(versions))
        if self._determinism.deterministic_routing:
            # By version, actor and number: what shares a batch follows from what was asked, and
            # not from who asked first.
            # The last key of lexsort is the first to sort by.
            order = np.lexsort((columns[2], columns[1], versions))
        parts = [self._answer(each) for each in _by_version(_arranged(columns, order))]
        # Back into the order in which the requests came.
        answers = Answers(*map(_joined, zip(*parts, strict=True))).rows(np.argsort(order))
        ends = np.cumsum(lengths)
        return [answers.rows(slice(end - n, end)) for n, end in zip(lengths, ends, strict=True)]

    def _answer(self, asked: Asked) -> Answers:
        """Answer requests of one policy version, in their order."""
        evaluated = self._batching.evaluate(
            lambda inputs: self._policy(asked.version, inputs), asked.actors.tolist(), asked.inputs
        )
        logarithms, probabilities, states = evaluated.outputs
        # With a NaN among them no sum exceeds the uniform, and sample() would return an action that
        # does not exist.
        require_probabilities(probabilities)
        requests = zip(asked.actors.tolist(), asked.numbers.tolist(), strict=True)
        words = [self._word(asked.version, *request) for request in requests]
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
        # Kept for each actor: while its requests come in their order, the generator need not be
        # advanced.
        if actor not in self._words:
            self._words[actor] = RequestWords(request_account(self._seeds, actor).key)
        return self._words[actor].word(number)

    def _shared_word(self, version: int) -> int:
        if self._shared is None:
            # By the first version that it answers, or a resumed run would draw the same again.
            name = f"{_STREAM}/replica-{self._rank}"
            self._shared = Stream(name, self._seeds.root_of(_STREAM), version)
        return self._shared.word()


class Requests:
    """The requests of one actor, and how they were answered.

    Attributes:
        account: The words that its actions were drawn by.
    """

    def __init__(self, seeds: SeedsSpec, actor: int, batching: Batching, replicas: int) -> None:
        """Begin with no request.

        Args:
            seeds: The spec's ``seeds`` section, with the root seed that holds.
            actor: Whose.
            batching: How batches ought to be made.
            replicas: Number of replicas of the service.
        """
        self.account = request_account(seeds, actor)
        self._actor, self._batching, self._replicas = actor, batching, replicas
        self._own = RequestWords(self.account.key)
        self._counts = dict.fromkeys(_COUNTS, 0)

    def enter(self, word: int, replica: int, size: int, place: int) -> None:
        """Enter how the next request was answered, see :class:`Answers`."""
        counts, batching = self._counts, self._batching
        # The actor computes the word of its request itself, and does not rely on what the replica
        # states.
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
    """Add up what actors counted, from the :meth:`Requests.state` of each.

    Returns:
        The counts of :class:`capsule.experiment.contract.Inference`, by field.
    """
    totals = {name: sum(state[name] for state in states) for name in _COUNTS}
    return {"requests": sum(state["draws"] for state in states), **totals}


def request_account(seeds: SeedsSpec, actor: int) -> Account:
    """Return an empty account of the words that the requests of an actor are drawn from."""
    return Account(_STREAM, seeds.root_of(_STREAM), actor)


def replica_of(actor: int, replicas: int) -> int:
    """Return the rank of the replica that answers a logical actor."""
    return actor % replicas


def sample(probabilities: NDArray[np.float32], uniform: float) -> int:
    """Return the action at which the distribution function passes ``uniform``.

    Args:
        probabilities: float32 ``[actions]``; added up one after the other in float64.
        uniform: In ``[0, 1)``, of their sum.
    """
    # A running sum has one order; np.sum chooses one by the layout in memory. The last sum is not
    # exactly 1: unless the uniform is multiplied by it, a uniform near 1 may be beyond the last
    # action.
    cumulated = np.cumsum(probabilities, dtype=np.float64)
    # On the right: an action of probability 0 is not drawn even by a uniform of 0.
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _arranged(arrays: Arrays, order: NDArray[np.int64]) -> Arrays:
    """Return arrays with their rows in an order; what has it already is not copied."""
    if (np.diff(order) == 1).all():
        return arrays
    return tuple(array[order] for array in arrays)


def _by_version(columns: Arrays) -> Iterator[Asked]:
    """Split versions, actors, numbers and inputs, row by row, where the version changes."""
    versions = columns[0]
    # Without deterministic routing, a version may occur in several places. Each has a batch of its
    # own, because the order of arrival stays.
    borders = np.flatnonzero(np.diff(versions)) + 1
    for start, end in pairwise([0, *borders.tolist(), len(versions)]):
        actors, numbers, *inputs = (column[start:end] for column in columns[1:])
        yield Asked(int(versions[start]), actors, numbers, tuple(inputs))


def require_probabilities(probabilities: NDArray[np.float32]) -> None:
    """Check the distributions that actions are drawn from.

    Args:
        probabilities: float32 ``[rows, actions]``.

    Raises:
        CapsuleError: CAP-T151, it is no distribution, as the parameters are too large.
    """
    if not np.isfinite(probabilities).all():
        raise CapsuleError(
            "CAP-T151",
            "the policy gives an action a probability of nan",
            fix="Lower trainer.learning_rate or trainer.max_gradient_norm.",
        )
