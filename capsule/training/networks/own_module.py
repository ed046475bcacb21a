"""A torch module of the user, which computes the features of observations.

A function in the user's source tree, or in a package, returns it::

    def make(shape: tuple[int, ...]) -> torch.nn.Module

``shape`` is the shape of one observation: ``(frame_stack, *image)``. The module takes float32
``[batch, *shape]``, with pixels from 0 to 255, and returns float32 ``[batch, width]``. It must be a
pure function of its parameters and its input. Its parameters are part of the run's flat buffer:
float32 tensors that replace the module's own at every call. Their initial values are those that the
function gives them, drawn from torch's generator with a seed from the run's stream
``initialization``.

Capsule does not control the order of the module's sums. A spec with a module therefore requires
``accelerator.numerics: native``; and because a row may depend on its batch, every batch has a fixed
size.
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
PREFIX = "module."  # prefix of the names of the module's parameters

# One instance of each module for each thread, because its parameters are replaced during a call.
_made = threading.local()


@dataclass(frozen=True)
class OwnModule:
    """A module, represented by its source so that it can be sent to other processes.

    Attributes:
        source: ``MODULE:FUNCTION``.
        shape: Shape of one observation.
        image: Prefix of the image in the names of its parameters, before :data:`PREFIX`.
    """

    source: str
    shape: Shape
    image: str = ""

    def shapes(self) -> dict[str, Shape]:
        """Return parameter name to shape, in the module's order.

        Raises:
            CapsuleError: CAP-T244, the function fails, or its module has buffers, or parameters
                that are not float32 or have no shape yet.
        """
        named = self._module().named_parameters()
        return {self._prefix + name: tuple(each.shape) for name, each in named}

    def width(self) -> int:
        """Return the number of features, by computing those of observations of zeros.

        Raises:
            CapsuleError: CAP-T244, the module fails, or its result is not float32 ``[batch,
                width]``.
        """
        module = self._module()
        try:
            with torch.no_grad():
                # Two observations, so that a module that drops the batch dimension is noticed.
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
        """Return the features, float32 ``[batch, width]``.

        Args:
            parameters: The run's parameters, by name.
            seen: float32 ``[batch, *shape]``.
        """
        own = {
            name.removeprefix(self._prefix): tensor
            for name, tensor in parameters.items()
            if name.startswith(self._prefix)
        }
        found: torch.Tensor = torch.func.functional_call(self._module(), own, (seen,))
        return found

    def initialize(self, views: Mapping[str, torch.Tensor], stream: Stream) -> None:
        """Set the parameters to the initial values that the function gives them.

        Args:
            views: The run's parameters, by name.
            stream: The stream from which the seed of torch's generator is drawn.
        """
        # By default fork_rng() would also save the generators of all GPUs, and start CUDA for that.
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
        """Return this thread's instance of the module."""
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
