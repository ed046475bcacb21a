"""Actor-critic networks of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3).

*Torso*. ``shallow`` is the small network of figure 3: convolutions of 16 filters of 8x8 in strides
of 4 and of 32 of 4x4 in strides of 2, then a dense layer of 256, all rectified. Nothing is padded:
on frames of 72x96 that makes the paper's 1.2 million parameters; padded as TensorFlow's "SAME" it
would have 1.5. ``residual`` is the large one, with 15 convolutions, as
:mod:`capsule.training.networks.recurrent` describes it. ``nature`` has the three convolutions of
Mnih et al. 2015, doi:10.1038/nature14236: section 5.3.2 says that the shallow network of Atari
"features three convolutional layers". For small tasks ``small-conv`` has the convolution of Young
and Tian 2019 (arXiv:1903.03176) instead, and ``mlp``, for flat observations, none. A rectified
dense layer follows each of them.

*Language*. With a ``vocabulary`` the features of an instruction, as
:mod:`capsule.training.networks.language` makes them, follow those of the torso.

*Memory*. The LSTM of :mod:`capsule.training.networks.recurrent` reads these features, the previous
reward and the previous action, one-hot (none: all zero). With ``recurrent_units`` 0 the heads read
the features alone, as in "the feed forward network used in (Mnih et al., 2016)" of section 5.3.2:
neither the previous action nor the previous reward.

*Heads*. A dense layer for the logits of the policy and one for the baseline.

Weights and biases start as :func:`capsule.training.networks.feedforward.initialize` has them; the
paper leaves it open. Under :data:`capsule.training.layers.backends.FIXED_ORDER` a row depends on
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
        language: Makes features of instructions; None where there are none.
        words: Most words of an instruction; 0 where there are none.
    """

    language: LanguageChannel | None = None
    words: int = 0

    def unroll(
        self, parameters: Tensors, seen: Sequences
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Evaluate sequences.

        Args:
            parameters: Name to tensor.
            seen: A reset sets the recurrent state to zero: an episode begins there. Elsewhere row 0
                continues from ``states``.

        Returns:
            Logits, float32 ``[time, batch, actions]``; baselines, ``[time, batch]``; and the states
            after the last row, ``[batch, *state_shape]``.

        Raises:
            ValueError: Instructions are missing, or the network reads none.
        """
        features = self.torso.features(parameters, seen.observations.flatten(0, 1))
        instructions, states = seen.instructions, seen.states
        if (0 if instructions is None else instructions.shape[2]) != self.words:
            raise ValueError("instructions go with a network that has a vocabulary")
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
    """Describe the network with the torso of a name, or of layers, for one kind of observation.

    The LSTM has ``recurrent_units``, 0 for none: in the paper 256, and on Atari none. The torso's
    dense layer has ``hidden_units``: in the paper 256, and in ``residual`` always. ``vocabulary``
    words make instructions of up to ``words``; both are 0 where there are none.
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
