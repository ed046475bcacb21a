"""For all tests of studies."""

import pytest

from tests.study.small_studies import Resolutions


@pytest.fixture
def resolutions(monkeypatch):
    return Resolutions(monkeypatch)
