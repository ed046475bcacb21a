"""The dense record of some parameter updates: every tensor, and every operator call.

``dense.jsonl`` contains one JSON object per line. The first names the spec and the steps. Then
each update has one line per operator call of the learner's thread, in order, and one trace record
(:mod:`capsule.experiment.trace`) with every tensor, which is not part of a chain. The record is
written when two runs are bisected (``capsule diff --bisect``), is not signed, and claims nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import Model
from capsule.experiment.files import open_regular
from capsule.experiment.lock import Sha256
from capsule.experiment.trace import Record

SCHEMA = "capsule/dense/v1"
MAX_LINE_BYTES = 1 << 24
MAX_RESULT_BYTES = 1 << 20  # of each result that are kept
MAX_DATA_BYTES = 64 << 20  # of all results together
MAX_CALLS = 100_000  # of one update


class DenseHeader(Model):
    """The header of a dense record: the updates that it records."""

    schema_id: Literal["capsule/dense/v1"] = Field("capsule/dense/v1", alias="schema")
    spec: Sha256 = Field(description="SHA-256 of the spec, in canonical JSON.")
    first: int = Field(description="Agent step at which the first recorded update ends.")
    last: int = Field(description="Agent step at which the last recorded update ends.")


class OperatorResult(Model):
    """A tensor that an operator returned or wrote to."""

    dtype: str = Field(description="Name of the type in torch, e.g. 'float32'.")
    shape: tuple[int, ...]
    digest: str = Field(description="XXH3-128 of the elements, row-major.")
    data: str | None = Field(
        None, description="Base64 of the first elements, little-endian; null if none are kept."
    )


class OperatorCall(Model):
    """One call of an operator."""

    operator: str
    where: str | None = Field(
        description="Innermost line of the program in the call stack, as FILE:LINE; null if no "
        "line of the program is in it."
    )
    arguments: dict[str, str] = Field(description="Numbers among the arguments, by position.")
    inputs: tuple[str, ...] = Field(description="Digests of the tensors among the arguments.")
    results: tuple[OperatorResult, ...]


@dataclass(frozen=True)
class Update:
    """One parameter update.

    Attributes:
        calls: Its operator calls in order.
        record: The trace record at its end, with every tensor.
    """

    calls: tuple[OperatorCall, ...]
    record: Record


def is_dense(path: Path) -> bool:
    """Return whether a file begins as a dense record does."""
    try:
        with open_regular(path) as stream:
            return f'"schema":"{SCHEMA}"'.encode() in stream.read(1 << 10)
    except OSError:
        return False


def read_header(path: Path) -> DenseHeader:
    """Read the header of a dense record.

    Raises:
        CapsuleError: CAP-V074, the file is not a dense record.
    """
    for _, line in _lines(path):
        try:
            return DenseHeader.model_validate_json(line)
        except ValidationError as error:
            raise _malformed(path, 1, str(error).splitlines()[0]) from error
    raise _malformed(path, 1, "is missing")


def read_updates(path: Path) -> Iterator[Update]:
    """Yield the updates of a dense record.

    Raises:
        CapsuleError: CAP-V074, a line is not one of a dense record.
    """
    calls: list[OperatorCall] = []
    for number, line in _lines(path):
        if number == 1:
            continue
        try:
            fields: Any = json.loads(line)
            if "operator" in fields:
                calls.append(OperatorCall.model_validate_json(line))
                if len(calls) > MAX_CALLS:
                    raise ValueError(f"more than {MAX_CALLS} calls of one update")
                continue
            step = fields.pop("step")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise _malformed(path, number, str(error).splitlines()[0]) from error
        if type(step) is not int:
            raise _malformed(path, number, "has no step")
        yield Update(tuple(calls), Record(0, step, fields, ""))
        calls = []


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    with open_regular(path, follow=False) as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n"):
                raise _malformed(path, number, "is cut off or too long")
            yield number, line


def _malformed(path: Path, number: int, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V074",
        f"{path.name} line {number} of a dense record: {what}",
        fix="Make it again with 'capsule diff … --dense FILE', with the same version of Capsule.",
    )
