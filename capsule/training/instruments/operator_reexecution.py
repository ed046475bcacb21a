"""Executing every torch operator twice on the same inputs, and comparing the bits.

A dispatch mode is between the program and torch's dispatcher. It executes each operator for the
program first, and then again on copies of the memory that the first execution wrote to, with the
generator in its earlier state. The program gets the results that it would get without the mode,
except for ``torch.linalg.eigvalsh`` and ``svdvals``: under any mode, torch also computes the
vectors, with another algorithm.

The mode does not detect work that a custom operator hides from the dispatcher, CUDA graphs, races
between processes, and a race that does not occur in these repetitions. Operators that communicate
with other processes are not repeated.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from capsule.training.instruments.operator_rules import Status, status_of
from capsule.training.instruments.report import (
    Location,
    OperatorDifference,
    OperatorUse,
    user_stack,
)

ALIGNMENT = 64  # bytes of a cache line; kernels may depend on a tensor's position in one

# Arguments that operators change although their schemas do not say so: running statistics of the
# batch normalisations, and cuDNN's generator.
_UNMARKED_WRITES = frozenset({"running_mean", "running_var", "dropout_state"})
# Results that a kernel need not fill: scratch memory for the backward pass.
_SCRATCH_RESULTS = {"aten::mkldnn_rnn_layer": {3}, "aten::_cudnn_rnn": {3}}
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other subclasses wrap tensors
# Namespaces whose operators have side effects: they communicate, or take time stamps.
_EFFECTS = ("c10d", "_c10d", "symm_mem", "rpc", "profiler")


@dataclass
class _Use:
    """The observations so far of one operator on one device from one line."""

    status: Status
    documented: str | None
    stack: tuple[Location, ...]
    calls: int = 0
    repeated: int = 0
    differing: int = 0
    first: OperatorDifference | None = None


@dataclass
class _Census:
    """The counts to which the modes of all threads add."""

    limit: int
    calls: int = 0
    uses: dict[tuple[str, str, Status, Location | None], _Use] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generators: threading.RLock = field(default_factory=threading.RLock)


class OperatorMode(TorchDispatchMode, ABC):
    """A dispatch mode that receives the operators, below autograd, of the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch would import its compiler, which takes seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass a call of an operator to :meth:`execute`; execute anything else unchanged."""
        call = DispatchedCall(func, args, kwargs or {})
        # Higher-order operators have no schema.
        if isinstance(func, torch._ops.OpOverload):  # noqa: SLF001
            return self.execute(call, types)
        return call.execute()

    @abstractmethod
    def execute(self, call: DispatchedCall, types: Sequence[type]) -> Any:
        """Execute a call and return its result.

        Args:
            call: The call.
            types: Types of its arguments, as torch passes them.
        """


class ReexecutionMode(OperatorMode):  # type: ignore[no-untyped-call]
    """Re-executes the operators of the thread that enters it.

    Every other thread must enter :meth:`for_this_thread`; all share one census.
    """

    def __init__(self, *, limit: int = 1 << 62) -> None:
        """Prepare the mode; calls after the first ``limit`` are neither repeated nor counted."""
        super().__init__()
        self._census = _Census(limit)

    def for_this_thread(self) -> ReexecutionMode:
        """Return a mode for another thread, which adds to the same census."""
        mode = ReexecutionMode()
        mode._census = self._census
        return mode

    @property
    def calls(self) -> int:
        """The number of operator calls so far."""
        return self._census.calls

    @property
    def exhausted(self) -> bool:
        """Whether the limit was reached."""
        return self._census.calls >= self._census.limit

    def uses(self) -> tuple[OperatorUse, ...]:
        """Return the census in the order of first use."""
        return tuple(
            OperatorUse(
                operator=operator,
                device=device,
                status=use.status,
                documented=use.documented,
                calls=use.calls,
                repeated=use.repeated,
                differing=use.differing,
                first_difference=use.first,
                stack=use.stack,
            )
            for (operator, device, _, _), use in self._census.uses.items()
        )

    def execute(self, call: DispatchedCall, types: Sequence[type]) -> Any:
        """Execute a call for the program, and again for the comparison."""
        if self.exhausted:
            return call.execute()
        use, index = self._count(call, user_stack())
        if not call.repeatable(types):
            return call.execute()
        # All threads share the default generator, and none may draw while another one has set it
        # back.
        with self._census.generators if call.seeded else nullcontext():
            result, elements, differing = call.compare()
        with self._census.lock:
            use.repeated += 1
            if differing:
                use.differing += 1
                use.first = use.first or OperatorDifference(
                    index=index, elements=elements, differing=differing
                )
        return result

    def _count(self, call: DispatchedCall, stack: tuple[Location, ...]) -> tuple[_Use, int]:
        status, documented = call.status()
        where = stack[0] if stack else None
        with self._census.lock:
            index = self._census.calls
            self._census.calls += 1
            key = (call.name, call.device, status, where)
            use = self._census.uses.setdefault(key, _Use(status, documented, stack))
            use.calls += 1
        return use, index


class DispatchedCall:
    """One call of an operator with its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs

    @property
    def named(self) -> dict[str, Any]:
        """The arguments, by position or name."""
        return {str(place): value for place, value in enumerate(self._args)} | self._kwargs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return list(_tensors((self._args, self._kwargs)))

    @property
    def name(self) -> str:
        """The name with namespace and overload, such as ``aten::add.Tensor``."""
        schema = self._func._schema  # noqa: SLF001 - torch offers no other way to the schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

    @property
    def device(self) -> str:
        """The type of the device on which it computes."""
        for tensor in self.tensors:
            return tensor.device.type
        # Operators that make new tensors need not have any among their arguments.
        return torch.device(self._kwargs.get("device") or "cpu").type

    @property
    def seeded(self) -> bool:
        """Whether it draws from a generator."""
        takes_generator = any(
            argument.name == "generator"
            for argument in self._func._schema.arguments  # noqa: SLF001
        )
        return takes_generator or torch.Tag.nondeterministic_seeded in self._func.tags

    def status(self) -> tuple[Status, str | None]:
        """Return the status of the call, and the entry of torch's documentation that states it."""
        return status_of(
            self._func._schema.name,  # noqa: SLF001
            self.device,
            {**dict(self._arguments()), **self._kwargs},
            seeded=self.seeded,
        )

    def repeatable(self, types: Sequence[type]) -> bool:
        """Return whether the call can be executed again without side effects, and compared."""
        func = self._func
        # Views compute nothing, and in-place views would change an argument of the program.
        # Messages would be sent twice. Uninitialized memory has no content to compare. Tensors that
        # wrap others, or are not plain memory, cannot be copied as bytes.
        return not (
            func.is_view
            or torch.Tag.inplace_view in func.tags
            or func.namespace.startswith(_EFFECTS)
            or self.status()[0] == "uninitialized"
            or any(issubclass(kind, torch.Tensor) and kind not in _PLAIN for kind in types)
            or any(_unusual(tensor) for tensor in _tensors(self._written()))
        )

    def execute(self) -> Any:
        """Execute the call and return its result."""
        return self._func(*self._args, **self._kwargs)

    def outcome(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors that the operator wrote to, and those that it returned."""
        return list(_tensors([*self._written(), *self._results(result)]))

    def compare(self) -> tuple[Any, int, int]:
        """Execute the operator twice, and compare.

        Returns:
            The result, the number of elements of all results, and how many of them had other bits.
        """
        written = list(_tensors(self._written()))
        copies = _Copies(written, self.tensors)
        generator = self._generator()
        before = generator.get_state() if generator else None
        result = self.execute()
        after = generator.get_state() if generator else None
        try:
            if generator and before is not None:
                generator.set_state(before)
            again = self._execute_on(copies)
        finally:
            if generator and after is not None:
                # The program continues with the state in which its own execution left the
                # generator.
                generator.set_state(after)
        first = [*written, *self._results(result)]
        second = [*map(copies.substitute, written), *self._results(again)]
        return result, *_compare(first, second)

    def _execute_on(self, copies: _Copies) -> Any:
        if not copies:
            return self.execute()
        args, kwargs = tree_map(copies.substitute, (self._args, self._kwargs))
        return self._func(*args, **kwargs)

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        for argument, value in zip(self._func._schema.arguments, self._args, strict=False):  # noqa: SLF001
            yield argument.name, value

    def _written(self) -> list[Any]:
        """Return the values of the arguments that the operator writes to."""
        values = {**dict(self._arguments()), **self._kwargs}
        return [
            values[argument.name]
            for argument in self._func._schema.arguments  # noqa: SLF001
            if argument.name in values
            and (
                argument.name in _UNMARKED_WRITES
                or (argument.alias_info is not None and argument.alias_info.is_write)
            )
        ]

    def _results(self, result: Any) -> list[Any]:
        """Return the operator's results, without scratch memory and without written arguments."""
        schema = self._func._schema  # noqa: SLF001
        scratch = _SCRATCH_RESULTS.get(schema.name, set())
        parts = result if isinstance(result, tuple) and len(schema.returns) > 1 else (result,)
        kept = [
            part
            for number, (part, returned) in enumerate(zip(parts, schema.returns, strict=False))
            if number not in scratch and returned.alias_info is None
        ]
        return tree_leaves(kept)

    def _generator(self) -> torch.Generator | None:
        if not self.seeded:
            return None
        values = {**dict(self._arguments()), **self._kwargs}
        given: torch.Generator | None = values.get("generator")
        if given is not None:
            return given
        if self.device == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator


class _Copies:
    """Copies of the memory to which an operator writes, and views of them.

    Arguments that share memory also share it in the copies, and each tensor keeps its strides and
    its position within a cache line, because all of these may select another kernel, with other
    rounding.
    """

    def __init__(self, written: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        addresses = {_storage(tensor) for tensor in written}
        self._memory: dict[int, tuple[int, torch.Tensor]] = {}
        for address in addresses:
            spans = [_span(tensor) for tensor in tensors if _storage(tensor) == address]
            start = min(first for first, _ in spans) // ALIGNMENT * ALIGNMENT
            stop = max(last for _, last in spans)
            owner = next(tensor for tensor in written if _storage(tensor) == address)
            self._memory[address] = (start, _bytes_of(owner, start, stop))

    def __len__(self) -> int:
        return len(self._memory)

    def substitute(self, value: Any) -> Any:
        """Return the view of a copy that replaces a tensor; return other values unchanged."""
        if not isinstance(value, torch.Tensor) or _storage(value) not in self._memory:
            return value
        start, memory = self._memory[_storage(value)]
        # ``start`` is a multiple of ALIGNMENT, and so of the size of every type of element.
        offset = value.storage_offset() - start // value.element_size()
        view = torch.empty(0, dtype=value.dtype, device=value.device)
        return view.set_(memory.untyped_storage(), offset, value.size(), value.stride())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else -1  # noqa: SLF001


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor covers: the first, and the end."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return first, first
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return first, first + (1 + sum((int(count) - 1) * stride for count, stride in steps)) * size


def _bytes_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return a copy of a part of a tensor's storage: uint8 ``[stop - start]``."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())[start:stop].clone()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _unusual(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not plain strided memory, and cannot be copied as bytes."""
    return tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_meta


def _compare(first: list[Any], second: list[Any]) -> tuple[int, int]:
    """Return the number of elements of two lists of results, and how many have other bits."""
    elements = differing = 0
    for left, right in zip(first, second, strict=True):
        if isinstance(left, torch.Tensor):
            elements += left.numel()
            differing += _differing(left, right)
        else:
            elements += 1
            differing += _bits(left) != _bits(right)
    return elements, differing


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return the number of elements in which two tensors have different bits, also in a NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return max(left.numel(), right.numel())
    if left.numel() == 0 or left.layout != torch.strided:
        return 0
    bits = [element_bytes(tensor) for tensor in (left, right)]
    if torch.equal(*bits):
        return 0
    return int((bits[0] != bits[1]).any(1).sum())


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided tensor's elements, row-major: uint8 ``[elements, size]``."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A dimension with one element may have any stride in a contiguous tensor, which view() rejects.
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).view(plain.numel(), plain.element_size())


def _bits(value: Any) -> Any:
    return struct.pack("<d", value) if isinstance(value, float) else value
