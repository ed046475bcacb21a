"""Rows on time and order: clocks, schedules, whatever happens at once."""

from __future__ import annotations

from capsule.entropy.evidence import Evidence, Judgement, Source, Treatment
from capsule.experiment.mechanisms import TrainerUse


def _clocks(evidence: Evidence) -> Judgement:
    report = evidence.report
    if report is None or report.clock == "system":
        return "assumed", "the calendar clock was left alone"
    treatment: Treatment = "eliminated" if report.clock == "fixed" else "ordered"
    passed = sum(1 for each in evidence.programs if each.executed and not each.preloaded)
    if passed:
        return "assumed", (
            f"the calendar clock was {report.clock}, but {passed:,} programs are not linked with "
            "the C library in which it is answered"
        )
    return treatment, f"the calendar clock was {report.clock}; others were left alone"


def _scheduling(evidence: Evidence) -> Judgement:
    trainer = evidence.mechanisms.trainer
    if trainer is not None:
        return _trainer_schedule(trainer)
    report = evidence.report
    counted = f": {report.processes:,} processes" if report and report.supervised else ""
    return "assumed", f"Capsule does not order the program's processes and threads{counted}"


def _trainer_schedule(trainer: TrainerUse) -> Judgement:
    actors = f"{trainer.actors:,} actors"
    match trainer.schedule:
        case "serial":
            return "ordered", "one actor took turns with the learner"
        case "lockstep":
            return "ordered", f"the experience of {actors} was learned by a rule"
        case "recorded":
            return "recorded", f"the order in which that of {actors} was learned was written down"
        case "replayed":
            return "recorded", f"that of {actors} was learned in the order of a log"
        case "live":
            return "unsupported", f"that of {actors} was learned as it arrived"


SOURCES = (
    Source("Clocks", _clocks, "a program whose results depend on the time"),
    Source("Scheduling", _scheduling, "threads or processes that race for shared state"),
    # Actors that are answered by a service: batches, seeds and routes of its requests go here.
)
