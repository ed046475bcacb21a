"""The trained state of a trainer, for checkpoints and for the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.training.networks.feedforward import Parameters
from capsule.training.state.trace import arrays_digest


class TrainState:
    """Parameters, the state of an optimizer, target parameters, and further parameters."""

    def __init__(
        self,
        online: Parameters,
        optimizer: Mapping[str, Parameters],
        *,
        target: Parameters | None = None,
        others: Mapping[str, Parameters] = MappingProxyType({}),
    ) -> None:
        """Refer to the tensors of a trainer.

        Args:
            online: Parameters theta.
            optimizer: State of the optimizer, by kind.
            target: Parameters of the target network, if there is one.
            others: Further parameters, by group; they are in checkpoints, but not in the trace.
        """
        self._online, self._optimizer = online, optimizer
        self._targets = {} if target is None else {"target": target}
        optimized = {f"optimizer/{name}": part for name, part in optimizer.items()}
        self._groups = {"parameters": online, **self._targets, **optimized, **others}

    def names(self) -> list[str]:
        """Return the names of :meth:`tensors`."""
        return [f"{group}/{name}" for group, part in self._groups.items() for name in part.views]

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of all tensors, as ``group/name``."""
        return {
            f"{group}/{name}": array
            for group, parameters in self._groups.items()
            for name, array in parameters.arrays().items()
        }

    def load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Set the values to those that :meth:`tensors` returned."""
        for group, parameters in self._groups.items():
            parameters.load({name: tensors[f"{group}/{name}"] for name in parameters.views})

    def digests(self, gradient: Sequence[torch.Tensor] | None) -> dict[str, dict[str, str]]:
        """Return the tensors of a trace record: component to tensor name to digest.

        Args:
            gradient: The last gradient, a flat tensor for each parameter tensor; None before the
                first.
        """
        names = list(self._online.views)
        return {
            **({} if gradient is None else {"gradient": _digests(names, gradient)}),
            "parameters": _digests(names, self._online.segments),
            **{name: _digests(names, part.segments) for name, part in self._targets.items()},
            "optimizer": {
                f"{kind}/{name}": digest
                for kind, part in self._optimizer.items()
                for name, digest in _digests(names, part.segments).items()
            },
        }


def _digests(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, str]:
    """Return name to digest of each tensor's elements, in the order of their memory."""
    return {
        name: arrays_digest([tensor.detach().cpu().numpy()])
        for name, tensor in zip(names, tensors, strict=True)
    }
