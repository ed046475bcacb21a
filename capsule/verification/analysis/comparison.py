"""Comparing what was claimed with what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from capsule.bundle.claims import NO_NAMESPACES, CheckpointClaim, Claims, TrainingClaims
from capsule.experiment import contract
from capsule.experiment.spec import Spec
from capsule.experiment.states import ResumeState
from capsule.experiment.trace import BEGINNING, Difference, Mark, first_difference
from capsule.host.wording import shown_value
from capsule.verification.verdict import (
    ComponentDifference,
    TraceDifference,
)

MAX_DIFFERENCES = 40
SHOWN_CHARACTERS = 120

# Every claim, causes before effects: the first fact that differs is the one to look at. What only a
# trainer of Capsule's own or only a user's program claims is absent from the other's claims.
ORDER = (
    "lock",
    "image",
    "relaxations",
    "data",
    "flags",
    "libraries",
    # A replay that needed more than the recorded randomness has no profile, and repeats no run.
    "entropy_profile",
    "streams",
    "schedule",
    "arrivals",
    "trace",
    "checkpoints",
    "parameters",
    "evaluation",
    "steps",
    "episodes",
    "outputs",
    "deleted",
    "empty_folders",
    "standard_output",
)


# Flags by which libraries say what code they chose for the processor
# (capsule.training.determinism.cpu).
PROCESSOR_FLAGS = frozenset(
    {
        "mkl.branch",
        "mkl.threads",
        "mkl.vendor_check",
        "nnpack.enabled",
        "numerics.self_test",
        "numpy.cpu_features",
        "onednn.isa",
        "openblas.core",
        "torch.cpu_capability",
    }
)


def compare_claims(claimed: Claims, found: Claims) -> tuple[ComponentDifference, ...]:
    """List the facts that differ, causes before effects, at most :data:`MAX_DIFFERENCES`.

    Whether the machine had namespaces for the run is not compared: the report names it.
    """
    left, right = (
        claims.model_dump(mode="json", by_alias=True)
        | {"relaxations": [name for name in claims.relaxations if name != NO_NAMESPACES]}
        for claims in (claimed, found)
    )
    return compare_documents({n: left.get(n) for n in ORDER}, {n: right.get(n) for n in ORDER})


def only_other_code(claimed: TrainingClaims, found: TrainingClaims, spec: Spec) -> bool:
    """Tell whether claims differ, but only in the code that libraries chose for the processor.

    Only the profile ``native`` leaves them this choice, which is no result.
    """
    if spec.cpu_numerics != "native" or not compare_claims(claimed, found):
        return False
    chosen = {name: value for name, value in claimed.flags.items() if name in PROCESSOR_FLAGS}
    others = {name: value for name, value in found.flags.items() if name not in PROCESSOR_FLAGS}
    return not compare_claims(claimed, found.model_copy(update={"flags": {**others, **chosen}}))


def compare_documents(
    claimed: Mapping[str, Any], found: Mapping[str, Any]
) -> tuple[ComponentDifference, ...]:
    """List the leaves in which two JSON documents differ, in order of the first one's keys."""
    names = dict.fromkeys([*claimed, *found])
    # Lazy, so that untrusted documents that differ everywhere cost no more than what is listed.
    differing = (_differences(name, claimed.get(name), found.get(name)) for name in names)
    return tuple(islice(chain.from_iterable(differing), MAX_DIFFERENCES))


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
            found=shown_value(right.get(step)),
        )
        for step in sorted(left)
        if left[step] != right.get(step)
    )


def compare_traces(
    recorded: Path, found: Path, since: Mark = BEGINNING, until: int | None = None
) -> TraceDifference | None:
    """Find the first trace record that differs.

    With ``since`` and ``until``, one segment is compared, which is all that ``found`` has.
    """
    difference = first_difference(recorded, found, since=since, until=until)
    return None if difference is None else trace_difference(difference)


def compare_states(claimed: ResumeState, found: ResumeState) -> tuple[ComponentDifference, ...]:
    """List what differs between two states to resume from, except for the time they took."""
    left = claimed.model_dump(mode="json", exclude={"seconds"})
    right = found.model_dump(mode="json", exclude={"seconds"})
    return tuple(islice(_differences("state", left, right), MAX_DIFFERENCES))


def trace_difference(difference: Difference) -> TraceDifference:
    """Return a difference of two traces as reports have it."""
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
        # Lists of two lengths are one difference, since their elements need not correspond.
        yield ComponentDifference(component=path, claimed=_show(left), found=_show(right))


def _show(value: Any) -> str:
    text = shown_value(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
