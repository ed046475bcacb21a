"""Which mirrors are asked, and that files come from them whole."""

import errno
import io
import stat

import pytest

from capsule.experiment.spec import SourcesSpec
from capsule.image.distribution import DEBIAN, UBUNTU
from capsule.image.resolution.mirrors import (
    Downloader,
    DownloadError,
    is_snapshot,
    mirrors,
)

SNAPSHOT = "https://snapshot.example/archive/debian/20260901T000000Z"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that makes a program the only one of this machine besides sh and cat."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for vendor in (DEBIAN, UBUNTU):
        monkeypatch.delenv(vendor.variable, raising=False)

    def make(name, output):
        file = folder / name
        file.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{output}\nEND\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("vendor", [DEBIAN, UBUNTU], ids=lambda each: each.name)
def test_without_apt_they_are_the_vendors_own(vendor):
    assert mirrors(vendor, SourcesSpec()) == list(vendor.mirrors)


def test_apts_mirrors_of_the_vendor_are_taken(programs):
    lines = [
        "Debian|trixie|http://one.example/debian/",
        "Debian|trixie-updates|http://one.example/debian/",
        "|stable-security|http://two.example/debian-security",
        "Ubuntu|noble|http://three.example/ubuntu/",
        "|noble|http://four.example/ubuntu/",
        "Docker CE|bookworm|http://five.example/debian/",
        "Debian|bookworm|cdrom:/disc/",
    ]
    programs("apt-get", "\n".join(lines))
    found = mirrors(DEBIAN, SourcesSpec())
    assert found == ["http://one.example/debian", "http://two.example/debian-security"]
    found = mirrors(UBUNTU, SourcesSpec())
    assert found == ["http://three.example/ubuntu", "http://four.example/ubuntu"]


def test_apts_mirrors_of_another_distribution_are_not(programs):
    programs("apt-get", "Ubuntu|noble|http://three.example/ubuntu/")
    assert mirrors(DEBIAN, SourcesSpec()) == list(DEBIAN.mirrors)


def test_the_variable_replaces_apts_mirrors_and_the_spec_both(programs, monkeypatch):
    programs("apt-get", "Debian|bookworm|http://one.example/debian/")
    monkeypatch.setenv("CAPSULE_DEBIAN_MIRROR", f"{SNAPSHOT}/ https://m.example/debian")
    assert mirrors(DEBIAN, SourcesSpec()) == ["https://m.example/debian", SNAPSHOT]
    assert mirrors(UBUNTU, SourcesSpec()) == list(UBUNTU.mirrors)
    monkeypatch.setenv("CAPSULE_UBUNTU_MIRROR", "https://u.example/ubuntu")
    assert mirrors(UBUNTU, SourcesSpec()) == ["https://u.example/ubuntu"]
    spec = SourcesSpec(debian=("file:/spec/archive/",))
    assert mirrors(DEBIAN, spec) == mirrors(UBUNTU, spec) == ["file:/spec/archive"]


@pytest.mark.parametrize(
    ("address", "dated"),
    [(SNAPSHOT, True), (f"{SNAPSHOT}/", True), ("https://deb.debian.org/debian", False)],
)
def test_snapshots_are_known_by_their_date(address, dated):
    assert is_snapshot(address) is dated


def download(address, path, limit=100):
    target = io.BytesIO()
    with Downloader() as downloader:
        downloader.download(address, path, target, limit)
    return target.getvalue()


def test_files_come_over_http_and_from_folders(mirror):
    (mirror.folder / "a+b~c.xz").write_bytes(b"content")
    assert download(mirror.address, "a+b~c.xz") == b"content"
    assert download(mirror.folder.as_uri(), "a+b~c.xz") == b"content"


@pytest.mark.parametrize(
    ("scheme", "path", "reason"),
    [
        ("http", "none", "404"),
        ("http", "large", "larger than 100 bytes"),
        ("file", "none", "no such file"),
        ("file", "large", "larger than 100 bytes"),
        ("ftp", "large", "begins with http, https or file"),
    ],
)
def test_what_does_not_come_is_named(mirror, scheme, path, reason):
    (mirror.folder / "large").write_bytes(bytes(101))
    address = {"http": mirror.address, "file": mirror.folder.as_uri(), "ftp": "ftp://m.example"}
    with pytest.raises(DownloadError, match=reason) as caught:
        download(address[scheme], path)
    assert str(caught.value).startswith(f"{address[scheme]}/{path}")


def test_apts_proxies_are_used_but_for_the_hosts_that_it_excepts(programs, mirror):
    (mirror.folder / "file").write_bytes(b"content")
    proxy = mirror.address  # it takes requests for any host, and knows no path of theirs
    programs("apt-config", f'Acquire::http::Proxy "{proxy}";\nAcquire::Languages "none";')
    with pytest.raises(DownloadError, match="404"):
        download("http://elsewhere.example", "file")
    assert mirror.asked[-1] == "http://elsewhere.example/file"
    programs(
        "apt-config",
        f'Acquire::http::Proxy "{proxy}/none";\nAcquire::http::Proxy::127.0.0.1 "DIRECT";',
    )
    assert download(mirror.address, "file") == b"content"
    assert mirror.asked[-1] == "/file"


def test_the_proxies_of_the_environment_come_before_those_of_apt(programs, mirror, monkeypatch):
    (mirror.folder / "file").write_bytes(b"content")
    programs("apt-config", f'Acquire::http::Proxy "{mirror.address}/apt";')
    monkeypatch.setenv("HTTP_PROXY", f"{mirror.address}/environment")
    with pytest.raises(DownloadError, match="404"):
        download("http://elsewhere.example", "file")
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert download(mirror.address, "file") == b"content"
    assert mirror.asked[-1] == "/file"


def test_a_malformed_address_is_named(mirror):
    with pytest.raises(DownloadError, match=r"http://\[x/none: Invalid IPv6 URL"):
        download("http://[x", "none")


def test_a_full_disk_is_no_fault_of_the_mirror(mirror):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    (mirror.folder / "a").write_bytes(b"content")
    for address in (mirror.address, mirror.folder.as_uri()):
        with Downloader() as downloader, pytest.raises(OSError, match="No space left"):
            downloader.download(address, "a", Full(), 100)
