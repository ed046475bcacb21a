"""Scores of members that run a user program: numbers in JSON files that it wrote.

A study says where they are, as ``scores: {NAME: FILE#POINTER}``. The file is an output that the
program claims, and the pointer (RFC 6901) leads to a number, or to a list of numbers with one for
each evaluation. A number may also be the text of a C99 hexadecimal float, which loses no digit. A
network of Capsule's trainers has a mean return; here such a number is the score.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from capsule.bundle.claims import ProgramClaims
from capsule.experiment.canonical import MAX_VALUES, count_values, sha256_hex
from capsule.report.scores import ScoredTask
from capsule.report.subject import NetworkReturns
from capsule.study.spec import StudySpec

MAX_SCORES = 2_000_000  # of all members of a study; each takes some 250 bytes of memory
ReadOutput = Callable[[ProgramClaims, str], bytes]
Tasks = tuple[tuple[ScoredTask, tuple[NetworkReturns, ...]], ...]


def scored_outputs(study: StudySpec, claims: ProgramClaims, read: ReadOutput) -> dict[str, bytes]:
    """Read the outputs of a member in which its scores are, by their paths.

    Args:
        study: The study.
        claims: Claims of the member.
        read: Returns what an output holds, by its path in the working folder.

    Raises:
        ValueError: The study names no scores; an output was not claimed, or is not as claimed.
    """
    if study.scores is None:
        raise ValueError("it runs a program, and the study does not say where its scores are")
    outputs = {}
    for path in dict.fromkeys(source.partition("#")[0] for source in study.scores.values()):
        claimed = claims.outputs.get(path)
        # The digest of a link is that of its target's name (contract.Output), not that of a file.
        if claimed is None or claimed.target is not None:
            raise ValueError(f"it has no output {path}")
        outputs[path] = read(claims, path)
        # Opening a member's bundle does not compare its files with its claims, as 'verify' does.
        if sha256_hex(outputs[path]) != claimed.sha256:
            raise ValueError(f"its output {path} is not the one that it claims")
    return outputs


class ScoreReader:
    """Reads the scores of all members of a study, and each file that members share only once.

    A bundle contains a shared file once. Without bounds on all members together, a small bundle
    with many of them would fill the memory.
    """

    def __init__(self, study: StudySpec) -> None:
        """Begin with no member."""
        self._study = study
        self._known: dict[tuple[str, ...], Tasks] = {}
        self._left = MAX_SCORES

    def read(self, claims: ProgramClaims, outputs: Mapping[str, bytes]) -> Tasks:
        """Return the scores of the next member: each name is a task, each number an evaluation.

        Args:
            claims: Claims of the member.
            outputs: As of :func:`scored_outputs`.

        Raises:
            ValueError: As of :func:`program_tasks`.
        """
        files = tuple(claims.outputs[path].sha256 for path in outputs)
        if files not in self._known:
            self._known[files] = program_tasks(self._study, outputs, self._left)
        tasks = self._known[files]
        self._left -= sum(len(points) for _, points in tasks)
        if self._left < 0:
            raise _too_many()
        return tasks


def program_tasks(study: StudySpec, outputs: Mapping[str, bytes], most: int = MAX_SCORES) -> Tasks:
    """Return the scores of a member: each name is a task, each number an evaluation.

    Args:
        study: The study, which names scores.
        outputs: As of :func:`scored_outputs`.
        most: How many numbers there may be.

    Raises:
        ValueError: A file is not JSON, a pointer leads to no number and no list of numbers, or
            there are too many of them.
    """
    for path, content in outputs.items():
        if count_values(content) > MAX_VALUES:
            raise ValueError(f"its output {path} has more than {MAX_VALUES:,} values")
    tasks = []
    for name, source in (study.scores or {}).items():
        path, _, pointer = source.partition("#")
        try:
            found = _resolve(json.loads(outputs[path]), pointer)
        except (ValueError, LookupError, RecursionError) as error:
            raise ValueError(f"{source} does not exist or cannot be read: {error}") from error
        values = found if isinstance(found, list) else [found]
        most -= len(values)
        if most < 0:
            raise _too_many()
        try:
            numbers = [_number(value) for value in values]
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"{source} is neither a number nor a list of numbers: {error}"
            ) from error
        if not numbers:
            raise ValueError(f"{source} is an empty list")
        points = (NetworkReturns(step, (number,)) for step, number in enumerate(numbers, 1))
        tasks.append((ScoredTask("program", name), tuple(points)))
    return tuple(tasks)


def _too_many() -> ValueError:
    return ValueError(f"the members of the study have more than {MAX_SCORES:,} scores")


def _number(value: Any) -> float:
    """Return a number, which may be the text of a hexadecimal one.

    Raises:
        ValueError: It is none.
        OverflowError: It is too large.
    """
    # Without the prefix, float.fromhex() would read '12' as 18, and would accept 'nan' and 'inf'.
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return float.fromhex(value)
    # The type is compared, because isinstance() would accept true and false as numbers.
    if type(value) not in (int, float):
        raise ValueError(repr(value))
    return float(value)


def _resolve(document: Any, pointer: str) -> Any:
    """Return what a JSON pointer leads to (RFC 6901, section 4).

    Raises:
        LookupError: Nothing.
        ValueError: An index of a list is not a number.
    """
    for token in pointer.split("/")[1:]:
        # The order is that of RFC 6901, section 4: the other one would turn '~01' into '/'.
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list):
            # isdecimal() alone accepts the digits of other scripts, as does int().
            if not key.isascii() or not key.isdecimal() or (key[0] == "0" and key != "0"):
                raise ValueError(f"{key!r} is not an index of a list")
            document = document[int(key)]
        elif isinstance(document, dict):
            document = document[key]
        else:
            raise LookupError(f"{key!r} of a value that is neither an object nor a list")  # noqa: TRY004
    return document
