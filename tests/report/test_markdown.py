"""Markdown in which text from elsewhere stays text."""

import re

from capsule.report.markdown import code, plain
from tests.report.runs import HOSTILE


def test_markdown_is_escaped():
    assert plain("a|b*c_[d](e)<f>") == r"a\|b\*c\_\[d\](e)\<f\>"
    assert code("a`b") == "`a'b`"
    assert not re.search(r"(?<!\\)<", plain(HOSTILE))
