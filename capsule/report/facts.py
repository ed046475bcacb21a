"""Sentences about a run that several documents need, in Markdown."""

from __future__ import annotations

from capsule.bundle.claims import Observations, ProgramClaims, TrainingClaims
from capsule.bundle.manifest import MANIFEST
from capsule.bundle.reproducing import what_ran
from capsule.experiment.lock import Lock
from capsule.experiment.spec import CudaAccelerator
from capsule.experiment.trainers import CommandTrainer
from capsule.host.wording import counted
from capsule.report.markdown import code, plain
from capsule.report.scores import by_task
from capsule.report.story import machine_of, tell
from capsule.report.subject import NOT_ASSERTED, NetworkReturns, ReportedRun
from capsule.report.text import bytes_text

MAX_FILES = 5
NO_EVALUATION = "no evaluation"


def what(subject: ReportedRun) -> str:
    """Describe the run."""
    return plain(what_ran(subject.lock.spec))


def is_program(subject: ReportedRun) -> bool:
    """Tell a user program from one of Capsule's trainers."""
    return isinstance(subject.lock.spec.trainer, CommandTrainer)


def in_image(subject: ReportedRun) -> bool:
    """Tell a run in a container from one of a plain process, which used no image."""
    return subject.claims.image is not None


def verify_options(subject: ReportedRun) -> str:
    """Return the options with which ``capsule verify`` executes the run again."""
    return "--key SIGNER.pub" + " --engine process" * (not in_image(subject))


def machine(subject: ReportedRun) -> str:
    """Name the machine of the run."""
    return plain(machine_of(subject.observations))


def hardware_needed(subject: ReportedRun) -> str:
    """Name the hardware that a machine must have."""
    spec = subject.lock.spec
    common = f"x86-64, {spec.limits.memory_mb:,} MiB of memory"
    profile = f"numerics {code(spec.cpu_numerics)}"
    if isinstance(spec.accelerator, CudaAccelerator):
        gpu = plain(spec.accelerator.gpu or "an NVIDIA GPU")
        return f"{common}, {gpu}, driver {plain(spec.accelerator.driver)}; {profile}"
    return f"{common}; {profile}"


def lasted(seen: Observations) -> str:
    """Return the duration of a run, as ``1 min 20 s``."""
    minutes, left = divmod(round(seen.training_seconds), 60)
    return f"{minutes:,} min {left} s" if minutes else f"{left} s"


def licensed(subject: ReportedRun) -> str:
    """Count the components of the image, and those for which the SBOM states a licence."""
    licences = subject.inventory.licences
    components = sum(licences.values())
    stated = components - licences.get(NOT_ASSERTED, 0)
    return f"{stated:,} of {counted(components, 'component')}"


def size(subject: ReportedRun) -> str:
    """Return the size of the bundle."""
    return bytes_text(sum(each.size for each in subject.files))


def starts(subject: ReportedRun) -> str | None:
    """Name the starts that the networks were scored from; None if a program evaluates itself."""
    if not isinstance(subject.claims, TrainingClaims):
        return None
    spec, evaluation = subject.lock.spec.evaluation, subject.claims.evaluation
    # With no-ops there is no ranking, so a start set cannot be pinned then (EvaluationSpec).
    if spec.noop_max:
        made = "of 1 no-op" if spec.noop_max == 1 else f"of 1 to {spec.noop_max} no-ops"
    elif spec.start_set is not None:
        # Nothing in the bundle shows it.
        made = f"of a start set, which names the run {spec.start_set.run} as its origin"
    else:
        made = "ranked by the final network of this run"
    sequences = counted(len(evaluation.starts), "start sequence")
    return f"{sequences} {made}, SHA-256 {evaluation.start_set}"


def results(subject: ReportedRun) -> str:
    """Describe the results: returns, or the number of outputs."""
    claims = subject.claims
    text = claimed_results(subject.lock, claims, subject.evaluation)
    if isinstance(claims, ProgramClaims) and text == claims.described and not claims.nothing:
        return f"{text}; each file is claimed by its SHA-256"
    return text


def claimed_results(
    lock: Lock, claims: TrainingClaims | ProgramClaims, evaluation: tuple[NetworkReturns, ...]
) -> str:
    """Describe the results that a run claims: returns, or the number of outputs."""
    without = claims.described if isinstance(claims, ProgramClaims) else NO_EVALUATION
    return last_returns(lock, evaluation) or without


def last_returns(lock: Lock, evaluation: tuple[NetworkReturns, ...]) -> str | None:
    """Describe the last evaluation; None without one, or if it has no returns."""
    if not evaluation or not evaluation[-1].returns:
        return None
    return f"at step {evaluation[-1].step:,}, {returns_text(lock, evaluation[-1])}"


def returns_text(lock: Lock, evaluation: NetworkReturns) -> str:
    """Describe the returns of an evaluation, by game; games without returns are left out."""
    games = list(by_task(lock, (evaluation,)))
    return "; ".join(
        f"{task.name}: " * (len(games) > 1)
        + f"mean return {found.mean:.6g} over {counted(len(found.returns), 'start')} "
        + f"(lowest {min(found.returns):.6g}, highest {max(found.returns):.6g})"
        for task, (found,) in games
        if found.returns
    )


def reproduced(subject: ReportedRun) -> str:
    """Describe what is known of re-executions."""
    story = tell(subject)
    return f"{plain(story.headline)}. {plain(story.sentence)}"


def requested(subject: ReportedRun) -> str:
    """List the Python packages that the spec asks for, as they were resolved."""
    wheels = [wheel for wheel in subject.lock.image.wheels if wheel.requested is not None]
    wheels.sort(key=lambda wheel: wheel.name)
    return ", ".join(f"{plain(wheel.name)} {plain(wheel.version)}" for wheel in wheels)


def made(subject: ReportedRun) -> list[str]:
    """Name the files that a run made, or the manifest that lists them if they are many or none."""
    paths = [each.path for each in subject.files if each.role in ("checkpoint", "output")]
    return paths if 0 < len(paths) <= MAX_FILES else [*paths[:MAX_FILES], MANIFEST]
