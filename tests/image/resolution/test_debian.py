from __future__ import annotations

import hashlib
import json
import shutil
import subprocess

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SourcesSpec
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN, DEBIAN_12, DISTRIBUTIONS
from capsule.image.recipe import data_file, load_recipe
from capsule.image.resolution.debian import (
    resolve_debian,
    shipped_base,
)
from capsule.image.resolution.indexes import read_archive
from capsule.image.resolution.mirrors import mirrors
from capsule.image.resolution.relations import install

NOWHERE = SourcesSpec(debian=("file:/nonexistent/debian/",))
BASE = load_recipe("cpu", "debian-12").debian


def resolve(cache, *extra, sources=SourcesSpec(), refresh_base=False):  # noqa: B008 - frozen
    return resolve_debian(
        DEBIAN_12, BASE, extra, sources, cache, refresh_base=refresh_base, progress=lambda _: None
    )


def test_shipped_base_holds_the_roots_of_every_recipe():
    for distribution in DISTRIBUTIONS.values():
        packages = shipped_base(distribution).packages
        recipes = [load_recipe(name, distribution.name) for name in ("cpu", "cuda")]
        assert {each.name for each in packages} == {
            name for recipe in recipes for name in recipe.debian
        }
        assert all(each.requested for each in packages)


def test_shipped_base_is_a_canonical_document_without_hosts():
    data = data_file("images", "debian-12.lock.json").read_bytes()
    assert shipped_base(DEBIAN_12).document() == data
    assert b"://" not in data
    assert [entry["name"] for entry in json.loads(data)["packages"]] == sorted(BASE)


def test_base_alone_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    packages = resolve(Cache(tmp_path))
    assert [package.name for package in packages] == sorted(BASE)


def test_a_root_that_is_not_shipped_is_a_coded_error(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        resolve_debian(
            DEBIAN_12,
            ("libc6", "libnew1"),
            (),
            SourcesSpec(),
            Cache(tmp_path),
            refresh_base=False,
            progress=lambda _: None,
        )
    assert caught.value.code == "CAP-L125"
    assert "libnew1" in caught.value.message


def test_an_unreachable_mirror_is_a_coded_error(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        resolve(Cache(tmp_path), "libgl1", sources=NOWHERE)
    assert caught.value.code == "CAP-L122"
    assert "image.sources.debian" in caught.value.fix


def entry(name, version="1-1", **fields):
    pool = f"pool/main/{name[0]}/{name}_{version}_all.deb"
    facts = {"Package": name, "Version": version, "Architecture": "all", **fields}
    return facts | {
        "Filename": pool,
        "Size": "1",
        "SHA256": hashlib.sha256(pool.encode()).hexdigest(),
    }


def test_without_apt_or_dpkg_extra_packages_are_locked_from_a_mirror(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    index = [entry("tool", Depends="libtool1, libc6"), entry("libtool1"), entry("libc6", "2.36")]
    sources = SourcesSpec(debian=(mirror.publish(index),))
    packages = {each.name: each for each in resolve(Cache(tmp_path), "tool", sources=sources)}
    assert set(packages) == {*BASE, "tool", "libtool1"}
    assert packages["tool"].requested
    assert not packages["libtool1"].requested
    assert packages["tool"].pool == "pool/main/t/tool_1-1_all.deb"
    assert packages["libc6"] in shipped_base(DEBIAN_12).packages
    with pytest.raises(CapsuleError, match="'none1'") as caught:
        resolve(Cache(tmp_path), "tool", "none1", sources=sources)
    assert caught.value.code == "CAP-L123"


@pytest.fixture(scope="module")
def archive_cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("archive"))


@pytest.mark.network
def test_extra_packages_come_with_dependencies_beyond_the_base(archive_cache):
    packages = {
        package.name: package for package in resolve(archive_cache, "libncurses6", "libgomp1")
    }
    assert set(packages) == {*BASE, "libncurses6", "libgomp1"}
    assert packages["libgomp1"].requested
    assert packages["libgomp1"].pool.startswith("pool/")
    assert list(packages) == sorted(packages)


@pytest.mark.network
def test_dependencies_are_marked_as_such(archive_cache):
    packages = {package.name: package for package in resolve(archive_cache, "libx11-6")}
    assert packages["libx11-6"].requested
    assert not packages["libxcb1"].requested


@pytest.mark.network
def test_unknown_packages_are_named(archive_cache):
    with pytest.raises(CapsuleError) as caught:
        resolve(archive_cache, "libgomp1", "no-such-library9")
    assert caught.value.code == "CAP-L123"
    assert "'no-such-library9'" in caught.value.message


@pytest.mark.network
def test_virtual_packages_cannot_be_resolved(archive_cache):
    with pytest.raises(CapsuleError) as caught:
        resolve(archive_cache, "awk")
    assert caught.value.code == "CAP-L124"
    assert "awk" in caught.value.message


@pytest.mark.network
def test_base_can_be_taken_from_the_mirrors(archive_cache):
    fresh = resolve(archive_cache, refresh_base=True)
    assert [package.name for package in fresh] == sorted(BASE)
    assert {package.pool.partition("/")[0] for package in fresh} == {"pool"}
    assert all(package.requested for package in fresh)


# One with many alternatives, one with virtual packages, and what images of games ask for.
ORACLE = ("default-jre-headless", "ffmpeg", "libgl1", "libsdl2-2.0-0", "python3-numpy", "xvfb")


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_packages_are_chosen_as_apt_chooses_them(archive_cache, tmp_path):
    (tmp_path / "status").touch()
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    settings = {
        "Dir::State": tmp_path,
        "Dir::State::status": tmp_path / "status",
        "Dir::Cache": tmp_path,
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    subprocess.run(["apt-get", "-qq", *options, "update"], capture_output=True, check=True)
    folder = archive_cache.folder("debian")
    index = read_archive(mirrors(DEBIAN, SourcesSpec()), DEBIAN_12, folder, lambda _: None)
    for name in ORACLE:
        command = ["apt-get", "-qq", *options, "--print-uris", "install", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        files = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("'")]
        # apt writes the colon of an epoch as %3a in file names.
        expected = {tuple(file.replace("%3a", ":").split("_")[:2]) for file in files}
        assert {(each.name, each.version) for each in install([name], [], index)} == expected
