"""Indexes count only as what the archive's key signed, and stay for when there is no network."""

import pytest
from pysequoia import Tsk

from capsule.experiment.errors import CapsuleError
from capsule.image.distribution import DEBIAN, DEBIAN_12, UBUNTU, UBUNTU_24_04
from capsule.image.resolution import indexes
from capsule.image.resolution.indexes import read_archive, signed_text, suites
from tests.image.resolution.conftest import INDEX

DEAD = "http://127.0.0.1:9/debian"
ONE, TWO = ({"Package": "a", "Version": version} for version in ("1", "2"))


@pytest.fixture
def read(tmp_path):
    """Return a function that reads archives: the version of package a, and the messages."""
    folder = tmp_path / "indexes"
    folder.mkdir()

    def read_version(*addresses, distribution=DEBIAN_12):
        messages = []
        found = read_archive(addresses, distribution, folder, messages.append).candidate("a")
        return found and found.version, "\n".join(messages)

    return read_version


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://m.example/debian", ["bookworm", "bookworm-updates"]),
        ("https://m.example/debian-security", ["bookworm-security"]),
        (
            "https://snapshot.example/archive/debian-security/20260901T000000Z",
            ["bookworm-security"],
        ),
    ],
)
def test_each_archive_is_asked_for_its_suites(address, expected):
    assert suites(address, DEBIAN_12) == expected


def test_of_ubuntu_only_the_release_itself_is_read():
    """Its archive drops what noble-updates and noble-security had before."""
    assert suites(UBUNTU.mirrors[0], UBUNTU_24_04) == ["noble"]


def test_all_suites_of_all_mirrors_count(mirror, read):
    address = mirror.publish([ONE])
    mirror.publish([], suite="bookworm-updates")
    assert read(address) == ("1", "")
    security = mirror.publish([TWO], below="debian-security", suite="bookworm-security")
    assert read(address, security) == ("2", "")


def test_a_suite_that_is_missing_is_said(mirror, read):
    address = mirror.publish([ONE])
    version, messages = read(address)
    assert version == "1"
    assert "the packages of bookworm-updates are not used" in messages


def test_an_index_is_downloaded_again_only_if_it_changed(mirror, read):
    address = mirror.publish([ONE])
    assert read(address)[0] == "1"
    mirror.asked.clear()
    assert read(address)[0] == "1"
    assert not [path for path in mirror.asked if "Packages" in path]
    mirror.publish([TWO])
    assert read(address)[0] == "2"


def test_without_a_network_the_last_index_is_used(mirror, read, monkeypatch):
    address = mirror.publish([ONE])
    assert read(address)[0] == "1"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    version, messages = read(address)
    assert version == "1"
    assert "using the package index of the last resolution" in messages


def test_an_index_that_was_replaced_meanwhile_is_found_by_its_digest(mirror, read):
    address = mirror.publish([ONE])
    place = mirror.folder / "debian" / "dists" / "bookworm" / INDEX
    release = signed_text((place.parents[2] / "InRelease").read_bytes(), DEBIAN)
    digest = indexes._index_digest(release, "main")
    by_hash = place.parent / "by-hash" / "SHA256" / digest
    by_hash.parent.mkdir(parents=True)
    by_hash.write_bytes(place.read_bytes())
    place.write_bytes(b"newer")
    assert read(address)[0] == "1"


def test_snapshots_are_read_only_where_there_is_nothing_else(mirror, read):
    snapshot = mirror.publish([ONE], below="archive/debian/20260901T000000Z")
    current = mirror.publish([TWO])
    assert read(current, snapshot)[0] == "2"
    assert read(snapshot)[0] == "1"


def test_an_archive_that_is_out_of_date_is_said(mirror, read):
    address = mirror.publish([ONE], until="Sat, 11 Jul 2020 10:16:37 UTC")
    version, messages = read(address)
    assert version == "1"
    assert "was valid until Sat, 11 Jul 2020" in messages


def refused(read, address):
    with pytest.raises(CapsuleError) as caught:
        read(address)
    assert caught.value.code == "CAP-L122"
    assert "CAPSULE_DEBIAN_MIRROR" in caught.value.fix
    return caught.value.message


def test_no_mirror_is_an_error(read, mirror):
    assert "127.0.0.1" in refused(read, DEAD)
    security = mirror.publish([TWO], below="debian-security", suite="bookworm-security")
    refused(read, security)


def test_another_key_is_refused(mirror, read):
    address = mirror.publish([ONE], key=Tsk.generate("mallory@mirror.example"))
    assert "not signed by Debian" in refused(read, address)


@pytest.mark.parametrize(
    "change",
    [{"origin": "Ubuntu"}, {"codename": "trixie"}, {"codename": "bookworm-updates"}],
)
def test_another_release_is_refused(mirror, read, change):
    address = mirror.publish([ONE], **change)
    assert "it is of" in refused(read, address)


def test_what_was_changed_after_signing_is_refused(mirror, read):
    address = mirror.publish([ONE])
    file = mirror.folder / "debian" / "dists" / "bookworm" / "InRelease"
    good = file.read_bytes()
    file.write_bytes(good.replace(b"Codename: bookworm", b"Codename: bookwurm"))
    assert "not signed by Debian" in refused(read, address)
    file.write_bytes(b"<html>sign in</html>")
    assert "not signed by Debian" in refused(read, address)


def test_an_index_that_is_not_the_signed_one_is_refused(mirror, read):
    address = mirror.publish([ONE])
    (mirror.folder / "debian" / "dists" / "bookworm" / INDEX).write_bytes(b"forged")
    assert "404" in refused(read, address)  # it is not there by its digest, either


def test_nothing_beside_the_signed_text_counts(mirror):
    mirror.publish([ONE])
    signed = (mirror.folder / "debian" / "dists" / "bookworm" / "InRelease").read_bytes()
    text = signed_text(b"Origin: Evil\n\n" + signed + b"\nOrigin: Evil\n", DEBIAN)
    assert "Evil" not in text
    assert text.startswith("Origin: Debian")


def test_the_keys_that_come_with_capsule_are_those_of_debian_12_and_13():
    found = {certificate.fingerprint for certificate in indexes._keyring(DEBIAN)}
    assert found == {  # as https://ftp-master.debian.org/keys.html lists them
        "b8b80b5b623eab6ad8775c45b7c5d7d6350947f8",
        "05ab90340c0c5e797f44a8c8254cf3b5aec0a8f0",
        "4d64fec119c2029067d6e791f8d2585b8783d481",
        "04b54c3cdca79751b16bc6b5225629df75b188bd",
        "5e04a1e3223a19a20706e20f9904613d4cce68c6",
        "41587f7db8c774bccf131416762f67a0b2c39de4",
    }


def test_the_keys_of_ubuntu_are_those_that_sign_its_archive():
    found = {certificate.fingerprint for certificate in indexes._keyring(UBUNTU)}
    assert found == {  # of 2012 and 2018, as https://wiki.ubuntu.com/SecurityTeam/FAQ lists them
        "790bc7277767219c42c86f933b4fe6acc0b21f32",
        "f6ecb3762474eda9d21b7022871920d1991bc93c",
    }


def test_both_components_of_ubuntu_count(mirror, read):
    ubuntu = {"below": "ubuntu", "suite": "noble", "origin": "Ubuntu"}
    address = mirror.publish([ONE], universe=[TWO], **ubuntu)
    assert read(address, distribution=UBUNTU_24_04) == ("2", "")
    mirror.publish([ONE], **ubuntu)
    with pytest.raises(CapsuleError) as caught:
        read(address, distribution=UBUNTU_24_04)
    assert "it does not list universe/binary-amd64/Packages.xz" in caught.value.message
    assert "CAPSULE_UBUNTU_MIRROR" in caught.value.fix


def test_a_release_of_debian_is_none_of_ubuntu(mirror, read):
    address = mirror.publish([ONE], universe=[], suite="noble")
    with pytest.raises(CapsuleError) as caught:
        read(address, distribution=UBUNTU_24_04)
    assert "it is of Debian noble" in caught.value.message
