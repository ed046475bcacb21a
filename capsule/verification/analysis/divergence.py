"""Where two runs part, by how much, and why: the analysis of ``capsule diff`` and ``verify``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.bundle.bundle import OpenedBundle
from capsule.engine.interface import Engine
from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.machine.fingerprint import take_fingerprint
from capsule.verification.analysis.causes import Facts, explain
from capsule.verification.analysis.comparison import compare_documents, trace_difference
from capsule.verification.analysis.pin_differences import changes, ranked
from capsule.verification.analysis.runs import ComparedRun, Training, bundle_side, directory_side
from capsule.verification.analysis.trace_alignment import TraceAlignment, walk_traces
from capsule.verification.content.tensor_comparison import compare_tensors
from capsule.verification.content.ulp import Distance, Width, distance
from capsule.verification.verdict import (
    Bisection,
    ComponentDifference,
    Divergence,
    NumberDifference,
    OutputComparison,
    Replica,
    TensorDifference,
)


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared as far as nothing need be executed for it.

    Attributes:
        report: The analysis.
        facts: What it rests on.
    """

    report: Divergence
    facts: Facts

    def with_bisection(self, found: Bisection) -> Divergence:
        """Return the analysis once the first differing update, and operator, are known."""
        facts = Facts(**{**vars(self.facts), "bisection": found})
        return self.report.model_copy(
            update={
                "bisection": found,
                "causes": explain(facts),
                "explanations": ranked(facts.changes, facts.family()),
            }
        )


def compare_sides(
    a: ComparedRun,
    b: ComparedRun,
    differences: tuple[ComponentDifference, ...] | None = None,
    outputs: OutputComparison | None = None,
) -> Comparison:
    """Compare two runs.

    Args:
        a: One.
        b: The other.
        differences: What differs beside the trace, if the caller knows.
        outputs: The outputs of a program that differ, if the caller has compared them by content.

    Raises:
        CapsuleError: CAP-V073, one is a trainer's and the other a program's; CAP-T141, CAP-V011, a
            trace or a checkpoint is malformed.
    """
    if (a.training is None) != (b.training is None):
        raise CapsuleError(
            "CAP-V073",
            f"{a.name} and {b.name} have nothing to compare: one is of a trainer of Capsule's own, "
            "the other of a program",
            fix="Name two runs of one kind.",
            exit_code=ExitCode.USAGE,
        )
    report = Divergence(a=a.name, b=b.name, equal=False)
    walk = None
    loss = None
    if a.training is not None and b.training is not None:
        prefix = a.training.evaluation is None or b.training.evaluation is None
        walk = _walk(a, b, a.training, b.training, prefix=prefix)
        loss = _loss(walk)
        report = _measured(report, walk, a.training, b.training, prefix=prefix)
    else:
        report = report.model_copy(
            update={"differences": compare_documents(a.results(), b.results())}
        )
    if differences is not None:
        report = report.model_copy(update={"differences": differences})
    contradictions = [f"{side.name}: {each}" for side in (a, b) for each in side.contradictions]
    facts = Facts(
        walk, report.differences, changes(a, b), tuple(contradictions), loss, outputs=outputs
    )
    equal = report.first is None and not report.differences and not contradictions
    update = {
        "equal": equal,
        "causes": () if equal else explain(facts),
        "explanations": ranked(facts.changes, facts.family()),
    }
    return Comparison(report.model_copy(update=update), facts)


def analysis(
    bundle: OpenedBundle,
    lock: Lock,
    engine: Engine,
    directory: Path,
    differences: tuple[ComponentDifference, ...],
    outputs: OutputComparison | None = None,
) -> dict[str, Any]:
    """Return what a verification report has of a bundle (a) and its re-execution here (b).

    Args:
        bundle: The bundle, which agrees with itself.
        lock: Its lock.
        engine: Where it was executed again.
        directory: Run directory of that.
        differences: What differs in the claims.
        outputs: What differs in the outputs of a program.

    Returns:
        ``divergence``; of a trainer's run ``first_difference``, and of a whole one ``replica``.
    """
    machine = take_fingerprint(engine.describe())
    a = bundle_side(bundle, "the bundle", checked=True)
    b = directory_side(directory, "the re-execution", lock, machine, checked=True)
    report = compare_sides(a, b, differences, outputs).report
    facts: dict[str, Any] = {"divergence": None if report.equal else report}
    if b.training is not None:
        facts["first_difference"] = report.first
        if b.training.evaluation is not None:
            facts["replica"] = Replica(evaluation=b.training.evaluation, divergence=report.map)
    return facts


def _walk(
    a: ComparedRun, b: ComparedRun, left: Training, right: Training, *, prefix: bool
) -> TraceAlignment:
    recordings = a.spec.recording, b.spec.recording
    return walk_traces(left.trace, right.trace, recordings, prefix=prefix)


def _measured(
    report: Divergence, walk: TraceAlignment, left: Training, right: Training, *, prefix: bool
) -> Divergence:
    """Put down where two traces part, and how far results are apart."""
    results = left.results(), right.results()
    if prefix:  # the streams and checkpoints of a prefix are those of its end
        steps = {each["step"] for each in results[0]["checkpoints"]}
        steps &= {each["step"] for each in results[1]["checkpoints"]}
        results = tuple(
            {"checkpoints": [item for item in each["checkpoints"] if item["step"] in steps]}
            for each in results
        )  # type: ignore[assignment]
    checkpoint, tensors = _tensors(left, right)
    return report.model_copy(
        update={
            "first": None if walk.first is None else trace_difference(walk.first),
            "equal_until": walk.equal_until,
            "last_equal": walk.last_equal,
            "map": walk.map(),
            "differences": compare_documents(*results),
            "numbers": tuple(_numbers(walk, left, right)),
            "checkpoint": checkpoint,
            "tensors": tensors,
        }
    )


def _loss(walk: TraceAlignment) -> Distance | None:
    """Measure the first losses that differ, in float32: they are sums of such numbers."""
    return None if walk.losses is None else distance(*walk.losses[1:], width=32)


def _numbers(walk: TraceAlignment, left: Training, right: Training) -> Iterator[NumberDifference]:
    if walk.losses is not None:
        step, a, b = walk.losses
        yield _number(f"loss at step {step}", a, b, 32)
    returns = list(_returns(left.evaluation, right.evaluation))
    if returns:
        what, a, b = max(returns, key=lambda item: distance(*item[1:]).relative)
        others = f", the most distant of {len(returns)}" if len(returns) > 1 else ""
        yield _number(what + others, a, b, 64)


def _number(what: str, a: float, b: float, width: Width) -> NumberDifference:
    found = distance(a, b, width)
    comparable = not found.nonfinite
    return NumberDifference(
        what=what,
        a=a.hex(),
        b=b.hex(),
        ulp=found.ulp if comparable else None,
        relative=found.relative if comparable else None,
    )


def _returns(
    left: contract.Evaluation | None, right: contract.Evaluation | None
) -> Iterator[tuple[str, float, float]]:
    """Yield the returns that differ: of which network from which start, and both."""
    if left is None or right is None:
        return
    for first, second in zip(left.points, right.points, strict=False):
        for start, pair in enumerate(zip(first.returns, second.returns, strict=False)):
            if pair[0] != pair[1]:
                a, b = map(_finite_number, pair)
                yield f"return of the network of step {first.step} from start {start}", a, b


def _finite_number(text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):  # a stranger's document
        return math.nan


def _tensors(left: Training, right: Training) -> tuple[int | None, tuple[TensorDifference, ...]]:
    """Compare the last checkpoint whose tensors both have."""
    common = left.tensors.keys() & right.tensors.keys()
    if not common:
        return None, ()
    step = max(common)
    return step, compare_tensors(left.tensors[step], right.tensors[step])
