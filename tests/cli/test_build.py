"""``capsule build`` of a CUDA spec without a GPU, and without an engine, as on a login node."""

import json

import pytest
from typer.testing import CliRunner

from capsule import execution
from capsule.cli import build, main
from capsule.engine.gpu import no_gpu
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.image.assembly.assemble import Image
from tests.verification.runs import CARTPOLE, make_lock, merged

CUDA = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9.10", "driver": ">=580"}
IMAGE = Image(b"{}", (), "localhost/capsule/cuda:test")


class WithoutGpu:
    """An engine that takes images, and has no GPU to give to a run."""

    name = "docker"

    def __init__(self):
        self.loaded = []

    def check(self, _lock):
        raise no_gpu("there is none")

    def prepare(self, _lock, image, _cache, *, progress):  # noqa: ARG002 - the interface
        self.loaded.append(image)


@pytest.fixture
def engine(monkeypatch):
    found, lock = WithoutGpu(), make_lock(merged(CARTPOLE, {"accelerator": CUDA}))
    monkeypatch.setattr(build, "locked", lambda *_, **__: (lock, SourcesSpec()))
    monkeypatch.setattr("capsule.engine.select.open_engine", lambda *_, **__: found)
    monkeypatch.setattr(execution, "build_image", lambda *_, **__: IMAGE)
    return found


def test_an_archive_is_written_where_there_is_no_gpu(engine, tmp_path):
    archive = tmp_path / "image.tar"
    arguments = ["build", "cuda.yaml", "--archive", str(archive), "--json", "--quiet"]
    done = CliRunner().invoke(main.app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["image"]["config"] == IMAGE.config_digest
    assert engine.loaded == [IMAGE]
    assert archive.stat().st_size > 0


def test_an_archive_that_cannot_be_written_is_found_before_anything_is_built(engine, tmp_path):
    (tmp_path / "folder").mkdir()
    arguments = ["build", "cuda.yaml", "--archive", str(tmp_path / "folder"), "--json", "--quiet"]
    done = CliRunner().invoke(main.app, arguments)
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (2, "CAP-X004")
    assert engine.loaded == []


def test_the_folder_of_an_archive_is_made(engine, tmp_path):
    archive = tmp_path / "new" / "image.tar"
    arguments = ["build", "cuda.yaml", "--archive", str(archive), "--quiet"]
    assert CliRunner().invoke(main.app, arguments).exit_code == 0
    assert engine.loaded == [IMAGE]
    assert [path.name for path in archive.parent.iterdir()] == ["image.tar"]


def test_an_archive_of_an_engine_without_images_is_refused(engine, tmp_path):
    engine.name = "process"
    archive = tmp_path / "image.tar"
    arguments = ["build", "cuda.yaml", "--archive", str(archive), "--json", "--quiet"]
    done = CliRunner().invoke(main.app, arguments)
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (2, "CAP-E049")
    assert (engine.loaded, archive.exists()) == ([], False)


@pytest.fixture
def unpacked(engine, monkeypatch):
    """Have no engine; the images that are unpacked."""
    found = []

    def missing(*_, **__):
        raise CapsuleError("CAP-E001", "bwrap is not on the PATH", fix="Install it.")

    assert engine.loaded == []
    monkeypatch.setattr("capsule.engine.select.open_engine", missing)
    monkeypatch.setattr(execution, "unpacked_root", lambda image, *_: found.append(image))
    return found


@pytest.mark.parametrize("name", ["bwrap", "apptainer"])
def test_an_image_is_built_and_unpacked_for_an_engine_that_only_other_machines_have(
    unpacked, tmp_path, name
):
    archive = tmp_path / "image.tar"
    arguments = ["build", "cuda.yaml", "--engine", name, "--archive", str(archive)]
    done = CliRunner().invoke(main.app, arguments)
    assert done.exit_code == 0, done.output
    assert unpacked == [IMAGE]
    assert archive.stat().st_size > 0
    assert "warning: bwrap is not on the PATH. The image is built for machines" in done.stderr
    assert f"next: capsule run cuda.yaml --engine {name}, on a machine that has" in done.stderr
    done = CliRunner().invoke(main.app, [*arguments, "--json", "--quiet"])
    assert json.loads(done.stdout)["engine"] == name


@pytest.mark.parametrize("name", ["docker", "podman", "auto"])
def test_a_container_engine_that_is_missing_gets_no_image(unpacked, name):
    done = CliRunner().invoke(main.app, ["build", "cuda.yaml", "--engine", name, "--json"])
    assert json.loads(done.stdout)["code"] == "CAP-E001"
    assert unpacked == []
