"""A data set of one file."""

import pytest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "1.txt").write_text("1\n")
    return folder
