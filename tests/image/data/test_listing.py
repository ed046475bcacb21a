"""Listings of data sets: what is pinned, what is refused, and how a difference is named."""

import hashlib
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment import beneath
from capsule.experiment.canonical import sha256_file, sha256_hex
from capsule.host.errors import CapsuleError
from capsule.image.data.listing import (
    Meter,
    digests_of,
    first_difference,
    list_data,
    listing_document,
    parse_listing,
    pin_of,
    size_text,
)

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # of FIPS 180-4


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "set"
    (folder / "deep" / "empty").mkdir(parents=True)
    (folder / "deep" / "hello.txt").write_text("hello")
    (folder / "link").symlink_to("deep/hello.txt")
    (folder / ".hidden").write_bytes(b"")
    return folder


def test_every_path_is_listed(place):
    assert list_data("digits", place, sha256_file) == {
        ".hidden": f"file 0 {hashlib.sha256().hexdigest()}",
        "deep": "folder",
        "deep/empty": "folder",
        "deep/hello.txt": f"file 5 {HELLO}",
        "link": "symlink deep/hello.txt",
    }


def test_a_file_is_listed_like_a_folder_that_holds_it(place):
    listing = list_data("digits", place / "deep" / "hello.txt", sha256_file)
    assert listing == {"hello.txt": f"file 5 {HELLO}"}
    renamed = list_data("digits", place / "deep" / "hello.txt", sha256_file, called="other")
    assert renamed == {"other": f"file 5 {HELLO}"}


def test_the_digest_is_that_of_the_canonical_document(place):
    listing = list_data("digits", place / "deep", sha256_file)
    document = f'{{"empty":"folder","hello.txt":"file 5 {HELLO}"}}'.encode()
    assert listing_document(listing) == document
    pin = pin_of(listing)
    assert (pin.sha256, pin.files, pin.size) == (hashlib.sha256(document).hexdigest(), 1, 5)
    assert size_text(pin) == "1 file, 5 bytes"
    assert size_text(pin.model_copy(update={"size": 1})) == "1 file, 1 byte"


def test_a_spec_names_a_data_set_by_its_only_file_or_by_its_listing():
    def listed(facts):
        return *digests_of(facts)[:-1], digests_of(facts)[-1] == pin_of(facts).sha256

    assert listed({"a": f"file 5 {HELLO}"}) == (HELLO, True)
    assert listed({"a": f"file 5 {HELLO}", "b": f"file 5 {HELLO}"}) == (True,)
    # A link can have any text as its target.
    assert listed({"a": f"symlink {HELLO}"}) == (True,)


def test_modes_and_times_do_not_count(place):
    before = list_data("digits", place, sha256_file)
    (place / "deep" / "hello.txt").chmod(0o600)
    os.utime(place / "deep" / "hello.txt", (1, 1))
    assert list_data("digits", place, sha256_file) == before


def make_link(target):
    return lambda place: (place / "bad").symlink_to(target)


def make_socket(place):
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(place)  # the path of a socket is short
        listener.bind("bad")


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (make_link("/etc/passwd"), "CAP-L302", "outside"),
        (make_link("../../elsewhere"), "CAP-L302", "outside"),
        (make_link(os.fsdecode(b"\xff")), "CAP-L302", "unsafe"),
        (lambda place: os.mkfifo(place / "bad"), "CAP-L302", "pipe"),
        (make_socket, "CAP-L302", "socket"),
        (lambda place: (place / "a\nb").touch(), "CAP-L302", "unsafe"),
        (lambda place: (place / os.fsdecode(b"\xff")).touch(), "CAP-L302", "UTF-8"),
    ],
)
def test_what_cannot_be_pinned_is_refused(place, spoil, code, said, monkeypatch):
    monkeypatch.chdir(place)
    spoil(place)
    with pytest.raises(CapsuleError, match=said) as caught:
        list_data("digits", place, sha256_file)
    assert caught.value.code == code


def test_a_folder_without_a_file_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CapsuleError, match="contains no file") as caught:
        list_data("digits", tmp_path, sha256_file)
    assert caught.value.code == "CAP-L303"


def test_too_many_files_are_refused(place, monkeypatch):
    monkeypatch.setattr(beneath, "MAX_ENTRIES", 3)
    with pytest.raises(CapsuleError, match="too large") as caught:
        list_data("digits", place, sha256_file)
    assert caught.value.code == "CAP-L304"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("capsule.image.data.listing.MAX_LISTING_BYTES", "its listing has more than 0 MiB"),
        ("capsule.experiment.canonical.MAX_VALUES", "its listing has more than 3 values"),
    ],
)
def test_a_listing_that_no_reader_would_accept_is_refused(place, monkeypatch, limit, said):
    monkeypatch.setattr(limit, 3)
    with pytest.raises(CapsuleError, match=said) as caught:
        list_data("digits", place, sha256_file)
    assert caught.value.code == "CAP-L304"


@pytest.mark.parametrize("path", ["deep/hello.txt", "deep", "."])
def test_what_another_user_could_not_read_is_refused_for_root(place, path):
    list_data("digits", place, sha256_file, for_everyone=True)
    (place / path).chmod(0o700)
    with pytest.raises(CapsuleError, match=f"{(place / path).name} has mode 0700") as caught:
        list_data("digits", place, sha256_file, for_everyone=True)
    assert caught.value.code == "CAP-L305"
    assert caught.value.fix.endswith(f"chmod -R a+rX {place}")


FILE = f"file 5 {HELLO}"
OTHER = f"file 5 {sha256_hex(b'other')}"


@pytest.mark.parametrize(
    ("pinned", "found", "said"),
    [
        ({"a": FILE, "b": FILE}, {"a": FILE}, "b is missing"),
        ({"a": FILE}, {"a": FILE, "b": FILE}, "b was added"),
        ({"a": FILE}, {"a": f"file 6 {HELLO}"}, "a now has 6 bytes, and had 5"),
        ({"a": FILE}, {"a": f"file 1 {HELLO}"}, "a now has 1 byte, and had 5"),
        (
            {"a": FILE, "b": FILE},
            {"a": OTHER, "b": OTHER},
            f"a now has the SHA-256 {sha256_hex(b'other')}, and had {HELLO}",
        ),
        ({"a": "folder"}, {"a": FILE}, f"a is now a {FILE}, and was a folder"),
        ({"a": "symlink b"}, {"a": "symlink c"}, "a is now a symlink c, and was a symlink b"),
    ],
)
def test_the_first_difference_is_named(pinned, found, said):
    assert first_difference(pinned, found) == said


@pytest.mark.slow
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3}){0,2}", fullmatch=True),
        st.sampled_from(["folder", FILE, OTHER, "symlink a/b"]),
        min_size=1,
    )
)
def test_a_listing_reads_back_from_its_document(listing):
    assert parse_listing(listing_document(listing)) == listing


@pytest.mark.parametrize(
    "document",
    [
        b"[]",
        b'{"a":1}',
        b'{"a":"file 05 ' + HELLO.encode() + b'"}',
        b'{"a":"file 5"}',
        b'{"a":"device"}',
        b'{"a/":"folder"}',
        b'{"":"folder"}',
        b'{ "a":"folder"}',
    ],
)
def test_what_is_no_listing_is_refused(document):
    with pytest.raises(ValueError, match=r"\w"):
        parse_listing(document)


@pytest.mark.parametrize("path", ["../a", "/a", "a//b", "a/./b"])
def test_a_path_that_leads_elsewhere_is_refused(path):
    with pytest.raises(ValueError, match="not a plain path"):
        parse_listing(listing_document({path: "folder"}))


def test_a_meter_tells_how_far_it_is_every_few_seconds(tmp_path, monkeypatch):
    told, now = [], [0.0]
    monkeypatch.setattr("capsule.image.data.listing.time.monotonic", lambda: now[0])
    meter = Meter("hashing", told.append, 4 << 20)
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    assert meter.sha256(tmp_path / "file") == sha256_file(tmp_path / "file")
    assert told == []
    now[0] = 5.0
    meter.add(1 << 20)
    meter.add(0)
    assert told == ["hashing: 4 MiB of 4 MiB"]
