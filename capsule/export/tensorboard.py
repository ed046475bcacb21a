"""Metrics as TensorBoard's event files.

An event file is a sequence of records (TFRecord: length, CRC of the length, data, CRC of the data)
and each record is one ``Event`` message of tensorflow/core/util/event.proto. Scalars need five
fields of three messages, so they are encoded here: the libraries that write such files need NumPy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from capsule.export.folders import new_folders
from capsule.export.runs import ExportedRun, Point
from capsule.verification.content.events import record_checksum

FILE_VERSION = b"brain.Event:2"
EVENT_FILE = "events.out.tfevents.{seconds:010d}.capsule"
# The field numbers below are those of Event (1 wall_time, 2 step, 3 file_version, 5 summary),
# Summary (1 value) and Summary.Value (1 tag, 2 simple_value).
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers


def export_tensorboard(runs: Iterable[ExportedRun], folder: Path) -> None:
    """Write a folder with one event file for each run; ``tensorboard --logdir`` shows them.

    A point without a time of its own has that of the run's start, or 0.

    Raises:
        CapsuleError: CAP-P203, the folder of a run exists already.
        OSError: A file cannot be written.
    """
    # All folders get their names when the last one is written, so that an error leaves none.
    with new_folders(folder) as make:
        for run, place in [(run, make(folder / run.name)) for run in runs]:
            started = run.started or 0.0
            with (place / EVENT_FILE.format(seconds=int(started))).open("wb") as stream:
                writer = EventWriter(stream.write, started)
                for metric in run.metrics:
                    for point in metric.points:
                        writer.write(metric.name, point)


class EventWriter:
    """Writes scalars to an event file."""

    def __init__(self, write: Callable[[bytes], object], started: float) -> None:
        """Begin the file of a run.

        Args:
            write: Appends to the file.
            started: When the run started, in seconds since the epoch.
        """
        self._write = write
        self._started = started
        write(_record(_double(1, started) + _bytes(3, FILE_VERSION)))

    def write(self, name: str, point: Point) -> None:
        """Append a value. TensorBoard keeps it in single precision."""
        value = _bytes(1, name.encode()) + _float(2, point.value)
        time = self._started if point.time is None else point.time
        event = _double(1, time) + _integer(2, point.step) + _bytes(5, _bytes(1, value))
        self._write(_record(event))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + record_checksum(length) + data + record_checksum(data)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _integer(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, _DOUBLE) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        return _key(field, _FLOAT) + struct.pack("<f", value)
    except OverflowError:  # larger than single precision can hold
        return _key(field, _FLOAT) + struct.pack("<f", math.copysign(math.inf, value))
