"""Comparing what a program wrote with what its re-execution wrote, file by file and by content."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import TypeGuard

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import ProgramClaims
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.canonical import open_regular
from capsule.experiment.contract import Output
from capsule.host.wording import counted
from capsule.verification.analysis.comparison import MAX_DIFFERENCES
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import NATURES, Comparison, Context, Data, Nature
from capsule.verification.content.times import Times
from capsule.verification.verdict import OutputComparison, OutputDifference

STANDARD_OUTPUT = "/dev/stdout"  # beside relative paths of files, of which none can be the same
COMPONENTS = ("outputs", "deleted", "empty_folders", "standard_output")  # of the claims

Claimed = Output | str  # a file or link; or what else is claimed of a path, in words


def recorded_outputs(bundle: OpenedBundle, claims: ProgramClaims) -> dict[str, Path]:
    """Return the bundle's copy of each claimed output but links, as :func:`compare_outputs` takes.

    Raises:
        CapsuleError: CAP-B144, the bundle lacks one.
    """
    members = run_bundle.claimed_outputs(claims)
    if claims.standard_output is not None:
        members[STANDARD_OUTPUT] = run_bundle.STANDARD_OUTPUT
    return {path: bundle.member(member) for path, member in members.items()}


def compare_outputs(
    claimed: ProgramClaims,
    found: ProgramClaims,
    recorded: Mapping[str, Path],
    directory: Path,
    times: Times,
) -> OutputComparison | None:
    """Compare all outputs of a program; None if they are equal.

    Files come first, in order of their paths, the standard output last.

    Args:
        claimed: What the bundle claims.
        found: What the re-execution claims.
        recorded: The bundle's copy of each claimed output, by path in the working folder or
            :data:`STANDARD_OUTPUT`.
        directory: Run directory of the re-execution.
        times: When the two runs took place.
    """
    before, after = _all_claims(claimed), _all_claims(found)
    files = _Files(recorded, directory, Context(times, compare_content))
    differences = [
        files.difference(path, before.get(path), other, after.get(other))
        for path, other in _pairs(before, after, times)
    ]
    if not differences:
        return None
    return OutputComparison(
        count=len(differences),
        nature=max((each.nature for each in differences), key=NATURES.index),
        files=tuple(islice(differences, MAX_DIFFERENCES)),
    )


def _all_claims(claims: ProgramClaims) -> dict[str, Claimed]:
    return {
        **dict.fromkeys(claims.empty_folders, "an empty folder"),
        **dict.fromkeys(claims.deleted, "deleted"),
        **claims.outputs,
        **({} if claims.standard_output is None else {STANDARD_OUTPUT: claims.standard_output}),
    }


def _pairs(
    before: Mapping[str, Claimed], after: Mapping[str, Claimed], times: Times
) -> Iterator[tuple[str, str]]:
    """Yield the paths that differ, each with that of the re-execution's file for it."""
    renamed = dict(_renamed(before, after, times))
    taken = set(renamed.values())
    # A file with another name is one difference: its name in the re-execution is not listed again.
    paths = {path for path in (*before, *after) if before.get(path) != after.get(path)}
    for path in sorted(paths - taken, key=lambda path: (path == STANDARD_OUTPUT, path)):
        yield path, renamed.get(path, path)


def _renamed(
    before: Mapping[str, Claimed], after: Mapping[str, Claimed], times: Times
) -> Iterator[tuple[str, str]]:
    """Pair files that only one side has: of equal content, or with names that differ in a date."""
    waiting: defaultdict[object, list[str]] = defaultdict(list)
    # In reverse, so that the last of each list, which is taken below, is the first by name.
    for path in sorted(after.keys() - before.keys(), reverse=True):
        for key in (("content", after[path]), ("name", times.found.masked(path))):
            waiting[key].append(path)
    taken: set[str] = set()
    for path in sorted(before.keys() - after.keys()):
        # Equal content pairs two files whatever their names are, and a name only where no content
        # does.
        for key in (("content", before[path]), ("name", times.claimed.masked(path))):
            free = [other for other in waiting[key] if other not in taken]
            if free and all(isinstance(each, Output) for each in (before[path], after[free[-1]])):
                taken.add(free[-1])
                yield path, free[-1]
                break


@dataclass(frozen=True)
class _Files:
    """The files of both runs, and how they are compared; see :func:`compare_outputs`."""

    recorded: Mapping[str, Path]
    directory: Path
    context: Context

    def difference(
        self, path: str, before: Claimed | None, other: str, after: Claimed | None
    ) -> OutputDifference:
        """Compare the recorded ``path`` with what the re-execution has at ``other``."""
        content = self._content(path, before, other, after)
        nature: Nature = "content" if content is None else content.nature
        claimed, found = _described(before), _described(after)
        if content is not None:
            claimed, found = content.parts[0].claimed, content.parts[0].found
        if path != other:
            renaming: Nature = "date" if self.context.times.dates(path, other) else "content"
            nature = renaming if before == after else max(nature, renaming, key=NATURES.index)
            found = f"equal content, as {other}" if before == after else found
        # Whether a file can be executed is no matter of how its content is written down.
        if _modes(before) != _modes(after):
            nature = "content"
        return OutputDifference(
            path=path,
            found_path=None if path == other else other,
            claimed=claimed,
            found=found,
            nature=nature,
            content=content,
        )

    def _content(
        self, path: str, before: Claimed | None, other: str, after: Claimed | None
    ) -> Comparison | None:
        """Compare two files by content; None if there are no two, or one cannot be read.

        The re-execution's statements about its files are untrusted: where it names a file, there
        may be a link to a file of this machine, which must not end up in a report.
        """
        digests = [each.sha256 for each in (before, after) if _is_file(each)]
        if len(set(digests)) != 2 or path not in self.recorded:
            return None
        is_file = other != STANDARD_OUTPUT
        copy = f"{contract.WORKSPACE}/{other}" if is_file else contract.STANDARD_OUTPUT
        try:
            with (
                open_regular(self.recorded[path]) as left,
                open_beneath(self.directory, copy) as right,
            ):
                return compare_content(path, _mapped(left), _mapped(right), self.context)
        except OSError:
            # Without a comparison, the difference counts as one of content.
            return None


def _mapped(stream: BufferedReader) -> Data:
    """Map a file; it stays mapped while something of it is in use."""
    # An empty file cannot be mapped.
    if not stream.seek(0, 2):
        return b""
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _is_file(output: Claimed | None) -> TypeGuard[Output]:
    return isinstance(output, Output) and output.target is None


def _modes(output: Claimed | None) -> bool:
    return isinstance(output, Output) and output.executable


def _described(output: Claimed | None) -> str:
    if output is None:
        return "no output"
    if isinstance(output, str):
        return output
    if output.target is not None:
        return f"link to {output.target}"
    executable = ", executable" if output.executable else ""
    return f"{counted(output.size, 'byte')}{executable}, sha256:{output.sha256}"
