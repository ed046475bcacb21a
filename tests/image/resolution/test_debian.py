from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SourcesSpec
from capsule.image.cache import Cache
from capsule.image.recipe import data_file, load_recipe
from capsule.image.resolution import debian
from capsule.image.resolution.debian import (
    BaseLock,
    mirrors,
    resolve_debian,
    shipped_base,
    shipped_layers,
    stanzas,
)

NOWHERE = SourcesSpec(debian=("file:/nonexistent/debian/",))
BASE = load_recipe("cpu").debian

needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")


def resolve(cache, *extra, sources=SourcesSpec(), refresh_base=False):  # noqa: B008 - frozen
    return resolve_debian(
        BASE, extra, sources, cache, refresh_base=refresh_base, progress=lambda _: None
    )


def test_shipped_base_holds_the_roots_of_every_recipe():
    names = {package.name for package in shipped_base()}
    assert names == set(load_recipe("cpu").debian) | set(load_recipe("cuda").debian)
    assert all(package.requested for package in shipped_base())


def test_shipped_base_is_a_canonical_document_without_hosts():
    data = data_file("images", "debian-12.lock.json").read_bytes()
    assert BaseLock(layers=shipped_layers(), packages=shipped_base()).document() == data
    assert b"://" not in data
    assert [entry["name"] for entry in json.loads(data)["packages"]] == sorted(BASE)


def test_base_alone_needs_neither_apt_nor_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    packages = resolve(Cache(tmp_path))
    assert [package.name for package in packages] == sorted(BASE)


def test_a_root_that_is_not_shipped_is_a_coded_error(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        resolve_debian(
            ("libc6", "libnew1"),
            (),
            SourcesSpec(),
            Cache(tmp_path),
            refresh_base=False,
            progress=lambda _: None,
        )
    assert caught.value.code == "CAP-L125"
    assert "libnew1" in caught.value.message


def test_extra_packages_without_apt_are_a_coded_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CapsuleError) as caught:
        resolve(Cache(tmp_path), "libgl1")
    assert caught.value.code == "CAP-L121"
    assert "image.debian" in caught.value.message


@needs_apt
def test_unreachable_mirror_is_a_coded_error(tmp_path):
    with pytest.raises(CapsuleError) as caught:
        resolve(Cache(tmp_path), "libgl1", sources=NOWHERE)
    assert caught.value.code == "CAP-L122"
    assert "image.sources.debian" in caught.value.fix


def test_the_specs_mirrors_replace_the_machines():
    assert mirrors(NOWHERE) == ["file:/nonexistent/debian"]


@needs_apt
def test_the_machines_mirrors_are_addresses():
    assert all(":/" in mirror and not mirror.endswith("/") for mirror in mirrors(SourcesSpec()))


def test_no_mirror_is_known_without_apt(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert mirrors(SourcesSpec()) == []


@pytest.mark.parametrize(
    ("address", "suites"),
    [
        ("https://m.example/debian", ["bookworm", "bookworm-updates"]),
        ("https://m.example/debian-security", ["bookworm-security"]),
    ],
)
def test_sources_list_asks_each_mirror_for_its_suites(address, suites, monkeypatch, tmp_path):
    monkeypatch.setattr(debian, "_KEYRING", tmp_path / "none")
    lines = debian._sources_list([address]).splitlines()
    assert lines == [f"deb {address} {suite} main" for suite in suites]
    monkeypatch.setattr(debian, "_KEYRING", tmp_path)
    assert f"deb [signed-by={tmp_path}] {address} {suites[0]} main" in debian._sources_list(
        [address]
    )


def test_stanzas_keep_first_lines_of_fields():
    text = "Package: a\nDescription: short: text\n long: text\n .\nVersion: 1:2.0\n\n\nPackage: b\n"
    assert list(stanzas(text)) == [
        {"Package": "a", "Description": "short: text", "Version": "1:2.0"},
        {"Package": "b"},
    ]


FIELDS = st.dictionaries(
    st.sampled_from(["Package", "Version", "Filename", "Size", "X-Other"]),
    st.text("abc019:./~+-", max_size=12),
    min_size=1,
)


@settings(deadline=None, max_examples=100)
@given(st.lists(FIELDS, max_size=4))
def test_stanzas_read_what_was_written(entries):
    text = "\n".join(
        "".join(f"{name}: {value}\n" for name, value in entry.items()) for entry in entries
    )
    assert list(stanzas(text)) == entries


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_stanzas_survive_any_text(text):
    assert all(isinstance(entry, dict) for entry in stanzas(text))


@pytest.fixture(scope="module")
def apt_cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("apt"))


@needs_apt
@pytest.mark.network
def test_extra_packages_come_with_dependencies_beyond_the_base(apt_cache):
    packages = {package.name: package for package in resolve(apt_cache, "libncurses6", "libgomp1")}
    assert set(packages) == {*BASE, "libncurses6", "libgomp1"}
    assert packages["libgomp1"].requested
    assert packages["libgomp1"].pool.startswith("pool/")
    assert list(packages) == sorted(packages)


@needs_apt
@pytest.mark.network
def test_dependencies_are_marked_as_such(apt_cache):
    packages = {package.name: package for package in resolve(apt_cache, "libx11-6")}
    assert packages["libx11-6"].requested
    assert not packages["libxcb1"].requested


@needs_apt
@pytest.mark.network
def test_unknown_packages_are_named(apt_cache):
    with pytest.raises(CapsuleError) as caught:
        resolve(apt_cache, "libgomp1", "no-such-library9")
    assert caught.value.code == "CAP-L123"
    assert "'no-such-library9'" in caught.value.message


@needs_apt
@pytest.mark.network
def test_virtual_packages_cannot_be_resolved(apt_cache):
    with pytest.raises(CapsuleError) as caught:
        resolve(apt_cache, "awk")
    assert caught.value.code == "CAP-L124"
    assert "awk" in caught.value.message


@needs_apt
@pytest.mark.network
def test_base_can_be_taken_from_the_mirrors(apt_cache):
    fresh = resolve(apt_cache, refresh_base=True)
    assert [package.name for package in fresh] == sorted(BASE)
    assert {package.pool.partition("/")[0] for package in fresh} == {"pool"}
    assert all(package.requested for package in fresh)
