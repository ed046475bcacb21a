"""GPU work that is launched on a stream of its own and, if the spec says so, as a CUDA graph.

A *stream* in this module is a CUDA stream. An update of a small network consists of hundreds of
kernels of a few microseconds each, and launching one from Python takes longer than executing it. A
graph is captured once and launched as a whole. Its kernels are those of the captured function, with
the same arguments at the same addresses, so it computes the same bits as a call of the function:
``accelerator.cuda_graphs`` affects only the speed of a run.

The sources are PyTorch, *CUDA semantics*, section "CUDA Graphs", and NVIDIA, *CUDA Graph Best
Practice for PyTorch*. A function can be captured if it follows these rules:

* It reads only tensors that keep their addresses, such as parameters and :class:`FixedTensors`,
  tensors that it makes itself, and values that never change.
* It copies nothing between the host and the device, and does not read a number of a tensor
  (``float(loss)``, ``tolist``), because both wait for the device.
* The operators that it calls, and the host's numbers among their arguments, are the same for every
  update.

``tests/training/capture_rules.py`` checks that the trainers follow these rules, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

WARM_UP = 3  # calls before the capture, in which cuBLAS, cuDNN and autograd allocate memory
Result = TypeVar("Result")


class FixedTensors:
    """Tensors on a device that keep their addresses while their values come from the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: tuple[torch.Tensor, ...] = ()

    def fill(self, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors with these values on the device; on the CPU, the sources themselves.

        Args:
            sources: Tensors on the CPU, with the same shapes and dtypes in every call. A source in
                pinned memory must not change until the device has read it; others are read at once.
        """
        if self._device.type == "cpu":
            return sources
        if not self._tensors:
            self._tensors = tuple(torch.empty_like(each, device=self._device) for each in sources)
        for tensor, source in zip(self._tensors, sources, strict=True):
            # CUDA does not guarantee that it has read pageable memory when an asynchronous copy
            # returns ("API synchronization behavior").
            tensor.copy_(source, non_blocking=source.is_pinned())
        return self._tensors


class Region(Generic[Result]):
    """A function that launches work on a device.

    On a GPU the work has a stream of its own, so that other work of the caller does not wait for
    it. Each region has its own stream, because graphs that were captured on the same stream share a
    workspace of cuBLAS (pytorch issue 193402). On the CPU the function is simply called.
    """

    def __init__(
        self, function: Callable[[], Result], device: torch.device, *, graph: bool
    ) -> None:
        """Prepare to launch a function.

        Args:
            function: The function. With ``graph`` it must follow the rules above.
            device: The device on which it computes.
            graph: Whether to launch a CUDA graph of it, after :data:`WARM_UP` calls.
        """
        self._function, self._graphed = function, graph
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls = 0
        self._graph: Graph[Result] | None = None

    def __call__(self) -> Result:
        """Launch the work, and let later work of the caller wait for it."""
        result = self.launch()
        self.join()
        return result

    def launch(self) -> Result:
        """Launch the work and return its results, which may be used after :meth:`join`.

        A graph returns its results in the same tensors every time.
        """
        if self._stream is not None:
            # The work waits for earlier work of the caller, such as the copies of
            # FixedTensors.fill().
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with on_stream:
            # Instruments watch torch's operators, which are not dispatched when a graph is
            # launched.
            if not self._graphed or is_watched():
                return self._function()
            if self._calls < WARM_UP:
                self._calls += 1
                return self._function()
            if self._graph is None:
                self._graph = Graph(self._function, self._stream)
            return self._graph.replay()

    def join(self) -> None:
        """Let later work of the caller wait for the work. The calling thread does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Graph(Generic[Result]):
    """The work of a function, captured once."""

    def __init__(self, function: Callable[[], Result], stream: torch.cuda.Stream | None) -> None:
        """Capture the function on a stream, without executing its work."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._results = function()

    def replay(self) -> Result:
        """Launch the work on the current stream; return the tensors that the capture made."""
        self._graph.replay()
        return self._results


def is_watched() -> bool:
    """Return whether an instrument watches the operators of this thread."""
    return is_in_torch_dispatch_mode()
