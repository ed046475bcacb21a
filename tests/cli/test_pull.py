"""``capsule pull``: an image of a registry in a file. The registry is one of this machine."""

import json
from dataclasses import replace

import pytest

from capsule.image.assembly.assemble import save_archive
from capsule.image.registry.images import push_image
from capsule.image.registry.reference import Reference
from tests.cli.conftest import capsule


@pytest.fixture
def pushed(registry, image):
    """The name of an image in the registry, with a tag and its digest."""
    return push_image(image, Reference.parse(f"{registry}/group/tiny:1"), lambda _: None)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "temporary"


def test_the_archive_is_that_of_the_image_under_the_name_in_the_registry(
    pushed, image, tmp_path, temporary
):
    tag = pushed._replace(digest=None)
    done = capsule("pull", tag, "-o", tmp_path / "pulled.tar", "--json", "--quiet")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {
        "schema": "capsule/pulled/v1",
        "image": image.config_digest,
        "manifest": image.manifest_digest,
        "file": str(tmp_path / "pulled.tar"),
    }
    assert done.stderr == ""
    save_archive(replace(image, reference=str(tag)), tmp_path / "own.tar")
    assert (tmp_path / "pulled.tar").read_bytes() == (tmp_path / "own.tar").read_bytes()
    assert list(temporary.iterdir()) == []


def test_the_terminal_shows_identity_file_and_progress(pushed, image, tmp_path):
    (tmp_path / "pulled.tar").write_text("earlier")
    done = capsule("pull", pushed, "-o", tmp_path / "pulled.tar")
    assert done.stdout == f"image     {image.config_digest}\narchive   {tmp_path / 'pulled.tar'}\n"
    assert f"pulling layer 1 of {len(image.layers)}" in done.stderr
    assert (tmp_path / "pulled.tar").stat().st_size > sum(layer.size for layer in image.layers)


@pytest.mark.parametrize(
    ("name", "code"),
    [("group/tiny:2", "CAP-I402"), ("group/tiny", "CAP-I401"), ("Group/tiny:1", "CAP-I401")],
)
def test_what_is_not_in_the_registry_leaves_an_earlier_file(
    registry, pushed, tmp_path, temporary, name, code
):
    (tmp_path / "pulled.tar").write_text("earlier")
    done = capsule("pull", f"{registry}/{name}", "-o", tmp_path / "pulled.tar", "--json")
    document = json.loads(done.stdout)
    assert (document["code"], done.exit_code) == (code, document["exit_code"])
    assert name in document["message"]
    assert (tmp_path / "pulled.tar").read_text() == "earlier"
    assert list(temporary.iterdir()) == []


def test_a_file_must_be_named():
    done = capsule("pull", "localhost:1/tiny:1")
    assert (done.exit_code, "--output" in done.stderr) == (2, True)


def test_a_missing_folder_is_made(pushed, tmp_path):
    path = tmp_path / "new" / "folder" / "pulled.tar"
    assert capsule("pull", pushed, "-o", path, "--quiet").exit_code == 0
    assert [each.name for each in path.parent.iterdir()] == ["pulled.tar"]


@pytest.mark.parametrize("place", ["folder", "/proc/pulled.tar"])
def test_a_place_that_cannot_be_written_is_found_before_the_download(tmp_path, place):
    (tmp_path / "folder").mkdir()
    done = capsule("pull", "localhost:1/tiny:1", "-o", tmp_path / place, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-X004")
    assert str(tmp_path / place) in document["message"]
