"""The differing outputs of a program on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from capsule.verification.verdict import OutputComparison, OutputDifference

MAX_FILES = 3
MAX_PARTS = 2
MAX_EQUAL = 3


def output_rows(outputs: OutputComparison) -> Iterator[tuple[str, str]]:
    """Yield the differing parts of outputs, with the names of equal ones."""
    for file in outputs.files[:MAX_FILES]:
        yield "output", _file(file)
        if file.content is None:
            continue
        for part in file.content.parts[:MAX_PARTS]:
            yield "", f"{part.where or 'file'} ({part.nature}): {part.claimed} / {part.found}"
        if file.content.count > MAX_PARTS:
            yield "", f"and {file.content.count - MAX_PARTS:,} more parts"
    if outputs.count > MAX_FILES:
        yield "", f"and {outputs.count - MAX_FILES:,} more outputs differ"


def _file(file: OutputDifference) -> str:
    name = file.path if file.found_path is None else f"{file.path} / {file.found_path}"
    if file.content is None:
        return f"{name}: {file.claimed} / {file.found}"
    equal = file.content.equal
    more = f" and {len(equal) - MAX_EQUAL} more" if len(equal) > MAX_EQUAL else ""
    same = f"; equal: {', '.join(equal[:MAX_EQUAL])}{more}" if equal else ""
    what = {"date": "only dates differ", "packaging": "only its packaging differs"}
    how = what.get(file.nature, f"{file.content.count:,} parts differ")
    return f"{name} ({file.content.format}): {how}{same}"
