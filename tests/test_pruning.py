"""Items of the cache, images and folders that are counted by kind, and deleted together."""

from unittest.mock import Mock

import pytest

from capsule.experiment.beneath import remove_folder
from capsule.host.owner import temporary_folder, this_process
from capsule.image.cache import Cache
from capsule.image.cache_items import CacheItem
from capsule.pruning import Pruning, Row, abandoned_containers, abandoned_folders


class Engine:
    """An engine with images, some of which containers have taken since they were listed."""

    engine = "docker"

    def __init__(self, *taken):
        self.removed, self._taken = [], taken

    def freed(self, images):
        return 1000 * len(images) - 1  # images share layers

    def remove(self, image):
        if image.id in self._taken:
            return False
        self.removed.append(image.id)
        return True


class EngineImage:
    def __init__(self, name):
        self.id = name


def item(kind, size, *paths):
    return CacheItem(kind=kind, paths=paths, bytes=size, last_used=0.0)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, in which a killed process left one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with temporary_folder("capsule-verify-") as left:
        pass
    left.mkdir()
    (left / "file").write_bytes(bytes(5000))
    return left


def test_only_folders_of_killed_processes_are_abandoned(temporary, tmp_path):
    with temporary_folder("capsule-verify-"):
        ((folder, size),) = abandoned_folders(Cache(tmp_path / "cache"))
    assert folder == temporary
    assert size >= 5000


@pytest.mark.parametrize("store", ["", "trees", "data"])
def test_what_a_killed_build_left_in_the_cache_is_deleted(temporary, tmp_path, store):
    cache = Cache(tmp_path / "cache")
    left = cache.root / store / "scratch" / "x.capsule-held"
    left.mkdir(parents=True)
    (left / "layer.tar").write_bytes(bytes(5000))
    found = abandoned_folders(cache)
    assert [folder for folder, _ in found] == [temporary, left]
    Pruning(folders=found).delete(pytest.fail)
    assert not left.exists()
    assert not temporary.exists()


def test_folders_that_another_machine_left_are_deleted_in_the_cache_alone(temporary, tmp_path):
    """All machines see who uses the cache, but not who holds a folder in /tmp."""
    cache, name = Cache(tmp_path / "cache"), "x.01234567.capsule-held"
    elsewhere, left = tmp_path / name, cache.root / "scratch" / name
    elsewhere.mkdir()
    left.mkdir(parents=True)
    found = abandoned_folders(cache)
    assert [folder for folder, _ in found] == [temporary, left]
    Pruning(folders=found).delete(pytest.fail)
    assert (elsewhere.exists(), left.exists()) == (True, False)


def test_a_folder_that_another_command_removes_meanwhile_is_left_out(
    temporary, tmp_path, monkeypatch
):
    monkeypatch.setattr("capsule.pruning.scratch_folders", lambda _: remove_folder(temporary) or ())
    assert abandoned_folders(Cache(tmp_path / "cache")) == []


def test_rows_count_each_kind_and_skip_what_is_not_there(tmp_path):
    images = [(Engine(), [EngineImage("a"), EngineImage("b")]), (Engine(), [])]
    pruning = Pruning(
        items=[item("layers", 10), item("packages", 5), item("layers", 7)],
        images=images,
        folders=[(tmp_path, 3), (tmp_path, 4)],
    )
    assert pruning.rows == [
        Row("layers", 2, 17),
        Row("packages", 1, 5),
        Row("images in docker", 2, 1999),
        Row("folders of killed processes", 2, 7),
    ]
    assert pruning.document() == {
        "bytes": 17 + 5 + 1999 + 7,
        "kinds": {
            "layers": {"number": 2, "bytes": 17},
            "packages": {"number": 1, "bytes": 5},
            "images in docker": {"number": 2, "bytes": 1999},
            "folders of killed processes": {"number": 2, "bytes": 7},
        },
    }


class ContainerEngine:
    """An engine with containers of killed processes."""

    name = "docker"

    def remove_abandoned(self, *, progress):
        progress("removed")


def test_containers_of_killed_processes_are_counted_and_removed():
    notes, pruning = [], Pruning(containers=[(ContainerEngine(), 2)])
    assert pruning.rows == [Row("containers of killed processes in docker", 2, 0)]
    pruning.delete(notes.append)
    assert notes == ["removed"]


def test_only_engines_with_such_containers_are_found(monkeypatch):
    owner = this_process()
    gone = f"{owner.rpartition('/')[0]}/0"  # another process had the number of this one
    clients = []
    for label in (owner, gone):
        client = Mock(**{"version.return_value": {"Version": "27.0"}})
        client.networks.list.return_value = []
        client.containers.list.return_value = [Mock(labels={"capsule.owner": label})]
        clients.append(("docker", client))
    monkeypatch.setattr("capsule.pruning.answering_engines", lambda: iter(clients))
    ((_, number),) = abandoned_containers()
    assert number == 1


def test_without_anything_there_are_no_rows():
    assert (Pruning().rows, Pruning().document()) == ([], {"bytes": 0, "kinds": {}})


def test_everything_is_deleted_but_images_that_a_container_has_by_now(tmp_path, temporary):
    (tmp_path / "layer").touch()
    (tmp_path / "kept").touch()
    engine, notes = Engine("b"), []
    Pruning(
        items=[item("layers", 0, tmp_path / "layer", tmp_path / "absent")],
        images=[(engine, [EngineImage("a"), EngineImage("b")])],
        folders=abandoned_folders(Cache(tmp_path / "cache")),
    ).delete(notes.append)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert engine.removed == ["a"]
    assert notes == ["docker keeps b, which a container uses"]


def test_folders_stay_if_they_were_not_chosen(temporary):
    Pruning().delete(pytest.fail)
    assert temporary.exists()
