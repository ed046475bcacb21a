"""The answer of ``capsule verify``, as a document."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerDifference
from capsule.execution import SeenSurroundings
from capsule.experiment import contract
from capsule.experiment.fields import Model, added
from capsule.host.errors import ExitCode
from capsule.host.wording import counted
from capsule.machine.compare import ExpectedGrade, FactComparison
from capsule.machine.kind import MachineKind
from capsule.verification.content.parts import Comparison, Nature
from capsule.verification.equivalence.returns import ReturnStatistics
from capsule.verification.variation import listed

Grade = Literal[
    "tampered",
    "untrusted",
    "intact",
    "environment-matches",
    "reproduced-bitwise",
    "reproduced-content",
    "reproduced-prefix",
    "reproduced-statistical",
    "reproduced-segments",
    "answers-fresh-seed",
    "not-reproduced",
    "inconclusive",
]
ImageSource = Literal["rebuilt", "supplied-base", "embedded", "registry"]
RequiredGrade = Literal["bitwise", "content", "statistical"]

# The verdict that each grade accepts, from the strongest to the weakest. A weaker verdict than the
# accepted one ends with the status of a run that differs.
ACCEPTED: dict[RequiredGrade, Grade] = {
    "bitwise": "reproduced-bitwise",
    "content": "reproduced-content",
    "statistical": "reproduced-statistical",
}

FAILURES: dict[Grade, ExitCode] = {
    "tampered": ExitCode.TAMPERED,
    "untrusted": ExitCode.TAMPERED,
    "not-reproduced": ExitCode.DIFFERS,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


def exit_code_of(verdict: Grade, required: RequiredGrade) -> ExitCode:
    """Return the exit status of a verdict if a grade is required."""
    # A verdict that is not in ACCEPTED, such as that of a prefix, has the same status whatever
    # grade is required.
    weaker = list(ACCEPTED.values())[list(ACCEPTED).index(required) + 1 :]
    return ExitCode.DIFFERS if verdict in weaker else FAILURES.get(verdict, ExitCode.OK)


class Judgement(NamedTuple):
    """A verdict, and its reason in one sentence."""

    verdict: Grade
    summary: str


class ComponentDifference(Model):
    """A claimed fact that the re-execution did not reproduce."""

    component: str = Field(description="Path in the claims, e.g. 'evaluation.points[1].returns'.")
    claimed: str
    found: str


class TraceDifference(Model):
    """The first trace record that differs."""

    step: int = Field(description="Agent step at which the differing record ends.")
    component: str = Field(
        description="First differing field of the record, in the order of the data flow."
    )
    name: str | None = Field(
        None,
        description="Random stream or tensor within the component; null if the record does not "
        "name it.",
    )
    claimed: str
    found: str
    also: tuple[str, ...] = Field(
        (), description="Further components that differ in the same record."
    )


class OutputDifference(Model):
    """An output of a program that differs."""

    path: str = Field(description="Path in the working folder, or '/dev/stdout'.")
    found_path: str | None = Field(
        None,
        description="Path of the file of the re-execution; null if it has the same name.",
    )
    claimed: str = Field(
        description="The first part that differs, or the kind of file at the path."
    )
    found: str
    nature: Nature = Field("content", description="The gravest nature among all differences.")
    content: Comparison | None = Field(
        None,
        description="Comparison of the two files part by part; null if there are no two files to "
        "compare.",
    )

    @property
    def name(self) -> str:
        """The path; both paths if the file of the re-execution has another one."""
        return self.path if self.found_path is None else f"{self.path} / {self.found_path}"

    @property
    def where(self) -> str | None:
        """Name the first part that differs."""
        return self.content.parts[0].where or None if self.content else None


class OutputComparison(Model):
    """All outputs of a program that differ."""

    count: int = Field(description="Number of outputs that differ.")
    nature: Nature = Field(description="The gravest nature among all outputs that differ.")
    files: tuple[OutputDifference, ...] = Field(
        description="The outputs in the order of their paths; at most 40."
    )

    def beyond(self, shown: int) -> str | None:
        """Count the outputs that differ beyond the first ones; None if there are no more."""
        more = self.count - shown
        return counted(more, "more output differs", "more outputs differ") if more > 0 else None


class DivergenceMap(Model):
    """The intervals of training in which two traces differ, component by component."""

    steps: int = Field(description="Agent step of the last record that both traces have.")
    components: dict[str, tuple[tuple[int, int], ...]] = Field(
        description="Intervals in which each component differs, as the agent steps of the first "
        "and the last of consecutive differing records. A component without intervals is equal "
        "throughout."
    )


class ReplicaResults(Model):
    """The results of a full re-execution, to be shown next to the recorded results."""

    evaluation: contract.Evaluation | None = Field(
        description="The evaluation of the re-execution; null if it has none."
    )
    divergence: DivergenceMap | None = Field(
        description="The intervals in which the two traces differ; null if there are no traces."
    )


class NumberDifference(Model):
    """Two numbers that should be equal."""

    what: str = Field(description="Name of the number, e.g. 'loss at step 208'.")
    a: contract.Hex
    b: contract.Hex
    ulp: int | None = Field(
        description="Distance in units in the last place, of float32 for a loss and of float64 for "
        "a return; null for NaN and infinity."
    )
    relative: float | None = Field(
        description="Relative difference |a - b| / max(|a|, |b|); null for NaN and infinity."
    )


class TensorDifference(Model):
    """One tensor that differs in two checkpoints."""

    name: str
    elements: int
    differing: int = Field(description="Number of elements whose bits differ.")
    nonfinite: int = Field(
        0, description="Number of differing elements that are NaN or infinite on at least one side."
    )
    ulp: int | None = Field(
        None,
        description="Largest distance in units in the last place; null if the elements are not "
        "floating-point numbers that can be compared.",
    )
    relative: float | None = Field(
        None,
        description="Largest relative difference |a - b| / max(|a|, |b|), under the same condition "
        "as 'ulp'.",
    )


CauseName = Literal[
    "other-seed",
    "other-settings",
    "environment-dynamics",
    "arithmetic",
    "actor-order",
    "changed-code-or-library",
    "tampering",
    "clock",
    "durations",
    "packaging",
    "order-of-lines",
    "addresses",
    "other-names",
    "other-draws",
    "unexplained",
]
# The most certain one comes first, since explain() of analysis/causes.py sorts by this order.
Certainty = Literal["shown", "likely", "possible"]


class Cause(Model):
    """A class of causes, and the evidence for it."""

    name: CauseName
    certainty: Certainty | None = Field(
        description="How certain the cause is; null for 'unexplained'."
    )
    evidence: tuple[str, ...]
    fix: str | None = Field(
        None, description="A remedy that makes the run repeatable; null if none is known."
    )

    @property
    def shown(self) -> str:
        """Return name and certainty."""
        return self.name if self.certainty is None else f"{self.name} ({self.certainty})"


class Explanation(Model):
    """A difference of two locks, runtimes or machines, and whether it can explain other results."""

    what: str = Field(description="Name of what differs, e.g. 'wheel gymnasium' or 'cpu.flags'.")
    a: str
    b: str
    why: str
    matters: bool = added(
        absent=True, description="Whether it may have changed a result, as far as that is known."
    )


class OperatorInvocation(Model):
    """A call of an operator on one side."""

    operator: str = Field(
        description="Name of the operator with its namespace and overload, e.g. 'aten::add.Tensor'."
    )
    where: str | None = Field(
        description="Innermost line of the program in the call stack, as FILE:LINE; null if the "
        "call stack has no line of the program."
    )
    arguments: dict[str, str] = Field(description="Numbers among the arguments, by position.")


class OperatorDivergence(Model):
    """The first operator whose results differ between the two sides."""

    step: int = Field(
        description="Agent step at which the parameter update that contains the operator ends."
    )
    call: int = Field(
        description="Number of the call among the operator calls of that update, from 0."
    )
    a: OperatorInvocation
    b: OperatorInvocation
    same_inputs: bool = Field(description="Whether the input tensors of the operator were equal.")
    elements: int = Field(description="Number of elements of the results that were compared.")
    differing: int = Field(description="Number of these elements whose bits differ.")
    ulp: int | None = Field(
        description="Largest distance in units in the last place; null if the results are not "
        "floating-point numbers or the operators differ."
    )


class Bisection(Model):
    """The result of executing both sides again with dense records."""

    step: int = Field(description="Agent step at which the first differing parameter update ends.")
    component: str = Field(description="First component of that update that differs.")
    name: str | None = Field(
        None, description="Stream or tensor within the component; null if it has no names."
    )
    also: tuple[str, ...] = Field((), description="Further components that differ.")
    operator: OperatorDivergence | None = Field(
        None,
        description="The first operator that differs; null if none does, so that the difference "
        "has another origin.",
    )


class Divergence(Model):
    """The point at which two runs diverge, the size of the differences, and likely causes."""

    schema_id: Literal["capsule/divergence/v1"] = Field("capsule/divergence/v1", alias="schema")
    a: str = Field(description="Name of the first run.")
    b: str = Field(description="Name of the second run.")
    equal: bool = Field(description="Whether all results that were compared are equal.")
    first: TraceDifference | None = Field(
        None,
        description="The first difference of the traces; 'claimed' is the value of a, 'found' that "
        "of b; null if they are equal or if there are none.",
    )
    equal_until: dict[str, int | None] = Field(
        default_factory=dict,
        description="Agent step of the last record up to which each component is equal; null if it "
        "differs from the first record on.",
    )
    last_equal: int = Field(
        0, description="Agent step of the last record before the first difference."
    )
    map: DivergenceMap | None = Field(
        None,
        description="The intervals in which the traces differ; null for programs, which have no "
        "traces.",
    )
    differences: tuple[ComponentDifference, ...] = Field(
        (), description="Results that differ: streams, checkpoints, evaluation, outputs."
    )
    outputs: OutputComparison | None = added(
        absent=None,
        description="The outputs of two runs of a program that differ, compared by content; "
        "'claimed' is the value of a, 'found' that of b. Null if none differs, and in a report of "
        "'capsule verify', whose own field 'outputs' contains them.",
    )
    numbers: tuple[NumberDifference, ...] = ()
    checkpoint: int | None = Field(
        None,
        description="Agent step of the checkpoint from which 'tensors' are taken; null if none was "
        "compared.",
    )
    tensors: tuple[TensorDifference, ...] = ()
    causes: tuple[Cause, ...] = Field((), description="Likely causes, the most likely first.")
    explanations: tuple[Explanation, ...] = Field(
        (),
        description="Differences of locks, runtimes and machines, the likeliest explanation first.",
    )
    bisection: Bisection | None = Field(
        None, description="The result of the bisection; null if it was not requested."
    )

    @property
    def exit_code(self) -> ExitCode:
        """0 if the results are equal, else 1."""
        return ExitCode.OK if self.equal else ExitCode.DIFFERS


class ReexecutedSegment(Model):
    """One segment of a run, between two claimed checkpoints, executed again."""

    begins: int = Field(
        description="Agent step of the checkpoint from which the segment starts; 0: the beginning "
        "of the run."
    )
    ends: int = Field(description="Agent step of the checkpoint with which the segment ends.")
    equal: bool = Field(
        description="Whether every trace record, the checkpoint and the state at the end of the "
        "segment are equal."
    )
    first_difference: TraceDifference | None = Field(
        None, description="The first trace record that differs; null if none does."
    )
    differences: tuple[ComponentDifference, ...] = Field(
        (),
        description="Differences of the checkpoint, and of the state with which the next segment "
        "begins.",
    )


class Challenge(Model):
    """Segments that the verifier chose, and the results of their re-execution."""

    chosen: Literal["at random", "all"] = Field(
        description="How the segments were chosen: 'at random', by this verifier from the "
        "randomness of its operating system, or 'all'."
    )
    of: int = Field(description="Number of segments that the run has.")
    segments: tuple[ReexecutedSegment, ...]
    undetected: float = Field(
        description="Probability that a run with one false segment would have passed this choice."
    )

    @property
    def first_unequal(self) -> ReexecutedSegment | None:
        """The first segment that is not the recorded one."""
        return next((segment for segment in self.segments if not segment.equal), None)


class FreshSeed(Model):
    """A prefix with a root seed that did not exist when the bundle was made."""

    seed: int = Field(description="The root seed, drawn by this verifier.")
    steps: int = Field(description="Number of agent steps, which are executed twice.")
    keys: int = Field(
        description="Number of random streams whose key is the one that the verifier derived "
        "itself."
    )
    contradictions: tuple[str, ...] = Field(
        (), description="Contradictions that an image which computes its results would not show."
    )
    unrepeated: tuple[str, ...] = Field(
        (),
        description="Differences between the two executions. An image which computes its results "
        "shows them only with a relaxation in the spec.",
    )


class RunSurroundings(SeenSurroundings):
    """The surroundings of a re-execution, as they were read back.

    The run itself reported its threads and processes; a program that was started before it in the
    same way reported the rest.
    """

    threads: str = Field(
        description="Number of maths threads according to torch, or else to OMP_NUM_THREADS."
    )
    processes: int | None = Field(
        description="Number of Python interpreters that the run started; null if it did not report "
        "it."
    )

    @property
    def processor_count(self) -> str:
        """The numbers of processors."""
        return f"{len(listed(self.processors))} usable, {self.told} reported"


class Report(Model):
    """The checks of a verification, their findings, and the verdict.

    Unless its description states another meaning, a null field was not determined: the verification
    ended earlier, or the fact does not apply to the run.
    """

    schema_id: Literal["capsule/verify-report/v1"] = Field(
        "capsule/verify-report/v1", alias="schema"
    )
    bundle: str = Field(description="File name of the bundle.")
    mode: str = Field(description="The extent of the verification, as in the option --mode.")
    verdict: Grade
    summary: str = Field(description="The verdict in one sentence.")
    claim_id: str | None = None
    signer: str | None = Field(
        None,
        description="Fingerprint of the first key whose signature counts, or else of the key that "
        "the bundle names as its signer; null for a keyless signature.",
    )
    signers: tuple[Signer, ...] = Field(
        (), description="The signers, and whether their signatures count."
    )
    integrity: bool | None = Field(
        None,
        description="Whether the files are those that the bundle lists. If 'authentic' is true, "
        "too, the bundle is unchanged since it was signed.",
    )
    authentic: bool | None = Field(
        None, description="Whether the bundle is signed by a key that you trust."
    )
    required: RequiredGrade = Field(
        "bitwise", description="Lowest grade that the caller accepts as reproduced."
    )
    expected: str | None = Field(
        None, description="The grade that can be expected of the two machines, with the reasons."
    )
    expected_grade: ExpectedGrade | None = Field(
        None, description="The expected grade without the reasons."
    )
    machine: MachineKind | None = Field(None, description="The kind of machine that verified.")
    manifest: str | None = Field(
        None, description="SHA-256 of the bundle's manifest.json, which covers all its files."
    )
    environment: tuple[FactComparison, ...] = Field(
        (), description="Comparison of the two machines, fact by fact."
    )
    image_rebuilt: bool | None = Field(
        None, description="Whether the rebuilt image is the claimed one."
    )
    image_source: ImageSource | None = Field(
        None,
        description="Origin of the image. 'rebuilt': built from the lock; 'supplied-base': the "
        "same, with the base layer of the signer; 'embedded' or 'registry': the image of the "
        "signer, from the bundle or from a registry; null: no image.",
    )
    besides: tuple[str, ...] | None = Field(
        None,
        description="Python packages that are not part of Capsule's recipe and default spec.",
    )
    startup: tuple[str, ...] | None = Field(
        None,
        description="Files of Python packages that every start of the interpreter executes, and "
        "groups of entry points that the import of torch executes.",
    )
    source_tree: str | None = added(
        absent=None,
        description="Number of files and SHA-256 of the source tree of the run, which is code of "
        "the signer: a program, or modules with an environment or a network. They are executed in "
        "the process of the trainer, whose results they can change. Null: the run has no tree.",
    )
    data: tuple[str, ...] | None = added(
        absent=None,
        description="The data sets of the run: name, size and SHA-256 of the listing. Null: none.",
    )
    records: tuple[str, ...] | None = added(
        absent=None,
        description="Inputs that a re-execution takes from the bundle, in which the signer may "
        "have written anything: the system's randomness, the order of arrivals, the schedule. "
        "Null: none.",
    )
    own_code: bool | None = Field(
        None,
        description="Whether the training code is Capsule's own: that of the version that "
        "verifies, or of a release whose digest it knows.",
    )
    claimed: str | None = Field(
        None, description="Description of what the run of a program claims."
    )
    first_difference: TraceDifference | OutputDifference | None = Field(
        None,
        description="The first trace record or the first output that differs; null if none does.",
    )
    outputs: OutputComparison | None = Field(
        None, description="The outputs of a program that differ; null if none does."
    )
    differences: tuple[ComponentDifference, ...] = Field(
        (), description="Claims that the re-execution did not reproduce."
    )
    statistics: ReturnStatistics | None = Field(
        None, description="Comparison of returns, if the bits of a whole run differ."
    )
    divergence: Divergence | None = Field(
        None,
        description="Difference between the bundle (a) and the re-execution (b), if they differ.",
    )
    replica: ReplicaResults | None = Field(
        None, description="The results of a full re-execution of a trainer's run."
    )
    challenge: Challenge | None = Field(
        None, description="The segments that were executed again; null without such a challenge."
    )
    fresh_seed: FreshSeed | None = Field(
        None, description="The challenge with a fresh seed; null without one."
    )
    unchecked: tuple[str, ...] = Field(
        (), description="Members of the bundle that this verification did not examine."
    )
    relaxations: tuple[str, ...] = Field(
        (), description="Guarantees that the recorded run or the re-execution gave up."
    )
    recorded_ledger: Ledger | None = Field(
        None,
        description="Sources of nondeterminism in the recorded run, as the signer states them.",
    )
    ledger: Ledger | None = Field(
        None,
        description="Sources in the re-execution; null if the run was not executed as a whole.",
    )
    ledger_differences: tuple[LedgerDifference, ...] = Field(
        (), description="Sources that the two ledgers treat differently."
    )
    surroundings: RunSurroundings | None = Field(
        None, description="Surroundings of a re-execution for --vary; null for any other."
    )
    reexecuted_steps: int | None = Field(
        None, description="Number of agent steps that were executed again; null for a program."
    )
    seconds: float | None = Field(
        None, description="Wall-clock time of the verification in seconds."
    )
    error: dict[str, str] | None = Field(
        None, description="The error that ended the verification; null if none did."
    )

    @property
    def exit_code(self) -> ExitCode:
        """The exit status of the verdict."""
        return exit_code_of(self.verdict, self.required)
