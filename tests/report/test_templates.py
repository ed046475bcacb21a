"""The templates of the page, in which text from elsewhere stays text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from capsule.report.templates import TEMPLATES, code
from capsule.report.text import printable
from tests.report.pages import Reader, drawn

SAFE = st.text(max_size=40)


@given(SAFE, SAFE)
def test_any_text_is_read_back_as_text(content, attribute):
    paragraph = TEMPLATES.from_string('<p title="{{ attribute }}">{{ content }}</p>')
    reader = Reader(paragraph.render(content=content, attribute=attribute))
    assert reader.tags == ["p"]
    assert "".join(reader.text) == printable(content)
    assert reader.attributes == [("title", printable(attribute))]


@given(st.lists(st.tuples(SAFE, SAFE), max_size=4))
def test_a_table_has_the_cells_it_was_given(rows):
    reader = Reader(drawn("table", "caption", ("a", "b"), rows))
    assert reader.tags.count("td") == len(rows)
    assert reader.attributes.count(("scope", "row")) == len(rows)
    assert reader.open == []


def test_only_markup_passes_unescaped():
    both = TEMPLATES.from_string("{{ one }}{{ other }}")
    assert both.render(one=Markup("<b>x</b>"), other="<b>") == "<b>x</b>&lt;b&gt;"
    assert code("<b>\x1b") == "<code>&lt;b&gt;\N{REPLACEMENT CHARACTER}</code>"


def test_a_template_does_not_leave_out_what_is_missing():
    with pytest.raises(UndefinedError):
        TEMPLATES.from_string("{{ missing }}").render()
