"""Rows on randomness: what the operating system, the processor and the interpreter give."""

from __future__ import annotations

from capsule.entropy.evidence import Evidence, Judged, Judgement, LedgerSource, Treatment
from capsule.host.wording import agreeing, counted


def system_treatment(evidence: Evidence) -> Judged:
    """Say what the operating system's entropy was replaced by, whether or not it was asked for."""
    report = evidence.report
    if report is None:
        return "assumed", "the launcher did not start the run"
    match report.mode:
        case "system":
            return "unsupported", "the spec leaves it to the system (entropy.mode: system)"
        case "virtual":
            return "seeded", "the launcher derived it from a seed (entropy.mode: virtual)"
        case "record":
            return "recorded", "the launcher recorded it in a random profile"
        case "replay":
            return "recorded", "the launcher replayed it from a random profile"


def _hash_seed(evidence: Evidence) -> Judgement:
    told = evidence.mechanisms.interpreters
    if evidence.untold is not None or told is None:
        return "assumed", str(evidence.untold)
    if not told.hash_seeds:
        return None
    processes = counted(told.started, "Python process", "Python processes")
    # Python draws such a seed from the operating system, so the treatment is that of its entropy.
    if drawn := told.hash_seeds.get("random"):
        treatment, _ = system_treatment(evidence)
        return treatment, f"{drawn:,} of {processes} drew {agreeing(drawn, 'its', 'their')} own"
    seeds = ", ".join(sorted(told.hash_seeds))
    treatment = "eliminated" if set(told.hash_seeds) == {"0"} else "seeded"
    return treatment, f"read back in {processes}: PYTHONHASHSEED={seeds}"


def _system_entropy(evidence: Evidence) -> Judgement:
    treatment, how = system_treatment(evidence)
    if treatment in ("assumed", "unsupported"):
        return treatment, how
    asked, own = evidence.requests, evidence.own_requests
    requests, size = counted(asked.calls, "request"), counted(asked.bytes, "byte")
    text = f"answered: {requests} for {size}"
    if own.calls:
        text += f" (and {own.calls:,} of Capsule's own interpreter)"
    return treatment, text + _starts(evidence)


def _starts(evidence: Evidence) -> str:
    report = evidence.report
    if report is None or report.starts == 1:
        return ""
    return f", in the last of {counted(report.starts, 'attempt')}"


def _raw_calls(evidence: Evidence) -> Judgement:
    judgement, report = system_treatment(evidence), evidence.report
    if report is None or report.mode == "system":
        return judgement
    if not report.supervised:
        return "assumed", "system calls were not supervised, so these requests are unknown"
    # These opens are seen and let through (docs/launcher.md), so the kernel's bytes may be in the
    # result.
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
    text = "known libraries are configured not to use them" if masked else "they were not masked"
    return "assumed", f"RDRAND and RDSEED cannot be intercepted; {text}"


def _start_bytes(evidence: Evidence) -> Judgement:
    judgement, report = system_treatment(evidence), evidence.report
    if report is None or report.mode == "system":
        return "assumed", "the kernel chose them"
    if not report.supervised:
        return "assumed", "system calls were not supervised, so the kernel chose them"
    executed = [each for each in evidence.programs if each.executed]
    derived = sum(each.start_bytes_derived for each in executed)
    treatment: Treatment = judgement[0] if derived == len(executed) else "assumed"
    return treatment, f"replaced in {derived:,} of {counted(len(executed), 'program')}"


def _addresses(evidence: Evidence) -> Judgement:
    if evidence.report is None:
        return "assumed", "the launcher, which turns their randomisation off, did not start the run"
    if evidence.report.address_randomization:
        return "unsupported", "their randomisation was on"
    if not evidence.mechanisms.surroundings.fixed_paths:
        return "assumed", (
            "their randomisation was read back as off, but paths are in memory too, and the run "
            "had this machine's own paths"
        )
    return "eliminated", "their randomisation was read back as off"


def _streams(evidence: Evidence) -> Judgement:
    if evidence.streams is None:
        return None
    drawn = sum(stream.draws for stream in evidence.streams.streams)
    streams = counted(len(evidence.streams.streams), "counter-based stream")
    return "seeded", f"{streams} gave {counted(drawn, 'word')}; each draw is digested"


SOURCES = (
    LedgerSource("Interpreter hash seed", _hash_seed, "an interpreter without these packages"),
    LedgerSource(
        "Operating-system entropy",
        _system_entropy,
        "a program that draws in an unpredictable order",
    ),
    LedgerSource(
        "Entropy by raw system calls", _raw_calls, "a kernel that answers without a system call"
    ),
    LedgerSource("Processor randomness", _instructions, "a program whose results depend on it"),
    LedgerSource("Start bytes of programs", _start_bytes, "a program that is not supervised"),
    LedgerSource(
        "Memory addresses",
        _addresses,
        "another kernel's layout; memory from other processes; a hash of an address",
    ),
    LedgerSource("Random streams", _streams, "a generator that is seeded otherwise"),
)
