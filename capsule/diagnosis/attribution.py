"""From what the instruments of two runs saw to findings: which line, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capsule.diagnosis.findings import Finding, finding
from capsule.experiment.spec import Spec
from capsule.training.instruments import (
    SEEDING,
    InstrumentReport,
    Location,
    OperatorUse,
    Source,
    SourceUse,
    Variable,
)

_CODES: dict[Source, str] = {
    "entropy": "CAP-D103",
    "address": "CAP-D104",
    "hash": "CAP-D105",
    "directory": "CAP-D106",
    "process": "CAP-D107",
}
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
        reports: Of all processes.
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
    if use.differing and use.first_difference is not None:
        first = use.first_difference
        return "CAP-D201", (
            f"{name} gave other bits in {use.differing} of {use.repeated} repetitions, first at "
            f"operator call {first.index:,} in {first.differing} of {first.elements} elements, "
            f"with {report.threads} threads"
        )
    if use.status == "with-flag" and report.algorithms == "off":
        return "CAP-D202", f"{name} was called {use.calls} times; torch lists: {use.documented}"
    if use.status == "raises" and (failed or report.algorithms != "error"):
        return "CAP-D203", f"{name} was called {use.calls} times; torch lists: {use.documented}"
    if use.status == "unknown":
        return "CAP-D204", f"{name} was called {use.calls} times and gave the same bits"
    return None, ""


def _warnings(report: InstrumentReport) -> Iterator[Finding]:
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
    found = list(_seeding_findings(first))
    clocks: set[str] = set()  # variables that hold a time
    for line in _differing_lines(first, second):
        explained = any(item.level == "error" for item in found)
        if line.asks("clock"):
            clocks |= {variable.name for variable, _ in line.variables}
            found.append(_clock_finding(line, first))
        elif (cause := _cause(line, spec)) is not None:
            found.append(line.finding(_CODES[cause], _REASONS[cause]))
        elif not explained and not line.names(clocks):
            code = "CAP-D103" if _RANDOM.search(line.text) else "CAP-D109"
            found.append(line.finding(code, "no known source is asked on this line"))
    return list({(item.code, str(item.where)): item for item in found}.values())


def _seeding_findings(report: InstrumentReport) -> Iterator[Finding]:
    """Yield the lines that seed a generator from the clock or the operating system."""
    for use in report.sources:
        text = report.text.get(str(use.where), "")
        code = {"clock": "CAP-D102", "entropy": "CAP-D103"}.get(use.source)
        if code and SEEDING.search(text) and not use.function.startswith("random."):
            message = f"a generator is seeded from {use.function}"
            yield finding(code, message, where=use.where, text=text)


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
        )


_REASONS: dict[Source, str] = {
    "entropy": "it draws from a generator that takes its state from the operating system",
    "address": "the same elements in another order, as their addresses fall",
    "hash": "the order or value comes from hash(), which the interpreter salts anew",
    "directory": "the order in which the file system lists a folder",
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
    program = "\n".join(report.text.values())
    if not _SEEDS_RANDOM.search(program):
        yield from (use.where for use in report.sources if use.function.startswith("random."))
    if not _SEEDS_TORCH.search(program):
        yield from (use.where for use in report.operators if use.status == "seeded")


def _key(variable: Variable) -> tuple[str, int, str]:
    # The two run directories differ, the files in them do not.
    return variable.where.file.rpartition("/")[2], variable.where.line, variable.name


def _cause(line: _Line, spec: Spec) -> Source | None:
    """Name the source that explains why a line differs."""
    if line.only_reordered():
        return _cause_of_order(line, spec)
    for source in ("address", "process", "directory"):
        if line.asks(source):
            return source
    if spec.determinism.hash_seed is None and _HASH.search(line.text):
        return "hash"
    return "entropy" if line.asks("entropy") or line.unseeded else None


def _cause_of_order(line: _Line, spec: Spec) -> Source:
    if line.asks("directory") or "glob(" in line.text:
        return "directory"
    if line.asks("entropy") or line.unseeded or _RANDOM.search(line.text):
        return "entropy"  # a shuffle
    salted = spec.determinism.hash_seed is None and not line.asks("address")
    texts = all(re.search(r"\b(str|bytes)\b", variable.kind) for variable, _ in line.variables)
    return "hash" if salted and texts and not _ADDRESS.search(line.text) else "address"


def _clock_finding(line: _Line, report: InstrumentReport) -> Finding:
    """Tell a seed taken from the clock from a mere measurement of time."""
    names = {variable.name for variable, _ in line.variables}
    users = [
        place
        for place, text in report.text.items()
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
