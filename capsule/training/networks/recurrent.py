"""Recurrent dueling Q-networks of R2D2 (Kapturowski et al. 2019, OpenReview r1lyTjAqYX, appendix).

*Torso*. ``nature`` has the three convolutions of Mnih et al. 2015, doi:10.1038/nature14236,
``small-conv`` has the one of Young and Tian 2019, arXiv:1903.03176, and ``mlp`` one rectified dense
layer of ``hidden_units`` for flat observations. ``residual`` has the 15 convolutions of IMPALA's
large network (Espeholt et al. 2018, arXiv:1802.01561, figure 3, right), which R2D2+ uses: three
sections of a 3x3 convolution, max-pooling over 3x3 with stride 2 and two residual blocks, then a
rectifier and a rectified dense layer of 256. Its convolutions and its pooling have TensorFlow's
padding "SAME": an odd row or column of padding is at the bottom or the right. ``nature`` and
``residual`` divide pixels by 255.

*Memory*. An LSTM (Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735, with the forget
gate of Gers et al. 2000, doi:10.1162/089976600300015015) reads the torso's features, the previous
reward, and the previous action as a one-hot vector, which is zero if there is none::

    i, f, o = sigmoid(...), g = tanh(...)    of (W x + b) + U h, in the order i, f, g, o
    c <- f c + i g
    h <- o tanh(c)

With ``recurrent_units`` 0 a rectified dense layer of ``hidden_units`` reads the same inputs: the
paper's feed-forward variant (table 1).

*Heads*. Advantages ``A`` and a value ``V`` are computed by two heads, each a rectified layer of
``hidden_units`` and a dense layer: ``Q = V + (A - mean A)`` (Wang et al. 2016, arXiv:1511.06581,
equation 9).

*Initialization*. :func:`capsule.training.networks.feedforward.initialize` draws the weights and
biases; the paper leaves them open. All biases of the LSTM, also those of the forget gate, are
uniform in ``[-1/sqrt(units), 1/sqrt(units))``, as in ``torch.nn.LSTM``. That one, however, has two
bias vectors, of which only the sum counts, and draws ``W`` from this range, too, instead of by its
own fan-in.

Under :data:`capsule.training.layers.backends.FIXED_ORDER` every row of a result depends on its own
inputs alone, so a policy may be evaluated in any batch, and a sequence as a whole or step by step.
All other operations are element-wise. On the CPU, Capsule's own kernels compute those of the LSTM,
because ``torch.sigmoid`` gives an element other bits outside of a full vector (30 of 1,003 elements
had other bits alone than in a tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.nn import functional

from capsule.experiment.trainers import OwnNetwork
from capsule.training.layers import kernels
from capsule.training.layers.backends import LayerBackend
from capsule.training.networks.feedforward import (
    Convolutions,
    Shape,
    convolution_shapes,
    dense,
    dense_shapes,
    images,
    joined,
    make_convolutions,
    prefixes,
    unpacked,
)
from capsule.training.networks.own_module import OwnModule
from capsule.training.state.frames import FrameLayout

TorsoName = Literal["nature", "residual", "small-conv", "mlp"]
Tensors = Mapping[str, torch.Tensor]
_SECTIONS = (16, 32, 32)  # channels
_BLOCKS = 2  # in a section
_RESIDUAL_UNITS = 256


class Sequences(NamedTuple):
    """The inputs of a network, time-major. An actor's step is a sequence of one row.

    Attributes:
        observations: uint8 or float32 ``[time, batch, frame_stack, *frame_shape]``.
        previous_actions: int64 ``[time, batch]``: the action before each row; -1 for none.
        previous_rewards: float32 ``[time, batch]``: the reward of that action.
        states: Recurrent states before row 0, float32 ``[batch, *state_shape]``.
        resets: bool ``[time, batch]``: the rows before which the recurrent state is set anew.
        instructions: int64 ``[time, batch, words]``, as
            :meth:`capsule.training.networks.language.Vocabulary.encode` numbers words; None, or
            with 0 words, if the network reads none.
    """

    observations: torch.Tensor
    previous_actions: torch.Tensor
    previous_rewards: torch.Tensor
    states: torch.Tensor
    resets: torch.Tensor
    instructions: torch.Tensor | None = None


class Torso(Protocol):
    """A network that computes the features of observations."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """Parameter name to shape, in order."""

    @property
    def width(self) -> int:
        """The number of features of one observation."""

    @property
    def modules(self) -> tuple[OwnModule, ...]:
        """The user modules that are part of the torso."""

    def features(self, parameters: Tensors, observations: torch.Tensor) -> torch.Tensor:
        """Return the features of observations, float32 ``[batch, width]``.

        Args:
            parameters: Name to tensor.
            observations: uint8 or float32 ``[batch, frame_stack, *frame_shape]``.
        """


@dataclass(frozen=True)
class Architecture:
    """A network without its parameters: a pure function of parameters, inputs and states.

    Attributes:
        shapes: Parameter name to shape, in order.
        state_shape: Shape of a recurrent state: ``(2, units)``, hidden and cell; ``(0,)`` for a
            network without memory.
        actions: Number of actions.
        torso: The part that computes the features of observations.
        products: The arithmetic of the layers.
    """

    shapes: dict[str, Shape]
    state_shape: Shape
    actions: int
    torso: Torso
    products: LayerBackend


class RecurrentNetwork(Architecture):
    """A recurrent or feed-forward dueling Q-network."""

    def unroll(self, parameters: Tensors, seen: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate sequences.

        No gradient flows from a row that is reset to the rows before it.

        Args:
            parameters: Name to tensor.
            seen: The inputs. A reset sets the recurrent state to ``states``; row 0 always has one.

        Returns:
            Q-values, float32 ``[time, batch, actions]``, and the states after the last row, float32
            ``[batch, *state_shape]``.
        """
        hidden, states = self.remember(parameters, seen)
        return self._duel(parameters, hidden).view(*seen.previous_actions.shape, -1), states

    def remember(self, parameters: Tensors, seen: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate sequences as :meth:`unroll`, up to the heads.

        Returns:
            The outputs of the memory, float32 ``[time * batch, units]``, and the states after the
            last row.
        """
        features = self.torso.features(parameters, seen.observations.flatten(0, 1))
        inputs = memory_inputs(features, seen, self.actions)
        states = seen.states
        if 0 in self.state_shape:
            return dense(self.products, parameters, "memory", inputs).relu(), states
        return unroll_lstm(self.products, parameters, inputs, states, states, seen.resets)

    def _duel(self, parameters: Tensors, hidden: torch.Tensor) -> torch.Tensor:
        advantages, value = (
            self._head(parameters, name, hidden) for name in ("advantage", "value")
        )
        # The mean is computed as a product with ones, whose sums have the order of ``products``.
        total = self.products.dense(advantages, advantages.new_ones(1, self.actions), None)
        return value + (advantages - total / self.actions)

    def _head(self, parameters: Tensors, name: str, hidden: torch.Tensor) -> torch.Tensor:
        hidden = dense(self.products, parameters, f"{name}1", hidden).relu()
        return dense(self.products, parameters, f"{name}2", hidden)


def make_recurrent_network(
    name: TorsoName | OwnNetwork,
    *,
    frame_stack: int,
    layout: FrameLayout,
    actions: int,
    recurrent_units: int,
    hidden_units: int,
    products: LayerBackend,
) -> RecurrentNetwork:
    """Return the network with the torso that a spec names or describes.

    Args:
        name: The spec's ``trainer.network``.
        frame_stack: Frames of one observation.
        layout: Layout of a frame.
        actions: Number of actions.
        recurrent_units: Units of the LSTM; 0 for a dense layer instead.
        hidden_units: Units of the hidden layer in each head, of the layer of ``mlp``, and of the
            dense layer that replaces the LSTM.
        products: The arithmetic of the layers.

    Raises:
        CapsuleError: As :func:`capsule.training.networks.feedforward.make_convolutions`.
    """
    torso: Torso
    if name == "residual":
        torso = make_residual_torso(frame_stack, layout, products)
    else:
        stack = make_convolutions(name, frame_stack, layout, products)
        # The memory reads the features of convolutions directly; only vectors pass through a dense
        # layer before.
        units = () if stack.strides else (hidden_units,)
        torso = make_plain_torso(stack, name.dense if isinstance(name, OwnNetwork) else units)
    shapes = dict(torso.shapes)
    fan_in = torso.width + 1 + actions
    if recurrent_units:
        shapes |= lstm_shapes(fan_in, recurrent_units)
    else:
        shapes |= dense_shapes("memory", fan_in, hidden_units)
    width = recurrent_units or hidden_units
    for head, outputs in (("advantage", actions), ("value", 1)):
        shapes |= dense_shapes(f"{head}1", width, hidden_units)
        shapes |= dense_shapes(f"{head}2", hidden_units, outputs)
    state_shape = (2, recurrent_units) if recurrent_units else (0,)
    return RecurrentNetwork(shapes, state_shape, actions, torso, products)


# --- torsos ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """Convolutions, or none for flat observations, and any number of dense layers."""

    shapes: dict[str, Shape]
    width: int
    convolutions: Convolutions
    dense: int

    @property
    def modules(self) -> tuple[OwnModule, ...]:
        return self.convolutions.modules

    def features(self, parameters: Tensors, observations: torch.Tensor) -> torch.Tensor:
        stack = self.convolutions
        # The backend computes a stack of rectified convolutions for a few images at a time, which
        # stay in the cache. Those with another activation are computed layer by layer.
        if stack.strides and stack.activation == "relu":
            seen, numbers = unpacked(stack.layout, observations)
            found = [
                stack.products.rectified_convolutions(
                    each, stack.prepare, stack.layers(parameters, prefix)
                )
                for prefix, each in zip(prefixes(stack.layout), seen, strict=True)
            ]
            features = joined([each.permute(0, 2, 3, 1).flatten(1) for each in found], numbers)
        else:
            features = stack.features(parameters, observations)
        for layer in range(1, self.dense + 1):
            features = stack.activate(dense(stack.products, parameters, f"dense{layer}", features))
        return features


def make_plain_torso(stack: Convolutions, units: Sequence[int]) -> Torso:
    """Return the torso of ``stack`` and dense layers of ``units``, each with its activation."""
    widths = (stack.width, *units)
    shapes = dict(stack.shapes)
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        shapes |= dense_shapes(f"dense{layer}", fan_in, fan_out)
    return _Plain(shapes, widths[-1], stack, len(units))


@dataclass(frozen=True)
class _Residual:
    """IMPALA's large network up to its LSTM."""

    shapes: dict[str, Shape]
    width: int
    products: LayerBackend
    layout: FrameLayout
    modules: tuple[()] = ()

    def features(self, parameters: Tensors, observations: torch.Tensor) -> torch.Tensor:
        seen, numbers = unpacked(self.layout, observations)
        found = [
            self._sections(parameters, prefix, images(each, 1 / 255))
            for prefix, each in zip(prefixes(self.layout), seen, strict=True)
        ]
        return dense(self.products, parameters, "dense1", joined(found, numbers)).relu()

    def _sections(self, parameters: Tensors, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features of one image, whose parameters' names begin with ``prefix``."""
        for section in range(1, len(_SECTIONS) + 1):
            name = f"{prefix}section{section}"
            hidden = self._convolve(parameters, f"{name}.conv", hidden, rectified=False)
            hidden = _maximum(hidden)
            for block in range(1, _BLOCKS + 1):
                inner = f"{name}.block{block}.conv"
                change = self._convolve(parameters, f"{inner}1", hidden.relu(), rectified=True)
                hidden = hidden + self._convolve(parameters, f"{inner}2", change, rectified=False)
        return hidden.relu().permute(0, 2, 3, 1).flatten(1)

    def _convolve(
        self, parameters: Tensors, name: str, inputs: torch.Tensor, *, rectified: bool
    ) -> torch.Tensor:
        padded = functional.pad(inputs, (1, 1, 1, 1))
        weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return self.products.convolution(padded, weight, bias, 1, rectified=rectified)


def make_residual_torso(frame_stack: int, layout: FrameLayout, products: LayerBackend) -> Torso:
    """Return the torso of IMPALA's large network for one kind of observation."""
    shapes: dict[str, Shape] = {}
    fan_in = frame_stack * layout.numbers
    for prefix, image in zip(prefixes(layout), layout.images, strict=True):
        before = frame_stack * math.prod(image[:-2])
        rows, columns = image[-2:]
        for section, channels in enumerate(_SECTIONS, start=1):
            shapes |= convolution_shapes(f"{prefix}section{section}.conv", before, channels, 3)
            for block in range(1, _BLOCKS + 1):
                for layer in (1, 2):
                    name = f"{prefix}section{section}.block{block}.conv{layer}"
                    shapes |= convolution_shapes(name, channels, channels, 3)
            rows, columns, before = -(-rows // 2), -(-columns // 2), channels
        fan_in += before * rows * columns
    shapes |= dense_shapes("dense1", fan_in, _RESIDUAL_UNITS)
    return _Residual(shapes, _RESIDUAL_UNITS, products, layout)


def _maximum(inputs: torch.Tensor) -> torch.Tensor:
    """Return the maxima over 3x3 with stride 2; each side is halved, rounded up.

    ``max_pool2d`` adds gradients in any order on a GPU. Here, two equal numbers share the gradient
    of their maximum equally.
    """
    for dimension in (3, 2):
        size = inputs.shape[dimension]
        # The padding "SAME" of a window of 3 with stride 2 is one element at the end, and for an
        # odd side also one at the beginning. pad() counts dimensions from the last.
        border = [0, 0] * (3 - dimension) + [size % 2, 1]
        padded = functional.pad(inputs, border, value=-math.inf)
        first, second, third = (
            padded[(slice(None),) * dimension + (slice(start, start + size, 2),)]
            for start in range(3)
        )
        inputs = torch.maximum(torch.maximum(first, second), third)
    return inputs


# --- the LSTM -------------------------------------------------------------------------------------


def memory_inputs(features: torch.Tensor, seen: Sequences, actions: int) -> torch.Tensor:
    """Return the inputs of a memory, float32 ``[time * batch, width + 1 + actions]``.

    They are the features, the previous reward and the one-hot previous action.

    Args:
        features: Features of the observations, float32 ``[time * batch, width]``.
        seen: The sequences.
        actions: Number of actions.
    """
    chosen = torch.arange(actions, device=features.device)
    action = (seen.previous_actions.reshape(-1, 1) == chosen).to(torch.float32)
    return torch.cat((features, seen.previous_rewards.reshape(-1, 1), action), 1)


def lstm_shapes(fan_in: int, units: int) -> dict[str, Shape]:
    """Return the shapes of the LSTM's parameters."""
    return {
        "lstm.inputs.weight": (4 * units, fan_in),
        "lstm.recurrent.weight": (4 * units, units),
        "lstm.bias": (4 * units,),
    }


def unroll_lstm(
    products: LayerBackend,
    parameters: Tensors,
    inputs: torch.Tensor,
    states: torch.Tensor,
    fresh: torch.Tensor,
    resets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate the LSTM on sequences.

    Args:
        products: The arithmetic of the layers.
        parameters: Name to tensor, as :func:`lstm_shapes` names them.
        inputs: float32 ``[time * batch, fan_in]``.
        states: Hidden and cell before row 0, float32 ``[batch, 2, units]``.
        fresh: Hidden and cell after a reset, float32 ``[batch, 2, units]``.
        resets: bool ``[time, batch]``: the rows that are preceded by a reset; row 0 is ignored.

    Returns:
        Hidden states, float32 ``[time * batch, units]``, and the states after the last row.
    """
    weight, bias = parameters["lstm.inputs.weight"], parameters["lstm.bias"]
    gates = products.dense(inputs, weight, bias).contiguous().view(*resets.shape, -1)
    recurrent = parameters["lstm.recurrent.weight"]
    hidden, states = _lstm(gates, recurrent, states, fresh, resets, products)
    return hidden.flatten(0, 1), states


class _Lstm(torch.autograd.Function):
    """All time steps of an LSTM, so that the gradient of each weight is one product."""

    @staticmethod
    def forward(
        context: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        states: torch.Tensor,
        fresh: torch.Tensor,
        resets: torch.Tensor,
        products: LayerBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time, batch, units = *inputs.shape[:2], weight.shape[1]
        gates = torch.empty_like(inputs)
        hidden, squashed = (inputs.new_empty(time, batch, units) for _ in range(2))
        before = inputs.new_empty(2, time, batch, units)  # hidden and cell
        start = state = states.transpose(0, 1).contiguous()
        for row, mask in enumerate(_reset_masks(resets)):
            before[:, row] = state if mask is None else torch.where(mask, start, state)
            start = fresh.transpose(0, 1)  # from row 1 on; the mask of row 0 is all true
            recurrent = products.dense(before[0, row], weight, None).contiguous()
            state = torch.empty_like(state)
            _step(
                inputs[row],
                recurrent,
                before[1, row],
                gates=gates[row],
                cell=state[1],
                squashed=squashed[row],
                hidden=state[0],
            )
            hidden[row] = state[0]
        context.products = products
        context.save_for_backward(weight, resets, gates, before, squashed)
        return hidden, state.transpose(0, 1).contiguous()

    @staticmethod
    def backward(
        context: Any, hidden_gradient: torch.Tensor, state_gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        weight, resets, gates, before, squashed = context.saved_tensors
        products: LayerBackend = context.products
        through = torch.empty_like(gates)
        # The gradient for hidden and cell after a row. A copy, because it is changed below, and
        # autograd may use the original elsewhere; contiguous() would not copy a batch of one.
        gradient = state_gradient.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        start, fresh = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for row, mask in reversed(list(enumerate(_reset_masks(resets)))):
            _step_back(
                gates[row],
                before[1, row],
                squashed[row],
                hidden_gradient[row] + gradient[0],
                cell_gradient=gradient[1],
                gate_gradients=through[row],
            )
            # _step_back() has turned gradient[1] into the gradient for the cell before this row.
            gradient[0] = products.matrix_product(through[row], weight)
            if mask is not None:
                # A reset cuts the sequence: the gradient belongs to the state that was set, and
                # does not reach the rows before.
                into = fresh if row else start
                into += gradient.where(mask, 0.0)
                gradient = gradient.where(~mask, 0.0)
        flat = through.flatten(0, 1)
        wants_weight = context.needs_input_grad[1]
        return (
            through,
            products.outer(flat, before[0].flatten(0, 1), torch.empty_like(weight))
            if wants_weight
            else None,
            start.transpose(0, 1),
            fresh.transpose(0, 1),
            None,
            None,
        )


def _reset_masks(resets: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the mask of the resets before each row, ``[batch, 1]``; None for no resets."""
    first, *others = resets.unsqueeze(2)
    # On a GPU, reading whether there are resets would wait for it, and an empty mask changes no
    # bit.
    if resets.device.type != "cpu":
        return [torch.ones_like(first), *others]
    some = resets.any(1).tolist()[1:]
    masks = [mask if found else None for mask, found in zip(others, some, strict=True)]
    return [torch.ones_like(first), *masks]


def _step(
    inputs: torch.Tensor, recurrent: torch.Tensor, before: torch.Tensor, **out: torch.Tensor
) -> None:
    """Take one step on any device; the arguments are those of :func:`kernels.lstm`."""
    if inputs.device.type == "cpu":
        kernels.lstm(inputs, recurrent, before, **out)
        return
    # These are views of ``gates``, in which the activations are computed in place.
    i, f, g, o = torch.add(inputs, recurrent, out=out["gates"]).chunk(4, 1)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    torch.add(f * before, i * g, out=out["cell"])
    torch.tanh(out["cell"], out=out["squashed"])
    torch.mul(o, out["squashed"], out=out["hidden"])


def _step_back(
    gates: torch.Tensor,
    before: torch.Tensor,
    squashed: torch.Tensor,
    hidden_gradient: torch.Tensor,
    **out: torch.Tensor,
) -> None:
    """Differentiate one step; the arguments are those of :func:`kernels.lstm_backward`."""
    if gates.device.type == "cpu":
        kernels.lstm_backward(gates, before, squashed, hidden_gradient, **out)
        return
    i, f, g, o = gates.chunk(4, 1)
    cell_gradient = out["cell_gradient"]
    cell_gradient += (hidden_gradient * o) * (1 - squashed * squashed)
    parts = (
        (cell_gradient * g) * (i * (1 - i)),
        (cell_gradient * before) * (f * (1 - f)),
        (cell_gradient * i) * (1 - g * g),
        (hidden_gradient * squashed) * (o * (1 - o)),
    )
    torch.cat(parts, 1, out=out["gate_gradients"])
    cell_gradient *= f


def _lstm(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Lstm.apply
    return apply(*arguments)
