"""The templates of the page, in which text from elsewhere stays text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from capsule.report.templates import MARKS, TEMPLATES, code, toned
from capsule.report.text import MAX_CHARACTERS, printable
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


def test_a_long_text_is_cut_before_it_is_escaped():
    shown = TEMPLATES.from_string("{{ text }}").render(text="<" * (MAX_CHARACTERS + 1))
    assert shown == "&lt;" * MAX_CHARACTERS + "…"


@pytest.mark.parametrize(("value", "expected"), [(12, "12"), (None, "absent"), (0.5, "0.5")])
def test_values_that_are_no_text_are_shown_as_one(value, expected):
    assert TEMPLATES.from_string("{{ value }}").render(value=value) == expected


# --- marks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tone", MARKS)
def test_a_tone_has_a_sign_besides_its_colour_that_is_not_read_out(tone):
    reader = Reader(toned("<i>reproduced\x1b", tone))
    assert reader.tags == ["span", "span"]
    assert "".join(reader.text) == f"{MARKS[tone]} <i>reproduced\N{REPLACEMENT CHARACTER}"
    assert reader.attributes == [
        ("class", "toned"),
        ("class", f"mark {tone}"),
        ("aria-hidden", "true"),
    ]


def test_signs_differ_for_readers_who_see_no_colours():
    assert len(set(MARKS.values())) == len(MARKS) == 3


def test_a_word_without_a_tone_has_no_sign():
    reader = Reader(toned("<i>equal", None))
    assert (reader.tags, reader.attributes, reader.text) == (["span"], [], ["<i>equal"])


# --- what templates ask and write ---------------------------------------------------------------

CELLS = {
    "0": True,
    "-12": True,
    "12,345.67": True,
    "3.3e+08": True,
    "1e-05": True,
    5: True,
    "": False,
    "-": False,
    "12 s": False,
    "e+08": False,
    "nan": False,
    "1\n": False,
    "٣": False,
    Markup("12"): False,
}


@pytest.mark.parametrize(("cell", "expected"), CELLS.items(), ids=map(repr, CELLS))
def test_a_cell_is_a_number_only_if_all_of_it_is(cell, expected):
    asked = TEMPLATES.from_string("{{ cell is a_number }}")
    assert asked.render(cell=cell) == str(expected)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], False),
        ([("loss", "1", "2.5"), ("return", "3", "-4")], False),
        ([("loss", "1", "2.5"), ("return", "3", "none")], True),
        ([("only a head",)], False),
    ],
)
def test_rows_have_words_if_a_cell_beside_the_head_is_not_a_number(rows, expected):
    assert TEMPLATES.from_string("{{ rows is wordy }}").render(rows=rows) == str(expected)


def test_numbers_are_grouped_and_counted():
    text = TEMPLATES.from_string("{{ n | grouped }} of {{ n | counted('report') }}")
    assert text.render(n=12_345) == "12,345 of 12,345 reports"
