"""Checks of hyper-parameters that several algorithms have. Each raises ValueError."""

from __future__ import annotations

from typing import Any

from capsule.experiment.fields import is_given
from capsule.experiment.trainers.layers import OwnNetwork


def require_micro_batches(sizes: tuple[int, ...], batch_size: int) -> None:
    """Check that the parts of a minibatch add up to it."""
    if sum(sizes) != batch_size:
        raise ValueError(
            f"micro_batches {list(sizes)} add up to {sum(sizes)}, not to batch_size {batch_size}"
        )


def require_no_units(trainer: Any) -> None:
    """Check that ``hidden_units`` is not given where a network declares its own dense layers."""
    if isinstance(trainer.network, OwnNetwork) and is_given(trainer, "hidden_units"):
        raise ValueError(
            f"hidden_units {trainer.hidden_units} is not used by your own network: remove it, and "
            "list the units of its dense layers in network.dense"
        )


def require_multiple(trainer: Any, name: str, unit: str) -> None:
    """Check that one field of ``trainer`` is a multiple of another."""
    value, size = getattr(trainer, name), getattr(trainer, unit)
    if value % size:
        raise ValueError(f"{name} {value} is not a multiple of {unit} {size}")


def require_at_most(trainer: Any, name: str, limit: str) -> None:
    """Check that one field of ``trainer`` is no larger than another."""
    value, most = getattr(trainer, name), getattr(trainer, limit)
    if value > most:
        raise ValueError(f"{name} {value} exceeds {limit} {most}")
