"""Comparing what was claimed with what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, TextIO

from capsule.bundle.claims import NO_NAMESPACES, CheckpointClaim, Claims, ProgramClaims
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.contract import Output
from capsule.experiment.states import ResumeState
from capsule.experiment.trace import Difference, Mark, first_difference
from capsule.verification.verdict import (
    ComponentDifference,
    OutputDifference,
    TraceDifference,
)

MAX_DIFFERENCES = 40
SHOWN_CHARACTERS = 120
STANDARD_OUTPUT = "standard output"  # what reports call it, beside paths of files
MAX_LINE_CHARACTERS = 1 << 20

# Causes before effects: the first fact that differs is the one to look at. What only a trainer of
# Capsule's own or only a user's program claims is absent from the other's claims.
_ORDER = (
    "lock",
    "image",
    "relaxations",
    "flags",
    "libraries",
    "streams",
    "schedule",
    "arrivals",
    "trace",
    "checkpoints",
    "parameters",
    "evaluation",
    "steps",
    "episodes",
    "outputs",
    "deleted",
    "empty_folders",
    "standard_output",
)


def compare_claims(claimed: Claims, found: Claims) -> tuple[ComponentDifference, ...]:
    """List the facts that differ, causes before effects, at most :data:`MAX_DIFFERENCES`.

    Whether the machine had namespaces for the run is none of them: the report names it.
    """
    left, right = (
        claims.model_dump(mode="json", by_alias=True)
        | {"relaxations": [name for name in claims.relaxations if name != NO_NAMESPACES]}
        for claims in (claimed, found)
    )
    return compare_documents({n: left.get(n) for n in _ORDER}, {n: right.get(n) for n in _ORDER})


def compare_documents(
    claimed: Mapping[str, Any], found: Mapping[str, Any]
) -> tuple[ComponentDifference, ...]:
    """List the leaves in which two JSON documents differ, in order of the first one's keys."""
    names = dict.fromkeys([*claimed, *found])
    differing = (_differences(name, claimed.get(name), found.get(name)) for name in names)
    return tuple(islice(chain.from_iterable(differing), MAX_DIFFERENCES))


def compare_checkpoints(
    claimed: tuple[CheckpointClaim, ...], found: contract.CheckpointIndex, last_step: int
) -> tuple[ComponentDifference, ...]:
    """Compare the checkpoints of a prefix re-execution with the claimed ones up to its end."""
    left = {item.step: item.digest for item in claimed if item.step <= last_step}
    right = {item.step: item.digest() for item in found.checkpoints if item.step in left}
    return tuple(
        ComponentDifference(
            component=f"checkpoints.{step}",
            claimed=left[step],
            found=right.get(step, "missing"),
        )
        for step in sorted(left)
        if left[step] != right.get(step)
    )


def compare_traces(recorded: Path, found: Path, *, prefix: bool) -> TraceDifference | None:
    """Find the first trace record that differs; with ``prefix`` either trace may end early."""
    difference = first_difference(recorded, found, prefix=prefix)
    return None if difference is None else trace_difference(difference)


def compare_segment(recorded: Path, found: Path, since: Mark, until: int) -> TraceDifference | None:
    """Find the first record that differs in one segment, which is all that ``found`` has."""
    difference = first_difference(recorded, found, since=since, until=until)
    return None if difference is None else trace_difference(difference)


def compare_states(claimed: ResumeState, found: ResumeState) -> tuple[ComponentDifference, ...]:
    """List what differs between the states that two runs go on from, but for the time they took."""
    left = claimed.model_dump(mode="json", exclude={"seconds"})
    right = found.model_dump(mode="json", exclude={"seconds"})
    return tuple(islice(_differences("state", left, right), MAX_DIFFERENCES))


def compare_outputs(
    claimed: ProgramClaims, found: ProgramClaims, recorded: Mapping[str, Path], directory: Path
) -> OutputDifference | None:
    """Find the first output of a program that differs, and in a text the first line that does.

    Files come first, in order of their paths, the standard output last.

    Args:
        claimed: What the bundle claims.
        found: What the re-execution claims.
        recorded: The bundle's copy of each claimed output, by path in the working folder or
            :data:`STANDARD_OUTPUT`.
        directory: Run directory of the re-execution.
    """
    before, after = _all_outputs(claimed), _all_outputs(found)
    for path in sorted({*before, *after}, key=lambda path: (path == STANDARD_OUTPUT, path)):
        if before.get(path) != after.get(path):
            is_file = path != STANDARD_OUTPUT
            copy = f"{contract.WORKSPACE}/{path}" if is_file else contract.STANDARD_OUTPUT
            lines = None
            if path in recorded and path in after and after[path].target is None:
                lines = _first_line(recorded[path], directory, copy)
            return _output_difference(path, before.get(path), after.get(path), lines)
    return None


def _all_outputs(claims: ProgramClaims) -> dict[str, Output]:
    printed = claims.standard_output
    return claims.outputs | ({} if printed is None else {STANDARD_OUTPUT: printed})


def _output_difference(
    path: str, before: Output | None, after: Output | None, lines: tuple[int, str, str] | None
) -> OutputDifference:
    if lines is not None:
        number, left, right = lines
        return OutputDifference(path=path, line=number, claimed=_show(left), found=_show(right))
    return OutputDifference(path=path, claimed=_described(before), found=_described(after))


def _first_line(recorded: Path, directory: Path, path: str) -> tuple[int, str, str] | None:
    """Return number and content of the first line that differs; None unless both are text.

    What the re-execution says of its files is its own word: where it says that a file is, there
    may be a link to a file of this machine, which must not end up in a report.
    """
    try:
        with (
            recorded.open(encoding="utf-8", newline="") as left,
            TextIOWrapper(open_beneath(directory, path), encoding="utf-8", newline="") as right,
        ):
            for number, (a, b) in enumerate(zip_longest(_lines(left), _lines(right)), 1):
                if a != b:
                    return number, _ended(a), _ended(b)
    except (OSError, UnicodeDecodeError):
        return None
    return None


def _lines(stream: TextIO) -> Iterator[str]:
    """Yield lines of a file, none longer than :data:`MAX_LINE_CHARACTERS`."""
    while line := stream.readline(MAX_LINE_CHARACTERS):
        if "\0" in line:
            raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "not text")
        yield line


def _ended(line: str | None) -> str:
    return "end of file" if line is None else line.rstrip("\n")


def _described(output: Output | None) -> str:
    if output is None:
        return "missing"
    if output.target is not None:
        return f"link to {output.target}"
    return f"{output.size} bytes, sha256:{output.sha256}"


def trace_difference(difference: Difference) -> TraceDifference:
    """Return a difference of two traces as reports have it."""
    return TraceDifference(
        step=difference.step,
        component=difference.component,
        name=difference.name,
        claimed=_show(difference.a),
        found=_show(difference.b),
        also=difference.also,
    )


def _differences(path: str, left: Any, right: Any) -> Iterator[ComponentDifference]:
    """Walk two JSON values side by side."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from _differences(f"{path}.{key}", left.get(key), right.get(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _differences(f"{path}[{index}]", a, b)
    elif left != right:
        yield ComponentDifference(component=path, claimed=_show(left), found=_show(right))


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
