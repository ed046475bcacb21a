"""What can be deleted of a cache: kinds, sizes and ages; a cache in use is not touched."""

import errno
import multiprocessing
import os

import pytest

from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.cache_items import DERIVED, DOWNLOADED, cache_items, chosen

A, B, C, D, E, F = (letter * 64 for letter in "abcdef")
NOW = 2_000_000_000.0
DAY = 86_400


@pytest.fixture
def root(tmp_path):
    """A cache with one item of each kind; the n-th was used n days ago, and has n MiB."""
    root = tmp_path / "cache"
    for age, paths in enumerate(
        (
            (f"derived/{A}.layer.json", f"derived/{A}.layer.tar"),
            (f"environments/{B}.state", f"environments/{B}/bin/python"),
            (f"roots/{C}.state", f"roots/{C}/bin/tool"),
            (f"projects/{C}.state", f"projects/{C}/train.py"),
            (f"bytecode/{C}.state", f"bytecode/{C}/tool.pyc"),
            (f"objects/dd/{D[2:]}",),
            ("uv/CACHEDIR.TAG", "uv/e"),
            (f"trees/objects/ff/{F[2:]}",),
            (f"data/objects/aa/{A[2:]}",),
        ),
        start=1,
    ):
        for path in paths:
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        place.write_bytes(bytes(1 << 20) * age)
        for path in (place, *place.parents, *(root / each for each in paths)):
            if path.is_relative_to(root) and path != root:
                os.utime(path, (NOW - age * DAY, NOW - age * DAY))
    return root


def kinds(items):
    return [item.kind for item in items]


def test_each_item_has_its_kind_size_and_age(root):
    items = list(cache_items(Cache(root)))
    assert kinds(items) == [*DERIVED, *DOWNLOADED]
    for age, item in enumerate(items, start=1):
        assert item.last_used == pytest.approx(NOW - age * DAY)
        assert age << 20 <= item.bytes < (age << 20) + (64 << 10)


def test_an_item_that_was_read_lately_is_not_old(root):
    os.utime(root / "environments" / f"{B}.state", (NOW, NOW - 99 * DAY))
    found = chosen(cache_items(Cache(root)), DERIVED, before=NOW - DAY / 2)
    assert kinds(found) == ["bytecode", "unpacked source trees", "unpacked images", "layers"]


def test_to_look_at_items_makes_none_of_them_look_used(root):
    before = NOW - DAY / 2
    first = chosen(cache_items(Cache(root)), DERIVED, before=before)
    for folder in (path for path in root.rglob("*") if path.is_dir()):
        os.utime(folder, (NOW, folder.stat().st_mtime))  # as relatime notes that it was listed
    assert chosen(cache_items(Cache(root)), DERIVED, before=before) == first
    assert len(first) == len(DERIVED)


def test_an_item_is_as_young_as_the_file_in_it_that_was_used_last(root):
    os.utime(root / "uv" / "e", (NOW - 99 * DAY, NOW))
    found = chosen(cache_items(Cache(root)), DOWNLOADED, before=NOW - DAY / 2)
    assert kinds(found) == ["data sets", "source trees", "packages"]


def test_the_longest_unused_go_until_the_cache_is_small_enough(root):
    items = list(cache_items(Cache(root)))  # 45 MiB in all
    everything = (*DERIVED, *DOWNLOADED)
    assert kinds(chosen(items, everything, keep=37 << 20)) == ["data sets"]
    assert kinds(chosen(items, everything, keep=32 << 20)) == ["data sets", "source trees"]
    assert kinds(chosen(items, DERIVED, keep=0)) == [*reversed(DERIVED)]
    assert chosen(items, everything, keep=1 << 30) == []


def test_only_chosen_items_are_deleted(root):
    for item in chosen(cache_items(Cache(root)), DERIVED):
        item.delete()
    assert kinds(cache_items(Cache(root))) == [*DOWNLOADED]
    assert (root / "environments").is_dir()
    assert not (root / "environments" / B).exists()


@pytest.mark.parametrize(
    "record", [f"derived/{A}.layer.json", f"environments/{B}.state", f"roots/{C}.state"]
)
def test_what_a_killed_process_left_without_its_record_is_deleted_too(root, record):
    (root / record).unlink()
    items = list(cache_items(Cache(root)))
    assert kinds(items) == [*DERIVED, *DOWNLOADED]
    for item in items:
        item.delete()
    assert list(cache_items(Cache(root))) == []
    assert not list((root / record).parent.iterdir())


@pytest.mark.parametrize(
    "left",
    [
        f"derived/.{A}.layer.json.x1_4567a",
        f"roots/.{A}.state.x1_4567a",
        f"documents/.{A}.x1_4567a",
        f"objects/ee/.{A[2:]}.x1_4567a",
    ],
)
def test_what_a_killed_process_left_of_a_file_is_deleted(root, left):
    (root / left).parent.mkdir(exist_ok=True)
    (root / left).touch()
    for item in cache_items(Cache(root)):
        item.delete()
    assert not (root / left).exists()


def test_files_of_the_user_in_folders_of_the_same_names_stay(root):
    """CAPSULE_CACHE may be a folder of the user, e.g. the scratch folder on a cluster."""
    own = [
        "projects/thesis/paper.tex",
        "projects/thesis.state",
        f"projects/{C}.tex",
        "documents/letter.txt",
        "environments/venv/bin/python",
        "derived/results.layer.json.bak",
        "objects/dd/mesh.obj",
        "objects/meshes/mesh.obj",
        "debian/Packages.xz",
        "digests/mail.txt",
        "data/unpacked/images/1.png",
        "trees/objects/oak/leaf",
    ]
    for name in own:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("years of work")
    (root / "uv" / "CACHEDIR.TAG").unlink()
    for item in cache_items(Cache(root)):
        item.delete()
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == {*own, "uv/e"}


def test_documents_and_indexes_are_one_item_each(root):
    for name in (f"documents/{A}", f"documents/{B}", f"digests/{A}", f"debian/{A[:16]}.InRelease"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    found = kinds(cache_items(Cache(root)))
    assert found.count("layers") == 2
    assert found.count("package indexes") == 3


def test_links_of_an_environment_are_not_followed(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(8 << 20))
    (root / "environments" / B / "link").symlink_to(outside)
    for item in chosen(cache_items(Cache(root)), DERIVED):
        assert item.bytes < 6 << 20
        item.delete()
    assert (outside / "file").exists()


def _hold(root, ready, done):
    cache = Cache(root)
    cache.folder("derived")
    ready.set()
    done.wait()


@pytest.mark.slow
def test_a_cache_that_another_process_uses_is_not_held_exclusively(root):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(root, ready, done))
    process.start()
    try:
        ready.wait()
        with pytest.raises(CapsuleError, match="another Capsule process"), Cache(root).exclusive():
            pass
    finally:
        done.set()
        process.join()
    with Cache(root).exclusive():
        pass


def test_a_cache_is_held_for_as_long_as_it_is_used(root):
    cache = Cache(root)
    cache.use()
    with pytest.raises(CapsuleError, match="another Capsule process"), Cache(root).exclusive():
        pass
    del cache
    with Cache(root).exclusive():
        pass


def test_a_cache_that_can_only_be_read_is_used_without_a_lock(root, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    cache = Cache(root)
    monkeypatch.setattr("capsule.image.cache._open_lock", refuse)
    assert cache.folder("derived") == root / "derived"
    missing = root / "no" / "use"
    monkeypatch.setattr(
        "capsule.image.cache._open_lock", lambda _: (os.open(missing, os.O_RDWR), False)
    )
    with pytest.raises(FileNotFoundError):
        Cache(root).folder("derived")
