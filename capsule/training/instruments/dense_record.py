"""Dense records: every tensor after each parameter update, and every operator call in between.

``Job.dense`` requests them when two runs are bisected; :mod:`capsule.experiment.dense` describes
the format. The claimed trace is not affected. A run with a dense record has one thread, so that the
operators have one order. The record covers torch's operators, below autograd, and Capsule's own
kernels (:mod:`capsule.training.layers.kernels`), which are called loops here.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from capsule.experiment import contract
from capsule.experiment.dense import (
    MAX_DATA_BYTES,
    MAX_RESULT_BYTES,
    DenseHeader,
    OperatorCall,
    OperatorResult,
)
from capsule.experiment.spec import TrainingSpec
from capsule.training.instruments.operator_reexecution import (
    DispatchedCall,
    OperatorMode,
    element_bytes,
)
from capsule.training.instruments.report import own_line, user_stack
from capsule.training.layers import kernels
from capsule.training.state.streams import Stream
from capsule.training.state.trace import Trace
from capsule.training.trainer import Trainer

# Keyword arguments that a loop overwrites, so that their contents are not inputs.
_FILLED = frozenset({"out", "gates", "cell", "squashed", "hidden", "gate_gradients"})
# Functions of the module that compute nothing.
_NO_LOOPS = frozenset({"limit_instruction_set", "instruction_set", "has_products", "convolved"})
Write = Callable[[str], None]


class DenseRecorder:
    """Writes the dense record of a run.

    Attributes:
        trace: The trace to which the trainer writes.
    """

    def __init__(self, directory: Path, spec: TrainingSpec, window: contract.DenseWindow) -> None:
        """Begin the dense record, and open the trace.

        Args:
            directory: The run directory.
            spec: The experiment.
            window: The steps whose intervals are recorded.
        """
        path = directory / contract.DENSE
        # DenseTrace appends, and an earlier attempt may have left a file.
        path.unlink(missing_ok=True)
        self.trace = DenseTrace(directory / contract.TRACE, path)
        self._window, self._unit = window, spec.trainer.interval_steps
        self._log = OperatorLog(self.trace.write)
        header = DenseHeader(spec=spec.digest(), first=window.first, last=window.last)
        self.trace.write(header.model_dump_json(by_alias=True))

    def interval(self, trainer: Trainer) -> None:
        """Let the trainer make one interval, and record it if it is in the window."""
        end = trainer.step + self._unit
        if not self._window.first <= end <= self._window.last:
            trainer.train_step()
            return
        with self.trace.watching(), self._log.watching():
            trainer.train_step()
        # The claimed trace has its record of this step, if one is due, from train_step().
        with self.trace.dense():
            trainer.record(complete=True)
        self.trace.flush()


class DenseTrace(Trace):
    """A trace that also writes the records of the dense file.

    Values that the trainer passes only once, such as the unrolls that were trained on, are written
    to the next record of both files.
    """

    def __init__(self, path: Path, dense: Path) -> None:
        """Open both files; :meth:`restore` decides where the claimed trace continues."""
        super().__init__(path)
        self._lines = _Lines(dense)
        self._watched = self._dense = False
        self._owed: dict[Trace, dict[str, dict[str, Any]]] = {self._lines: {}}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also collect the data that are added while the block runs for the next dense record."""
        # Data that were added or passed before this update do not belong to a dense record.
        self._lines.forget()
        self._owed[self._lines] = {}
        self._watched = True
        try:
            yield
        finally:
            self._watched = False

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Write records into the dense file while the block runs."""
        self._dense = True
        try:
            yield
        finally:
            self._dense = False

    def write(self, line: str) -> None:
        """Append a line to the dense file."""
        self._lines.append(line.encode())

    def add(self, component: str, data: Any) -> None:
        """Fold ``data`` into the current record, and into the dense record if it is watched."""
        super().add(component, data)
        if self._watched:
            self._lines.add(component, data)

    def record(
        self,
        step: int,
        streams: Mapping[Any, Stream],
        *,
        generations: Mapping[str, Any] | None = None,
        unrolls: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        """Write a record (:meth:`Trace.record`), inside of :meth:`dense` to the dense file."""
        once = {"generations": generations, "unrolls": unrolls}
        writer: Trace = self._lines if self._dense else self
        other: Trace = self if self._dense else self._lines
        # This record has the new values, after those that its file is still owed. The other file is
        # owed the new values as well; the dense file, only if they are watched.
        owed = self._owed.pop(writer, {})
        if self._dense or self._watched:
            late = self._owed.get(other, {})
            self._owed[other] = {
                name: both
                for name, new in once.items()
                if (both := _joined(late.get(name), new)) is not None
            }
        joined = {name: _joined(owed.get(name), new) for name, new in once.items()}
        Trace.record(writer, step, streams, **{**facts, **joined})

    def flush(self) -> None:
        """Pass everything written to the operating system."""
        super().flush()
        self._lines.flush()

    def close(self) -> None:
        """Close both files."""
        super().close()
        self._lines.close()


class _Lines(Trace):
    """The dense file, with records and other lines, and without a hash chain."""

    def forget(self) -> None:
        """Drop the data of the current record."""
        self._leaves = dict.fromkeys(self._leaves, b"")

    def append(self, line: bytes) -> None:
        """Append a line."""
        self._file.write(line + b"\n")

    def _append(self, line: bytes) -> None:
        self.append(line)


def _joined(
    before: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    return None if before is None and new is None else {**(before or {}), **(new or {})}


class OperatorLog:
    """Records the operator calls of one thread.

    Attributes:
        inside: Whether a loop is being recorded; the operators that torch executes for it are not
            recorded.
    """

    def __init__(self, write: Write) -> None:
        """Begin a log that is written with ``write``, line by line."""
        self._write = write
        self._room = MAX_DATA_BYTES
        self.inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the operator calls of the calling thread while the block runs."""
        thread = threading.get_ident()
        loops = {
            name: self._logged(name, function, thread)
            for name, function in inspect.getmembers(kernels, inspect.isfunction)
            if function.__module__ == kernels.__name__
            and not name.startswith("_")
            and name not in _NO_LOOPS
        }
        originals = {name: getattr(kernels, name) for name in loops}
        # Callers look up the functions in their module at every call, so this affects all calls.
        vars(kernels).update(loops)
        try:
            with _LogMode(self):
                yield
        finally:
            vars(kernels).update(originals)

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        inputs: Sequence[torch.Tensor],
        execute: Callable[[], Any],
        outcome: Callable[[Any], Sequence[torch.Tensor]],
    ) -> Any:
        """Execute a call and record it.

        Args:
            name: Name of the operator.
            arguments: The arguments by position or name; numbers among them are recorded.
            inputs: The tensors that it reads.
            execute: Executes the call.
            outcome: Returns the tensors that the call wrote, given its result.

        Returns:
            The result of the call.
        """
        # Digested before the call, which may overwrite its inputs.
        before = tuple(_digest(tensor) for tensor in inputs)
        result = execute()
        where = own_line(user_stack())
        call = OperatorCall(
            operator=name,
            where=None if where is None else _short(str(where)),
            arguments={key: repr(value) for key, value in arguments.items() if _is_number(value)},
            inputs=before,
            results=tuple(self._result(tensor) for tensor in outcome(result)),
        )
        self._write(json.dumps(call.model_dump(mode="json"), separators=(",", ":")))
        return result

    def _logged(self, name: str, function: Callable[..., Any], thread: int) -> Callable[..., Any]:
        """Return a function that calls a loop and records it as an operator."""

        @functools.wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or self.inside:  # called by another loop
                return function(*args, **kwargs)
            self.inside = True
            try:
                read = [*args, *(value for key, value in kwargs.items() if key not in _FILLED)]
                return self.call(
                    f"capsule::{name}",
                    {**{str(place): value for place, value in enumerate(args)}, **kwargs},
                    _tensors(read),
                    lambda: function(*args, **kwargs),
                    lambda result: _tensors([args, kwargs, result]),
                )
            finally:
                self.inside = False

        return logged

    def _result(self, tensor: torch.Tensor) -> OperatorResult:
        data = element_bytes(tensor.detach().cpu()).numpy().reshape(-1).data
        size = min(len(data), MAX_RESULT_BYTES, self._room) // tensor.element_size()
        kept = bytes(data[: size * tensor.element_size()])
        self._room -= len(kept)
        return OperatorResult(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            digest=xxhash.xxh3_128_hexdigest(data),
            data=base64.b64encode(kept).decode() if kept else None,
        )


class _LogMode(OperatorMode):  # type: ignore[no-untyped-call]
    """Passes the operators of the thread that enters it to a log."""

    def __init__(self, log: OperatorLog) -> None:
        super().__init__()
        self._log = log

    def execute(self, call: DispatchedCall, types: Sequence[type]) -> Any:
        if self._log.inside or not call.repeatable(types):
            return call.execute()
        return self._log.call(call.name, call.named, call.tensors, call.execute, call.outcome)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(element_bytes(tensor.detach().cpu()).numpy().reshape(-1).data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _short(where: str) -> str:
    """Return a location without the folder in which the package or the source tree is installed."""
    for folder in ("-packages/", "/workspace/"):
        where = where.rpartition(folder)[2]
    return where[where.rindex("/capsule/") + 1 :] if "/capsule/" in where else where
