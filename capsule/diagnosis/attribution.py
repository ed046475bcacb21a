"""From what the instruments of two runs saw to findings: which line, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from capsule.diagnosis.findings import Finding, finding
from capsule.experiment.spec import Spec, calendar_clock
from capsule.host.wording import counted
from capsule.training.instruments.report import (
    SEEDING,
    InstrumentReport,
    Location,
    OperatorUse,
    Source,
    SourceUse,
    Variable,
)

RUNS = ("run-1", "run-2")  # equally long: the length of a path moves what is in memory
Cause = Source | Literal["race"]
_CODES: dict[Cause, str] = {
    "entropy": "CAP-D103",
    "race": "CAP-D111",
    "address": "CAP-D104",
    "hash": "CAP-D105",
    "directory": "CAP-D106",
    "process": "CAP-D107",
}
_RUN_FOLDER = re.compile(f"/({'|'.join(RUNS)})/")
_RANDOM = re.compile(r"\brandom\b|\brng\b|\buuid|\bsecrets\b")
_SEEDS_RANDOM = re.compile(r"\brandom\.seed\(|\bseed_everything\(|\bset_seed\(")
_SEEDS_TORCH = re.compile(r"\bmanual_seed\(|\bseed_everything\(|\bset_seed\(")
_HASH = re.compile(r"\bhash\(")
_ADDRESS = re.compile(r"\bid\b")


def operator_findings(
    reports: Sequence[InstrumentReport], *, failed: bool = False
) -> list[Finding]:
    """Return what the census of operators, the re-execution and torch's warnings say.

    Args:
        reports: Reports of all processes.
        failed: Whether the run stopped with an error, which an operator may have raised.
    """
    found: dict[tuple[str, str | None, str], Finding] = {}
    for report in reports:
        for item in (*_operators(report, failed=failed), *_warnings(report)):
            found.setdefault((item.code, item.operator, str(item.where)), item)
    return list(found.values())


def _operators(report: InstrumentReport, *, failed: bool) -> Iterator[Finding]:
    for use in report.operators:
        code, message = _judged(use, report, failed=failed)
        if code is not None:
            yield finding(
                code,
                message,
                where=use.where,
                text=report.text.get(str(use.where), ""),
                operator=use.operator,
            )


def _judged(use: OperatorUse, report: InstrumentReport, *, failed: bool) -> tuple[str | None, str]:
    name = f"{use.operator} on {use.device}"
    called = f"{name} was called {counted(use.calls, 'time')}"
    # What was seen comes before what torch documents.
    if use.differing and use.first_difference is not None:
        first = use.first_difference
        threads = f", with {counted(report.threads, 'thread')}" if report.threads else ""
        return "CAP-D201", (
            f"{name} gave other bits in {use.differing} of {counted(use.repeated, 'repetition')}, "
            f"first at operator call {first.index:,} in {first.differing} of "
            f"{counted(first.elements, 'element')}{threads}"
        )
    if use.status == "with-flag" and report.algorithms == "off":
        return "CAP-D202", f"{called}; torch lists: {use.documented}"
    # With 'error', torch itself stops the run at such a call. If the run ended well, none of its
    # calls was one.
    if use.status == "raises" and (failed or report.algorithms != "error"):
        return "CAP-D203", f"{called}; torch lists: {use.documented}"
    if use.status == "unknown":
        return "CAP-D204", f"{called} and gave the same bits"
    return None, ""


def _warnings(report: InstrumentReport) -> Iterator[Finding]:
    # The census of operators names these lines already.
    known = {str(use.where) for use in report.operators if use.status == "raises"}
    for warning in report.warnings:
        if str(warning.where) not in known:
            text = report.text.get(str(warning.where), "")
            yield finding("CAP-D203", warning.message, where=warning.where, text=text)


def line_findings(first: InstrumentReport, second: InstrumentReport, spec: Spec) -> list[Finding]:
    """Explain why two processes, one of each run, computed different values.

    A line is explained by the sources that it asked, or by the way in which its values differ. A
    line with neither is taken to repeat what an earlier one began, unless there is no such line.
    """
    found = list(_seeding_findings(first, spec))
    # Lines come in the order of their first assignment, so an earlier one may have led to a later
    # one.
    clocks: set[str] = set()  # variables that hold a time
    for line in _differing_lines(first, second):
        explained = any(item.level == "error" for item in found)
        if line.asks_clock(spec):
            clocks |= {variable.name for variable, _ in line.variables}
            found.append(_clock_finding(line, first))
        elif (cause := _cause(line, spec)) is not None:
            if cause != "race" or not explained:  # what came in another order stays so
                found.append(line.finding(_CODES[cause], _REASONS[cause]))
        elif not explained and not line.names(clocks):
            # Under any other mode, randomness of the system is derived or replayed, and so the same
            # in both runs.
            system = spec.entropy.mode == "system" and _RANDOM.search(line.text)
            code = "CAP-D103" if system else "CAP-D109"
            found.append(line.finding(code, "no known source is used on this line"))
    return list({(item.code, str(item.where)): item for item in found}.values())


def asked_findings(
    reports: Sequence[InstrumentReport], spec: Spec, *, numbers_pinned: bool
) -> list[Finding]:
    """Return the lines that ask a source which nothing controls, where nothing else is known.

    These are candidates: that the answer reached a result was not seen.

    Args:
        reports: Reports of all processes.
        spec: What was run.
        numbers_pinned: Whether process numbers follow from what the run starts.
    """
    codes: dict[Source, str] = {**_CODES, "clock": "CAP-D108"}  # type: ignore[dict-item]
    found = {}
    for report in reports:
        for use in report.sources:
            # In a separate namespace, the processes of a run get the same numbers each time.
            pinned = use.source == "process" and numbers_pinned
            if _is_open(use, spec) and not pinned:
                item = finding(
                    codes[use.source],
                    f"{use.function} is called here, and no earlier difference was found",
                    where=use.where,
                    text=report.text.get(str(use.where), ""),
                    level="warning",
                    curable=not _is_monotonic(use),
                )
                found[item.code, str(item.where)] = item
    return list(found.values())


def _is_open(use: SourceUse, spec: Spec) -> bool:
    """Tell whether the answers of a source may differ from run to run under a spec."""
    match use.source:
        case "clock":
            return _is_monotonic(use) or calendar_clock(spec) == "system"
        case "entropy":
            return spec.entropy.mode == "system"
        case "directory":
            return not spec.determinism.sorted_listings
        case _:
            return True


def _is_monotonic(use: SourceUse) -> bool:
    return use.function.startswith(("time.monotonic", "time.perf_counter"))


def _seeding_findings(report: InstrumentReport, spec: Spec) -> Iterator[Finding]:
    """Yield the lines that seed a generator from the clock or the operating system."""
    for use in report.sources:
        text = report.text.get(str(use.where), "")
        code = {"clock": "CAP-D102", "entropy": "CAP-D103"}.get(use.source)
        # Draws from Python's global generator are judged by _unseeded_draws().
        seeds = SEEDING.search(text) and not use.function.startswith("random.")
        if code and seeds and _is_open(use, spec):
            message = f"a generator is seeded from {use.function}"
            curable = not _is_monotonic(use)
            yield finding(code, message, where=use.where, text=text, curable=curable)


@dataclass(frozen=True)
class _Line:
    """A line whose variables have other values in the second run."""

    where: Location
    text: str
    variables: list[tuple[Variable, Variable | None]]
    sources: list[SourceUse]
    unseeded: bool

    def asks(self, source: Source) -> bool:
        """Whether it asks a source; a draw of Python's global generator is judged apart."""
        return any(
            use.source == source and not use.function.startswith("random.") for use in self.sources
        )

    def asks_clock(self, spec: Spec) -> bool:
        """Whether it asks a clock that nothing controls."""
        return any(use.source == "clock" and _is_open(use, spec) for use in self.sources)

    @property
    def only_monotonic(self) -> bool:
        """Whether every clock that it asks is a monotonic one."""
        clocks = [use for use in self.sources if use.source == "clock"]
        return bool(clocks) and all(_is_monotonic(use) for use in clocks)

    def names(self, variables: set[str]) -> bool:
        return not variables.isdisjoint(re.findall(r"\w+", self.text))

    def only_reordered(self) -> bool:
        """Whether the same values, or elements of values, came in another order."""
        return all(
            other is not None
            and (
                variable.elements == other.elements
                or (variable.values > 1 and variable.unordered == other.unordered)
            )
            for variable, other in self.variables
        )

    def finding(self, code: str, reason: str) -> Finding:
        variable, other = self.variables[0]
        return finding(
            code,
            f"variable {variable.name!r} differs{_examples(variable, other)}: {reason}",
            where=self.where,
            text=self.text,
            curable=not self.only_monotonic,
        )


_REASONS: dict[Cause, str] = {
    "race": "results come in the order in which threads, processes or tasks are ready, or a task "
    "draws the randomness of the worker that executes it",
    "entropy": "it draws from a generator that takes its state from the operating system",
    "address": "the same elements are in another order, which depends on their addresses",
    "hash": "the order or value comes from hash(), whose salt the interpreter draws at each start",
    "directory": "it has the order in which the file system lists a folder",
    "process": "it is, or comes from, a process or thread number",
    "clock": "it is a time",
}


def _differing_lines(first: InstrumentReport, second: InstrumentReport) -> Iterator[_Line]:
    """Yield the lines that differ, in the order of their first assignment."""
    others = {_key(variable): variable for variable in second.variables}
    lines: dict[tuple[str, int], _Line] = {}
    for variable in first.variables:
        other = others.get(_key(variable))
        if other is not None and other.digest == variable.digest:
            continue
        where = variable.where
        line = lines.setdefault((where.file, where.line), _line_at(where, first))
        line.variables.append((variable, other))
    yield from lines.values()


def _line_at(where: Location, report: InstrumentReport) -> _Line:
    def here(location: Location | None) -> bool:
        return location is not None and str(location) == str(where)

    return _Line(
        where=where,
        text=report.text.get(str(where), ""),
        variables=[],
        sources=[use for use in report.sources if here(use.where)],
        unseeded=any(here(where) for where in _unseeded_draws(report)),
    )


def _unseeded_draws(report: InstrumentReport) -> Iterator[Location | None]:
    """Yield the lines that draw from a global generator which the program never seeds."""
    # The report has the text of all lines that it names, and of those that seed a generator.
    program = "\n".join(report.text.values())
    if not _SEEDS_RANDOM.search(program):
        yield from (use.where for use in report.sources if use.function.startswith("random."))
    if not _SEEDS_TORCH.search(program):
        yield from (use.where for use in report.operators if use.status == "seeded")


def _key(variable: Variable) -> tuple[str, int, str, str]:
    where = variable.where
    # The two run directories differ, the files in them do not.
    return _RUN_FOLDER.sub("/", where.file), where.line, where.function, variable.name


def _cause(line: _Line, spec: Spec) -> Cause | None:
    """Name the source that explains why a line differs."""
    # Equal elements in another order have other causes than different values.
    if line.only_reordered():
        return _cause_of_order(line, spec)
    for source in ("address", "process", "directory"):
        if line.asks(source):
            return source
    if spec.determinism.hash_seed is None and _HASH.search(line.text):
        return "hash"
    return _cause_of_draw(spec) if line.asks("entropy") or line.unseeded else None


def _cause_of_draw(spec: Spec) -> Cause:
    """Entropy that is derived or replayed differs only where another thread draws it."""
    return "entropy" if spec.entropy.mode == "system" else "race"


def _cause_of_order(line: _Line, spec: Spec) -> Cause:
    listed = line.asks("directory") or "glob(" in line.text
    if listed and not spec.determinism.sorted_listings:
        return "directory"
    if line.asks("entropy") or line.unseeded or _RANDOM.search(line.text):
        return _cause_of_draw(spec)  # a shuffle
    by_address = line.asks("address") or bool(_ADDRESS.search(line.text))
    # Python salts only the hashes of str and bytes. That of an object without __hash__ is its
    # address.
    texts = all(re.search(r"\b(str|bytes)\b", variable.kind) for variable, _ in line.variables)
    if spec.determinism.hash_seed is None and texts and not by_address:
        return "hash"
    # Where addresses are fixed, they cannot have moved anything, and a race is left.
    return "address" if by_address or spec.entropy.address_randomization else "race"


def _clock_finding(line: _Line, report: InstrumentReport) -> Finding:
    """Tell a seed taken from the clock from a mere measurement of time."""
    names = {variable.name for variable, _ in line.variables}
    users = [
        place
        for place, text in report.text.items()
        # Either this line seeds a generator itself, or another one does with a variable that is set
        # here.
        if SEEDING.search(text)
        and (place == str(line.where) or not names.isdisjoint(re.findall(r"\w+", text)))
    ]
    if not users:
        return line.finding("CAP-D108", _REASONS["clock"])
    used = ", ".join(sorted({place.rpartition("/")[2] for place in users}))
    return line.finding("CAP-D102", f"it comes from the clock, and a generator is seeded at {used}")


def _examples(variable: Variable, other: Variable | None) -> str:
    """Show the first values that differ, if they can be shown."""
    if other is None:
        return " (the second run never sets it)"
    for left, right in zip(variable.shown, other.shown, strict=False):
        if left != right:
            return f" ({left} and {right})"
    return ""
