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
    Budget,
    Comparison,
    Context,
    Data,
    Findings,
    NotComparableError,
)
from capsule.verification.content.pickles import storage_types
from capsule.verification.content.reading import Window
from capsule.verification.content.tensor_comparison import Tensor
from capsule.verification.content.zip_ends import checked_end
from capsule.verification.content.zip_headers import Stated, checked_header

MAGIC = b"PK\x03\x04"
MAX_MEMBERS = 20_000
_PIECE_BYTES = 1 << 20
_PICKLE = "/data.pkl"  # of a torch file, beside data/0, data/1, …
_HELD = {True: "present", False: "missing"}
# What the directory states of a member beside its dates and sizes. The attributes hold the mode: a
# symbolic link has the same content as a file with its target.
_FACTS = {
    "attributes": "external_attr",
    "internal attributes": "internal_attr",
    "system": "create_system",
    "reserved field": "reserved",
    "disk": "volume",
    "comment": "comment",
}
# The versions of the format that features of an archive need (APPNOTE 4.4.3.2). They follow from
# how members are stored.
_VERSIONS = frozenset({10, 11, 20, 21, 25, 27, 45, 46, 50, 51, 52, 61, 62, 63})
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}


def compare_zip(left: Data, right: Data, context: Context) -> Comparison:
    """Compare two archives member by member, by content and then by what is said of them."""
    found = Findings("zip")
    archives = _Archive(left, context.budget), _Archive(right, context.budget)
    before, after = (archive.members for archive in archives)
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            found.differs(name, (_HELD[name in before], _HELD[name in after]))
            continue
        if _equal(archives, name, context):
            found.same(name)
        else:
            _compare_members(archives, name, found, context)
        _compare_dates(archives, name, found)
        _compare_facts(archives, name, found)
    if list(before) != list(after) and before.keys() == after.keys():
        orders = ", ".join(before), ", ".join(after)
        found.differs("order of the members", orders, "packaging")
    _compare_versions("the directory", archives[0].end_versions, archives[1].end_versions, found)
    return found.comparison()


class _Archive:
    """An archive whose bytes all belong to its members or its directory."""

    def __init__(self, data: Data, budget: Budget) -> None:
        self._data = data
        self._budget = budget
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
        self.stated = self._checked_headers()
        self.end_versions = checked_end(data, self._zip.start_dir, len(infos))
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
        size = self.members[name].file_size  # zipfile reads no more than this
        if size > MAX_MEMBER_BYTES:
            raise NotComparableError("a member is too large")
        self._budget.spend(size)
        return self._zip.read(name)

    def storage(self, name: str) -> Tensor | None:
        """Return a member as the numbers that it holds; None if it is not a storage."""
        dtype = self._types.get(name)
        data = None if dtype is None else self.whole(name)
        if dtype is None or data is None or len(data) % _SIZES[dtype]:
            return None
        return Tensor(dtype, (len(data) // _SIZES[dtype],), memoryview(data))

    def versions(self, name: str) -> tuple[int, ...]:
        """Return the versions that a member states: of its writer, and those that it requires."""
        info = self.members[name]
        return info.create_version, info.extract_version, self.stated[name].version

    def _checked_headers(self) -> dict[str, Stated]:
        """Check that nothing lies before, between or behind the members; return what they state."""
        members = sorted(self.members.values(), key=lambda info: info.header_offset)
        starts = [*(info.header_offset for info in members), self._zip.start_dir]
        # Readers skip what comes before the first member, so it could be anything.
        if starts[0] != 0:
            raise NotComparableError("bytes that belong to no member")
        ends = zip(members, starts[1:], strict=True)
        return {
            info.filename: checked_header(self._data, info, end, self._budget) for info, end in ends
        }


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


def _compare_dates(archives: tuple[_Archive, _Archive], name: str, found: Findings) -> None:
    """Compare the dates of a member."""
    listed = tuple(archive.members[name].date_time for archive in archives)
    left, right = stated = tuple(archive.stated[name] for archive in archives)
    if listed[0] != listed[1]:
        found.differs(f"{name}, date", (_date(listed[0]), _date(listed[1])), "date")
    # The header has the date of the directory, unless one of them was changed.
    if left.date != right.date and tuple(each.date for each in stated) != listed:
        found.differs(f"{name}, date in the header", (_date(left.date), _date(right.date)), "date")
    if left.extra_dates != right.extra_dates:
        found.differs(f"{name}, extended date", (left.extra_dates, right.extra_dates), "date")


def _compare_facts(archives: tuple[_Archive, _Archive], name: str, found: Findings) -> None:
    """Compare what else two archives state of a member."""
    left, right = (archive.members[name] for archive in archives)
    for what, field in _FACTS.items():
        pair = getattr(left, field), getattr(right, field)
        if pair[0] != pair[1]:
            found.differs(f"{name}, {what}", pair)
    before, after = (archive.stated[name].extra for archive in archives)
    if before != after:
        found.differs(f"{name}, extra field", (before, after))
    _compare_versions(name, archives[0].versions(name), archives[1].versions(name), found)


def _compare_versions(
    where: str, left: tuple[int, ...], right: tuple[int, ...], found: Findings
) -> None:
    """Compare the versions of the format that two archives state."""
    if left != right:
        known = _VERSIONS.issuperset((*left, *right))
        found.differs(f"{where}, versions", (left, right), "packaging" if known else "content")


def _date(date: tuple[int, ...]) -> str:
    return "{}-{:02}-{:02} {:02}:{:02}:{:02}".format(*date)
