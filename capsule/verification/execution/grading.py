"""The verdict on a re-execution, by bits, by content or by returns."""

from __future__ import annotations

from typing import Any

from capsule.bundle.claims import NO_NAMESPACES, ProgramClaims, TrainingClaims
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment.evaluation import ToleranceSpec
from capsule.experiment.lock import Lock
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted
from capsule.image.code import training_code_digest
from capsule.image.releases import release_of
from capsule.machine.compare import ExpectedGrade, compare, expected_grade
from capsule.machine.fingerprint import Fingerprint
from capsule.verification.analysis.comparison import (
    PROCESSOR_FLAGS,
    compare_claims,
    only_other_code,
)
from capsule.verification.analysis.outputs import COMPONENTS
from capsule.verification.component_words import component_differs, component_words
from capsule.verification.content.parts import HARMLESS
from capsule.verification.equivalence.returns import ReturnStatistics, outcome_of
from capsule.verification.findings import (
    AnalysisFinding,
    ComparisonFinding,
    EnvironmentFinding,
    ExecutionFinding,
    ImageFinding,
)
from capsule.verification.request import Mode
from capsule.verification.verdict import Grade, ImageSource, Judgement, OutputComparison

BITWISE = Judgement("reproduced-bitwise", "the re-execution reproduced every claim, bit for bit")
FEWER_ATTEMPTS = Judgement(
    "reproduced-bitwise",
    f"{BITWISE.summary}, except that the program made fewer attempts to send or to receive at its "
    "end than the arrival log lists",
)
OTHER_CODE = Judgement(
    "reproduced-bitwise",
    "every result is the same, bit for bit, although the libraries chose other code for this "
    "processor",
)
SIGNERS: dict[ImageSource | None, str] = {
    "embedded": "; the image was the signer's own and was not rebuilt from the lock",
    "registry": "; the image was taken from a registry and was not rebuilt from the lock",
    "supplied-base": "; the base layer was the signer's own and was not built from the packages",
}

# Claims that another processor or GPU cannot change; of flags and streams a part.
_FIXED = (
    "lock",
    "image",
    "relaxations",
    "data",
    "entropy_profile",
    "libraries",
    "flags",
    "streams",
    "schedule",
)


def judge(
    run: RecordedRun,
    mode: Mode,
    environment: EnvironmentFinding,
    executed: ExecutionFinding,
    compared: ComparisonFinding,
    analysed: AnalysisFinding,
) -> Judgement:
    """Judge the re-execution of a run, or of a prefix of it.

    Args:
        run: The recorded run.
        mode: How far it was executed.
        environment: The comparison of the two machines, with the grade to be expected.
        executed: The re-execution.
        compared: What differs in its claims.
        analysed: Where the two runs diverge.

    Raises:
        CapsuleError: CAP-V048 of :func:`judge_program`.
    """
    claims, found = run.claims, compared.claims
    if isinstance(claims, ProgramClaims):
        return judge_program(claims, compared)
    # Bits are judged first. Only the claims of a whole run can then be accepted by their returns.
    judgement = judge_training(mode, executed, compared, analysed)
    if not compared.differences or not isinstance(found, TrainingClaims):
        return judgement
    if (same := bitwise(claims, found, run.lock.spec)) is not None:
        return same
    return grade_replica(
        judgement.summary,
        environment.expected_grade,
        run.lock.spec.evaluation.tolerance,
        inconsistent(analysed.first_difference, analysed.rejoined)
        or beyond_arithmetic(claims, found)
        or unconfirmed(run, environment.here, executed.compilers),
        analysed.statistics,
    )


def judge_program(claims: ProgramClaims, found: ComparisonFinding) -> Judgement:
    """Judge a program's re-execution by its outputs.

    Raises:
        CapsuleError: CAP-V048, nothing is claimed and nothing came out, which decides nothing.
    """
    outputs = found.outputs
    # Differences of outputs count by their nature only if a comparison accounts for them.
    explained = () if outputs is None else COMPONENTS
    others = [each for each in found.differences if not each.component.startswith(explained)]
    # A difference beside the outputs is never a matter of dates, so it also decides where the
    # outputs have the same content.
    if outputs is not None and (others or outputs.nature not in HARMLESS):
        first = outputs.files[0]
        where = "" if first.where is None else f", at {first.where}"
        return Judgement("not-reproduced", f"the outputs first differ in {first.path}{where}")
    if others:
        differs = f"the outputs are equal, but {component_differs(others[0].component)}"
        return Judgement("not-reproduced", differs)
    if outputs is not None:
        return Judgement("reproduced-content", _same_content(outputs))
    # This is the last check, so that a re-execution that does leave something is a difference.
    if claims.nothing:
        raise CapsuleError(
            "CAP-V048",
            "NOTHING IS CLAIMED: the program left no file and printed nothing, so there is nothing "
            "that could be reproduced",
            fix="Have the program write its results into its working folder, or print them.",
        )
    return FEWER_ATTEMPTS if found.fewer_attempts else BITWISE


def _same_content(outputs: OutputComparison) -> str:
    what = "dates" if outputs.nature == "date" else "how the same content is stored"
    differ = counted(outputs.count, "output differs", "outputs differ")
    return f"the content of every output was reproduced, but not every bit: {differ} only in {what}"


def bitwise(claimed: TrainingClaims, found: TrainingClaims, spec: Spec) -> Judgement | None:
    """Judge a whole re-execution whose every result is the recorded one; None of any other."""
    if not compare_claims(claimed, found):
        return BITWISE
    return OTHER_CODE if only_other_code(claimed, found, spec) else None


def judge_training(
    mode: Mode, executed: ExecutionFinding, compared: ComparisonFinding, analysed: AnalysisFinding
) -> Judgement:
    """Judge a re-execution of a trainer's run, or of a prefix of it, bit for bit."""
    first = analysed.first_difference
    if first is not None:
        name = f" ({first.name})" if first.name else ""
        where = f"in {component_words(first.component)}{name}"
        return Judgement("not-reproduced", f"the runs first differ at step {first.step}, {where}")
    if compared.differences:
        differs = component_differs(compared.differences[0].component)
        return Judgement("not-reproduced", f"the traces are equal, but {differs}")
    if mode.steps is None:
        return BITWISE
    # How far it went is what the run itself wrote down, and may be less than it was asked for.
    ends = {executed.reexecuted_steps, analysed.compared_steps}
    if ends != {mode.steps}:
        early = f"the re-execution ended before step {mode.steps:,}, which it was to reach"
        return Judgement("not-reproduced", early)
    steps = "step is" if mode.steps == 1 else f"{mode.steps:,} steps are"
    same = f"the first {steps} the same, bit for bit"
    return Judgement("reproduced-prefix", f"{same}; the rest was not re-executed")


def grade_replica(
    difference: str,
    expected: ExpectedGrade,
    tolerance: ToleranceSpec | None,
    unexplained: str | None,
    statistics: ReturnStatistics | None,
) -> Judgement:
    """Judge a whole re-execution whose claims are not the bundle's.

    Where equal bits were to be expected, other bits are not accepted. Elsewhere the returns decide,
    if the spec declared a tolerance.

    Args:
        difference: The first difference, in words.
        expected: The grade to be expected of the two machines.
        tolerance: What the lock declares.
        unexplained: Why the arithmetic of another machine cannot be the cause: of
            :func:`inconsistent` or :func:`beyond_arithmetic`; None if it can.
        statistics: Statistics of both runs' returns; None if they cannot be compared.
    """
    judgement = judge_difference(difference, expected, unexplained)
    if judgement is not None:
        return judgement
    if tolerance is None:
        return Judgement(
            "not-reproduced",
            f"{difference}; equal bits could not be expected here, but the spec declares no "
            "evaluation.tolerance by which others could be accepted",
        )
    if statistics is None:
        incomparable = "the returns of the final networks cannot be compared"
        return Judgement("inconclusive", f"{difference}; {incomparable}")
    outcome = outcome_of(statistics)
    verdict: dict[str, Grade] = {
        "within": "reproduced-statistical",
        "outside": "not-reproduced",
        "undecided": "inconclusive",
    }
    prefix = "different bits, as expected" if outcome == "within" else difference
    return Judgement(verdict[outcome], f"{prefix}: {statistics.shown}")


def judge_difference(
    difference: str, expected: ExpectedGrade, unexplained: str | None
) -> Judgement | None:
    """Judge other bits than the claimed ones; None if another machine may be their cause.

    The arguments are those of :func:`grade_replica`.
    """
    # Where equal bits are expected, no tolerance excuses others.
    if expected != "statistical":
        return Judgement("not-reproduced", difference)
    if unexplained is not None:
        return Judgement("not-reproduced", f"{difference}; {unexplained}")
    return None


def inconsistent(first: object | None, rejoined: int | None) -> str | None:
    """Return why a tolerance does not apply to a pair of traces; None if it does.

    The arithmetic of another machine shows in the trace, where every update is recorded, and its
    differences spread. Other results beside equal traces, or a record that differs alone, may have
    another origin.

    Args:
        first: The first trace record that differs, if one does.
        rejoined: Step of the last one, if later records are equal again.
    """
    if first is None:
        return "a tolerance applies only where the traces differ"
    if rejoined is not None:
        return (
            f"the records after step {rejoined} are equal again, and a tolerance applies only "
            "where differences last"
        )
    return None


def beyond_arithmetic(claimed: TrainingClaims, found: TrainingClaims) -> str | None:
    """Name a differing claim that no other arithmetic explains; None if there is none.

    Another processor or GPU may change what is computed, and what its libraries report.
    It does not change the experiment, the image, a library's version, a flag, the seed of a stream
    or the schedule.
    """
    left, right = _fixed(claimed), _fixed(found)
    name = next((name for name in _FIXED if left[name] != right[name]), None)
    if name is None:
        return None
    return f"{component_differs(name)}, which other arithmetic does not explain"


def _fixed(claims: TrainingClaims) -> dict[str, Any]:
    facts = claims.model_dump(include={*_FIXED})
    facts["flags"] = {
        name: value for name, value in claims.flags.items() if name not in PROCESSOR_FLAGS
    }
    facts["relaxations"] = [name for name in claims.relaxations if name != NO_NAMESPACES]
    # How much was drawn, and thus the digest of the draws, may follow from other actions.
    facts["streams"] = [(stream.name, stream.seed, stream.key) for stream in claims.streams]
    return facts


def unconfirmed(run: RecordedRun, here: Fingerprint, imported: str | None) -> str | None:
    """Return why a package that the bundle names cannot be the cause; None if another cause can.

    That the recorded run imported such a package is the signer's word.

    Args:
        run: The recorded run.
        here: The machine that executed it again.
        imported: Packages whose functions depend on the processor and that it then imported.
    """
    named = run.compilers()
    if named is None or imported is not None:
        return None
    grade, _ = expected_grade(compare(run.observations().fingerprint, here, run.lock.spec))
    if grade == "statistical":
        return None
    return f"the bundle names {named} as imported, and the re-execution imported no such package"


def reservations(lock: Lock, image: ImageFinding) -> str:
    """Return what a verdict adds about an image or code that is not what the lock produces here."""
    said = SIGNERS.get(image.image_source, "")
    code = lock.image.code.sha256
    if code == training_code_digest():
        return said
    if (version := release_of(code)) is not None:
        return f"{said}; the training code was that of Capsule {version}"
    return f"{said}; the training code was the signer's own and not this Capsule's"
