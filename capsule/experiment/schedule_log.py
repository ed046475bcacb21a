"""The schedule log: the order in which unrolls were trained on, and their policy versions.

A run whose actors are asynchronous is a pure function of its spec and of this log. The file is one
line of canonical JSON (RFC 8785), the header, and after it the *planes*, compressed by zlib (RFC
1950): first the actor of every unroll, in the order of training, then the *lag* of every unroll,
the number of parameter updates by which its behaviour policy was older than the policy that was
trained on it. Both are little-endian numbers of as many bytes as the header states. A digest in
the header covers the header and the planes, so that a schedule has one header, whatever program
compressed it.

Nothing here needs torch or numpy: hosts read logs with it.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import Field, ValidationError

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt
from capsule.experiment.lock import Sha256
from capsule.experiment.trainers import MAX_RECORDED_ACTORS, MAX_RECORDED_UNROLLS

MAX_HEADER_BYTES = 1024
_NO_DIGEST = "0" * 64
_Width = Literal[1, 2]


class Header(Model):
    """The first line of a log."""

    schema_id: Literal["capsule/schedule/v1"] = Field("capsule/schedule/v1", alias="schema")
    spec: Sha256 = Field(
        description="SHA-256 of the spec to which the schedule belongs, in canonical JSON."
    )
    actors: PositiveInt = Field(le=MAX_RECORDED_ACTORS, description="Number of actors.")
    batch: PositiveInt = Field(
        le=MAX_RECORDED_ACTORS, description="Number of unrolls in a parameter update."
    )
    updates: NonNegativeInt = Field(
        le=MAX_RECORDED_UNROLLS, description="Number of parameter updates that were recorded."
    )
    bytes_of: tuple[_Width, _Width] = Field(
        description="Number of bytes of an actor number, and of a lag."
    )
    content: Sha256 = Field(
        _NO_DIGEST,
        description="SHA-256 of this line, with 64 zeros in place of this field, and of the planes "
        "before compression.",
    )


@dataclass(frozen=True)
class ScheduleLog:
    """A schedule as it was recorded.

    Attributes:
        spec: SHA-256 of the spec's canonical JSON.
        actors: Number of actors.
        batch: Number of unrolls in an update.
        played: The actor of each unroll, in the order of training, ``array('H')``.
        lags: The lag of each unroll, ``array('H')``.
    """

    spec: str
    actors: int
    batch: int
    played: array[int]
    lags: array[int]

    @property
    def updates(self) -> int:
        """Number of parameter updates that the log covers."""
        return len(self.played) // self.batch

    def slots(self, update: int) -> Iterator[tuple[int, int]]:
        """Yield actor and version of each unroll of an update, in order."""
        for place in range(update * self.batch, (update + 1) * self.batch):
            yield self.played[place], update - self.lags[place]

    @property
    def header(self) -> Header:
        """The header of the file."""
        return self._parts()[0]

    def digest(self) -> str:
        """Return the SHA-256 of the header, which does not depend on the compression."""
        return sha256_hex(_line(self.header))

    def document(self) -> bytes:
        """Return the file."""
        header, planes = self._parts()
        return _line(header) + zlib.compress(planes, 9)

    def _parts(self) -> tuple[Header, bytes]:
        widths = _width(self.actors - 1), _width(max(self.lags, default=0))
        planes = b"".join(
            _encoded(plane, width)
            for plane, width in zip((self.played, self.lags), widths, strict=True)
        )
        header = Header(
            spec=self.spec,
            actors=self.actors,
            batch=self.batch,
            updates=self.updates,
            bytes_of=widths,
        )
        return header.model_copy(update={"content": _content(header, planes)}), planes


def parse_schedule(data: bytes) -> ScheduleLog:
    """Read an untrusted log.

    Raises:
        CapsuleError: CAP-T341, it is cut off, was changed, or describes an impossible schedule.
    """
    line, feed, compressed = data.partition(b"\n")
    if not feed or len(line) > MAX_HEADER_BYTES:
        _reject("has no header line")
    try:
        header = Header.model_validate_json(line)
    except ValidationError as error:
        _reject(f"has a header of another form: {error.errors()[0]['msg']}")
    unrolls = header.updates * header.batch
    if unrolls > MAX_RECORDED_UNROLLS:
        _reject(f"claims {unrolls} unrolls, more than {MAX_RECORDED_UNROLLS}")
    # The size has been limited by now, so that a compressed bomb is never unpacked.
    planes = _decompressed(compressed, unrolls * sum(header.bytes_of))
    if _content(header, planes) != header.content:
        _reject("was changed: it does not have the digest that its header states")
    cut = unrolls * header.bytes_of[0]
    played, lags = (
        _decoded(plane, width)
        for plane, width in zip((planes[:cut], planes[cut:]), header.bytes_of, strict=True)
    )
    log = ScheduleLog(header.spec, header.actors, header.batch, played, lags)
    _check(log)
    # The header is computed again from what was read. Wider numbers than needed, for example,
    # would give one schedule two files.
    if _line(log.header) != line + feed:
        _reject("is not in canonical form")
    return log


def _check(log: ScheduleLog) -> None:
    """Reject an impossible schedule. A small file can contain millions of unrolls."""
    largest = max(log.played, default=-1)
    if largest >= log.actors:
        update = log.played.index(largest) // log.batch
        _reject(f"has actor {largest} in update {update}, but there are {log.actors}")
    # A lag cannot exceed the number of an update that comes later than the largest lag.
    for update in range(min(log.updates, max(log.lags, default=0))):
        if max(_of_update(log.lags, update, log.batch)) > update:
            _reject(f"has a version before the first in update {update}")
    # An update with a single unroll cannot have an actor twice.
    for update in range(log.updates if log.batch > 1 else 0):
        if len(set(_of_update(log.played, update, log.batch))) < log.batch:
            _reject(f"has an actor twice in update {update}")


def _of_update(plane: array[int], update: int, batch: int) -> array[int]:
    return plane[update * batch : (update + 1) * batch]


def _decompressed(data: bytes, size: int) -> bytes:
    """Decompress ``data`` if it contains exactly ``size`` bytes; never make more."""
    stream = zlib.decompressobj()
    try:
        # One byte more than allowed shows that there are too many, without making all of them.
        planes = stream.decompress(data, size + 1)
    except zlib.error as error:
        _reject(f"does not decompress: {error}")
    # zlib ignores bytes after the end of a stream, and no digest would cover them.
    if len(planes) != size or not stream.eof or stream.unused_data:
        _reject(f"does not contain the {size} bytes of its planes")
    return planes


def _content(header: Header, planes: bytes) -> str:
    return sha256_hex(_line(header.model_copy(update={"content": _NO_DIGEST})) + planes)


def _width(largest: int) -> _Width:
    return 1 if largest < 256 else 2


def _encoded(plane: array[int], width: int) -> bytes:
    return _little_endian(plane).tobytes()[:: 3 - width]  # the lower byte if the width is 1


def _decoded(data: bytes, width: int) -> array[int]:
    wide = bytearray(len(data) * 2 // width)
    wide[:: 3 - width] = data
    plane = array("H")
    plane.frombytes(wide)
    return _little_endian(plane)


def _little_endian(plane: array[int]) -> array[int]:
    """Convert a plane between the byte orders of this machine and of the file."""
    turned = plane[:]
    if sys.byteorder == "big":
        turned.byteswap()
    return turned


def _line(header: Header) -> bytes:
    fields: dict[str, Any] = header.model_dump(mode="json", by_alias=True)
    return canonical_json(fields) + b"\n"


def _reject(what: str) -> NoReturn:
    raise CapsuleError(
        "CAP-T341",
        f"the schedule log {what}",
        fix="Take the log from the bundle, or the run directory, again.",
    )
