"""Zip archives, and the files of numpy and torch that are such: member by member.

The storages of a torch file are compared as numbers of the type that its pickle names, which is
read opcode by opcode and never executed.
"""

from __future__ import annotations

import zipfile
from typing import BinaryIO, cast

from capsule.verification.content.arrays import note_tensors
from capsule.verification.content.parts import (
    MAX_MEMBER_BYTES,
    Comparison,
    Context,
    Data,
    Findings,
    NotComparableError,
)
from capsule.verification.content.pickles import storage_types
from capsule.verification.content.reading import Window
from capsule.verification.content.tensor_comparison import Tensor
from capsule.verification.content.zip_headers import Extra, checked_extra

MAGIC = b"PK\x03\x04"
MAX_MEMBERS = 20_000
_PIECE_BYTES = 1 << 20
_PICKLE = "/data.pkl"  # of a torch file, beside data/0, data/1, …
_HELD = {True: "present", False: "missing"}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}


def compare_zip(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two archives member by member, by content and then by what is said of them."""
    found = Findings("zip")
    archives = _Archive(left), _Archive(right)
    before, after = (archive.members for archive in archives)
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            found.differs(name, (_HELD[name in before], _HELD[name in after]))
        elif _equal(archives, name, context):
            found.same(name)
            _compare_facts(before[name], after[name], found)
            _compare_extras(name, archives[0].extras[name], archives[1].extras[name], found)
        else:
            _compare_members(archives, name, found, context)
    if list(before) != list(after) and before.keys() == after.keys():
        orders = ", ".join(before), ", ".join(after)
        found.differs("order of the members", orders, "packaging")
    return found.comparison()


class _Archive:
    """An archive whose bytes all belong to its members or its directory."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._zip = zipfile.ZipFile(cast("BinaryIO", Window(data)))
        infos = self._zip.infolist()
        if len(infos) > MAX_MEMBERS:
            raise NotComparableError(f"{len(infos):,} members")
        self.members = {info.filename: info for info in infos}
        if len(self.members) < len(infos) or self._zip.comment:
            raise NotComparableError("a member twice, or a comment")
        # zipfile cuts a name at its first NUL and keeps the original beside it.
        if any(info.filename != info.orig_filename for info in infos):
            raise NotComparableError("a name that continues behind its end")
        self.extras = self._checked_extras()
        # With several pickles, it is not known which one describes the storages.
        pickles = [name for name in self.members if name.endswith(_PICKLE)]
        self._types = {}
        if len(pickles) == 1:
            folder = pickles[0].removesuffix(_PICKLE)
            types = storage_types(self.whole(pickles[0]))
            self._types = {f"{folder}/data/{key}": dtype for key, dtype in types.items()}

    def open(self, name: str) -> BinaryIO:
        """Open a member."""
        return cast("BinaryIO", self._zip.open(name))

    def whole(self, name: str) -> bytes:
        """Return a member's content."""
        with self.open(name) as stream:
            data = stream.read(MAX_MEMBER_BYTES + 1)
        if len(data) > MAX_MEMBER_BYTES:
            raise NotComparableError("a member is too large")
        return data

    def storage(self, name: str) -> Tensor | None:
        """Return a member as the numbers that it holds; None if it is not a storage."""
        dtype = self._types.get(name)
        data = None if dtype is None else self.whole(name)
        if dtype is None or data is None or len(data) % _SIZES[dtype]:
            return None
        return Tensor(dtype, (len(data) // _SIZES[dtype],), memoryview(data))

    def _checked_extras(self) -> dict[str, Extra]:
        """Check that nothing lies before, between or behind the members; return what they add."""
        members = sorted(self.members.values(), key=lambda info: info.header_offset)
        starts = [*(info.header_offset for info in members), self._zip.start_dir]
        # Readers skip what comes before the first member, so it could be anything.
        if starts[0] != 0:
            raise NotComparableError("bytes that belong to no member")
        ends = zip(members, starts[1:], strict=True)
        return {info.filename: checked_extra(self._data, info, end) for info, end in ends}


def _equal(archives: tuple[_Archive, _Archive], name: str, context: Context) -> bool:
    """Tell whether a member has the same content in both archives."""
    with archives[0].open(name) as left, archives[1].open(name) as right:
        while True:
            # At the end of a member, zipfile compares its checksum (BadZipFile).
            pieces = left.read(_PIECE_BYTES), right.read(_PIECE_BYTES)
            context.budget.spend(len(pieces[0]) + len(pieces[1]))
            if pieces[0] != pieces[1]:
                return False
            if not pieces[0]:
                return True


def _compare_members(
    archives: tuple[_Archive, _Archive], name: str, found: Findings, context: Context
) -> None:
    left, right = archives
    sizes = left.members[name].file_size, right.members[name].file_size
    if max(sizes) > MAX_MEMBER_BYTES:
        found.differs(name, (f"{sizes[0]:,} bytes", f"{sizes[1]:,} bytes"))
        return
    before, after = left.storage(name), right.storage(name)
    if before is None or after is None:
        found.include(name, context.inner(name, left.whole(name), right.whole(name)))
    else:
        note_tensors(name, before, after, found)


def _compare_facts(left: zipfile.ZipInfo, right: zipfile.ZipInfo, found: Findings) -> None:
    """Compare what two archives say of a member with equal content."""
    if left.date_time != right.date_time:
        found.differs(f"{left.filename}, date", (_date(left), _date(right)), "date")
    # They hold the mode: a symbolic link has the same content as a file with its target.
    if left.external_attr != right.external_attr:
        modes = f"{left.external_attr:#x}", f"{right.external_attr:#x}"
        found.differs(f"{left.filename}, attributes", modes)
    if left.comment != right.comment:
        found.differs(f"{left.filename}, comment", (left.comment, right.comment))


def _compare_extras(name: str, left: Extra, right: Extra, found: Findings) -> None:
    if left.dates != right.dates:
        found.differs(f"{name}, extended date", (left.dates, right.dates), "date")
    if left.others != right.others:
        found.differs(f"{name}, extra field", (left.others, right.others))


def _date(info: zipfile.ZipInfo) -> str:
    return "{}-{:02}-{:02} {:02}:{:02}:{:02}".format(*info.date_time)
