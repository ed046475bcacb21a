"""Rows on randomness: what the operating system, the processor and the interpreter give."""

from __future__ import annotations

from capsule.entropy.evidence import Evidence, Judgement, Source, Treatment, counted


def system_treatment(evidence: Evidence) -> Judgement:
    """Say what the operating system's entropy was replaced by, whether or not it was asked for."""
    report = evidence.report
    if report is None:
        return "assumed", "the run was not started by the launcher"
    if report.mode == "system":
        return "unsupported", "the launcher left it alone, as it was told to"
    return ("seeded" if report.mode == "virtual" else "recorded"), f"entropy was {report.mode}"


def _hash_seed(evidence: Evidence) -> Judgement:
    told = evidence.mechanisms.interpreters
    if evidence.untold is not None or told is None:
        return "assumed", str(evidence.untold)
    if not told.hash_seeds:
        return None
    if drawn := told.hash_seeds.get("random"):
        judgement = system_treatment(evidence)
        treatment = "assumed" if judgement is None else judgement[0]
        return treatment, f"{drawn:,} of {told.started:,} Python processes drew theirs"
    seeds = ", ".join(sorted(told.hash_seeds))
    treatment = "eliminated" if set(told.hash_seeds) == {"0"} else "seeded"
    processes = counted(told.started, "Python process", "Python processes")
    return treatment, f"read back in {processes}: PYTHONHASHSEED={seeds}"


def _system_entropy(evidence: Evidence) -> Judgement:
    judgement = system_treatment(evidence)
    if judgement is None or judgement[0] in ("assumed", "unsupported"):
        return judgement
    asked, own = evidence.requests, evidence.own_requests
    requests, size = counted(asked.calls, "request"), counted(asked.bytes, "byte")
    text = f"answered: {requests} for {size}"
    if own.calls:
        text += f" (besides {own.calls:,} of Capsule's own interpreter)"
    return judgement[0], text + _starts(evidence)


def _starts(evidence: Evidence) -> str:
    report = evidence.report
    if report is None or report.starts == 1:
        return ""
    return f", in the last of {report.starts} starts"


def _raw_calls(evidence: Evidence) -> Judgement:
    judgement, report = system_treatment(evidence), evidence.report
    if report is None or judgement is None or report.mode == "system":
        return judgement
    if not report.supervised:
        return "assumed", "system calls were not supervised: they would not have been seen"
    if missed := sum(each.unanswered for each in evidence.programs):
        return (
            "unsupported",
            f"let through: {counted(missed, 'open of a random file', 'opens of random files')}",
        )
    bypassed = sum(each.getrandom.calls + each.devices.calls for each in evidence.programs)
    if not bypassed:
        return None
    return judgement[0], f"answered past the preloaded library: {counted(bypassed, 'request')}"


def _instructions(evidence: Evidence) -> Judgement:
    masked = evidence.report is not None and evidence.report.mode != "system"
    text = "libraries known to use them are told not to" if masked else "nothing masks them"
    return "assumed", f"RDRAND and RDSEED cannot be intercepted; {text}"


def _start_bytes(evidence: Evidence) -> Judgement:
    judgement, report = system_treatment(evidence), evidence.report
    if judgement is None or report is None or report.mode == "system":
        return "assumed", "the kernel gave them"
    if not report.supervised:
        return "assumed", "system calls were not supervised, so that the kernel gave them"
    executed = [each for each in evidence.programs if each.executed]
    derived = sum(each.start_bytes_derived for each in executed)
    treatment: Treatment = judgement[0] if derived == len(executed) else "assumed"
    return treatment, f"replaced in {derived:,} of {counted(len(executed), 'program')}"


def _addresses(evidence: Evidence) -> Judgement:
    if evidence.report is None:
        return "assumed", "the run was not started by the launcher, which switches them off"
    if evidence.report.address_randomization:
        return "unsupported", "the launcher left their randomisation on"
    if not evidence.mechanisms.surroundings.fixed_paths:
        return "assumed", (
            "the launcher read back that their randomisation is off, but paths lie in memory, too, "
            "and the run had this machine's own"
        )
    return "eliminated", "the launcher read back that their randomisation is off"


def _streams(evidence: Evidence) -> Judgement:
    if evidence.streams is None:
        return None
    drawn = sum(stream.draws for stream in evidence.streams.streams)
    count = len(evidence.streams.streams)
    return "seeded", f"{count} counter-based streams gave {drawn:,} words; each draw is digested"


SOURCES = (
    Source("Interpreter hash seed", _hash_seed, "an interpreter without these packages"),
    Source(
        "Operating-system entropy", _system_entropy, "a program that draws in an order of its own"
    ),
    Source(
        "Entropy by raw system calls", _raw_calls, "a kernel that answers without a system call"
    ),
    Source("Processor randomness", _instructions, "a program that uses it for its results"),
    Source("Start bytes of programs", _start_bytes, "a program that is not supervised"),
    Source(
        "Memory addresses",
        _addresses,
        "another kernel's layout; memory from other processes; a hash of an address",
    ),
    Source("Random streams", _streams, "a generator that is seeded otherwise"),
)
