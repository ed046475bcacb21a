"""Files whose bytes differ, compared by what they say: made by the real libraries, then bent."""

import base64
import gzip
import io
import json
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from capsule.verification.content import gzips
from capsule.verification.content.events import record_checksum
from capsule.verification.content.formats import compare_content
from capsule.verification.content.parts import Context
from capsule.verification.content.times import Span, Times

CLAIMED, FOUND = 1_732_262_000, 1_763_798_000
TIMES = Times(Span(CLAIMED, CLAIMED + 600), Span(FOUND, FOUND + 600))
CONTEXT = Context(TIMES, compare_content)


def compare(left, right, name="file"):
    return compare_content(name, left, right, CONTEXT)


def summary(found):
    return [(part.where, part.nature) for part in found.parts]


def zipped(members, year=2024, method=zipfile.ZIP_DEFLATED, prefix=b""):
    stream = io.BytesIO(prefix)
    stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream, "a" if prefix else "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), data)
    return stream.getvalue()


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


def test_bytes_beside_the_members_make_an_archive_incomparable():
    plain = zipped({"a": b"1"})
    hidden = plain[:31] + zipped({"a": b"1"}, 2025)[31:]  # a control: dates in the directory only
    assert compare(plain, hidden).nature == "date"
    start = plain.index(b"PK\x01\x02")
    stream = bytearray(plain[:start] + b"score=9000" * 9 + plain[start:])
    place = stream.index(b"PK\x05\x06") + 16
    stream[place : place + 4] = struct.pack("<I", start + 90)
    assert zipfile.ZipFile(io.BytesIO(bytes(stream))).read("a") == b"1"
    found = compare(plain, bytes(stream))
    assert (found.format, found.nature) == ("bytes", "content")


def with_extra(here=b"", there=b"", size=1):
    """Return an archive of one stored byte with extra fields in its header and its directory."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        info = zipfile.ZipInfo("a")
        archive.writestr(info, b"1")
        info.extra = there
    data = bytearray(stream.getvalue())
    data[18:26] = struct.pack("<2I", size, size)
    data[28:30] = struct.pack("<H", len(here))
    data[31:31] = here
    place = data.index(b"PK\x05\x06") + 16
    data[place : place + 4] = struct.pack("<I", data.index(b"PK\x01\x02"))
    return bytes(data)


def record(kind, body):
    return struct.pack("<2H", kind, len(body)) + body


ONE = struct.pack("<Q", 1)
IN_EXTRA = 0xFFFFFFFF
DATE = struct.pack("<I", 1_732_262_001)


@pytest.mark.parametrize(
    ("extra", "nature"),
    [
        ({"here": record(1, ONE * 2), "size": IN_EXTRA}, "packaging"),
        ({"here": record(1, ONE * 2)}, "packaging"),
        ({"here": record(1, ONE + struct.pack("<Q", 9)), "size": IN_EXTRA}, "content"),
        ({"size": IN_EXTRA}, "content"),
        ({"here": record(1, b"score500")}, "content"),
        ({"there": record(1, b"score500")}, "content"),
        ({"there": record(1, ONE)}, "packaging"),
        ({"here": record(0x5455, b"\1" + DATE), "there": record(0x5455, b"\1" + DATE)}, "date"),
        ({"here": record(0x5455, b"\3" + DATE * 2), "there": record(0x5455, b"\3" + DATE)}, "date"),
        ({"here": record(0x5455, b"\2" + DATE), "there": record(0x5455, b"\2")}, "date"),
        ({"here": record(0x5455, b"score500")}, "content"),
        ({"here": record(0x5455, b"")}, "content"),
        ({"here": record(0x5455, b"\1" + DATE) * 2}, "content"),
        ({"here": b"UT\xff\xff"}, "content"),
        ({"here": record(0x4246, b"ZZZ")}, "packaging"),
    ],
)
def test_an_extra_field_hides_nothing(extra, nature):
    assert compare(with_extra(), with_extra(**extra)).nature == nature


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


def test_arrays_saved_together_have_sizes_in_an_extra_field():
    streams = [io.BytesIO(), io.BytesIO()]
    for stream, save in zip(streams, (np.savez, np.savez_compressed), strict=True):
        save(stream, a=np.arange(99))
    left, right = (stream.getvalue() for stream in streams)
    assert (compare(left, right).format, compare(left, right).nature) == ("zip", "packaging")


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


def saved(tensors):
    stream = io.BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


def test_the_storages_of_a_torch_file_are_compared_as_numbers_and_never_unpickled():
    weights = {"w": torch.arange(8, dtype=torch.float32), "b": torch.ones(3, dtype=torch.float64)}
    other = {**weights, "w": weights["w"].clone()}
    other["w"][3] = torch.nextafter(other["w"][3], torch.tensor(9.0))
    found = compare(saved(weights), saved(other))
    names = [part for part in found.parts if "/data/" in part.where]
    assert [(part.where, part.claimed) for part in names] == [("archive/data/0", "F32 [8]")]
    assert names[0].found == "1 of 8 elements differ, up to 1 ulp apart"
    assert "archive/data/1" in found.equal


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path, number):
        self.path, self.number = path, number

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w'); {self.number}",)


def test_a_pickle_is_read_and_never_executed(tmp_path):
    trap = tmp_path / "sprung"
    for wrap in (pickle.dumps, lambda value: zipped({"archive/data.pkl": pickle.dumps(value, 2)})):
        found = compare(wrap(Trap(trap, 1)), wrap(Trap(trap, 2)))
        assert found.nature == "content"
        assert not trap.exists()


def test_a_pickle_names_the_text_before_what_differs():
    left, right = ({"loss": 0.5, "steps": 7}, {"loss": 0.25, "steps": 7})
    found = compare(pickle.dumps(left), pickle.dumps(right))
    assert (found.format, summary(found)) == ("pickle", [("number after 'loss'", "content")])
    found = compare(pickle.dumps({"start": CLAIMED + 1.5}), pickle.dumps({"start": FOUND + 2.5}))
    assert summary(found) == [("number after 'start'", "date")]
    assert compare(pickle.dumps([1]), pickle.dumps([1, 2])).parts[0].where.startswith("structure")


def stable_baselines(start_time, policy=b"weights", episode=0.5):
    """Return what stable-baselines3 saves, in form: settings with pickles, and tensors."""
    settings = {
        "n_steps": 64,
        "start_time": start_time,
        "ep_info_buffer": {
            ":type:": "<class 'collections.deque'>",
            ":serialized:": base64.b64encode(
                pickle.dumps([{"r": 9.0, "l": 9, "t": episode}])
            ).decode(),
        },
    }
    data = json.dumps(settings, indent=4).encode()
    return zipped({"data": data, "policy.pth": policy}, method=zipfile.ZIP_STORED)


def test_a_saved_policy_whose_start_time_differs_differs_in_dates_only():
    left, right = stable_baselines(CLAIMED * 10**9 + 5), stable_baselines(FOUND * 10**9 + 7)
    found = compare(left, right)
    assert (found.nature, summary(found)) == ("date", [("data: start_time", "date")])
    assert "policy.pth" in found.equal


def test_a_saved_policy_that_was_timed_differs_in_more_than_dates():
    left = stable_baselines(CLAIMED * 10**9)
    found = compare(left, stable_baselines(FOUND * 10**9, episode=0.25))
    assert found.nature == "content"
    assert summary(found) == [
        ("data: start_time", "date"),
        ("data: ep_info_buffer.:serialized:: number after 't'", "content"),
    ]


@pytest.mark.parametrize(
    ("claimed", "found", "nature"),
    [
        (CLAIMED + 1, FOUND + 1, "date"),
        ((CLAIMED + 1) * 10**3, (FOUND + 1) * 10**3, "date"),
        (CLAIMED + 1, FOUND - 86_400, "content"),  # not a time of the re-execution
        (CLAIMED + 1, (FOUND + 1) * 10**4, "content"),
        (9000.0, FOUND + 1, "content"),  # a score in place of a date
        (True, False, "content"),
    ],
)
def test_a_number_is_a_date_only_if_it_lies_in_the_time_of_its_own_run(claimed, found, nature):
    left, right = (json.dumps({"x": value}).encode() for value in (claimed, found))
    assert compare(left, right).nature == nature


@pytest.mark.parametrize(
    ("claimed", "found", "nature"),
    [
        ("2024-11-22T07:55:01", "2025-11-22T07:55:09.25", "date"),
        ("run-20241122_075501-x", "run-20251122_075509-x", "date"),
        ("events.1732262001.host", "events.1763798009.host", "date"),
        ("2024-11-22 07:55:01 loss 0.5", "2025-11-22 07:55:01 loss 0.6", "content"),
        ("2024-11-21 07:55:01", "2025-11-22 07:55:01", "content"),
        ("1732262001.5 a", "1763798009 a", "date"),
        ("11732262001", "11763798009", "content"),
        ("0.1732262001", "0.1763798009", "content"),
        ("1732262001640013976", "1763798009242436841", "date"),
        ("score 920241122075501", "score 920251122075509", "content"),  # of fifteen digits
        ("score 202411220755011", "score 202511220755099", "content"),
        ("12024-11-22 07:55:01", "12025-11-22 07:55:09", "content"),
    ],
)
def test_dates_in_texts_are_told_from_everything_else(claimed, found, nature):
    left, right = (f"begin\n{text}\n".encode() for text in (claimed, found))
    result = compare(left, right)
    assert (result.format, summary(result)) == ("text", [("line 2", nature)])


def test_gzip_is_compared_unpacked():
    left, right = gzip.compress(b"1\n2\n", mtime=5), gzip.compress(b"1\n2\n", mtime=6)
    found = compare(left, right)
    assert (found.format, found.equal) == ("gzip", ("content",))
    assert summary(found) == [("time in the header", "date")]
    found = compare(left, gzip.compress(b"1\n3\n", mtime=6))
    assert summary(found) == [("content: line 2", "content")]
    level = compare(gzip.compress(bytes(9999), 1, mtime=5), gzip.compress(bytes(9999), 9, mtime=5))
    assert level.nature == "packaging"


def test_a_gzip_file_of_any_size_is_not_copied_to_be_unpacked(monkeypatch):
    def named(mtime):
        data = gzip.compress(b"1", mtime=mtime)
        return data[:3] + b"\x08" + data[4:10] + b"n" * 2_000 + b"\0" + data[10:]

    assert compare(named(5), named(6)).format == "gzip"
    monkeypatch.setattr(gzips, "MAX_MEMBER_BYTES", 1_000)
    assert compare(named(5), named(6)).format == "bytes"


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def test_arrays_are_compared_element_by_element():
    left = np.linspace(0, 1, 12, dtype=np.float64).reshape(3, 4)
    right = left.copy()
    right[1, 1] = np.nextafter(right[1, 1], 2)
    found = compare(npy(left), npy(right))
    assert found.format == "numpy array"
    assert found.parts[0].found == "1 of 12 elements differ, up to 1 ulp apart"
    assert summary(compare(npy(left), npy(left.T))) == [("header", "content")]
    found = compare(npz(w=left, b=np.ones(2)), npz(w=right, b=np.ones(2)))
    assert (found.equal, summary(found)) == (("b.npy",), [("w.npy: elements", "content")])
    objects = np.array([Trap("/nonexistent/x", 1)], dtype=object)
    assert compare(npy(objects), npy(left)).format == "bytes"


def test_safetensors_are_compared_tensor_by_tensor_and_by_their_metadata():
    tensors = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.int64)}
    left = save_safetensors(tensors, {"made": "2024-11-22T07:55:01"})
    found = compare(left, save_safetensors(tensors, {"made": "2025-11-22T07:55:01"}))
    assert (found.format, set(found.equal)) == ("safetensors", {"a", "b"})
    assert summary(found) == [("metadata.made", "date")]
    other = save_safetensors({**tensors, "a": np.full(3, 2, np.float32)}, {"made": "x"})
    found = compare(left, other)
    assert summary(found) == [("a", "content"), ("metadata.made", "content")]


def record(data):
    length = struct.pack("<Q", len(data))
    return length + record_checksum(length) + data + record_checksum(data)


def event(time, step, tag, value):
    """Return an Event of TensorBoard as protobuf encodes it."""
    name = tag.encode()
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(inner)]) + inner
    return record(
        b"\x09" + struct.pack("<d", time) + b"\x10" + bytes([step]) + b"\x2a"
        + bytes([len(summary)]) + summary
    )  # fmt: skip


def test_the_checksum_of_records_is_crc32c():
    assert record_checksum(b"123456789") == (
        (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    ).to_bytes(4, "little")  # RFC 3720 has the value before the mask


def test_event_files_are_compared_without_their_times():
    def events(time, loss):
        return record(b"\x09" + struct.pack("<d", time) + b"\x1a\x0dbrain.Event:2") + event(
            time + 1, 5, "loss", loss
        )

    found = compare(events(1.0, 0.5), events(2.0, 0.5))
    assert (found.format, found.nature) == ("TensorBoard events", "date")
    found = compare(events(1.0, 0.5), events(2.0, 0.25))
    last = found.parts[-1]
    assert (last.where, last.claimed) == ("record 2", "step 5, loss = 0.5")
    assert last.found == "step 5, loss = 0.25"
    found = compare(events(1.0, 0.5), events(1.0, 0.5) + event(3.0, 6, "loss", 0.1))
    assert (found.parts[0].where, found.parts[0].claimed) == ("record 3", "end of file")
    broken = events(2.0, 0.5)[:-1] + b"\0"
    assert compare(events(1.0, 0.5), broken).format == "bytes"


def test_json_lines_and_tables_name_the_field():
    left, right = b'{"step":1,"loss":0.5}\n{"step":2,"loss":0.25}\n', b'{"step":1,"loss":0.5}\n'
    found = compare(left, right)
    assert (found.format, summary(found)) == ("JSON lines", [("line 2", "content")])
    found = compare(left, left.replace(b"0.25", b"0.26"))
    assert summary(found) == [("line 2: loss", "content")]
    left = b"time,loss\n%d,0.5\n%d,0.25\n" % (CLAIMED + 1, CLAIMED + 2)
    right = b"time,loss\n%d,0.5\n%d,0.25\n" % (FOUND + 1, FOUND + 2)
    found = compare(left, right, "log.csv")
    assert (found.format, found.nature) == ("CSV", "date")
    found = compare(left, right.replace(b"0.25", b"0.26"), "log.csv")
    assert found.parts[-1].where == "line 3, column loss"
    assert compare(b"a,b\n1.0,2\n", b"a,b\n1.00,2\n", "a.csv").nature == "packaging"


def test_the_same_lines_in_another_order_are_told_from_other_lines():
    assert compare(b"a\nb\nc\n", b"a\nc\nb\n").nature == "order"
    assert compare(b"a\nb\n", b"a\nb\nb\n").nature == "content"
    assert compare(b"a\n\nb\n", b"a\nx\nb\n").parts[0].claimed == ""


def test_json_written_otherwise_is_packaging_and_numbers_of_other_types_are_not():
    assert compare(b'{"a": 1, "b": 2}', b'{"b":2,"a":1}').nature == "packaging"
    assert compare(b'{"a": 1}', b'{"a": 1.0}').nature == "content"
    assert compare(b'{"a": 1, "a": 2}', b'{"a": 3, "a": 2}').nature == "content"


def test_bytes_of_no_format_are_compared_by_place():
    found = compare(b"\xff\x00\x01" * 5, b"\xff\x00\x02" * 5)
    assert (found.format, found.parts[0].where) == ("bytes", "byte 2")


SEEDS = [
    zipped({"a": b"1"}),
    saved({"w": torch.ones(2)}),
    pickle.dumps({"a": [1, 2.5, "x", b"y"]}),
    gzip.compress(b"text\n"),
    npy(np.ones(3)),
    npz(a=np.ones(2)),
    save_safetensors({"a": np.ones(2)}, {"k": "v"}),
    event(1.0, 2, "loss", 0.5),
    b'{"a": [1, {"b": "c"}]}',
    b"a,b\n1,2\n",
]


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.integers(0, 40),
)
def test_no_bent_file_breaks_the_comparison_or_is_taken_for_equal(seed, changes, cut):
    bent = bytearray(seed[: max(1, len(seed) - cut)])
    for place, value in changes:
        bent[place % len(bent)] = value
    for left, right in ((seed, bytes(bent)), (bytes(bent), seed)):
        found = compare(left, right, "x.csv")
        assert found.count >= 1
        assert found.parts


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from([s[:6] for s in SEEDS]))
def test_no_bytes_break_the_comparison(left, right, magic):
    assert compare(magic + left, magic + right).parts
