"""The language channel of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3).

*Words*. A :class:`Vocabulary` numbers its words in the order of their characters. An instruction is
split at white space and at ``, . ; : ! ?``, which have no numbers; upper case is treated as lower
case.

*Channel*. Each word has an embedding of 20 numbers. An LSTM of 64 units, as in
:mod:`capsule.training.networks.recurrent`, reads them one by one, beginning with a state of zero;
its outputs at the last word are the features of the instruction. The features of an empty
instruction are zero.

Under :data:`capsule.training.layers.backends.FIXED_ORDER` the features depend on the instruction
alone, bit for bit: neither on other instructions in the batch, nor on the number of unused places
for words. Equal instructions are therefore evaluated once, with the sum of their gradients, and
only up to the last word of the longest one. The bits of torch's libraries depend on sizes. With
them, every row is evaluated with all its places for words, because the instructions of some rows
would otherwise change the sizes, and so the bits, of others.

Tables are read by a product with one-hot rows. Its result is exact, and its gradient is a sum in
the order of the layers' arithmetic; ``index_add`` and similar operators add in any order on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import LanguageSpec
from capsule.training.layers.backends import LayerBackend
from capsule.training.networks.feedforward import Shape
from capsule.training.networks.recurrent import Tensors, lstm_shapes, unroll_lstm

NO_WORD = -1
_EMBEDDING = 20
_UNITS = 64
_PREFIX = "language."
_BETWEEN_WORDS = re.compile(r"[\s,.;:!?]+")

# The grammar of BabyAI (Chevalier-Boisvert et al. 2019, arXiv:1810.08272, figure 2), as minigrid
# writes its missions.
BABYAI_WORDS = (
    *("a", "after", "and", "ball", "behind", "blue", "box", "door", "front", "go", "green", "grey"),
    *("in", "key", "left", "next", "object", "of", "on", "open", "pick", "purple", "put", "red"),
    *("right", "the", "then", "to", "up", "yellow", "you", "your"),
)


# --- words ----------------------------------------------------------------------------------------


class Vocabulary:
    """The words of instructions.

    Attributes:
        words: All words, sorted; the number of a word is its index.
        longest: Most words of an instruction; 0 without instructions.
    """

    def __init__(self, words: Iterable[str], longest: int) -> None:
        """Number the words.

        Args:
            words: The words, in any order; repetitions are ignored.
            longest: Most words of an instruction.

        Raises:
            CapsuleError: CAP-T241, one of them is not a single word in lower case.
        """
        self.words = tuple(sorted(set(words)))
        self.longest = longest
        self._numbers = {word: number for number, word in enumerate(self.words)}
        for word in self.words:
            if _split(word) != [word]:
                raise CapsuleError(
                    "CAP-T241",
                    f"the vocabulary has {word!r}, which is not one word in lower case",
                    fix="Split it at spaces, drop punctuation, and write it in lower case.",
                )

    def encode(self, instruction: str) -> NDArray[np.int64]:
        """Return the numbers of an instruction's words, then :data:`NO_WORD`: int64 ``[longest]``.

        Raises:
            CapsuleError: CAP-T242, a word is not in the vocabulary, or there are too many words.
        """
        words = _split(instruction)
        unknown = [word for word in words if word not in self._numbers]
        if unknown:
            raise _unreadable(
                f"the instruction {instruction!r} has the word {unknown[0]!r}, which is not among "
                f"the {len(self.words)} of the vocabulary",
                fix="Add the word to trainer.language.vocabulary.",
            )
        if len(words) > self.longest:
            raise _unreadable(
                f"the instruction {instruction!r} has {len(words)} words; there is room for "
                f"{self.longest}",
                fix=f"Set trainer.language.longest to {len(words)} or more.",
            )
        numbers = np.full(self.longest, NO_WORD, np.int64)
        numbers[: len(words)] = [self._numbers[word] for word in words]
        return numbers


NO_INSTRUCTIONS = Vocabulary((), 0)


def make_vocabulary(spec: LanguageSpec | None) -> Vocabulary:
    """Return the vocabulary that a spec's section ``trainer.language`` describes.

    Raises:
        CapsuleError: CAP-T241, as :class:`Vocabulary`.
    """
    if spec is None:
        return NO_INSTRUCTIONS
    return Vocabulary(
        BABYAI_WORDS if spec.vocabulary == "babyai" else spec.vocabulary, spec.longest
    )


def _split(text: str) -> list[str]:
    return [word for word in _BETWEEN_WORDS.split(text.lower()) if word]


def _unreadable(message: str, *, fix: str) -> CapsuleError:
    return CapsuleError("CAP-T242", message, fix=fix)


# --- the channel ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanguageChannel:
    """A network that computes the features of instructions.

    Attributes:
        vocabulary: Number of words of the vocabulary.
        products: The arithmetic of its layers.
    """

    vocabulary: int
    products: LayerBackend

    @property
    def shapes(self) -> dict[str, Shape]:
        """Parameter name to shape, in order."""
        lstm = lstm_shapes(_EMBEDDING, _UNITS)
        return {
            f"{_PREFIX}embedding.weight": (self.vocabulary, _EMBEDDING),
            **{_PREFIX + name: shape for name, shape in lstm.items()},
        }

    @property
    def width(self) -> int:
        """The number of features of one instruction."""
        return _UNITS

    def features(self, parameters: Tensors, instructions: torch.Tensor) -> torch.Tensor:
        """Return the features of instructions, float32 ``[batch, width]``.

        Args:
            parameters: Name to tensor.
            instructions: int64 ``[batch, words]``, as :meth:`Vocabulary.encode` numbers words.
        """
        if not self.products.fixed_order:
            return self._evaluate(parameters, instructions)
        distinct, places = torch.unique(instructions, dim=0, return_inverse=True)
        longest = max(1, int(_lengths(distinct).max()))  # an LSTM of no steps has no output
        return _rows(self.products, self._evaluate(parameters, distinct[:, :longest]), places)

    def _evaluate(self, parameters: Tensors, instructions: torch.Tensor) -> torch.Tensor:
        words = instructions.t()
        embedded = _rows(self.products, parameters[f"{_PREFIX}embedding.weight"], words.flatten())
        lstm = {name: parameters[_PREFIX + name] for name in lstm_shapes(_EMBEDDING, _UNITS)}
        zero = embedded.new_zeros(len(instructions), 2, _UNITS)
        resets = torch.zeros_like(words, dtype=torch.bool)
        outputs, _ = unroll_lstm(self.products, lstm, embedded, zero, zero, resets)
        steps = torch.arange(len(words), device=words.device).unsqueeze(1)
        at_last = (steps == _lengths(instructions) - 1).unsqueeze(2)
        # This sums one number and zeros, which is exact in any order, and so is its gradient.
        return outputs.view(*words.shape, _UNITS).where(at_last, 0.0).sum(0)


def _lengths(instructions: torch.Tensor) -> torch.Tensor:
    """Return the number of words of each row, int64 ``[batch]``."""
    return (instructions != NO_WORD).sum(1)


def _rows(products: LayerBackend, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return rows of a table, float32 ``[batch, width]``; zeros for :data:`NO_WORD`.

    Args:
        products: The arithmetic of the product.
        table: float32 ``[rows, width]``.
        numbers: int64 ``[batch]``.
    """
    rows = torch.arange(len(table), device=table.device)
    # NO_WORD equals none of the row numbers, and so gives a row of zeros.
    chosen = (numbers.unsqueeze(1) == rows).to(torch.float32)
    return products.dense(chosen, table.t().contiguous(), None)
