"""Named random streams: one per source of randomness (Nagarajan et al. 2019, arXiv:1809.05676).

Every stream is Philox4x64-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405, "Parallel random
numbers: as easy as 1, 2, 3") in counter mode: word ``n`` of a stream is word ``n mod 4`` of the
block that encrypts the counter ``n // 4`` under the stream's key. The key is a hash of seed, name
and index. Streams are therefore independent, a new stream does not change another one, and each can
be re-seeded separately. Only raw 64-bit words come from numpy; all distributions are computed by
formulas of this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.contract import StreamProfile, stream_key
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SeedsSpec, StreamName

_WORDS_PER_BLOCK = 4
_COUNTERS = 2**256
_UNIT = 2.0**-53  # spacing of the uniforms


class Account:
    """The account of one random stream: how many words were drawn, and a digest of them.

    Every draw adds one link to :attr:`digest`: SHA-256 over the previous digest's bytes and the
    drawn words (little-endian), starting from 32 zero bytes.

    Attributes:
        name: Name of the stream.
        seed: Seed from which it is derived.
        index: Distinguishes the streams of one name, such as one for each actor.
        key: Philox key (:func:`capsule.experiment.contract.stream_key`); its two 64-bit words are
            read little-endian.
        draws: Number of 64-bit words drawn so far.
    """

    def __init__(self, name: str, seed: int, index: int = 0) -> None:
        self.name = name
        self.seed = seed
        self.index = index
        self.key = stream_key(seed, name, index)
        self._jump(0, bytes(32))

    @property
    def digest(self) -> str:
        """SHA-256 chain over every draw, as lower-case hexadecimal digits."""
        return self._head.hex()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot from which ``restore`` continues."""
        return {"key": self.key, "draws": self.draws, "digest": self.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot of the same stream.

        Raises:
            CapsuleError: CAP-T201, the snapshot belongs to another stream or seed.
        """
        if state["key"] != self.key:
            raise CapsuleError(
                "CAP-T201",
                f"stream {self.name!r}: the saved state has key {state['key']}, but seed "
                f"{self.seed} and index {self.index} give {self.key}",
                fix="Resume with the spec with which the run began, or start a new run directory.",
            )
        self._jump(state["draws"], bytes.fromhex(state["digest"]))

    def profile(self) -> StreamProfile:
        """Return the profile of the stream so far."""
        return StreamProfile(
            name=self.name, seed=self.seed, key=self.key, draws=self.draws, digest=self.digest
        )

    def enter(self, word: int) -> None:
        """Count a draw of one word."""
        self._enter(1, word.to_bytes(8, "little"))

    def _jump(self, draws: int, head: bytes) -> None:
        """Continue after ``draws`` words, with ``head`` as the end of their chain."""
        self.draws = draws
        self._head = head

    def _enter(self, count: int, words: bytes) -> None:
        """Count one draw of ``count`` words."""
        self.draws += count
        self._head = hashlib.sha256(self._head + words).digest()


class Stream(Account):
    """One random stream, from which numbers are drawn one after the other."""

    def word(self) -> int:
        """Draw one 64-bit word."""
        word: int = self._philox.random_raw()
        self.enter(word)
        return word

    def uniform(self) -> float:
        """Draw one float64, uniform over the multiples of 2^-53 in [0, 1)."""
        return uniform_of(self.word())

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Draw ``count`` uniforms, float64 ``[count]``, from as many words.

        The digest differs from that of ``count`` single draws, because this is one draw.
        """
        # All operations are exact: 53 bits fit into a float64, and the factor is a power of two.
        return (self._words(count) >> np.uint64(11)) * np.float64(_UNIT)

    def integer(self, bound: int) -> int:
        """Draw an integer in ``[0, bound)``: ``floor(uniform * bound)``.

        The rounded product never reaches ``bound``: ``bound * (1 - 2^-53)`` rounds to the double
        before it. The bias is below ``bound * 2^-53``.

        Raises:
            ValueError: ``bound`` is not in ``[1, 2^53]``.
        """
        _check_bound(bound)
        return int(self.uniform() * bound)

    def integers(self, bound: int, count: int) -> NDArray[np.int64]:
        """Draw ``count`` integers as :meth:`integer` does: int64 ``[count]``.

        Raises:
            ValueError: ``bound`` is not in ``[1, 2^53]``.
        """
        _check_bound(bound)
        return (self.uniforms(count) * bound).astype(np.int64)

    def _jump(self, draws: int, head: bytes) -> None:
        super()._jump(draws, head)
        block, word = divmod(draws, _WORDS_PER_BLOCK)
        self._philox = _philox(self.key, block)
        # Philox can only be set to the beginning of a block, so the words drawn before are skipped.
        self._philox.random_raw(word)

    def _words(self, count: int) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self._philox.random_raw(count)
        self._enter(count, words.astype("<u8", copy=False).tobytes())
        return words


class RequestWords:
    """The random words of numbered requests, each of which has a block of a key of its own.

    The word of request ``n`` is the first word of block ``n``, that is word ``4 n`` of the key. It
    therefore depends neither on the requests that were answered before nor on the replica.
    """

    def __init__(self, key: str) -> None:
        """Begin with request 0 of a Philox key, as :attr:`Account.key`."""
        self._philox = _philox(key, 0)
        self._next = 0

    def word(self, request: int) -> int:
        """Return the 64-bit word of a request."""
        # The counter wraps around, so an earlier block can also be reached by advancing.
        if request != self._next:
            self._philox.advance((request - self._next) % _COUNTERS)
        self._next = request + 1
        # The rest of the block is drawn as well, so that the generator is at the block of the next
        # request, and requests in their order need no advance.
        return int(self._philox.random_raw(_WORDS_PER_BLOCK)[0])


def make_streams(seeds: SeedsSpec) -> dict[StreamName, Stream]:
    """Make every stream of an experiment, from its own seed or, by default, the root seed."""
    names: tuple[StreamName, ...] = get_args(StreamName)
    return {name: Stream(name, seeds.root_of(name)) for name in names}


def uniform_of(word: int) -> float:
    """Return the uniform of a 64-bit word, which is a multiple of 2^-53 in [0, 1)."""
    return (word >> 11) * _UNIT


def _philox(key: str, block: int) -> np.random.Philox:
    """Return a generator whose next word is the first word of a block of a key."""
    number = int.from_bytes(bytes.fromhex(key), "little")
    # numpy increments the counter before each block.
    return np.random.Philox(key=number, counter=(block - 1) % _COUNTERS)


def _check_bound(bound: int) -> None:
    if not 1 <= bound <= 2**53:
        raise ValueError(f"bound {bound} is not in [1, 2^53]")
