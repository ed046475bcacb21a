"""The outputs of a program that differ, on a terminal: from a re-execution or from another run."""

from __future__ import annotations

from collections.abc import Iterator

from capsule.host.wording import counted
from capsule.verification.verdict import OutputComparison, OutputDifference

MAX_PATHS = 3
MAX_FILES = 3
MAX_PARTS = 2


def output_rows(outputs: OutputComparison) -> Iterator[tuple[str, str]]:
    """Yield the differing parts of outputs, with the names of equal ones."""
    for file in outputs.files[:MAX_FILES]:
        yield "output", _output(file)
        if file.content is None:
            continue
        for part in file.content.parts[:MAX_PARTS]:
            yield "", f"{part.where or 'file'} ({part.nature}): {part.claimed} / {part.found}"
        if file.content.count > MAX_PARTS:
            yield "", f"and {counted(file.content.count - MAX_PARTS, 'more part')}"
    if more := outputs.beyond(MAX_FILES):
        yield "", f"and {more}"


def _output(file: OutputDifference) -> str:
    if file.content is None:
        return f"{file.name}: {file.claimed} / {file.found}"
    equal = file.content.equal
    same = f"; equal: {listed_paths(equal)}" if equal else ""
    what = {"date": "only dates differ", "packaging": "only its packaging differs"}
    parts = counted(file.content.count, "part differs", "parts differ")
    how = what.get(file.nature, parts)
    return f"{file.name} ({file.content.format}): {how}{same}"


def listed_paths(paths: tuple[str, ...]) -> str | None:
    """Return the first paths, and the number of the others; None if there are none."""
    more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
    return ", ".join(paths[:MAX_PATHS]) + more or None
