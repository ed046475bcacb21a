"""Scores, and what rliable gives for them."""

import json

import pytest

from tests.study.statistics.record_rliable import RECORD, make_scores


@pytest.fixture
def scores():
    """Return a maker of scores, tasks x runs, by a generator that is not under test."""
    return make_scores


@pytest.fixture(scope="session")
def rliable():
    """Return the results of rliable 1.2.0, by what was asked for."""
    return json.loads(RECORD.read_text())
