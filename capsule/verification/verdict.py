"""The answer of ``capsule verify``, as a document."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger, LedgerDifference
from capsule.execution import SeenSurroundings
from capsule.experiment import contract
from capsule.experiment.fields import Model
from capsule.host.errors import ExitCode
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

# What each grade that a user may require accepts, the strongest first. A verdict of this list that
# is weaker than the required one ends with the status of a run that differs.
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


class Judgement(NamedTuple):
    """A verdict, and its reason in one sentence."""

    verdict: Grade
    summary: str


class ComponentDifference(Model):
    """One claimed fact that the re-execution did not give again."""

    component: str = Field(description="Path in the claims, e.g. 'evaluation.points[1].returns'.")
    claimed: str
    found: str


class TraceDifference(Model):
    """The first trace record that differs."""

    step: int = Field(description="Agent step at which the differing record ends.")
    component: str = Field(description="First differing field, in data-flow order.")
    name: str | None = Field(None, description="Stream or tensor within it, where recorded.")
    claimed: str
    found: str
    also: tuple[str, ...] = Field((), description="What else differs in the same record.")


class OutputDifference(Model):
    """An output of a program that differs."""

    path: str = Field(description="In the working folder, or '/dev/stdout'.")
    found_path: str | None = Field(
        None, description="The re-execution's file, if it has another name."
    )
    claimed: str = Field(description="The first part that differs, or what is at the path.")
    found: str
    nature: Nature = Field("content", description="The gravest of all that differs.")
    content: Comparison | None = Field(
        None, description="Part by part; null if there are no two files to compare."
    )

    @property
    def where(self) -> str | None:
        """Name the first part that differs."""
        return self.content.parts[0].where or None if self.content else None


class OutputComparison(Model):
    """All outputs of a program that differ."""

    count: int
    nature: Nature = Field(description="The gravest of all.")
    files: tuple[OutputDifference, ...] = Field(description="In order of paths; at most 40.")


class DivergenceMap(Model):
    """Where in training time the records of two traces differ, component by component."""

    steps: int = Field(description="Step of the last record that both have.")
    components: dict[str, tuple[tuple[int, int], ...]] = Field(
        description="Component to intervals: steps of the first and last of consecutive records "
        "that differ in it. A component without any is equal throughout."
    )


class ReplicaResults(Model):
    """The results of a full re-execution, to be shown beside the recorded ones."""

    evaluation: contract.Evaluation | None
    divergence: DivergenceMap | None


class NumberDifference(Model):
    """Two numbers that should be equal."""

    what: str = Field(description="E.g. 'loss at step 208'.")
    a: contract.Hex
    b: contract.Hex
    ulp: int | None = Field(description="Steps of float32 from one to the other; null for NaN.")
    relative: float | None = Field(description="|a - b| / max(|a|, |b|); null for NaN, infinity.")


class TensorDifference(Model):
    """One tensor that differs in two checkpoints."""

    name: str
    elements: int
    differing: int = Field(description="Elements with other bits.")
    nonfinite: int = Field(0, description="Those of them where a side is NaN or infinite.")
    ulp: int | None = Field(None, description="Largest distance; null if not comparable floats.")
    relative: float | None = Field(None, description="Largest |a - b| / max(|a|, |b|).")


CauseName = Literal[
    "other-seed",
    "other-settings",
    "environment-dynamics",
    "arithmetic",
    "actor-order",
    "changed-code-or-library",
    "tampering",
    "clock",
    "packaging",
    "order-of-lines",
    "other-names",
    "unexplained",
]
Certainty = Literal["shown", "likely", "possible"]


class Cause(Model):
    """A class of causes, and the evidence for it."""

    name: CauseName
    certainty: Certainty | None = Field(description="Null for 'unexplained'.")
    evidence: tuple[str, ...]
    fix: str | None = Field(None, description="How to make the run repeat, if that is known.")

    @property
    def shown(self) -> str:
        """Return name and certainty."""
        return self.name if self.certainty is None else f"{self.name} ({self.certainty})"


class Explanation(Model):
    """A difference of two locks, runtimes or machines that could explain other results."""

    what: str = Field(description="E.g. 'wheel gymnasium' or 'cpu.flags'.")
    a: str
    b: str
    why: str


class OperatorInvocation(Model):
    """A call of an operator on one side."""

    operator: str = Field(description="With namespace and overload: aten::add.Tensor")
    where: str | None = Field(description="FILE:LINE of the innermost line of the program.")
    arguments: dict[str, str] = Field(description="Numbers among the arguments, by position.")


class OperatorDivergence(Model):
    """The first operator that gave other bits on the two sides."""

    step: int = Field(description="Step at which the parameter update that contains it ends.")
    call: int = Field(description="Its number among the operator calls of that update, from 0.")
    a: OperatorInvocation
    b: OperatorInvocation
    same_inputs: bool = Field(description="Whether its input tensors were equal.")
    elements: int = Field(description="Elements of its results that were compared.")
    differing: int
    ulp: int | None = Field(
        description="Largest distance; null if the results are not floats or the operators differ."
    )


class Bisection(Model):
    """The result of executing both sides again with dense records."""

    step: int = Field(description="Step at which the first differing parameter update ends.")
    component: str
    name: str | None = None
    also: tuple[str, ...] = ()
    operator: OperatorDivergence | None = Field(
        None, description="Null if no operator differs: the difference has another origin."
    )


class Divergence(Model):
    """Where two runs diverge, by how much, and why."""

    schema_id: Literal["capsule/divergence/v1"] = Field("capsule/divergence/v1", alias="schema")
    a: str
    b: str
    equal: bool = Field(description="Whether all results that were compared are equal.")
    first: TraceDifference | None = Field(None, description="'claimed' is a's, 'found' is b's.")
    equal_until: dict[str, int | None] = Field(
        default_factory=dict,
        description="Component to the step of the last record up to which it is equal; null if it "
        "differs from the first record on.",
    )
    last_equal: int = Field(0, description="Step of the last record before the first difference.")
    map: DivergenceMap | None = None
    differences: tuple[ComponentDifference, ...] = Field(
        (), description="Results that differ: streams, checkpoints, evaluation, outputs."
    )
    numbers: tuple[NumberDifference, ...] = ()
    checkpoint: int | None = Field(None, description="Step of the checkpoint of 'tensors'.")
    tensors: tuple[TensorDifference, ...] = ()
    causes: tuple[Cause, ...] = Field((), description="Most likely first.")
    explanations: tuple[Explanation, ...] = Field((), description="Most likely first.")
    bisection: Bisection | None = None

    @property
    def exit_code(self) -> ExitCode:
        """0 if the results are equal, else 1."""
        return ExitCode.OK if self.equal else ExitCode.DIFFERS


class ReexecutedSegment(Model):
    """One segment of a run, between two claimed checkpoints, executed again."""

    begins: int = Field(
        description="Agent step of the checkpoint that it starts from; 0: the beginning."
    )
    ends: int = Field(description="Agent step of the checkpoint it must end with.")
    equal: bool = Field(description="Every trace record, the checkpoint and the state at its end.")
    first_difference: TraceDifference | None = None
    differences: tuple[ComponentDifference, ...] = Field(
        (), description="In the checkpoint, and in the state that the next segment begins with."
    )


class Challenge(Model):
    """Segments that the verifier chose, and the results of their re-execution."""

    chosen: Literal["at random", "all"] = Field(
        description="'at random': by this verifier, from its operating system's randomness."
    )
    of: int = Field(description="Segments that the run has.")
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

    seed: int = Field(description="Drawn by this verifier.")
    steps: int = Field(description="Agent steps, executed twice.")
    keys: int = Field(description="Random streams with the key that the verifier derives itself.")
    contradictions: tuple[str, ...] = Field(
        (), description="What an image that computes its results would not do."
    )


class RunSurroundings(SeenSurroundings):
    """What was read back of a re-execution's surroundings.

    Threads and processes are of the run itself; the rest is of a program that was started before it
    in the same way.
    """

    threads: str = Field(description="Maths threads as torch, or else OMP_NUM_THREADS, gives them.")
    processes: int | None = Field(
        description="Python interpreters that the run started; null if it did not say."
    )

    @property
    def processor_count(self) -> str:
        """The numbers of processors."""
        return f"{len(listed(self.processors))} usable, {self.told} reported"


class Report(Model):
    """The checks of a verification, their findings, and the verdict."""

    schema_id: Literal["capsule/verify-report/v1"] = Field(
        "capsule/verify-report/v1", alias="schema"
    )
    bundle: str = Field(description="File name of the bundle.")
    mode: str
    verdict: Grade
    summary: str = Field(description="The verdict in one sentence.")
    claim_id: str | None = None
    signer: str | None = Field(None, description="Fingerprint of the key that signed the bundle.")
    signers: tuple[Signer, ...] = Field((), description="Who signed, and whether it counts.")
    integrity: bool | None = Field(None, description="Unchanged since it was signed.")
    authentic: bool | None = Field(None, description="Signed by a key you trust.")
    required: RequiredGrade = Field(
        "bitwise", description="Lowest grade that the caller accepts as reproduced."
    )
    expected: str | None = Field(None, description="What can be expected of the two machines.")
    expected_grade: ExpectedGrade | None = Field(None, description="The same, without reasons.")
    machine: MachineKind | None = Field(None, description="The kind of machine that verified.")
    manifest: str | None = Field(
        None, description="SHA-256 of the bundle's manifest.json, which covers all its files."
    )
    environment: tuple[FactComparison, ...] = ()
    image_rebuilt: bool | None = Field(None, description="Rebuilding gave the claimed image.")
    image_source: ImageSource | None = Field(
        None,
        description="Rebuilt from the lock; the same but for the base layer, which is the signer's "
        "own; or the signer's own image, as embedded in the bundle or taken from a registry; null "
        "without an image.",
    )
    besides: tuple[str, ...] | None = Field(
        None,
        description="Python packages beyond those that Capsule's recipe and default spec bring.",
    )
    startup: tuple[str, ...] | None = Field(
        None,
        description="Files of Python packages that every start of the interpreter executes, and "
        "groups of entry points that importing torch does.",
    )
    own_code: bool | None = Field(
        None,
        description="The training code is Capsule's own: that of the version that verifies, or of "
        "a release that it knows by digest.",
    )
    claimed: str | None = Field(None, description="What a program's run claims, in words.")
    first_difference: TraceDifference | OutputDifference | None = None
    outputs: OutputComparison | None = Field(
        None, description="The outputs of a program that differ; null if none does."
    )
    differences: tuple[ComponentDifference, ...] = ()
    statistics: ReturnStatistics | None = Field(
        None, description="Comparison of returns, where the bits of a whole run differ."
    )
    divergence: Divergence | None = Field(
        None, description="Between the bundle (a) and the re-execution (b), if they differ."
    )
    replica: ReplicaResults | None = Field(
        None, description="The results of a full re-execution of a trainer's run."
    )
    challenge: Challenge | None = None
    fresh_seed: FreshSeed | None = None
    unchecked: tuple[str, ...] = Field(
        (), description="Members of the bundle that this verification did not look into."
    )
    relaxations: tuple[str, ...] = ()
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
        None, description="Of a re-execution for --vary; null for any other."
    )
    reexecuted_steps: int | None = None
    seconds: float | None = None
    error: dict[str, str] | None = Field(None, description="Coded error that ended the check.")

    @property
    def exit_code(self) -> ExitCode:
        """The exit status of the verdict."""
        grades = list(ACCEPTED.values())
        if self.verdict in grades[list(ACCEPTED).index(self.required) + 1 :]:
            return ExitCode.DIFFERS
        return FAILURES.get(self.verdict, ExitCode.OK)
