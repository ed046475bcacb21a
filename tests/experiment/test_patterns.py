"""Patterns that choose paths: the last one that matches decides."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.experiment.patterns import chosen


@pytest.mark.parametrize(
    ("patterns", "path", "expected"),
    [
        (["*"], "a/b/.c", True),
        (["*", "!*.log"], "a/b.log", False),
        (["*", "!data/*", "data/small.csv"], "data/small.csv", True),
        (["results/*"], "other", False),
        (["A"], "a", False),
    ],
)
def test_the_last_matching_pattern_decides(patterns, path, expected):
    assert chosen(path, patterns) is expected


@given(st.text(min_size=1), st.lists(st.text(min_size=2)))
def test_a_final_star_takes_everything_and_its_negation_nothing(path, patterns):
    assert chosen(path, [*patterns, "*"])
    assert not chosen(path, [*patterns, "!*"])


def test_without_a_pattern_nothing_is_chosen():
    assert not chosen("a", [])


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("data/*", "data/a/b.csv", True),
        ("data/*", "data", False),
        ("data/*", "other/data/a", False),
        ("?.py", "a.py", True),
        ("?.py", "ab.py", False),
        ("[ab].py", "b.py", True),
        ("[!ab].py", "b.py", False),
        ("[!ab].py", "c.py", True),
        ("*.PY", "a.py", False),
        ("a.b", "axb", False),
    ],
)
def test_a_pattern_is_one_of_a_shell_whose_star_crosses_folders(pattern, path, expected):
    assert chosen(path, [pattern]) is expected


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(["!a"], False), (["!b"], False), (["a", "!b"], True), (["!a", "a"], True)],
)
def test_an_exclusion_alone_chooses_nothing(patterns, expected):
    assert chosen("a", patterns) is expected


def test_patterns_may_come_from_an_iterator():
    assert chosen("a", iter(["*", "!b"]))


names = st.text("ab/.", min_size=1, max_size=6)
patterns = st.lists(st.text("ab*/.!", min_size=2, max_size=5).filter(lambda each: each[1] != "!"))


@given(names, patterns)
def test_patterns_that_do_not_match_change_nothing(path, given_patterns):
    matching = [
        pattern
        for pattern in given_patterns
        if fnmatch.fnmatchcase(path, pattern[1:] if pattern[0] == "!" else pattern)
    ]
    assert chosen(path, given_patterns) is chosen(path, matching)
    assert chosen(path, given_patterns) is bool(matching and matching[-1][0] != "!")
