"""Scores, and rliable's library as an oracle."""

import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest


@pytest.fixture
def scores():
    """Return a maker of scores, tasks x runs, by a generator that is not under test."""

    def make(seed, tasks, runs):
        return (10 * np.random.default_rng(seed).normal(size=(tasks, runs))).tolist()

    return make


@pytest.fixture(scope="session")
def library():
    """Return ``rliable.library``, which needs only the bootstrap of its dependency ``arch``.

    The package ``arch`` 7 itself cannot be imported with pandas 3, and rliable excludes ``arch`` 8.
    """
    if "arch" not in sys.modules:
        package = types.ModuleType("arch")
        package.__path__ = find_spec("arch").submodule_search_locations
        sys.modules["arch"] = package
    from rliable import library

    return library
