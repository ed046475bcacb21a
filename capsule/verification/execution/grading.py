"""What a whole re-execution is worth that gave other bits."""

from __future__ import annotations

from typing import Any

from capsule.bundle.claims import NO_NAMESPACES, TrainingClaims
from capsule.experiment.evaluation import ToleranceSpec
from capsule.machine.compare import ExpectedGrade
from capsule.verification.equivalence.returns import ReturnStatistics, outcome_of
from capsule.verification.verdict import Divergence, Grade

# Claims that another processor or GPU cannot change; of flags and streams a part.
_FIXED = (
    "lock",
    "image",
    "relaxations",
    "entropy_profile",
    "libraries",
    "flags",
    "streams",
    "schedule",
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


def grade_replica(
    difference: str,
    expected: ExpectedGrade,
    tolerance: ToleranceSpec | None,
    unexplained: str | None,
    statistics: ReturnStatistics | None,
) -> tuple[Grade, str]:
    """Return verdict and summary of a whole re-execution whose claims are not the bundle's.

    Where equal bits were to be expected, nothing makes up for their absence. Elsewhere the returns
    decide, if the spec declared by how much they may be off.

    Args:
        difference: The first difference, in words.
        expected: What the two machines let one expect.
        tolerance: What the lock declares.
        unexplained: Why the arithmetic of another machine cannot be the cause: of
            :func:`inconsistent` or :func:`beyond_arithmetic`; None if it can.
        statistics: Of both runs' returns; None if they cannot be compared.
    """
    if expected != "statistical":
        return "not-reproduced", difference
    if unexplained is not None:
        return "not-reproduced", f"{difference}; {unexplained}"
    if tolerance is None:
        return "not-reproduced", (
            f"{difference}; equal bits were not to be expected here, but the spec declares no "
            "evaluation.tolerance by which other ones could be accepted"
        )
    if statistics is None:
        return "inconclusive", f"{difference}; the returns of the final networks cannot be compared"
    outcome = outcome_of(statistics)
    verdict: dict[str, Grade] = {
        "within": "reproduced-statistical",
        "outside": "not-reproduced",
        "undecided": "inconclusive",
    }
    prefix = "other bits, as was to be expected" if outcome == "within" else difference
    return verdict[outcome], f"{prefix}: {statistics.shown}"


def inconsistent(first: object | None, divergence: Divergence | None) -> str | None:
    """Say why the claims cannot have come from a run like the recorded one; None if they can.

    The arithmetic of another machine shows in the trace, where every update is recorded. Claims
    that differ although the traces are equal have another origin, and so have differences that
    the analysis takes for tampering.

    Args:
        first: The first trace record that differs, if one does.
        divergence: The analysis of the difference.
    """
    if first is None:
        return "equal traces lead to equal results, whatever the machine"
    causes = () if divergence is None else divergence.causes
    tampering = next((cause for cause in causes if cause.name == "tampering"), None)
    return None if tampering is None else "; ".join(tampering.evidence)


def beyond_arithmetic(claimed: TrainingClaims, found: TrainingClaims) -> str | None:
    """Say which claim differs that no other arithmetic explains; None if there is none.

    Another processor or GPU may change what is computed, and what its libraries say of themselves.
    It does not change the experiment, the image, a library's version, a flag, the seed of a stream
    or the schedule.
    """
    left, right = _fixed(claimed), _fixed(found)
    name = next((name for name in _FIXED if left[name] != right[name]), None)
    return None if name is None else f"no other arithmetic explains that {name} differs"


def _fixed(claims: TrainingClaims) -> dict[str, Any]:
    facts = claims.model_dump(include={*_FIXED})
    facts["flags"] = {
        name: value for name, value in claims.flags.items() if name not in PROCESSOR_FLAGS
    }
    facts["relaxations"] = [name for name in claims.relaxations if name != NO_NAMESPACES]
    facts["streams"] = [(stream.name, stream.seed, stream.key) for stream in claims.streams]
    return facts
