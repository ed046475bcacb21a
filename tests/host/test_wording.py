"""Words of messages that depend on a number, or on whether there is a value."""

import pytest

from capsule.host.wording import agreeing, counted, shown_value


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("file",), "0 files"),
        (1, ("file",), "1 file"),
        (2, ("file",), "2 files"),
        (1_234_567, ("byte",), "1,234,567 bytes"),
        (1, ("process", "processes"), "1 process"),
        (2, ("process", "processes"), "2 processes"),
    ],
)
def test_things_are_counted_in_words(number, words, text):
    assert counted(number, *words) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "absent"),
        ("", ""),
        (0, "0"),
        (False, "False"),
        ("None", "None"),
        ({"layers": ["é", None]}, '{"layers": ["é", null]}'),
        (["a", 1], '["a", 1]'),
    ],
)
def test_a_value_that_is_absent_has_a_word(value, text):
    assert shown_value(value) == text


@pytest.mark.parametrize(("number", "verb"), [(0, "differ"), (1, "differs"), (2, "differ")])
def test_a_verb_agrees_with_the_number_before_it(number, verb):
    assert agreeing(number, "differs", "differ") == verb
