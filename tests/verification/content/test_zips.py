"""Zip archives are compared member by member, and torch files storage by storage."""

import gzip
import io
import json
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsule.verification.content import zips
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import Budget, Context, NotComparableError
from capsule.verification.content.zips import compare_zip
from tests.verification.content.comparing import CONTEXT, TIMES, compare, saved, summary, zipped


def test_a_zip_whose_dates_differ_is_said_to_differ_in_nothing_else():
    found = compare(zipped({"a": b"1", "b": b"2"}), zipped({"a": b"1", "b": b"2"}, 2025))
    assert (found.format, found.nature, found.equal) == ("zip", "date", ("a", "b"))
    assert summary(found) == [("a, date", "date"), ("b, date", "date")]


def test_a_member_that_differs_is_compared_by_its_own_format():
    left = zipped({"policy": b"weights", "data": json.dumps({"steps": 5, "lr": 0.1}).encode()})
    right = zipped({"policy": b"weights", "data": json.dumps({"steps": 5, "lr": 0.2}).encode()})
    found = compare(left, right)
    assert (found.nature, found.equal) == ("content", ("policy",))
    assert summary(found) == [("data: lr", "content")]
    assert found.parts[0].found.startswith("0.2, ")


def test_members_in_another_order_or_stored_otherwise_are_packaging():
    left = zipped({"a": b"1", "b": b"2"})
    assert summary(compare(left, zipped({"b": b"2", "a": b"1"}))) == [
        ("order of the members", "packaging")
    ]
    assert compare(left, zipped({"a": b"1", "b": b"2"}, method=zipfile.ZIP_STORED)).nature == (
        "packaging"
    )


def test_a_member_too_many_is_content():
    found = compare(zipped({"a": b"1"}), zipped({"a": b"1", "b": b"2"}, 2025))
    assert (found.nature, found.parts[-1].where) == ("content", "b")


@pytest.mark.parametrize(
    ("place", "value", "where", "nature"),
    [
        (10, b"\x21", "a, date in the header", "date"),  # time
        (12, b"\x22", "a, date in the header", "date"),  # date
        (4, bytes([45]), "a, versions", "packaging"),
        (4, b"s", "a, versions", "content"),
        (5, b"s", "a, versions", "content"),
        ("made by", bytes([45]), "a, versions", "packaging"),
        ("system", b"\0", "a, system", "content"),
        ("required", bytes([45]), "a, versions", "packaging"),
        ("reserved", b"\1", "a, reserved field", "content"),
        ("disk", b"\1", "a, disk", "content"),
        ("internal", b"\1", "a, internal attributes", "content"),
    ],
)
def test_no_field_about_a_member_is_ignored(place, value, where, nature):
    plain = zipped({"a": b"1"})
    offsets = {"made by": 4, "system": 5, "required": 6, "reserved": 7, "disk": 34, "internal": 36}
    if isinstance(place, str):
        place = plain.index(b"PK\x01\x02") + offsets[place]
    found = compare(plain, plain[:place] + value + plain[place + 1 :])
    assert (found.format, found.equal, summary(found)) == ("zip", ("a",), [(where, nature)])


def test_the_fields_about_a_member_are_compared_whatever_its_content():
    left, right = (zipped({"a": gzip.compress(b"1", mtime=time)}) for time in (5, 6))
    assert compare(left, right).nature == "date"
    place = right.index(b"PK\x01\x02") + 38
    found = compare(left, right[:place] + b"\1" + right[place + 1 :])
    assert ("a, attributes", "content") in summary(found)


def test_a_date_in_the_header_is_shown():
    plain = zipped({"a": b"1"})
    (part,) = compare(plain, plain[:12] + zipped({"a": b"1"}, 2025)[12:14] + plain[14:]).parts
    assert (part.claimed, part.found) == ("2024-01-01 00:00:00", "2025-01-01 00:00:00")


@pytest.mark.slow
def test_a_bomb_is_not_unpacked():
    bomb = zipped({"a": bytes(80 << 20)})
    other = zipped({"a": bytes(80 << 20) + b"1"})
    found = compare(bomb, other)
    assert summary(found) == [("a", "content")]
    nested = zipped({"a": zipped({"b": zipped({"c": zipped({"d": zipped({"e": b"1"})})})})})
    deeper = zipped({"a": zipped({"b": zipped({"c": zipped({"d": zipped({"e": b"2"})})})})})
    assert compare(nested, deeper).nature == "content"
    assert compare(gzip.compress(bytes(80 << 20)), gzip.compress(bytes(81 << 20))).format == "bytes"


def test_the_storages_of_a_torch_file_are_compared_as_numbers_and_never_unpickled():
    weights = {"w": torch.arange(8, dtype=torch.float32), "b": torch.ones(3, dtype=torch.float64)}
    other = {**weights, "w": weights["w"].clone()}
    other["w"][3] = torch.nextafter(other["w"][3], torch.tensor(9.0))
    found = compare(saved(weights), saved(other))
    names = [part for part in found.parts if "/data/" in part.where]
    assert [(part.where, part.claimed) for part in names] == [("archive/data/0", "F32 [8]")]
    assert names[0].found == "1 of 8 elements differs, up to 1 ulp apart"
    assert "archive/data/1" in found.equal


def storages(found):
    """Return the parts that are storages: a torch file also has a digest of all of them."""
    return [part for part in found.parts if part.where.startswith("archive/data/")]


@pytest.mark.parametrize(
    ("dtype", "described"),
    [
        (torch.float64, "F64 [4]"),
        (torch.float32, "F32 [4]"),
        (torch.float16, "F16 [4]"),
        (torch.bfloat16, "BF16 [4]"),
        (torch.int64, "I64 [4]"),
        (torch.int32, "I32 [4]"),
        (torch.int16, "I16 [4]"),
        (torch.int8, "I8 [4]"),
    ],
)
def test_every_type_of_a_storage_has_as_many_elements_as_torch_says(dtype, described):
    left, right = (torch.tensor([1, 2, 3, last], dtype=dtype) for last in (4, 5))
    (part,) = storages(compare(saved({"w": left}), saved({"w": right})))
    assert (part.where, part.claimed) == ("archive/data/0", described)
    assert part.found.startswith("1 of 4 elements differs")


def torch_like(*folders, number):
    """Return a torch file with an additional pickle in each of some folders."""
    with zipfile.ZipFile(io.BytesIO(saved({"w": torch.tensor([1.0, number])}))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return zipped({**members, **{f"{folder}/data.pkl": b"other" for folder in folders}})


@pytest.mark.parametrize(
    ("folders", "where", "claimed"),
    [
        ((), "archive/data/0", "F32 [2]"),
        # The float32 numbers 1 and 2 are 00 00 80 3f and 00 00 00 40.
        (("b",), "archive/data/0: byte 6", "0x80 of 8 bytes"),
    ],
)
def test_storages_that_two_pickles_could_describe_are_compared_as_bytes(folders, where, claimed):
    left, right = (torch_like(*folders, number=number) for number in (1.0, 2.0))
    (part,) = storages(compare(left, right))
    assert (part.where, part.claimed) == (where, claimed)


MEMBERS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4), st.binary(max_size=9), min_size=1, max_size=4
)


@given(MEMBERS)
def test_equal_members_are_equal_however_they_are_stored(members):
    reverse = zipped(dict(reversed(members.items())), method=zipfile.ZIP_STORED)
    found = compare_zip(zipped(members), reverse, CONTEXT)
    assert (found.nature, set(found.equal)) == ("packaging", set(members))


def doubled():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a", b"1")
        archive.writestr("a", b"2")
    return stream.getvalue()


def commented():
    data = zipped({"a": b"1"})
    return data[:-2] + struct.pack("<H", 3) + b"500"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (doubled, "twice"),
        (commented, "comment"),
        (lambda: zipped({"a.b": b"1"}).replace(b"a.b", b"a\0b"), "behind its end"),
        (lambda: b"PK\x03\x04" + zipped({"a": b"1"}), "no member"),
    ],
    ids=["a member twice", "a comment", "a name with NUL", "bytes before the first member"],
)
def test_an_archive_that_readers_may_take_differently_is_not_compared(make, reason):
    with pytest.raises(NotComparableError, match=reason):
        compare_zip(make(), zipped({"a": b"1"}), CONTEXT)


def test_an_archive_of_many_members_is_not_compared(monkeypatch):
    monkeypatch.setattr(zips, "MAX_MEMBERS", 2)
    two, three = (zipped(dict.fromkeys("abc"[:count], b"1")) for count in (2, 3))
    assert compare_zip(two, two, CONTEXT).equal == ("a", "b")
    with pytest.raises(NotComparableError, match="3 members"):
        compare_zip(two, three, CONTEXT)


@pytest.mark.parametrize(("method", "times"), [(zipfile.ZIP_STORED, 1), (zipfile.ZIP_DEFLATED, 2)])
def test_the_bytes_of_both_archives_are_taken_from_the_budget(method, times):
    data = zipped({"a": b"12345", "b": b"678"}, method=method)
    context = Context(TIMES, compare_content, Budget(times * 16))
    assert compare_zip(data, data, context).equal == ("a", "b")
    assert context.budget.left == 0
    with pytest.raises(NotComparableError, match="are to be unpacked"):
        compare_zip(data, data, context)


def test_what_is_read_of_members_that_differ_is_taken_from_the_budget(monkeypatch):
    monkeypatch.setattr(zips, "_PIECE_BYTES", 10)
    # They differ in the first byte, and the search for a difference reads one piece of each.
    left, right = (
        zipped({"a": byte + bytes(99)}, method=zipfile.ZIP_STORED) for byte in (b"1", b"2")
    )
    context = Context(TIMES, compare_content, Budget(2 * (10 + 100)))
    assert compare_zip(left, right, context).nature == "content"
    assert context.budget.left == 0
    with pytest.raises(NotComparableError, match="are to be unpacked"):
        compare_zip(left, right, Context(TIMES, compare_content, Budget(2 * (10 + 100) - 1)))


def test_what_is_read_of_the_pickle_of_a_torch_file_is_taken_from_the_budget():
    data = saved({"w": torch.ones(3)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    context = Context(TIMES, compare_content)
    before = context.budget.left
    compare_zip(data, data, context)
    assert before - context.budget.left == 2 * (sum(sizes.values()) + sizes["archive/data.pkl"])


def test_the_versions_behind_the_directory_are_compared():
    plain = saved({"w": torch.ones(3)})
    place = plain.index(b"PK\x06\x06") + 12
    for offset in range(4):
        other = bytearray(plain)
        other[place + offset] ^= 1
        assert summary(compare(plain, bytes(other))) == [("the directory, versions", "content")]


def test_a_member_whose_checksum_is_wrong_makes_an_archive_incomparable():
    plain = zipped({"a": b"12345"}, method=zipfile.ZIP_STORED)
    assert compare(plain, plain.replace(b"12345", b"12346")).format == "bytes"
