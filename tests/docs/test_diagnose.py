"""The page on 'capsule diagnose': its example is run, and prints what is shown."""

import pytest

from tests.docs.pages import follow


@pytest.mark.network
@pytest.mark.slow
def test_the_example_is_diagnosed_as_shown(tmp_path):
    follow("diagnose.md", tmp_path)
