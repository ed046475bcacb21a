"""The answer of ``capsule verify``, as a document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from capsule.bundle.trust import Signer
from capsule.entropy.ledger import Ledger
from capsule.experiment import contract
from capsule.experiment.errors import ExitCode
from capsule.experiment.fields import Model
from capsule.machine.compare import ExpectedGrade, Row
from capsule.machine.kind import MachineKind
from capsule.verification.equivalence import ReturnStatistics

Grade = Literal[
    "tampered",
    "untrusted",
    "intact",
    "environment-matches",
    "reproduced-bitwise",
    "reproduced-prefix",
    "reproduced-statistical",
    "not-reproduced",
    "inconclusive",
]
RequiredGrade = Literal["bitwise", "statistical"]

EXIT_CODES: dict[Grade, ExitCode] = {
    "tampered": ExitCode.TAMPERED,
    "untrusted": ExitCode.TAMPERED,
    "intact": ExitCode.OK,
    "environment-matches": ExitCode.OK,
    "reproduced-bitwise": ExitCode.OK,
    "reproduced-prefix": ExitCode.OK,
    "reproduced-statistical": ExitCode.OK,
    "not-reproduced": ExitCode.DIFFERS,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


class ComponentDifference(Model):
    """One fact that was claimed and did not recur."""

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
    """The first output of a program that differs."""

    path: str = Field(description="In the working folder, or 'standard output'.")
    line: int | None = Field(None, description="First line that differs, from 1, if it is text.")
    claimed: str = Field(description="That line, or the digest, or 'missing'.")
    found: str


class DivergenceMap(Model):
    """Where in training time the records of two traces differ, component by component."""

    steps: int = Field(description="Step of the last record that both have.")
    components: dict[str, tuple[tuple[int, int], ...]] = Field(
        description="Component to intervals: steps of the first and last of consecutive records "
        "that differ in it. A component without any is equal throughout."
    )


class Replica(Model):
    """What a full re-execution gave, to be shown beside what was recorded."""

    evaluation: contract.Evaluation | None
    divergence: DivergenceMap | None


class Report(Model):
    """What was checked, what was found, and the verdict."""

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
        "statistical", description="Least grade that counts as reproduced, as the caller chose."
    )
    expected: str | None = Field(None, description="What the two machines let one expect.")
    expected_grade: ExpectedGrade | None = Field(None, description="The same, without reasons.")
    machine: MachineKind | None = Field(None, description="The kind of machine that verified.")
    manifest: str | None = Field(
        None, description="SHA-256 of the bundle's manifest.json, which stands for all of it."
    )
    environment: tuple[Row, ...] = ()
    image_rebuilt: bool | None = Field(None, description="The image identity was obtained again.")
    image_source: Literal["rebuilt", "embedded"] | None = Field(
        None,
        description="Rebuilt from the lock; or the signer's own, as embedded in the bundle; null "
        "without an image.",
    )
    first_difference: TraceDifference | OutputDifference | None = None
    differences: tuple[ComponentDifference, ...] = ()
    replica: Replica | None = Field(None, description="Of a full re-execution of a trainer's run.")
    statistics: ReturnStatistics | None = Field(
        None, description="Comparison of returns, where the bits of a whole run differ."
    )
    relaxations: tuple[str, ...] = ()
    ledger: Ledger | None = Field(None, description="Sources of nondeterminism, as recorded.")
    reexecuted_steps: int | None = None
    seconds: float | None = None
    error: dict[str, str] | None = Field(None, description="Coded error that ended the check.")

    @property
    def exit_code(self) -> ExitCode:
        """Exit status that says the verdict."""
        if self.verdict == "reproduced-statistical" and self.required == "bitwise":
            return ExitCode.DIFFERS
        return EXIT_CODES[self.verdict]
