"""Rows on time and order: clocks, schedules, whatever happens at once."""

from __future__ import annotations

from capsule.entropy.evidence import Evidence, Judgement, LedgerSource, Treatment
from capsule.experiment.contract import PROGRAM_PROCESS
from capsule.experiment.mechanisms import TrainerUse
from capsule.host.wording import agreeing, counted


def _clocks(evidence: Evidence) -> Judgement:
    clocks = {each.clock for each in evidence.told}
    readings = sum(each.readings for each in evidence.told)
    # The program can write to the journal. Entries that contradict each other give the weaker row.
    if len(clocks) != 1 or "system" in clocks:
        return "assumed", "the calendar clock was the machine's"
    clock = clocks.pop()
    shown = f"the calendar clock was {clock} and was read {counted(readings, 'time')}"
    if passed := _passed(evidence):
        return "assumed", f"{shown}, but {passed}"
    treatment: Treatment = "eliminated" if clock == "fixed" else "ordered"
    return treatment, f"{shown}; the other clocks were the machine's"


def _listings(evidence: Evidence) -> Judgement:
    count = sum(each.listings for each in evidence.told if each.sorted)
    if not evidence.told or not all(each.sorted for each in evidence.told):
        return "assumed", "folders were listed in the order of the file system"
    folders = counted(count, "folder was", "folders were")
    listed = f"{folders} listed in the order of {agreeing(count, 'its', 'their')} names"
    if passed := _passed(evidence):
        return "assumed", f"{listed}, but {passed}"
    return "ordered", listed


def _cores(evidence: Evidence) -> Judgement:
    told = {each.cores for each in evidence.told}
    count = sum(each.core_questions for each in evidence.told)
    if len(told) != 1 or None in told:
        return "assumed", "programs saw the machine's number of processors"
    answered = f"programs asked {counted(count, 'time')} and got {told.pop()}"
    if passed := _passed(evidence):
        return "assumed", f"{answered}, but {passed}"
    return "eliminated", f"{answered}; files of /proc and /sys still describe the machine"


def _passed(evidence: Evidence) -> str | None:
    """Say which programs the kernel may have answered; None if there were none."""
    # Capsule's trainers start no programs but Python, which loads the library.
    if evidence.is_program and not (evidence.report and evidence.report.supervised):
        return "the run was not supervised, so programs without Capsule's library were not seen"
    count = sum(1 for each in evidence.programs if each.executed and not each.preloaded)
    if not count:
        return None
    return f"{counted(count, 'program')} did not load Capsule's library"


def _numbers(evidence: Evidence) -> Judgement:
    report, process = evidence.report, evidence.mechanisms.process
    if report is None:
        return "assumed", "the launcher, which pins them, did not start the run"
    if not report.own_numbers:
        return "assumed", "other processes took numbers of the same namespace"
    shown = f"alone in its namespace, the launcher started process {report.first_process}"
    if evidence.is_program:
        shown += f", which started the program as process {process}"
    # A trainer is the first process itself. Only for a program is a second number prepared
    # (docs/launcher.md).
    expected = PROGRAM_PROCESS if evidence.is_program else None
    if not report.numbers_pinned or process != expected:
        return "assumed", f"{shown}: these numbers can differ between runs"
    return "eliminated", shown


def _scheduling(evidence: Evidence) -> Judgement:
    trainer = evidence.mechanisms.trainer
    if trainer is not None:
        return _trainer_schedule(trainer)
    report = evidence.report
    text = "Capsule does not order the program's processes and threads"
    if report is not None and report.supervised:
        text += f": {counted(report.processes, 'process', 'processes')}"
    return "assumed", text


def _trainer_schedule(trainer: TrainerUse) -> Judgement:
    actors = counted(trainer.actors, "actor")
    match trainer.schedule:
        case "serial":
            return "ordered", "one actor and the learner took turns"
        case "lockstep":
            return "ordered", f"a fixed rule ordered the experience of {actors}"
        case "recorded":
            return "recorded", f"the order of the experience of {actors} was recorded"
        case "replayed":
            return "recorded", f"the experience of {actors} was trained on in the order of a log"
        case "live":
            return "unsupported", f"the experience of {actors} was trained on as it arrived"


def _arrivals(evidence: Evidence) -> Judgement:
    log = evidence.arrivals
    if log is None:
        return None
    return "recorded", f"the order of {counted(log.arrivals, 'arrival')} was recorded"


# Also one that has loaded Capsule's library, such as a program in Go that is linked dynamically.
_RAW_CALLS = "a program that asks the kernel without the C library"

SOURCES = (
    LedgerSource(
        "Clocks", _clocks, f"{_RAW_CALLS}; results that depend on how long something took"
    ),
    LedgerSource("Listing order", _listings, _RAW_CALLS),
    LedgerSource(
        "Processor count", _cores, f"{_RAW_CALLS}; a program that reads files of /proc or /sys"
    ),
    LedgerSource("Process numbers", _numbers, "threads or processes that race to start others"),
    LedgerSource("Scheduling", _scheduling, "threads or processes that race for shared state"),
    LedgerSource("Order of arrival", _arrivals, "tasks that communicate in other ways"),
)
