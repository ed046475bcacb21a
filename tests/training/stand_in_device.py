"""A device that is not the CPU and computes on it: what a GPU would reject, it rejects.

Tensors of the device hold a tensor of the CPU each, on which operators are executed. An operator
that mixes tensors of both places fails, as it does with CUDA, but for numbers without dimensions
and for copies. Data cannot be read without a copy to the CPU (``numpy()`` fails).
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from capsule.training.instruments.operator_rules import status_of

# PyTorch's place for backends of others (torch.utils.backend_registration), of which this is one.
_setup_privateuseone_for_python_backend("elsewhere")
DEVICE = torch.device("elsewhere", 0)
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


class MixedDevicesError(RuntimeError):
    """An operator got tensors of the CPU and of the device."""


class Elsewhere(torch.Tensor):
    """A tensor of the device.

    Attributes:
        inner: Its values, on the CPU.
    """

    @staticmethod
    def __new__(cls, inner):
        """Wrap a tensor of the CPU."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    def __repr__(self):
        """Show the values."""
        return f"Elsewhere({self.inner!r})"

    def tolist(self):
        """Return the values, as CUDA does, and as subclasses of tensors do not."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        """Execute an operator."""
        return _execute(operator, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Makes what is asked for on the device there, and lists the operators that used it.

    Attributes:
        used: Name of an operator to what torch documents of its calls on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.used = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        there = any(isinstance(each, Elsewhere) for each in tree_iter((args, kwargs)))
        if there or _is_there(kwargs.get("device")):
            names = (argument.name for argument in operator._schema.arguments)
            named = dict(zip(names, args, strict=False)) | kwargs
            status, _ = status_of(operator._schema.name, "cuda", named, seeded=False)
            self.used.setdefault(operator._schema.name, set()).add(status)
        return _execute(operator, args, kwargs)


class _Literals(TorchFunctionMode):
    """Has ``torch.tensor``, which asks no mode below where to make a tensor, make it there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and _is_there(kwargs.get("device")):
            return function(*args, **kwargs | {"device": None}).to(kwargs["device"])
        return function(*args, **kwargs)


def _is_there(device):
    return device is not None and torch.device(device).type == DEVICE.type


def _execute(operator, args, kwargs):
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, Elsewhere)]
    here = [each for each in tensors if not isinstance(each, Elsewhere) and each.dim()]
    packet = operator.overloadpacket
    if there and here and packet not in _COPIES:
        raise MixedDevicesError(f"{operator} got tensors of the CPU beside tensors of the device")
    wanted = kwargs.get("device")
    stays = _is_there(wanted) if wanted is not None else bool(there)
    if packet is torch.ops.aten.copy_:
        stays = isinstance(args[0], Elsewhere)
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map_only(Elsewhere, lambda each: each.inner, (args, kwargs))
    found = _FUSED.get(operator, operator)(*inner_args, **inner_kwargs)
    if not stays:
        return found
    wrapped = tree_map_only(torch.Tensor, Elsewhere, found)
    # What came from the CPU is a copy, even of an operator that may give its argument back ("to").
    return return_and_correct_aliasing(operator, args, kwargs, wrapped) if there else wrapped


# What CUDA has in one operator, and the CPU has not.


def _lstm_cell(inputs, hidden, cell, input_bias=None, hidden_bias=None):
    gates = inputs + hidden
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(hidden, cell, before, after, gates, has_bias):
    i, f, g, o = gates.chunk(4, 1)
    squashed = after.tanh()
    hidden = torch.zeros_like(before) if hidden is None else hidden
    through = hidden * o * (1 - squashed * squashed)
    through = through if cell is None else through + cell
    parts = (
        through * g * i * (1 - i),
        through * before * f * (1 - f),
        through * i * (1 - g * g),
        hidden * squashed * o * (1 - o),
    )
    back = torch.cat(parts, 1)
    return back, through * f, back.sum(0) if has_bias else None


_FUSED = {
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm_cell,
    torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
}


@contextmanager
def stand_in_device():
    """Have the device within a block; yields the operators that used it, by status."""
    # Torch's inference mode is not for subclasses of tensors; to operators it is the same as this.
    with _Mode() as mode, _Literals(), patch.object(torch, "inference_mode", torch.no_grad):
        yield mode.used
