"""Finding data sets on a machine, and checking them before and after a run."""

import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from capsule.experiment.canonical import sha256_file, sha256_hex
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.image.data.listing import MAX_LISTING_BYTES, list_data, pin_of
from capsule.image.data.places import (
    find_data,
    parse_places,
    read_listing,
    remember,
    unpacked_place,
)


@pytest.fixture
def lock(folder):
    return Lock.model_construct(data={"digits": pin_of(list_data("digits", folder, sha256_file))})


def find(lock, cache, **given):
    return find_data(lock, cache, lambda _: None, given).get("digits")


def test_a_lock_without_data_sets_needs_none(cache):
    assert find_data(Lock.model_construct(data=None), cache, print) == {}


def test_a_data_set_that_was_never_seen_is_asked_for(lock, cache):
    with pytest.raises(CapsuleError, match=r"'digits' \(1 file, 2 bytes, SHA-256") as caught:
        find(lock, cache)
    assert caught.value.code == "CAP-E046"
    assert "--data digits=PATH" in caught.value.fix


def test_a_data_set_that_was_named_once_is_remembered(lock, folder, cache):
    assert find(lock, cache, digits=folder) == find(lock, cache)


def test_a_data_set_that_is_gone_is_asked_for_with_its_place(lock, folder, cache):
    find(lock, cache, digits=folder)
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(CapsuleError, match=f"{folder} does not exist any more"):
        find(lock, cache)
    assert find(lock, cache, digits=folder.with_name("elsewhere")).path.name == "elsewhere"


def unpack(folder, lock, cache):
    """Put into the cache what a bundle carried."""
    place = unpacked_place(cache, lock.data["digits"])
    return shutil.copytree(folder, place)


def test_what_a_bundle_carried_does_not_replace_the_place_of_the_users_copy(lock, folder, cache):
    find(lock, cache, digits=folder)
    unpacked = unpack(folder, lock, cache)
    find(lock, cache, digits=unpacked).check("digits", print)
    assert find(lock, cache).path == folder
    # Without the user's copy, it is used, and the copy is still known when it returns.
    folder.rename(folder.with_name("elsewhere"))
    assert find(lock, cache).check("digits", print) == lock.data["digits"]
    assert find(lock, cache).path == unpacked
    folder.with_name("elsewhere").rename(folder)
    assert find(lock, cache).path == folder


def test_a_damaged_copy_of_what_a_bundle_carried_may_be_deleted(lock, folder, cache):
    unpack(folder, lock, cache)
    shutil.rmtree(folder)
    found = find(lock, cache)
    (found.path / "1.txt").write_text("damaged\n")
    with pytest.raises(CapsuleError, match="CAP-E044") as caught:
        found.check("digits", print)
    assert caught.value.fix.startswith(f"Delete {found.path}: it is unpacked again")


def test_what_the_user_of_a_run_cannot_read_is_named(lock, folder, cache, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    (folder / "1.txt").chmod(0o600)
    with pytest.raises(CapsuleError, match="has mode 0600") as caught:
        find(lock, cache, digits=folder).check("digits", print)
    assert (caught.value.code, "chmod -R a+rX" in caught.value.fix) == ("CAP-L305", True)


def test_what_a_bundle_carried_is_found_by_its_digest_alone(lock, folder, cache):
    unpacked = unpack(folder, lock, cache)
    assert find(lock, cache).check("digits", print) == lock.data["digits"]
    shutil.rmtree(unpacked)
    with pytest.raises(CapsuleError, match=r"is not on this machine$"):
        find(lock, cache)


def test_a_single_file_may_have_another_name(folder, cache, tmp_path):
    listing = list_data("digits", folder / "1.txt", sha256_file)
    lock = Lock.model_construct(data={"digits": pin_of(listing)})
    remember(cache, listing, folder / "1.txt")
    (tmp_path / "copy").write_text("1\n")
    found = find(lock, cache, digits=tmp_path / "copy")
    assert (found.path, found.below) == (tmp_path / "copy", "1.txt")
    assert found.check("digits", print) == pin_of(listing)
    assert find(lock, cache, digits=folder).below == ""  # a folder that holds only this file


def test_a_new_place_is_remembered_once_it_has_the_pinned_data_set(lock, folder, cache, tmp_path):
    find(lock, cache, digits=folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "1.txt").write_text("2\n")
    with pytest.raises(CapsuleError, match=r"1\.txt now has the SHA-256"):
        find(lock, cache, digits=other).check("digits", print)
    assert find(lock, cache).path == folder
    (other / "1.txt").write_text("1\n")
    find(lock, cache, digits=other).check("digits", print)
    assert find(lock, cache).path == other


@pytest.mark.parametrize("known", [True, False])
def test_another_data_set_is_refused(lock, folder, cache, known):
    if known:
        find(lock, cache, digits=folder)
    (folder / "1.txt").write_text("2\n")
    said = r"1\.txt now has the SHA-256" if known else "its digest is"
    with pytest.raises(CapsuleError, match=said) as caught:
        find(lock, cache, digits=folder).check("digits", print)
    assert caught.value.code == "CAP-E044"


def test_what_cannot_be_pinned_is_not_the_pinned_data_set(lock, folder, cache):
    found = find(lock, cache, digits=folder)
    (folder / "2.txt").symlink_to("/etc/passwd")
    with pytest.raises(CapsuleError, match="outside of the data set") as caught:
        found.check("digits", print)
    assert caught.value.code == "CAP-E044"


def test_a_damaged_note_or_listing_of_the_cache_is_made_again(lock, folder, cache):
    found = find(lock, cache, digits=folder)
    digest = lock.data["digits"].sha256
    cache.data.path(digest).write_text("{}")
    (cache.data.folder("places") / digest).write_text("{}")
    with pytest.raises(CapsuleError):
        find(lock, cache)
    assert find(lock, cache, digits=folder) == found


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"[]", b"not JSON"])
def test_a_damaged_note_of_a_place_counts_as_missing(lock, folder, cache, damaged):
    found = find(lock, cache, digits=folder)
    (cache.data.folder("places") / lock.data["digits"].sha256).write_bytes(damaged)
    with pytest.raises(CapsuleError, match="is not on this machine"):
        find(lock, cache)
    assert find(lock, cache, digits=folder) == found


def test_a_downloaded_file_is_no_listing(tmp_path, cache):
    """An untrusted lock may pin the digest of any file that is in the cache."""
    (tmp_path / "file").write_bytes(b"any file")
    digest = sha256_hex(b"any file")
    cache.data.add(tmp_path / "file", digest)
    assert read_listing(digest, cache) is None


def test_a_downloaded_file_that_is_larger_than_any_listing_is_not_read(tmp_path, cache):
    size = MAX_LISTING_BYTES + 1
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate(size)
    digest = sha256_file(tmp_path / "file")
    cache.data.add(tmp_path / "file", digest)
    tracemalloc.start()
    try:
        assert read_listing(digest, cache) is None
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["digits", "=a", "digits=", ""])
def test_the_option_is_a_name_and_a_path(text):
    with pytest.raises(CapsuleError, match="is not NAME=PATH") as caught:
        parse_places([text])
    assert caught.value.code == "CAP-E045"


def test_the_option_may_name_no_unknown_home_directory():
    with pytest.raises(CapsuleError, match="'d=~no-such-user/x'") as caught:
        parse_places(["d=~no-such-user/x"])
    assert caught.value.code == "CAP-E045"


def test_the_option_names_each_data_set_once():
    assert parse_places(["a=b=c", "d=~/e"]) == {"a": Path("b=c"), "d": Path.home() / "e"}
    with pytest.raises(CapsuleError, match="names a data set twice"):
        parse_places(["a=b", "a=c"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"other": "."}, "the data sets of the lock are digits"),
        ({"digits": "no"}, "does not exist"),
    ],
)
def test_what_the_option_names_must_exist(lock, cache, given, said):
    with pytest.raises(CapsuleError, match=said) as caught:
        find_data(lock, cache, print, {name: Path(path) for name, path in given.items()})
    assert caught.value.code == "CAP-E045"
