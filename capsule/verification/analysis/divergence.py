"""Where two runs diverge, by how much, and why: for ``capsule diff`` and ``verify``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capsule.bundle.claims import (
    ImageClaim,
    ProgramClaims,
    TrainingClaims,
    collect_claims,
    read_arrivals,
)
from capsule.bundle.run_bundle import ARRIVALS, RecordedRun
from capsule.experiment import contract
from capsule.experiment.spec import RecordingSpec, calendar_clock
from capsule.host.errors import CapsuleError
from capsule.machine.fingerprint import Fingerprint
from capsule.verification.analysis.causes import Facts, explain
from capsule.verification.analysis.comparison import (
    compare_checkpoints,
    compare_claims,
    compare_documents,
    only_other_code,
    trace_difference,
)
from capsule.verification.analysis.outputs import bundled_outputs, compare_outputs, outputs_in
from capsule.verification.analysis.pin_differences import changes, circumstances, ranked
from capsule.verification.analysis.runs import (
    ComparedRun,
    Training,
    bundle_side,
    directory_side,
    read_checkpoint_index,
)
from capsule.verification.analysis.trace_alignment import TraceAlignment, align_traces
from capsule.verification.content.parts import shown_name
from capsule.verification.content.tensor_comparison import compare_tensors
from capsule.verification.content.ulp import Width, distance
from capsule.verification.equivalence.returns import compare_returns
from capsule.verification.findings import AnalysisFinding, ComparisonFinding, ExecutionFinding
from capsule.verification.verdict import (
    Bisection,
    ComponentDifference,
    Divergence,
    NumberDifference,
    OutputComparison,
    ReplicaResults,
    TensorDifference,
)


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs, for which nothing is executed.

    Attributes:
        a: Name of one.
        b: Name of the other.
        facts: What is known of their difference.
        numbers: Losses and returns that differ.
        checkpoint: Step of the last checkpoint whose tensors both have.
        tensors: The tensors that differ in it.
        outputs: The outputs of a program that differ, unless the caller has compared them.
    """

    a: str
    b: str
    facts: Facts
    numbers: tuple[NumberDifference, ...] = ()
    checkpoint: int | None = None
    tensors: tuple[TensorDifference, ...] = ()
    outputs: OutputComparison | None = None

    @property
    def equal(self) -> bool:
        """Whether everything that results of a run are compared by is equal."""
        facts = self.facts
        return not (facts.first or facts.results or facts.contradictions)

    def report(self, bisection: Bisection | None = None) -> Divergence:
        """Build the analysis, with the first differing update and operator if they are known."""
        facts = replace(self.facts, bisection=bisection)
        alignment = facts.alignment or TraceAlignment()
        return Divergence(
            a=self.a,
            b=self.b,
            equal=self.equal,
            first=None if alignment.first is None else trace_difference(alignment.first),
            equal_until=alignment.equal_until,
            last_equal=alignment.last_equal,
            map=None if facts.alignment is None else alignment.map(),
            differences=facts.results,
            outputs=self.outputs,
            numbers=self.numbers,
            checkpoint=self.checkpoint,
            tensors=self.tensors,
            causes=() if self.equal else explain(facts),
            explanations=ranked(facts.changes, facts.family()),
            bisection=bisection,
        )


def compare_sides(
    a: ComparedRun,
    b: ComparedRun,
    differences: tuple[ComponentDifference, ...] | None = None,
    outputs: OutputComparison | None = None,
) -> RunComparison:
    """Compare two runs.

    Args:
        a: One.
        b: The other.
        differences: What differs beside the trace, if the caller has compared that.
        outputs: The outputs of a program that differ, if the caller has compared ``differences``.

    Raises:
        CapsuleError: CAP-V073, one is a trainer's and the other a program's; CAP-T141, CAP-V011, a
            trace or a checkpoint is malformed.
    """
    if (a.training is None) != (b.training is None):
        raise CapsuleError(
            "CAP-V073",
            f"{a.name} and {b.name} cannot be compared: one is a run of a trainer of Capsule's "
            "own, the other of a program",
            fix="Name two runs of the same kind.",
        )
    alignment = checkpoint = None
    numbers: tuple[NumberDifference, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    if a.training is None or b.training is None:
        left, right = a.results(), b.results()
    else:
        prefix = a.training.evaluation is None or b.training.evaluation is None
        recordings = a.spec.recording, b.spec.recording
        alignment = align_traces(a.training.trace, b.training.trace, recordings, prefix=prefix)
        left, right = _results(a.training, b.training, recordings, prefix=prefix)
        numbers = tuple(_numbers(alignment, a.training, b.training))
        checkpoint, tensors = _tensors(a.training, b.training)
    compared = None
    if differences is None:
        differences = compare_documents(left, right)
        if a.outputs is not None and b.outputs is not None:
            outputs = compared = compare_outputs(a.outputs, b.outputs)
    facts = Facts(
        alignment=alignment,
        results=differences,
        changes=changes(a, b),
        circumstances=circumstances(a, b),
        contradictions=tuple(
            f"{side.name}: {each}" for side in (a, b) for each in side.contradictions
        ),
        # In float32: a loss is a sum of such numbers.
        loss=distance(*alignment.losses[1:], width=32) if alignment and alignment.losses else None,
        outputs=outputs,
        clock=calendar_clock(a.spec),
        drawn=tuple(_other_draws(a.drawn, b.drawn)),
    )
    return RunComparison(a.name, b.name, facts, numbers, checkpoint, tensors, compared)


def _other_draws(a: Mapping[str, int], b: Mapping[str, int]) -> Iterator[str]:
    """Yield each process that asked for other amounts of randomness in the two runs."""
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            amounts = (f"{each[name]:,} bytes" if name in each else "nothing" for each in (a, b))
            yield f"process {shown_name(name)} asked for randomness: {' / '.join(amounts)}"


def compare_results(
    run: RecordedRun,
    image: ImageClaim | None,
    engine: str,
    directory: Path,
    steps: int | None,
    executed: ExecutionFinding,
) -> ComparisonFinding:
    """Compare what a re-execution left with the claims of the recorded run.

    Args:
        run: The recorded run.
        image: The identity of the image that was executed, if the engine used one.
        engine: The name of the engine.
        directory: The run directory of the re-execution.
        steps: The length of a prefix, of which only checkpoints are compared; None: a whole run.
        executed: The re-execution.

    Raises:
        CapsuleError: CAP-B090, a document of the run directory is missing or malformed.
    """
    claims, outputs, fewer_attempts = run.claims, None, False
    if steps is not None and isinstance(claims, TrainingClaims):
        # A prefix has neither an evaluation nor final claims. analyse() compares its trace.
        index = read_checkpoint_index(directory)
        return ComparisonFinding(compare_checkpoints(claims.checkpoints, index, steps))
    found = collect_claims(run.lock, image, engine, directory)
    left, right = claims.flags, found.flags
    # Flags that were to have other values get the recorded ones, so that they compare equal.
    kept = {name: value for name, value in right.items() if name not in executed.varied}
    stated = {name: value for name, value in left.items() if name in executed.varied}
    found = found.model_copy(update={"flags": {**kept, **stated}})
    if isinstance(claims, ProgramClaims) and isinstance(found, ProgramClaims):
        outputs = compare_outputs(bundled_outputs(run), outputs_in(directory, executed.span))
        if claims.arrivals != found.arrivals and _repeats_arrivals(run, directory, claims, found):
            found = found.model_copy(update={"arrivals": claims.arrivals})
            fewer_attempts = True
    return ComparisonFinding(compare_claims(claims, found), outputs, found, fewer_attempts)


def _repeats_arrivals(
    run: RecordedRun, directory: Path, claims: ProgramClaims, found: ProgramClaims
) -> bool:
    if claims.arrivals is None or found.arrivals is None:
        return False
    recorded = read_arrivals(run.bundle.member(ARRIVALS))
    return read_arrivals(directory / contract.ARRIVALS).repeats(recorded)


def analyse(
    run: RecordedRun, here: Fingerprint, directory: Path, compared: ComparisonFinding
) -> AnalysisFinding:
    """Analyse where a bundle (a) and its re-execution here (b) diverge.

    Args:
        run: The recorded run, of a bundle that agrees with itself.
        here: The fingerprint of this machine.
        directory: The run directory of the re-execution.
        compared: What differs in the claims, and in the outputs of a program.
    """
    a = bundle_side(run, "the bundle")
    b = directory_side(directory, "the re-execution", run.lock, here)
    comparison = compare_sides(a, b, compared.differences, compared.outputs)
    report, alignment = comparison.report(), comparison.facts.alignment
    replica = None
    if b.training is not None and b.training.evaluation is not None:
        replica = ReplicaResults(evaluation=b.training.evaluation, divergence=report.map)
    # Returns are compared only where results differ: equal claims include equal returns.
    claims, found, statistics = run.claims, compared.claims if compared.differences else None, None
    equal = report.equal
    if isinstance(claims, TrainingClaims) and isinstance(found, TrainingClaims):
        spec, claim_id = run.lock.spec, claims.claim_id()
        equal = equal or only_other_code(claims, found, spec)
        if not equal:
            statistics = compare_returns(spec, claim_id, claims.evaluation, found.evaluation)
    return AnalysisFinding(
        first_difference=report.first,
        divergence=None if equal else report,
        replica=replica,
        compared_steps=None if report.map is None else report.map.steps,
        statistics=statistics,
        rejoined=None if alignment is None else alignment.rejoined,
    )


def _results(
    left: Training,
    right: Training,
    recordings: tuple[RecordingSpec, RecordingSpec],
    *,
    prefix: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those results of two trainers' runs that can be compared."""
    a, b = left.results(), right.results()
    # The streams of a prefix are those of its end. Checkpoints at other steps are no difference
    # where one run wrote them more often, or further.
    if prefix:
        a, b = ({"checkpoints": each["checkpoints"]} for each in (a, b))
    if prefix or recordings[0].checkpoint_interval != recordings[1].checkpoint_interval:
        steps = {each["step"] for each in a["checkpoints"]}
        steps &= {each["step"] for each in b["checkpoints"]}
        for each in (a, b):
            each["checkpoints"] = [item for item in each["checkpoints"] if item["step"] in steps]
    return a, b


def _numbers(
    alignment: TraceAlignment, left: Training, right: Training
) -> Iterator[NumberDifference]:
    if alignment.losses is not None:
        step, a, b = alignment.losses
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
    # Untrusted evaluations may have other numbers of points and returns. compare_documents()
    # reports that.
    for first, second in zip(left.points, right.points, strict=False):
        for start, pair in enumerate(zip(first.returns, second.returns, strict=False)):
            if pair[0] != pair[1]:
                a, b = map(_finite_number, pair)
                yield f"return of the network of step {first.step} from start {start}", a, b


def _finite_number(text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):  # an untrusted document
        return math.nan


def _tensors(left: Training, right: Training) -> tuple[int | None, tuple[TensorDifference, ...]]:
    """Compare the last checkpoint whose tensors both have."""
    common = left.tensors.keys() & right.tensors.keys()
    if not common:
        return None, ()
    step = max(common)
    return step, compare_tensors(left.tensors[step], right.tensors[step])
