"""A cache, and a data set of one file."""

import pytest

from capsule.image.cache import Cache


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "1.txt").write_text("1\n")
    return folder
