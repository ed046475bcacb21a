"""The data sets that a bundle carries, and those that are on this machine."""

from types import SimpleNamespace

import pytest

from capsule.bundle import run_bundle
from capsule.experiment.canonical import sha256_file
from capsule.experiment.lock import Lock
from capsule.image.cache import Cache
from capsule.image.data.listing import list_data, listing_document, pin_of
from capsule.image.data.places import find_data
from capsule.verification.integrity import data
from capsule.verification.integrity.data import supplied_data


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "one").write_text("1\n")
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """A run whose bundle carries its data set."""
    listing = list_data("digits", folder, sha256_file)

    def unpack(_run, _name, _listing, place, _cache):
        place.mkdir(parents=True)
        (place / "one").write_text("1\n")

    monkeypatch.setattr(data, "_unpack", unpack)
    return SimpleNamespace(
        lock=Lock.model_construct(data={"digits": pin_of(listing)}),
        observations=lambda: SimpleNamespace(data=None),
        bundle=SimpleNamespace(
            files={run_bundle.DATA_ARCHIVE.format(name="digits"): None},
            content=lambda *_: listing_document(listing),
        ),
    )


def test_the_digests_of_a_data_set_are_those_of_the_listing_in_the_bundle(run, folder):
    digests = sha256_file(folder / "one"), run.lock.data["digits"].sha256
    assert data.data_digests(run, "digits") == digests


def test_the_users_copy_stays_known_after_the_verification_of_a_bundle_with_data(
    run, folder, tmp_path
):
    cache = Cache(tmp_path / "cache")
    own = find_data(run.lock, cache, print, {"digits": folder})
    (folder / "one").write_text("changed since")
    # The bundle's data set is used, because what a place contains may have changed.
    carried = supplied_data(run, cache, {}, print)["digits"]
    assert carried.check("digits", print) == run.lock.data["digits"]
    (folder / "one").write_text("1\n")
    assert find_data(run.lock, cache, print) == {"digits": own["digits"]}
    given = supplied_data(run, cache, {"digits": folder}, print)
    assert given["digits"].path == folder
