"""Markdown in which text from elsewhere stays text. The oracle is another reader of Markdown."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from capsule.report.markdown import code, document, files, items, plain, rows, todo
from capsule.report.text import printable
from tests.report.runs import HOSTILE

READER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
# Hypothesis seldom finds what has a meaning in Markdown by itself.
TEXT = st.one_of(
    st.text(max_size=30), st.text(alphabet="\\`*_[]()<>|~&$#!ab;-+. :\"'\x1b\n", max_size=30)
)


def inline(text):
    """Return the kinds of elements that a line of Markdown has, and its text."""
    (block,) = READER.parseInline(text)
    tokens = block.children or []
    return {token.type for token in tokens}, "".join(token.content for token in tokens)


def test_markdown_is_escaped():
    assert plain("a|b*c_[d](e)<f>") == r"a\|b\*c\_\[d\](e)\<f\>"
    assert code("a`b") == "`a'b`"
    assert not re.search(r"(?<!\\)<", plain(HOSTILE))


@settings(max_examples=40)
@given(TEXT)
def test_plain_text_within_a_line_is_shown_as_it_is(text):
    kinds, shown = inline(f"a {plain(text)}")
    assert kinds <= {"text", "text_special"}
    assert shown == f"a {printable(text)}"


@settings(max_examples=40)
@given(TEXT.map(str.strip).filter(bool))
def test_a_code_span_has_the_text_and_nothing_else(text):
    kinds, shown = inline(code(text))
    assert kinds == {"code_inline"}
    assert shown == printable(text).replace("`", "'")


@settings(max_examples=40)
@given(st.lists(st.tuples(TEXT, TEXT), max_size=4))
def test_a_table_has_the_cells_that_it_was_given(lines):
    made = rows(("item", "text"), [tuple(map(plain, line)) for line in lines])
    tokens = READER.parse(made)
    cells = [
        "".join(part.content for part in following.children)
        for token, following in pairwise(tokens)
        if token.type in ("th_open", "td_open")
    ]
    # The reader also strips spaces that are none of Markdown, such as no-break spaces.
    expected = [printable(text).strip() for line in lines for text in line]
    assert [cell.strip() for cell in cells] == ["item", "text", *expected]


def test_an_empty_text_is_not_the_beginning_of_a_code_span():
    kinds, shown = inline(f"a {code('')} and {code('b')}")
    assert kinds == {"text", "code_inline"}
    assert shown == "a (empty) and b"


@pytest.mark.parametrize("value", [12, None, 1.5])
def test_values_that_are_no_text_are_written_as_python_writes_them(value):
    assert plain(value) == str(value)
    assert code(value) == f"`{value}`"


def test_files_are_cited_as_code_in_their_order():
    assert files("claims.json", "a b.txt") == "`claims.json`, `a b.txt`"
    assert files() == ""


def test_what_is_left_to_a_person_begins_with_a_word_to_search_for():
    assert todo("the licence.") == "**TODO**: the licence."


def test_blocks_are_separated_by_blank_lines_and_empty_ones_are_left_out():
    assert document("# Title", "", "Text.", items(["one", "two"])) == (
        "# Title\n\nText.\n\n- one\n- two\n"
    )


def test_a_list_has_an_item_for_each_line():
    opened = [token.type for token in READER.parse(items(["one", "two", "three"]))]
    assert opened.count("list_item_open") == 3
    assert opened.count("bullet_list_open") == 1
