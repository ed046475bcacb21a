"""A tiny image (static busybox), a lock to go with it, and tasks to run in it."""

import hashlib
import json
import os
import shutil
import signal
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from capsule.engine import supervise
from capsule.engine.connection import connect
from capsule.engine.containers import ContainerEngine
from capsule.engine.interface import Task
from capsule.experiment.canonical import sha256_file
from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import Lock, LockedWheel
from capsule.experiment.spec import LimitsSpec, SourcesSpec, Spec
from capsule.image.archives.layers import TarEntry, file_entry, write_tar
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.making import Layer
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.image.distribution import DEBIAN_12
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.fetch import fetch_debian
from capsule.native import native_part
from tests.conftest import wait_until
from tests.locked_images import locked_image

LIMITS = LimitsSpec(memory_mb=256, processes=32, disk_mb=64, minutes=5, temporary_mb=16)
LABEL = "capsule.test"
CREATED = "2020-01-01T00:00:00Z"
CPU = {"kind": "cpu"}
PODMAN = {"Version": "5.4.2", "Components": [{"Name": "Podman Engine", "Version": "5.4.2"}]}


class Rootless:
    """The SDK's client of a Podman without root, as far as an engine is opened and described."""

    def version(self):
        return {**PODMAN, "ApiVersion": "1.41"}

    def info(self):
        return {"Rootless": True, "CgroupVersion": "1"}

    def close(self):
        pass


@pytest.fixture
def nothing_answers(monkeypatch, tmp_path):
    """Have no container engine answer; the socket that is asked."""
    for variable in ("DOCKER_HOST", "CONTAINER_HOST"):
        monkeypatch.setenv(variable, f"unix://{tmp_path}/none.sock")
    return tmp_path / "none.sock"


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def make_lock():
    return _lock


@pytest.fixture(scope="session")
def fetched_interpreter():
    """The packages of the shipped base that hold its interpreter, in the usual cache."""
    shipped, names = shipped_base(DEBIAN_12).packages, DEBIAN_12.python_packages
    packages = [package for package in shipped if package.name in names]
    fetch_debian(DEBIAN_12.vendor, packages, Cache(), SourcesSpec(), lambda _: None)
    return packages


@pytest.fixture
def interpreter(cache, fetched_interpreter):
    """These packages, in the cache of the test."""
    for package in fetched_interpreter:
        cache.add(Cache().path(package.sha256), package.sha256)
    return fetched_interpreter


@pytest.fixture
def wheel(tmp_path, cache):
    """Put a wheel with one module in the cache; return its name and digest."""
    path = tmp_path / "made-1-py3-none-any.whl"
    info = "made-1.dist-info"
    files = {
        "made.py": "VALUE = 42\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: made\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # without the time of this moment
    digest = sha256_file(path)
    cache.add(path, digest)
    return "made", digest


@pytest.fixture
def lock(make_lock, wheel, interpreter):
    return make_lock(wheels=[wheel], debian=interpreter)


@pytest.fixture
def make_image(tmp_path):
    """Return a function that makes an image whose upper layer holds one text."""

    def make(text="one", reference="localhost/capsule/test:engine", labels=(), author="a test"):
        busybox = shutil.which("busybox")
        assert busybox, "the engine tests need the Debian package busybox-static"
        launcher = native_part("capsule-launch").read_bytes()
        base = {"bin/busybox": Path(busybox).read_bytes(), "bin/capsule-launch": launcher}
        links = {f"bin/{name}": "busybox" for name in ("sh", "python3.11")}
        layers = (
            _layer(tmp_path / "base.tar", base, links, ("out", "proc", "sys", "dev", "tmp", "etc")),
            _layer(tmp_path / f"{text}.tar", {"text": text.encode()}, {}, ()),
        )
        return _image(layers, reference, labels, author)

    return make


@pytest.fixture
def run_directory(tmp_path):
    # pytest's folders are closed to others; an engine for all of them has to enter this one.
    folder = tmp_path / "run" / "work"
    folder.parent.mkdir(mode=0o700)
    folder.mkdir()
    return folder


@pytest.fixture
def make_task(run_directory):
    """Return a function that makes a task which runs a shell script."""

    def make(
        script,
        *,
        environment=None,
        gpus=(),
        hostname=None,
        processors=None,
        data=None,
        **limits,
    ):
        return Task(
            run_directory=run_directory,
            environment=environment or {},
            limits=LIMITS.model_copy(update=limits),
            gpus=gpus,
            hostname=hostname,
            processors=processors,
            data=data or {},
            arguments=("busybox", "sh", "-c", script),
        )

    return make


@pytest.fixture
def data(tmp_path):
    """A data set that is a folder, and one that is a file, by their paths below the data folder."""
    folder, file = tmp_path / "set = a", tmp_path / "one.csv"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "text").write_text("deep\n")
    file.write_text("1,2\n")
    return {"digits": folder, "labels/a=b.csv": file}


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request):
    """Each container engine that answers here, which keeps the images of a module. Docker must."""
    try:
        opened = ContainerEngine(connect(request.param))
    except CapsuleError as error:
        if request.param == "docker":
            raise
        pytest.skip(error.message)
    yield opened
    remove_images(opened)


def remove_images(engine):
    """Remove the images of the tests from an engine."""
    for image in engine._client.images.list(all=True, filters={"label": LABEL}):
        engine._client.images.remove(image.id, force=True)


@pytest.fixture
def run(engine, make_image, make_lock, make_task, cache, run_directory):
    """Return a function that runs a script in a container: its end, and its output."""
    engine.prepare(make_lock(), make_image(), cache, progress=lambda _: None)

    def run_script(script, *, on_poll=lambda: None, **settings):
        ended = engine.run(make_task(script, **settings), on_poll)
        return ended, (run_directory / "output.log").read_text()

    return run_script


@pytest.fixture
def time_is_up(monkeypatch, run_directory):
    """What to call at each poll: once a task has made the file "ready", its minutes are over."""
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 60 * LIMITS.minutes)

    def look():
        if (run_directory / "ready").exists():
            monkeypatch.setattr(supervise, "time", late)

    return look


def interrupt_once_there(path):
    """Interrupt this process as soon as a file exists."""

    def interrupt():
        wait_until(path.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


def installations(notes):
    """Count them; on a machine without namespaces there are other notes."""
    return sum(note.startswith("installing the locked packages") for note in notes)


def _lock(wheels=(), accelerator=CPU, code=None, debian=()):
    spec = Spec.model_validate_json(
        json.dumps(
            {
                "schema": "capsule/spec/v1",
                "name": "test",
                "accelerator": accelerator,
                "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
                "trainer": {"algorithm": "dqn", "network": "mlp"},
            }
        )
    )
    return Lock(
        spec=spec,
        image=locked_image(
            code or training_code_digest(),
            "1",
            recipe=spec.accelerator.kind,
            debian=tuple(debian),
            wheels=tuple(
                LockedWheel(name=name, version="1", filename=f"{name}-1-py3-none-any.whl", sha256=h)
                for name, h in wheels
            ),
        ),
    )


def _layer(path, files, links, folders):
    entries = [file_entry(name, "a test", data, 0o755) for name, data in files.items()]
    # Some runtimes give a tmpfs the mode of the folder that it covers.
    modes = {name: 0o1777 if name == "tmp" else 0o755 for name in folders}
    entries += [TarEntry(name, "a test", "directory", mode) for name, mode in modes.items()]
    entries += [TarEntry(name, "a test", "symlink", 0o777, target=to) for name, to in links.items()]
    with path.open("wb") as stream:
        write_tar(entries, stream.write)
    data = path.read_bytes()
    return Layer(path.stem, f"sha256:{hashlib.sha256(data).hexdigest()}", path, len(data))


def _image(layers, reference, labels, author):
    diff_ids = [layer.diff_id for layer in layers]
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": CREATED,
            "config": {
                "Env": ["PATH=/bin", "HOME=/tmp"],
                "User": "61183:61183",
                "Labels": dict.fromkeys((LABEL, *labels), ""),
            },
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created": CREATED, "created_by": author} for _ in diff_ids],
        }
    ).encode()
    return Image(config, layers, reference)


def check_data_sets(run, data):
    """Check that a script can read data sets, and write to none of their folders and files."""
    ended, output = run(
        "cd $CAPSULE_DATA; pwd; cat digits/deep/text labels/a=b.csv;"
        " for place in . digits digits/deep labels; do"
        " (echo x > $place/probe) 2>/dev/null && echo $place; done;"
        " (echo x > labels/a=b.csv) 2>/dev/null || echo refused",
        data=data,
    )
    assert output.splitlines() == ["/data", "deep", "1,2", "refused"]
    assert ended.status == 0
    assert run("echo ${CAPSULE_DATA-none}")[1] == "none\n"
