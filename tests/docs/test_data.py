"""The page on data sets: its commands are run, and print what is shown."""

import pytest

from tests.docs.pages import follow

pytestmark = [pytest.mark.engine, pytest.mark.network]


def test_the_example_works_as_shown(tmp_path):
    follow("data.md", tmp_path)
