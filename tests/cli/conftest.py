"""For all tests of commands."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.host.network import CERTIFICATES
from capsule.image import pinning
from tests.hostile import genuine
from tests.image.conftest import Tiny
from tests.own_registry import running_registry
from tests.study.small_studies import Resolutions, write

SPECS = Path(__file__).parents[2] / "specs"
SMALL = SPECS / "dqn-breakout-small.yaml"


def capsule(*words, **settings):
    """Call the command line in this process."""
    return CliRunner().invoke(app, [*map(str, words)], **settings)


@pytest.fixture(autouse=True)
def no_debug(monkeypatch):
    """Forget --debug after a test: the option sets a variable of this process."""
    monkeypatch.setenv("CAPSULE_DEBUG", "")


@pytest.fixture
def bundle(tmp_path):
    """The bundle of a training, signed by the signer of all genuine bundles."""
    return genuine.packed(genuine.training(), tmp_path / "run.capsule.tar")


@pytest.fixture
def resolutions(monkeypatch):
    found = Resolutions(monkeypatch)
    monkeypatch.setattr(pinning, "resolve", found.resolve)
    return found


@pytest.fixture
def place(tmp_path, monkeypatch, resolutions):
    """A folder with a spec, a study of it and a key, in which no pin is looked up."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert capsule("keygen", "alice").exit_code == 0
    return tmp_path


@pytest.fixture
def image(tmp_path):
    """A tiny image, whose files are in a folder of its own."""
    (tmp_path / "image").mkdir()
    return Tiny(tmp_path / "image").assemble()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Host and port of an empty registry on this machine, which asks for no login."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", *CERTIFICATES):
        monkeypatch.delenv(name, raising=False)
    with running_registry(tmp_path / "registry") as host:
        yield host
