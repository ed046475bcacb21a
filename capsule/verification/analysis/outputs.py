"""Comparing what a program wrote in two of its runs, file by file and by content."""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import TypeGuard

from capsule.bundle import run_bundle
from capsule.bundle.claims import read_document
from capsule.bundle.run_bundle import RecordedRun, claimed_outputs
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.contract import Output
from capsule.experiment.files import open_regular
from capsule.experiment.spec import calendar_clock
from capsule.host.wording import counted
from capsule.verification.analysis.comparison import MAX_DIFFERENCES
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import NATURES, Comparison, Context, Data, Nature
from capsule.verification.content.times import UNKNOWN, Span, Times, stated_span
from capsule.verification.verdict import OutputComparison, OutputDifference

STANDARD_OUTPUT = "/dev/stdout"  # beside relative paths of files, of which none can be the same
COMPONENTS = ("outputs", "deleted", "empty_folders", "standard_output")  # of the claims

Claimed = Output | str  # a file or link; or what else is claimed of a path, in words


@dataclass(frozen=True)
class ProgramOutputs:
    """What a program left: the listing, and the files.

    Attributes:
        listing: What its run states about them.
        open_file: Opens a file of the listing by its path, or :data:`STANDARD_OUTPUT`; raises
            OSError if it cannot be read.
        span: When the program ran.
    """

    listing: contract.Outputs
    open_file: Callable[[str], BufferedReader]
    span: Span


def bundled_outputs(run: RecordedRun) -> ProgramOutputs:
    """Return the outputs of a program that a bundle holds."""
    bundle, observed = run.bundle, run.observations()
    listing = bundle.read(run_bundle.RUN + contract.OUTPUTS, contract.Outputs)
    members = {**claimed_outputs(listing.files), STANDARD_OUTPUT: run_bundle.STANDARD_OUTPUT}

    def open_file(path: str) -> BufferedReader:
        member = members[path]
        # 'capsule diff' also compares bundles that contradict themselves.
        if member not in bundle.files:
            raise FileNotFoundError(member)
        return open_regular(bundle.member(member))

    span = stated_span(observed.started, observed.finished, time.time())
    return ProgramOutputs(listing, open_file, span.with_clock(calendar_clock(run.lock.spec)))


def outputs_in(directory: Path, span: Span = UNKNOWN) -> ProgramOutputs:
    """Return the outputs of a program in a run directory, which ran at a known time or not.

    The run's statements about its files are untrusted: where it names a file, there may be a link
    to a file of this machine, which must not end up in a report.

    Raises:
        CapsuleError: CAP-B090, their listing is missing or malformed.
    """

    def open_file(path: str) -> BufferedReader:
        is_file = path != STANDARD_OUTPUT
        copy = f"{contract.WORKSPACE}/{path}" if is_file else contract.STANDARD_OUTPUT
        return open_beneath(directory, copy)

    listing = read_document(directory / contract.OUTPUTS, contract.Outputs)
    return ProgramOutputs(listing, open_file, span)


def compare_outputs(claimed: ProgramOutputs, found: ProgramOutputs) -> OutputComparison | None:
    """Compare all outputs of two runs of a program; None if they are equal.

    Files come first, in order of their paths, the standard output last.

    Args:
        claimed: The outputs of the recorded run, or of the first one.
        found: Those of the re-execution, or of the second run.
    """
    before, after = _all_listed(claimed.listing), _all_listed(found.listing)
    files = _Files(claimed, found, Context(Times(claimed.span, found.span), compare_content))
    differences = [
        files.difference(path, before.get(path), other, after.get(other))
        for path, other in _pairs(before, after, files.context.times)
    ]
    if not differences:
        return None
    return OutputComparison(
        count=len(differences),
        nature=max((each.nature for each in differences), key=NATURES.index),
        files=tuple(islice(differences, MAX_DIFFERENCES)),
    )


def _all_listed(listing: contract.Outputs) -> dict[str, Claimed]:
    printed = listing.standard_output
    return {
        **dict.fromkeys(listing.empty_folders, "an empty folder"),
        **dict.fromkeys(listing.deleted, "deleted"),
        **listing.files,
        **({} if printed is None else {STANDARD_OUTPUT: printed}),
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

    claimed: ProgramOutputs
    found: ProgramOutputs
    context: Context

    def difference(
        self, path: str, before: Claimed | None, other: str, after: Claimed | None
    ) -> OutputDifference:
        """Compare the recorded ``path`` with what the re-execution has at ``other``."""
        content = self._content(path, before, other, after)
        claimed, found = _described(before), _described(after)
        nature: Nature = "content" if content is None else content.nature
        # A link to a file whose name is a date is one of these dates itself.
        if _is_link(before) and _is_link(after) and self.context.times.dates(claimed, found):
            nature = "date"
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
        """Compare two files by content; None if there are no two, or one cannot be read."""
        digests = [each.sha256 for each in (before, after) if _is_file(each)]
        if len(set(digests)) != 2:
            return None
        try:
            with self.claimed.open_file(path) as left, self.found.open_file(other) as right:
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


def _is_link(output: Claimed | None) -> bool:
    return isinstance(output, Output) and output.target is not None


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
