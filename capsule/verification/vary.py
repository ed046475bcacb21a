"""``capsule verify --vary``: what a recorded run depends on.

The run is executed again unchanged, the control, and then once for each variation, with one thing
of its surroundings changed. Every execution is a whole verification by
:func:`capsule.verification.verify.verify`, which reads back what the run saw of its surroundings.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from pydantic import Field

from capsule.bundle.bundle import open_bundle
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.reporter import Reporter
from capsule.image.cache import Cache
from capsule.verification.request import Mode, VerifyRequest
from capsule.verification.variation import (
    CONTROL,
    Inapplicable,
    VariationName,
    Wanted,
    pinned,
    variation_of,
)
from capsule.verification.verdict import Report, RunSurroundings
from capsule.verification.verify import verify

Outcome = Literal["equal", "differs", "shielded", "not-applicable", "undecided"]
VARY_REPORT: Literal["capsule/vary-report/v1"] = "capsule/vary-report/v1"
REFUSED = "CAP-T101"  # the run has another variable than its spec stands for, and does not start


class VariedResult(Model):
    """A variation and its result."""

    name: VariationName
    outcome: Outcome = Field(
        description="Result of the variation. 'equal' or 'differs': the change reached the run, "
        "and its result is the recorded one or another; 'shielded': it did not reach the run; "
        "'not-applicable': nothing was executed, or the result does not depend on this change; "
        "'undecided': the execution ended without a result."
    )
    was: str | None = Field(None, description="Value that the control execution saw.")
    became: str | None = Field(
        None, description="Value that this execution saw; null if it saw none."
    )
    pinned: str | None = Field(
        None,
        description="What gives every re-execution the same value on every machine.",
    )
    reason: str | None = Field(None, description="Reason for any outcome other than 'equal'.")
    report: Report | None = Field(
        None, description="Report of the verification; null if there was none."
    )


class VaryReport(Model):
    """The dependence of a recorded run on its surroundings."""

    schema_id: Literal["capsule/vary-report/v1"] = Field(VARY_REPORT, alias="schema")
    bundle: str = Field(description="File name of the bundle.")
    conclusion: str
    control: Report = Field(description="The verification with nothing changed.")
    variations: tuple[VariedResult, ...] = Field(
        description="The variations; empty if the control execution did not reproduce the run, in "
        "which case none is executed."
    )
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """The status of the control if it failed; else whether a variation differs."""
        outcomes = {each.outcome for each in self.variations}
        if self.control.exit_code != ExitCode.OK:
            return self.control.exit_code
        if "differs" in outcomes:
            return ExitCode.DIFFERS
        return ExitCode.INCONCLUSIVE if "undecided" in outcomes else ExitCode.OK


def vary(request: VerifyRequest, wanted: Wanted, cache: Cache, reporter: Reporter) -> VaryReport:
    """Find out what a recorded run depends on.

    Args:
        request: How to verify it; its mode executes the whole run or a prefix.
        wanted: What is to be varied.
        cache: As for :func:`verify`.
        reporter: As for :func:`verify`.

    Raises:
        CapsuleError: CAP-V065, the mode executes nothing of the run, or segments of it; CAP-V067,
            the engine cannot make a variation that was asked for; what :func:`verify` raises.
    """
    started = time.monotonic()
    if request.mode.name not in ("full", "prefix"):
        raise CapsuleError(
            "CAP-V065",
            f"--vary requires an execution from the start, and mode {request.mode} has none",
            fix="Use --vary with --mode full or prefix:N.",
        )
    results: list[VariedResult] = []
    # Nothing is executed yet: what is wrong with the bundle or with the request (CAP-V067) is
    # reported before hours of re-execution.
    control = verify(replace(request, mode=Mode("integrity")), cache, reporter)
    if control.exit_code == ExitCode.OK:
        with open_bundle(request.bundle, request.trust) as bundle:
            lock = RecordedRun.read(bundle).lock
        if not wanted.where_possible:
            _require_engine(request, lock, wanted)
        reporter.note("control: executing the run unchanged")
        control = verify(replace(request, variation=CONTROL), cache, reporter)
        if control.exit_code == ExitCode.OK and control.surroundings is not None:
            usual = control.surroundings
            results += (_try(name, request, lock, usual, cache, reporter) for name in wanted.names)
    return VaryReport(
        bundle=request.bundle.name,
        conclusion=conclude(control, results),
        control=control,
        variations=tuple(results),
        seconds=round(time.monotonic() - started, 3),
    )


def _require_engine(request: VerifyRequest, lock: Lock, wanted: Wanted) -> None:
    # An untrusted program is executed without a container only on request.
    container = request.engine != "process"
    for name in wanted.names:
        # Which processors a run has is known after the control, and makes no difference to what an
        # engine can vary.
        found = variation_of(name, lock, "0", container=container)
        if isinstance(found, Inapplicable) and found.elsewhere:
            raise CapsuleError(
                "CAP-V067",
                f"--vary {name}: {found.reason}",
                fix=f"Remove {name} from --vary, or verify with --engine docker, podman, bwrap or "
                "apptainer.",
            )


def _try(
    name: VariationName,
    request: VerifyRequest,
    lock: Lock,
    usual: RunSurroundings,
    cache: Cache,
    reporter: Reporter,
) -> VariedResult:
    """Execute a run whose control reproduced it with a variation, and say what that showed."""
    was, held = value_of(name, usual), pinned(name, lock)
    change = variation_of(name, lock, usual.processors, container=request.engine != "process")
    if isinstance(change, Inapplicable):
        reason = change.reason
        return VariedResult(
            name=name, was=was, pinned=held, outcome="not-applicable", reason=reason
        )
    reporter.note(f"varying {name}")
    report = verify(replace(request, variation=change), cache, reporter)
    became = None if report.surroundings is None else value_of(name, report.surroundings)
    outcome, why = judge_variation(report, reached=became != was)
    # The shell that sets a program's variables changes its place in the tree of processes, and so
    # its derived randomness. The variation is to blame only if the shell alone changes nothing.
    if outcome == "differs" and (neutral := change.neutral(lock)) is not None:
        reporter.note(f"checking that the difference is due to {name}")
        alone = verify(replace(request, variation=neutral), cache, reporter)
        if alone.exit_code != ExitCode.OK:
            outcome, why = "not-applicable", OTHER_PLACE
    return VariedResult(
        name=name,
        was=was,
        became=became,
        pinned=held,
        outcome=outcome,
        reason=why,
        report=report,
    )


OTHER_PLACE = (
    "the shell that sets the variables already changes the result, with the recorded values, too: "
    "the randomness that the program gets follows from its place in the tree of processes"
)


def judge_variation(report: Report, *, reached: bool) -> tuple[Outcome, str | None]:
    """Return what a re-execution with a variation showed, and why.

    Args:
        report: The verification.
        reached: Whether the run saw another value than the control did.
    """
    # This comes before the check of the exit status, by which a run that did not start would be
    # undecided.
    if report.error is not None and report.error["code"] == REFUSED:
        return "shielded", f"the run does not start: {report.error['message']}"
    if report.exit_code not in (ExitCode.OK, ExitCode.DIFFERS):
        return "undecided", report.summary
    if not reached:
        equal = report.exit_code == ExitCode.OK
        what = "the run saw the same value as the control"
        return ("shielded", what) if equal else ("undecided", f"{what}, and yet {report.summary}")
    return ("equal", None) if report.exit_code == ExitCode.OK else ("differs", report.summary)


def value_of(name: VariationName, seen: RunSurroundings) -> str:
    """Return what a run saw of the thing that a variation changes."""
    if name == "cpu-count":
        return seen.processor_count
    return str(getattr(seen, name))


def _subject(control: Report) -> tuple[str, tuple[str, str]]:
    """Return the part of a run that was compared, and two verbs that agree with it."""
    steps = control.reexecuted_steps or 0
    if control.verdict != "reproduced-prefix":
        return "The result", ("does", "depends")
    if steps == 1:
        return "The first step", ("does", "depends")
    return f"The first {steps:,} steps", ("do", "depend")


def conclude(control: Report, results: list[VariedResult]) -> str:
    """Say in a few sentences what the results of variations show together."""
    if not results:
        return f"Nothing was varied, because the control is {control.verdict}: {control.summary}"
    subject, verb = _subject(control)
    named: dict[Outcome, list[VariedResult]] = {}
    for each in results:
        named.setdefault(each.outcome, []).append(each)

    def names(outcome: Outcome) -> str:
        return ", ".join(each.name for each in named.get(outcome, []))

    sentences = []
    if "equal" in named:
        sentences.append(f"{subject} {verb[0]} not depend on: {names('equal')}.")
    if "differs" in named:
        found = "; ".join(_dependence(each) for each in named["differs"])
        sentences.append(f"{subject} {verb[1]} on: {found}.")
    if "shielded" in named:
        sentences.append(f"The run is shielded from: {names('shielded')}.")
    if "undecided" in named:
        sentences.append(f"Undecided: {names('undecided')}.")
    if "not-applicable" in named:
        sentences.append(f"Not applicable: {names('not-applicable')}.")
    return " ".join(sentences)


def _dependence(result: VariedResult) -> str:
    held = f"; every re-execution has {result.pinned}" if result.pinned else ""
    return f"{result.name} ({result.reason}{held})"
