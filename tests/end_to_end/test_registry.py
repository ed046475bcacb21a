"""``capsule push``, ``pull`` and ``verify --pull``, with a run in a container and a registry."""

import secrets
import subprocess

import pytest

from tests.end_to_end.conftest import capsule, run
from tests.own_registry import running_registry

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.xdist_group("programs"),
]

PROGRAM = """\
schema: capsule/spec/v1
name: pushed
code: {path: pushed}
image: {packages: []}
trainer: {command: [python, train.py]}
limits: {memory_mb: 1024, minutes: 5}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with running_registry(tmp_path_factory.mktemp("registry") / "data") as host:
        yield host


@pytest.fixture(scope="module")
def pushed(workplace, host):
    """Run a program whose image no other test has, and push the image of its bundle."""
    (workplace / "pushed").mkdir()
    token = secrets.token_hex(8)
    (workplace / "pushed" / "train.py").write_text(
        f"import random\nprint({token!r}, random.random())\n"
    )
    (workplace / "pushed.yaml").write_text(PROGRAM)
    finished = run(workplace, spec="pushed.yaml")
    done = capsule(
        "push", finished.bundle, f"{host}/group/pushed:1", "--key", finished.public, "--json",
        cwd=workplace,
    )  # fmt: skip
    assert done.status == 0, done.errors
    yield finished, done.document
    docker("image", "rm", "--force", done.document["image"])


def docker(*arguments):
    return subprocess.run(["docker", *arguments], capture_output=True, text=True)


def test_an_image_from_a_registry_is_executed_if_it_is_the_claimed_one(pushed, host, tmp_path):
    finished, document = pushed
    docker("image", "rm", "--force", document["image"])
    done = finished.verify(finished.bundle, "--pull", document["reference"], cwd=tmp_path)
    assert (done.status, done.document["verdict"]) == (0, "reproduced-bitwise"), done.errors
    assert (done.document["image_source"], done.document["image_rebuilt"]) == ("registry", False)
    assert done.document["summary"].endswith(
        "; the image was taken from a registry and was not rebuilt from the lock"
    )


def test_another_image_is_not_executed(pushed, host, workplace, tmp_path):
    finished, _ = pushed
    (workplace / "pushed" / "more.txt").write_text("another tree, another image\n")
    name = f"{host}/group/other:1"
    try:
        assert capsule("push", "pushed.yaml", name, cwd=workplace).status == 0
    finally:
        (workplace / "pushed" / "more.txt").unlink()
    for reference, code in (name, "CAP-I405"), (f"{host}/group/absent:1", "CAP-I402"):
        done = finished.verify(finished.bundle, "--pull", reference, cwd=tmp_path)
        assert (done.status, done.document["verdict"]) == (4, "inconclusive")
        assert done.document["error"]["code"] == code


def test_the_spec_has_the_same_image_and_the_pulled_archive_is_loaded(pushed, host, tmp_path):
    finished, document = pushed
    again = capsule(
        "push", finished.spec, f"{host}/group/pushed:2", "--json", cwd=finished.spec.parent
    )
    assert again.document["manifest"] == document["manifest"]
    archive = tmp_path / "image.tar"
    pulled = capsule("pull", document["reference"], "-o", archive, "--json", cwd=tmp_path)
    assert pulled.document["image"] == document["image"]
    loaded = docker("load", "--input", str(archive))
    assert f"{host}/group/pushed:1" in loaded.stdout
    docker("image", "rm", "--force", f"{host}/group/pushed:1")


def test_options_that_contradict_are_refused(pushed, host, tmp_path):
    finished, document = pushed
    both = ("--pull", document["reference"], "--image", "embedded")
    assert "CAP-V068" in finished.verify(finished.bundle, *both, cwd=tmp_path).errors
    engine = ("--pull", document["reference"], "--engine", "process")
    assert "CAP-V050" in finished.verify(finished.bundle, *engine, cwd=tmp_path).errors
