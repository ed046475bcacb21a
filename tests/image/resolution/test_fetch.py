from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import LockedDebianPackage, LockedWheel
from capsule.experiment.spec import SourcesSpec
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_12
from capsule.image.resolution import fetch as fetching
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.fetch import fetch
from capsule.image.resolution.mirrors import Downloader
from tests.image.conftest import only_these_sources
from tests.locked_images import locked_image


def make_wheel(name: str, version: str, remark: str = "") -> bytes:
    stem = f"{name}-{version}.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {remark}\n"
        archive.writestr(f"{stem}/METADATA", metadata)
        archive.writestr(f"{stem}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{stem}/RECORD", "")
    return buffer.getvalue()


def lock_wheel(name: str, version: str, data: bytes) -> LockedWheel:
    return LockedWheel(
        name=name,
        version=version,
        filename=f"{name}-{version}-py3-none-any.whl",
        sha256=hashlib.sha256(data).hexdigest(),
    )


class Machine:
    """A machine with one package index and one folder of wheels, and nothing else."""

    def __init__(self, root: Path) -> None:
        self.index, self.folder = root / "simple", root / "wheels"
        self.cache = Cache(root / "cache")
        self.messages: list[str] = []
        for path in (self.index, self.folder):
            path.mkdir()

    def publish(self, wheel: LockedWheel, data: bytes) -> LockedWheel:
        project = self.index / wheel.name
        project.mkdir(exist_ok=True)
        (project / wheel.filename).write_bytes(data)
        link = f"{wheel.filename}#sha256={hashlib.sha256(data).hexdigest()}"
        (project / "index.html").write_text(f'<a href="{link}">{wheel.filename}</a>')
        return wheel

    def fetch(self, *wheels: LockedWheel) -> None:
        image = locked_image(wheels=tuple(wheels))
        fetch(DEBIAN_12, image, self.cache, SourcesSpec(), progress=self.messages.append)

    def holds(self, data: bytes) -> bool:
        sha256 = hashlib.sha256(data).hexdigest()
        return self.cache.has(sha256) and self.cache.path(sha256).read_bytes() == data


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    only_these_sources(monkeypatch, machine.index, machine.folder)
    return machine


@pytest.mark.slow
def test_wheels_come_from_folder_and_index(machine):
    alpha, beta, gamma = (make_wheel(name, "1.0") for name in ("alpha", "beta", "gamma"))
    wheels = [
        lock_wheel("alpha", "1.0", alpha),
        machine.publish(lock_wheel("beta", "1.0", beta), beta),
        machine.publish(lock_wheel("gamma", "1.0", gamma), gamma),
    ]
    (machine.folder / wheels[0].filename).write_bytes(alpha)
    machine.fetch(*wheels)
    assert machine.holds(alpha)
    assert machine.holds(beta)
    assert machine.holds(gamma)
    assert "copying alpha-1.0-py3-none-any.whl" in machine.messages
    assert "fetching 2 wheels" in machine.messages


def test_what_is_cached_is_not_asked_for_again(machine, monkeypatch):
    alpha = make_wheel("alpha", "1.0")
    wheel = lock_wheel("alpha", "1.0", alpha)
    (machine.folder / wheel.filename).write_bytes(alpha)
    machine.fetch(wheel)
    machine.messages.clear()

    def refuse(*_args, **_kwargs):
        pytest.fail("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    machine.fetch(wheel)
    assert machine.messages == []


@pytest.mark.slow
def test_another_build_in_a_folder_does_not_hide_the_locked_one(machine):
    locked, other = make_wheel("alpha", "1.0"), make_wheel("alpha", "1.0", "another build")
    wheel = machine.publish(lock_wheel("alpha", "1.0", locked), locked)
    (machine.folder / wheel.filename).write_bytes(other)
    machine.fetch(wheel)
    assert machine.holds(locked)
    assert any("not the locked file" in message for message in machine.messages)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["folder", "index"])
def test_a_forged_wheel_is_refused_by_name(machine, where):
    locked, forged = make_wheel("alpha", "1.0"), make_wheel("alpha", "1.0", "forged")
    good = make_wheel("beta", "1.0")
    wheel = lock_wheel("alpha", "1.0", locked)
    if where == "folder":
        (machine.folder / wheel.filename).write_bytes(forged)
    else:
        machine.publish(wheel, forged)
    beta = machine.publish(lock_wheel("beta", "1.0", good), good)
    with pytest.raises(CapsuleError) as caught:
        machine.fetch(wheel, beta)
    assert caught.value.code == "CAP-I302"
    assert "alpha-1.0-py3-none-any.whl" in caught.value.message.partition(" with ")[0]
    assert "beta" not in caught.value.message.partition(" with ")[0]
    assert not machine.cache.has(wheel.sha256)


@pytest.mark.slow
def test_an_index_that_lies_about_its_digest_is_refused(machine):
    locked, forged = make_wheel("alpha", "1.0"), make_wheel("alpha", "1.0", "forged")
    wheel = machine.publish(lock_wheel("alpha", "1.0", locked), locked)
    (machine.index / "alpha" / wheel.filename).write_bytes(forged)
    with pytest.raises(CapsuleError) as caught:
        machine.fetch(wheel)
    assert caught.value.code == "CAP-I302"
    assert not machine.cache.has(wheel.sha256)


@pytest.mark.slow
def test_a_wheel_that_is_nowhere_is_named(machine):
    with pytest.raises(CapsuleError) as caught:
        machine.fetch(lock_wheel("alpha", "1.0", b""))
    assert caught.value.code == "CAP-I302"
    assert "alpha-1.0-py3-none-any.whl" in caught.value.message
    assert "PIP_FIND_LINKS" in caught.value.fix  # verifiers have no spec in which to name a folder


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("alpha", "1.0\n--index-url=https://evil.example"),
        ("alpha", "2.0"),
        ("alpha @ https://evil.example/alpha.whl ;", "1.0"),
        ("-r /etc/hostname", "1.0"),
    ],
)
def test_a_lock_that_contradicts_itself_reaches_no_program(machine, monkeypatch, name, version):
    wheel = lock_wheel("alpha", "1.0", b"").model_copy(update={"name": name, "version": version})
    monkeypatch.setattr(fetching, "compile_wheels", lambda *_: pytest.fail("uv was started"))
    with pytest.raises(CapsuleError) as caught:
        machine.fetch(wheel)
    assert caught.value.code == "CAP-I305"


@pytest.mark.slow
def test_builds_of_pytorchs_own_are_located_by_uv(machine):
    torch = make_wheel("torch", "2.13.0+cpu")
    wheel = machine.publish(lock_wheel("torch", "2.13.0+cpu", torch), torch)
    machine.fetch(wheel)
    assert machine.holds(torch)


def test_a_missing_build_of_pytorchs_own_is_named(machine):
    with pytest.raises(CapsuleError) as caught:
        machine.fetch(lock_wheel("torch", "2.13.0+cpu", b""))
    assert caught.value.code == "CAP-I302"
    assert "torch-2.13.0+cpu-py3-none-any.whl" in caught.value.message
    assert "cannot be reached" in caught.value.message


def publish_deb(folder: Path, pool: str, data: bytes, name: str = "tiny") -> LockedDebianPackage:
    file = folder / pool
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return LockedDebianPackage(
        name=name,
        version="1:1.0+b1~x",
        architecture="all",
        pool=pool,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        requested=True,
    )


def fetch_debs(cache: Cache, addresses: list[str], *packages: LockedDebianPackage) -> None:
    sources = SourcesSpec(debian=tuple(addresses))
    fetch(DEBIAN_12, locked_image(debian=tuple(packages)), cache, sources, progress=lambda _: None)


def test_debian_packages_come_from_whichever_mirror_has_them(mirror, tmp_path):
    folder, address = mirror.folder, mirror.address
    packages = [
        publish_deb(folder / "debian", "pool/main/t/tiny/tiny_1.0+b1~x_all.deb", b"one"),
        publish_deb(folder / "security", "pool/updates/main/o/other_2_all.deb", b"two", "other"),
    ]
    cache = Cache(tmp_path / "cache")
    fetch_debs(cache, [f"{address}/debian", f"{address}/security/"], *packages)
    assert [cache.path(each.sha256).read_bytes() for each in packages] == [b"one", b"two"]


def test_a_debian_package_that_is_gone_is_named_with_the_fix(mirror, tmp_path):
    folder, address = mirror.folder, mirror.address
    here = publish_deb(folder, "pool/main/h/here_1_all.deb", b"here", "here")
    gone = publish_deb(folder, "pool/main/g/gone_1_all.deb", b"gone", "gone")
    (folder / gone.pool).unlink()
    cache = Cache(tmp_path / "cache")
    with pytest.raises(CapsuleError) as caught:
        fetch_debs(cache, [address], here, gone)
    assert caught.value.code == "CAP-I303"
    assert "gone 1:1.0+b1~x" in caught.value.message
    assert "404" in caught.value.message
    assert "here" not in caught.value.message.replace("there", "")
    assert "--refresh-base" in caught.value.fix
    assert "--refresh-base" in caught.value.fix
    assert cache.has(here.sha256)


def test_an_interruption_loses_no_debian_package_that_had_arrived(mirror, tmp_path, monkeypatch):
    packages = [
        publish_deb(mirror.folder, f"pool/main/t/{name}_1_all.deb", name.encode(), name)
        for name in ("first", "second")
    ]
    download = Downloader.download

    def interrupt(self, address, path, target, limit):
        if "second" in path:
            raise KeyboardInterrupt
        download(self, address, path, target, limit)

    monkeypatch.setattr(Downloader, "download", interrupt)
    cache = Cache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fetch_debs(cache, [mirror.address], *packages)
    assert [cache.has(package.sha256) for package in packages] == [True, False]


def test_a_forged_debian_package_is_refused(mirror, tmp_path):
    folder, address = mirror.folder, mirror.address
    package = publish_deb(folder, "pool/main/t/tiny_1_all.deb", b"locked")
    (folder / package.pool).write_bytes(b"forged")
    cache = Cache(tmp_path / "cache")
    with pytest.raises(CapsuleError, match=r"tiny 1:1\.0") as caught:
        fetch_debs(cache, [address], package)
    assert caught.value.code == "CAP-I303"
    assert "mismatch" in caught.value.message or package.sha256 in caught.value.message
    assert not cache.has(package.sha256)


def test_a_snapshot_has_what_mirrors_dropped_and_is_named(mirror, tmp_path):
    dated = "archive/debian/20260901T000000Z"
    here = publish_deb(mirror.folder / "debian", "pool/main/h/here_1_all.deb", b"here", "here")
    gone = publish_deb(mirror.folder / dated, "pool/main/g/gone_1_all.deb", b"gone", "gone")
    publish_deb(mirror.folder / dated, here.pool, b"here", "here")
    sources = SourcesSpec(debian=(f"{mirror.address}/{dated}", f"{mirror.address}/debian"))
    cache, messages = Cache(tmp_path / "cache"), []
    fetch(DEBIAN_12, locked_image(debian=(here, gone)), cache, sources, progress=messages.append)
    assert cache.path(gone.sha256).read_bytes() == b"gone"
    assert messages[-1].startswith(f"asking the snapshot {mirror.address}/{dated} for gone 1:1.0")
    # Of the snapshot nothing was asked for but what the mirror does not have.
    assert [path for path in mirror.asked if dated in path] == [f"/{dated}/{gone.pool}"]


def test_a_snapshot_is_trusted_no_more_than_a_mirror(mirror, tmp_path):
    dated = "archive/debian/20260901T000000Z"
    package = publish_deb(mirror.folder / dated, "pool/main/t/tiny_1_all.deb", b"locked")
    (mirror.folder / dated / package.pool).write_bytes(b"forged")
    cache = Cache(tmp_path / "cache")
    with pytest.raises(CapsuleError, match="has SHA-256") as caught:
        fetch_debs(cache, [f"{mirror.address}/{dated}"], package)
    assert caught.value.code == "CAP-I303"
    assert not cache.has(package.sha256)


@pytest.mark.network
def test_the_shipped_base_can_be_fetched(tmp_path):
    cache = Cache(tmp_path)
    image = locked_image(debian=shipped_base(DEBIAN_12).packages)
    fetch(DEBIAN_12, image, cache, SourcesSpec(), progress=lambda _: None)
    for package in image.debian:
        assert cache.path(package.sha256).stat().st_size == package.size
        assert cache.path(package.sha256).read_bytes().startswith(b"!<arch>\n")
    assert list((tmp_path / "scratch").iterdir()) == []
