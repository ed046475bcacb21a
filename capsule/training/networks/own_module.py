"""A torch module of the user, which makes features of observations.

A function of the user's module returns it::

    def make(shape: tuple[int, ...]) -> torch.nn.Module

``shape`` is that of one observation: ``(frame_stack, *frame)``. The module takes float32
``[batch, *shape]``, the numbers of images from 0 to 255, and returns float32 ``[batch, width]``. It
has to be a pure function of its parameters and of what it takes. Its parameters are those of the
run: float32 tensors in the run's flat buffer, which are put in the place of the module's own at
every call. They begin with the values that the function gives them, drawn from torch's generator
with a seed of the run's stream ``initialization``.

Which bits it computes is its own affair, so no portable numerics profile has it: a row may depend
on its batch, and every batch has a fixed size therefore.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from capsule.experiment.errors import CapsuleError
from capsule.training.state.source_tree import import_module
from capsule.training.state.streams import Stream

Shape = tuple[int, ...]
PREFIX = "module."  # of its parameters' names

_made = threading.local()  # by module: a call has its parameters replaced for as long as it lasts


@dataclass(frozen=True)
class OwnModule:
    """A module by its source, so that it can be sent to other processes.

    Attributes:
        source: ``MODULE:FUNCTION``.
        shape: Shape of one observation.
        image: What the names of its parameters begin with, before :data:`PREFIX`.
    """

    source: str
    shape: Shape
    image: str = ""

    def shapes(self) -> dict[str, Shape]:
        """Return parameter name to shape, in the module's order.

        Raises:
            CapsuleError: CAP-T244, the module cannot be made, or has what a run cannot keep.
        """
        named = self._module().named_parameters()
        return {self._prefix + name: tuple(each.shape) for name, each in named}

    def width(self) -> int:
        """Return the number of features, by asking for those of an observation of zeros.

        Raises:
            CapsuleError: CAP-T244, it cannot make them, or they are not float32 ``[batch, width]``.
        """
        module = self._module()
        try:
            with torch.no_grad():
                # Of two observations, so that a module that drops their dimension is noticed.
                found = module(torch.zeros(2, *self.shape))
        except Exception as error:
            reason = f"it fails at 2 observations {self.shape}: {type(error).__name__}: {error}"
            raise self._unusable(reason) from error
        if not isinstance(found, torch.Tensor) or found.dim() != 2 or len(found) != 2:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise self._unusable(f"of 2 observations {self.shape} it makes {what}, not (2, width)")
        if found.dtype != torch.float32:
            raise self._unusable(f"it makes {found.dtype}, not torch.float32")
        return found.shape[1]

    def features(self, parameters: Mapping[str, torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[batch, width]`` of float32 ``[batch, *shape]``."""
        own = {
            name.removeprefix(self._prefix): tensor
            for name, tensor in parameters.items()
            if name.startswith(self._prefix)
        }
        found: torch.Tensor = torch.func.functional_call(self._module(), own, (seen,))
        return found

    def initialize(self, views: Mapping[str, torch.Tensor], stream: Stream) -> None:
        """Give parameters the values with which the function makes the module.

        Args:
            views: The run's parameters, by name.
            stream: Gives the seed.
        """
        # By default fork_rng() would save the generators of all GPUs, too, and start CUDA for that.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream.integer(2**32))
            fresh = self._new()
        with torch.no_grad():
            for name, values in fresh.named_parameters():
                views[self._prefix + name].copy_(values)

    @property
    def _prefix(self) -> str:
        return self.image + PREFIX

    def _module(self) -> nn.Module:
        """Return the module of this thread."""
        modules: dict[OwnModule, nn.Module] = _made.__dict__.setdefault("modules", {})
        if self not in modules:
            modules[self] = self._new()
        return modules[self]

    def _new(self) -> nn.Module:
        name, _, function = self.source.partition(":")
        try:
            module = getattr(import_module(name), function)(self.shape)
        except Exception as error:
            raise self._unusable(f"{type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise self._unusable(f"it returns {type(module).__name__}, not a torch.nn.Module")
        if buffers := [name for name, _ in module.named_buffers()]:
            raise self._unusable(
                f"its module keeps {', '.join(buffers)} beside its parameters, as batch "
                "normalization does"
            )
        for name, each in module.named_parameters():
            if isinstance(each, nn.UninitializedParameter):
                raise self._unusable(f"its parameter {name} has no shape before the first call")
        if wrong := [n for n, each in module.named_parameters() if each.dtype != torch.float32]:
            raise self._unusable(f"its parameter {wrong[0]} is not torch.float32")
        return module.eval()

    def _unusable(self, reason: str) -> CapsuleError:
        return CapsuleError(
            "CAP-T244",
            f"trainer.network.module {self.source!r} cannot be used: {reason}",
            fix="Name a function of the source tree 'code', or of a package, that takes the shape "
            "of an observation and returns a torch.nn.Module without buffers, which makes float32 "
            "[batch, width] of float32 [batch, *shape].",
        )
