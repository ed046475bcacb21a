"""CUDA graphs without a GPU: what a function does on the stand-in device, recorded and repeated.

A graph knows kernels, their numbers and their addresses; it does not call the function again. So a
recording executes nothing in the end (what was written is put back), and a repetition executes the
recorded operators with the recorded numbers and tensors. Work that was launched is done only when
it is joined, as late as a GPU might do it. The rules of a capture, which
:mod:`capsule.training.determinism.cuda_graph` lists, are checked while the function is recorded,
and before the second repetition it is recorded once more, which must give the same.
"""

from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

from capsule.training.determinism import cuda_graph
from tests.training.stand_in_device import Elsewhere

_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CaptureError(RuntimeError):
    """A function cannot be captured."""


class Call(NamedTuple):
    """An operator that was executed.

    Attributes:
        operator: Which one.
        args: With tensors of the CPU, as all that follows.
        kwargs: The same.
        made: Results in memory of their own; None in the place of others.
    """

    operator: Any
    args: Any
    kwargs: Any
    made: list

    def repeat(self):
        """Execute it with the same arguments, into the tensors that it made."""
        if torch.Tag.inplace_view in self.operator.tags:  # another shape, which was recorded
            return
        found = tree_iter(self.operator(*self.args, **self.kwargs))
        tensors = (each for each in found if isinstance(each, torch.Tensor))
        for old, new in zip(self.made, tensors, strict=True):
            if old is not None:
                old.copy_(new)


class Recording(TorchDispatchMode):
    """Records the operators that use the device.

    Attributes:
        calls: In order.
        facts: What must be the same in every recording: operators, numbers and addresses.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.facts = [], []
        self._made, self._before = {}, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _check(operator, args, kwargs)
        self._remember(operator, args, kwargs)
        fact = (str(operator), self._fact((args, kwargs)))
        results = operator(*args, **kwargs)
        made = _there(results)
        if not made and not _there((args, kwargs)):
            return results
        known = {_storage(each) for each in _there((args, kwargs))}
        own = [each if _storage(each) not in known else None for each in made]
        for each in own:
            if each is not None:
                self._made.setdefault(_storage(each), len(self._made))
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        # Shapes that are changed in place later are other tensors of the same memory here.
        alias = partial(tree_map_only, Elsewhere, lambda each: each.inner.detach())
        self.calls.append(Call(operator, alias(args), alias(kwargs), alias(own)))
        self.facts.append(fact)
        return results

    def put_back(self):
        """Give what was written, and is not the recording's own, the values of before."""
        for tensor, values in self._before.values():
            tensor.inner.untyped_storage().copy_(values)

    def _remember(self, operator, args, kwargs):
        names = [argument.name for argument in operator._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in operator._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _there(given.get(argument.name)):
                place = _storage(tensor)
                if place not in self._made and place not in self._before:
                    values = tensor.inner.untyped_storage().clone()
                    self._before[place] = tensor, values

    def _fact(self, arguments):
        leaves, structure = tree_flatten(arguments)
        return [self._leaf(leaf) for leaf in leaves], str(structure)

    def _leaf(self, leaf):
        if isinstance(leaf, Elsewhere):
            place = _storage(leaf)
            address = self._made.get(place, ("not its own", place))
            return address, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()
        if isinstance(leaf, torch.Tensor):
            return leaf.tolist()
        return repr(leaf)


class RecordedGraph:
    """Stands for :class:`capsule.training.determinism.cuda_graph.Graph`."""

    def __init__(self, function):
        self._function, self._launched, self._launches = function, False, 0
        self._recording, self._results = record(function)

    def replay(self):
        """Launch it; :meth:`finish` executes it."""
        self._launches += 1
        if self._launches == 2:
            again, _ = record(self._function)
            _compare(self._recording.facts, again.facts)
        self._launched = True
        return self._results

    def finish(self):
        """Execute what was launched."""
        if self._launched:
            for call in self._recording.calls:
                call.repeat()
        self._launched = False


def record(function):
    """Record a function, which changes nothing; return the recording and the function's results."""
    with Recording() as recording:
        results = function()
    recording.put_back()
    return recording, results


@contextmanager
def graphs_without_a_gpu():
    """Have CUDA graphs on the stand-in device within a block; yields all that were made."""
    made = []

    def graph(function, stream):
        made.append(RecordedGraph(function))
        return made[-1]

    def join(region):
        if region._graph is not None:
            region._graph.finish()

    with (
        patch.object(cuda_graph, "Graph", graph),
        patch.object(cuda_graph, "WARM_UP", 1),
        patch.object(cuda_graph, "is_watched", lambda: False),
        patch.object(cuda_graph.Region, "join", join),
    ):
        yield made


def _compare(first, second):
    if first != second:
        pairs = zip(first, second, strict=False)
        other = next((pair for pair in pairs if pair[0] != pair[1]), "another number of them")
        raise CaptureError(f"a second update has other operators: {other}")


def _check(operator, args, kwargs):
    if _WAITING & set(operator.tags):
        raise CaptureError(f"{operator} waits for the device")
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    places = {isinstance(each, Elsewhere) for each in tensors}
    if "device" in kwargs and kwargs["device"] is not None:
        places.add(torch.device(kwargs["device"]).type == "elsewhere")
    if operator.overloadpacket in _COPIES and len(places) > 1:
        raise CaptureError(f"{operator} copies between the host and the device")
    if "pin" in operator.name():
        raise CaptureError(f"{operator} allocates pinned memory")


def _there(values):
    return [each for each in tree_iter(values) if isinstance(each, Elsewhere)]


def _storage(tensor):
    return tensor.inner.untyped_storage()._cdata
