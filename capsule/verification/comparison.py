"""Comparing what was claimed with what was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capsule.bundle.claims import CheckpointClaim, Claims
from capsule.experiment import contract
from capsule.experiment.trace import Difference, first_difference
from capsule.verification.verdict import ComponentDifference, TraceDifference

MAX_DIFFERENCES = 40
SHOWN_CHARACTERS = 120

# Causes before effects: the first fact that differs is the one to look at.
_ORDER = (
    "lock",
    "image",
    "relaxations",
    "flags",
    "libraries",
    "streams",
    "trace",
    "checkpoints",
    "parameters",
    "evaluation",
    "steps",
    "episodes",
)


def compare_claims(claimed: Claims, found: Claims) -> tuple[ComponentDifference, ...]:
    """List the facts that differ, causes before effects, at most :data:`MAX_DIFFERENCES`."""
    left = claimed.model_dump(mode="json", by_alias=True)
    right = found.model_dump(mode="json", by_alias=True)
    differences: list[ComponentDifference] = []
    for name in _ORDER:
        differences.extend(_differences(name, left[name], right[name]))
    return tuple(differences[:MAX_DIFFERENCES])


def compare_checkpoints(
    claimed: tuple[CheckpointClaim, ...], found: contract.CheckpointIndex, last_step: int
) -> tuple[ComponentDifference, ...]:
    """Compare the checkpoints of a prefix re-execution with the claimed ones up to its end."""
    left = {item.step: item.digest for item in claimed if item.step <= last_step}
    right = {item.step: item.digest() for item in found.checkpoints if item.step in left}
    return tuple(
        ComponentDifference(
            component=f"checkpoints.{step}",
            claimed=left[step],
            found=right.get(step, "missing"),
        )
        for step in sorted(left)
        if left[step] != right.get(step)
    )


def compare_traces(recorded: Path, found: Path, *, prefix: bool) -> TraceDifference | None:
    """Find the first trace record that differs; with ``prefix`` either trace may end early."""
    difference = first_difference(recorded, found, prefix=prefix)
    return None if difference is None else _trace_difference(difference)


def _trace_difference(difference: Difference) -> TraceDifference:
    return TraceDifference(
        step=difference.step,
        component=difference.component,
        name=difference.name,
        claimed=_show(difference.a),
        found=_show(difference.b),
        also=difference.also,
    )


def _differences(path: str, left: Any, right: Any) -> Iterator[ComponentDifference]:
    """Walk two JSON values side by side."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from _differences(f"{path}.{key}", left.get(key), right.get(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _differences(f"{path}[{index}]", a, b)
    elif left != right:
        yield ComponentDifference(component=path, claimed=_show(left), found=_show(right))


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
