"""Two files compared as a verification compares them, and files made by the real libraries."""

import io
import struct
import zipfile

import numpy as np
import torch

from capsule.verification.content.events import record_checksum
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import Context, Findings
from capsule.verification.content.times import Span, Times

CLAIMED, FOUND = 1_732_262_000, 1_763_798_000
TIMES = Times(Span(CLAIMED, CLAIMED + 600), Span(FOUND, FOUND + 600))
CONTEXT = Context(TIMES, compare_content)


def compare(left, right, name="file"):
    return compare_content(name, left, right, CONTEXT)


def summary(found):
    return [(part.where, part.nature) for part in found.parts]


def facts(found):
    """Return the parts of what a comparison has collected, without their nature."""
    return [(part.where, part.claimed, part.found) for part in found.parts]


def collected(note, *arguments):
    """Have a function note what differs in its arguments, and return what it noted."""
    found = Findings("test")
    note(*arguments, found, CONTEXT)
    return found


def zipped(members, year=2024, method=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), data, method)
    return stream.getvalue()


def saved(tensors):
    stream = io.BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path, number):
        self.path, self.number = path, number

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w'); {self.number}",)


def framed(data):
    """Return a record as TFRecord frames it."""
    length = struct.pack("<Q", len(data))
    return length + record_checksum(length) + data + record_checksum(data)


def event(time, step, tag, value):
    """Return an Event of TensorBoard as protobuf encodes it."""
    name = tag.encode()
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(inner)]) + inner
    return framed(
        b"\x09" + struct.pack("<d", time) + b"\x10" + bytes([step]) + b"\x2a"
        + bytes([len(summary)]) + summary
    )  # fmt: skip
