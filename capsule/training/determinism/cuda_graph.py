"""Work on a GPU that is launched on a stream of its own and, if the spec says so, as a CUDA graph.

An update of a small network is hundreds of kernels of a few microseconds each, and launching each
from Python takes longer than executing it. A graph is captured once and launched as a whole. Its
kernels are those of the function that was captured, with the same arguments at the same addresses,
so the bits are the ones that calling the function would give: ``accelerator.cuda_graphs`` changes
the time of a run and none of its numbers.

Sources: PyTorch, *CUDA semantics*, section "CUDA Graphs"; NVIDIA, *CUDA Graph Best Practice for
PyTorch*. What a function has to keep to, so that it can be captured:

* it reads tensors that keep their addresses, such as parameters and :class:`FixedTensors`, and
  tensors that it makes itself; it reads nothing else that changes;
* it copies nothing between the host and the device and reads no number of a tensor
  (``float(loss)``, ``tolist``), as both wait for the device;
* which operators it calls, and with which numbers, depends on no update.

``tests/training/capture_rules.py`` holds the trainers to these rules without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

WARM_UP = 3  # calls before the capture: cuBLAS, cuDNN and autograd allocate what they keep
Result = TypeVar("Result")


class FixedTensors:
    """Tensors on a device that keep their addresses while their values come from the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: tuple[torch.Tensor, ...] = ()

    def fill(self, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors of these values on the device; on the CPU they are the sources themselves.

        Args:
            sources: On the CPU, of the same shapes and dtypes in every call. One in pinned memory
                must stay as it is until the device has read it; others are read at once.
        """
        if self._device.type == "cpu":
            return sources
        if not self._tensors:
            self._tensors = tuple(torch.empty_like(each, device=self._device) for each in sources)
        for tensor, source in zip(self._tensors, sources, strict=True):
            # CUDA does not promise that it has taken the values of pageable memory when an
            # asynchronous copy returns ("API synchronization behavior").
            tensor.copy_(source, non_blocking=source.is_pinned())
        return self._tensors


class Region(Generic[Result]):
    """A function that launches work on a device.

    On a GPU the work has a stream of its own, so that what the caller launches meanwhile does not
    wait for it. Each region has its own, as graphs that were captured on one stream share a
    workspace of cuBLAS (pytorch issue 193402). On another device the function is just called.
    """

    def __init__(
        self, function: Callable[[], Result], device: torch.device, *, graph: bool
    ) -> None:
        """Launch nothing yet.

        Args:
            function: Without ``graph`` it need not keep to the rules above.
            device: Where it computes.
            graph: Launch a CUDA graph of it, after :data:`WARM_UP` calls.
        """
        self._function, self._graphed = function, graph
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls = 0
        self._graph: Graph[Result] | None = None

    def __call__(self) -> Result:
        """Launch the work, and have what is launched from now on wait for it."""
        result = self.launch()
        self.join()
        return result

    def launch(self) -> Result:
        """Launch the work behind what was launched before; return what :meth:`join` waits for.

        A graph gives its results in the same tensors every time.
        """
        if self._stream is not None:
            # What the caller has launched before, such as the copies of FixedTensors.fill(), comes
            # first.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._on_stream():
            # Instruments watch torch's operators, of which a graph shows them none.
            if not self._graphed or is_watched():
                return self._function()
            if self._calls < WARM_UP:
                self._calls += 1
                return self._function()
            if self._graph is None:
                self._graph = Graph(self._function, self._stream)
            return self._graph.replay()

    def join(self) -> None:
        """Have what is launched from now on wait for the work. The caller does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Graph(Generic[Result]):
    """What a function launches, captured once."""

    def __init__(self, function: Callable[[], Result], stream: torch.cuda.Stream | None) -> None:
        """Capture it on a stream, which executes nothing."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._results = function()

    def replay(self) -> Result:
        """Launch it on the current stream; return the results that the capture made."""
        self._graph.replay()
        return self._results


def is_watched() -> bool:
    """Tell whether an instrument watches the operators of this thread."""
    return is_in_torch_dispatch_mode()
