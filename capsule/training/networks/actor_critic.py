"""Actor-critic networks of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3).

*Torso*. ``shallow`` is the small network of figure 3: 16 filters of 8x8 with stride 4, 32 filters
of 4x4 with stride 2, and a dense layer of 256, all rectified. It has no padding: on frames of 72x96
it therefore has the paper's 1.2 million parameters; with the padding "SAME" of TensorFlow it would
have 1.5 million. ``residual`` is the large network, with 15 convolutions, which
:mod:`capsule.training.networks.recurrent` describes. ``nature`` has the three convolutions of Mnih
et al. 2015, doi:10.1038/nature14236: section 5.3.2 says that the shallow network of Atari "features
three convolutional layers". For small tasks, ``small-conv`` has the convolution of Young and Tian
2019 (arXiv:1903.03176), and ``mlp``, for flat observations, has none. A rectified dense layer
follows the convolutions of each torso.

*Language*. With a ``vocabulary``, the features of an instruction
(:mod:`capsule.training.networks.language`) are appended to those of the torso.

*Memory*. The LSTM of :mod:`capsule.training.networks.recurrent` reads these features, the previous
reward, and the previous action as a one-hot vector, which is zero if there is none. With
``recurrent_units`` 0 the heads read the features alone, and neither the previous action nor the
previous reward, as in "the feed forward network used in (Mnih et al., 2016)" of section 5.3.2.

*Heads*. One dense layer computes the logits of the policy, and another one the baseline.

:func:`capsule.training.networks.feedforward.initialize` draws the initial weights and biases, which
the paper leaves open. Under :data:`capsule.training.layers.backends.FIXED_ORDER` a row depends on
its own inputs alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from capsule.experiment.trainers import OwnNetwork
from capsule.training.layers.backends import LayerBackend
from capsule.training.networks.feedforward import (
    PlainName,
    dense,
    dense_shapes,
    make_convolutions,
)
from capsule.training.networks.language import LanguageChannel
from capsule.training.networks.recurrent import (
    Architecture,
    Sequences,
    Tensors,
    lstm_shapes,
    make_plain_torso,
    make_residual_torso,
    memory_inputs,
    unroll_lstm,
)
from capsule.training.state.frames import FrameLayout

ImpalaTorsoName = PlainName | Literal["residual"]


@dataclass(frozen=True)
class ActorCriticNetwork(Architecture):
    """A policy and a baseline.

    Attributes:
        language: Computes the features of instructions; None without instructions.
        words: Most words of an instruction; 0 without instructions.
    """

    language: LanguageChannel | None = None
    words: int = 0

    def unroll(
        self, parameters: Tensors, seen: Sequences
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Evaluate sequences.

        Args:
            parameters: Name to tensor.
            seen: The inputs. A reset, which marks the beginning of an episode, sets the recurrent
                state to zero. If row 0 is not reset, it continues from ``states``.

        Returns:
            Logits, float32 ``[time, batch, actions]``; baselines, ``[time, batch]``; and the states
            after the last row, ``[batch, *state_shape]``.

        Raises:
            ValueError: Instructions are missing, or are given to a network that reads none.
        """
        features = self.torso.features(parameters, seen.observations.flatten(0, 1))
        instructions, states = seen.instructions, seen.states
        if (0 if instructions is None else instructions.shape[2]) != self.words:
            raise ValueError("instructions require a network with a vocabulary, and vice versa")
        if instructions is not None and self.language is not None:
            told = self.language.features(parameters, instructions.flatten(0, 1))
            features = torch.cat((features, told), 1)
        hidden = features
        # Without a memory, the shape of a state is (0,).
        if 0 not in self.state_shape:
            hidden = memory_inputs(features, seen, self.actions)
            # unroll_lstm() leaves row 0 as it is.
            first = states.where(~seen.resets[0].view(-1, 1, 1), 0.0)
            fresh = torch.zeros_like(states)
            hidden, states = unroll_lstm(
                self.products, parameters, hidden, first, fresh, seen.resets
            )
        logits, baselines = (
            dense(self.products, parameters, name, hidden) for name in ("policy", "baseline")
        )
        rows = seen.previous_actions.shape
        return logits.reshape(*rows, self.actions), baselines.reshape(rows), states


def make_actor_critic_network(
    name: ImpalaTorsoName | OwnNetwork,
    *,
    frame_stack: int,
    layout: FrameLayout,
    actions: int,
    recurrent_units: int,
    hidden_units: int,
    products: LayerBackend,
    vocabulary: int = 0,
    words: int = 0,
) -> ActorCriticNetwork:
    """Return the network with the torso that a spec names or describes.

    Args:
        name: The spec's ``trainer.network``.
        frame_stack: Frames of one observation.
        layout: Layout of a frame.
        actions: Number of actions.
        recurrent_units: Units of the LSTM, 0 for none; 256 in the paper, and none on Atari.
        hidden_units: Units of the torso's dense layer, 256 in the paper; not used for ``residual``,
            which has 256, nor for a network of layers.
        products: The arithmetic of the layers.
        vocabulary: Number of words of the vocabulary; 0 without instructions.
        words: Most words of an instruction; 0 without instructions.

    Raises:
        CapsuleError: As :func:`capsule.training.networks.feedforward.make_convolutions`.
    """
    if name == "residual":
        torso = make_residual_torso(frame_stack, layout, products)
    else:
        stack = make_convolutions(name, frame_stack, layout, products)
        units = name.dense if isinstance(name, OwnNetwork) else (hidden_units,)
        torso = make_plain_torso(stack, units)
    language = LanguageChannel(vocabulary, products) if vocabulary else None
    shapes, width = dict(torso.shapes), torso.width
    if language is not None:
        shapes |= language.shapes
        width += language.width
    if recurrent_units:
        shapes |= lstm_shapes(width + 1 + actions, recurrent_units)
        width = recurrent_units
    shapes |= dense_shapes("policy", width, actions) | dense_shapes("baseline", width, 1)
    state_shape = (2, recurrent_units) if recurrent_units else (0,)
    return ActorCriticNetwork(shapes, state_shape, actions, torso, products, language, words)
