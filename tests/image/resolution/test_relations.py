"""Versions compare as dpkg has them, and packages are chosen as apt chooses them."""

import re
import shutil
import subprocess
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.image.resolution.indexes import index_of
from capsule.image.resolution.relations import (
    Relation,
    Stanza,
    Unresolvable,
    compare_versions,
    install,
    parse_relations,
)

# In ascending order; those of a line are equal (deb-version(7), and Debian policy 5.6.12).
VERSIONS = (
    ("1.0~~",),
    ("1.0~~a",),
    ("1.0~",),
    ("1.0~rc1-1",),
    ("1.0", "0:1.0", "1.0-0", "1.00"),
    ("1.0-1~deb12u1",),
    ("1.0-1",),
    ("1.0-1+b1",),
    ("1.0-1+deb12u1",),
    ("1.0a",),
    ("1.0+dfsg",),
    ("1.0.1",),
    ("1.2",),
    ("1.10",),
    ("1:0.1",),
    ("1:0.1:2",),
)


def test_versions_sort_as_debian_has_them():
    for (rank, line), (other, others) in product(enumerate(VERSIONS), repeat=2):
        for one, two in product(line, others):
            found = compare_versions(one, two)
            assert (found > 0) - (found < 0) == (rank > other) - (rank < other), (one, two)


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="needs dpkg")
@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(*[st.from_regex(r"\A([0-9]:)?[0-9][0-9a-b.+~]{0,5}(-[0-9a-b.+~]{1,3})?\Z")] * 2)
def test_versions_compare_as_dpkg_compares_them(one, other):
    found = compare_versions(one, other)
    operator = "lt" if found < 0 else "gt" if found > 0 else "eq"
    command = ["dpkg", "--compare-versions", one, operator, other]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_relations_have_alternatives_versions_and_qualifiers():
    assert parse_relations("libc6 (>= 2.36), a:any | b (<<1:2~), c (= ${x}) ") == [
        [Relation("libc6", ">=", "2.36")],
        [Relation("a", "", ""), Relation("b", "<<", "1:2~")],
        [Relation("c", "=", "${x}")],
    ]
    assert parse_relations("") == []


@settings(deadline=None, max_examples=200)
@given(st.text())
@pytest.mark.slow
def test_relations_and_versions_survive_any_text(text):
    parse_relations(text)
    assert compare_versions(text, text) == 0


def archive(*lines):
    """Return an index of packages, each ``NAME VERSION; Field: value; …``."""
    blocks = []
    for line in lines:
        head, *fields = line.split("; ")
        name, version = head.split()
        blocks.append("\n".join([f"Package: {name}", f"Version: {version}", *fields]))
    return index_of(["\n\n".join(blocks)])


def added(index, *extra, installed=()):
    base = [Stanza(*each.split(), {}) for each in installed]
    return {f"{each.name} {each.version}" for each in install(extra, base, index)}


def test_dependencies_come_with_theirs():
    index = archive("a 1; Depends: b, c (>= 2)", "b 1; Pre-Depends: d", "c 2", "d 1", "e 1")
    assert added(index, "a") == {"a 1", "b 1", "c 2", "d 1"}


def test_the_newest_version_of_several_suites_is_taken():
    index = index_of(["Package: a\nVersion: 1-1\n", "Package: a\nVersion: 1-1+deb12u2\n"])
    assert added(index, "a") == {"a 1-1+deb12u2"}


def test_what_is_installed_stays_unless_a_newer_version_is_needed():
    index = archive("a 1; Depends: b", "c 1; Depends: b (>= 2)", "b 2; Depends: d", "d 1")
    assert added(index, "a", installed=["b 1"]) == {"a 1"}
    assert added(index, "c", installed=["b 1"]) == {"c 1", "b 2", "d 1"}
    assert added(index, "b", installed=["b 3"]) == set()
    assert added(index, "b", installed=["b 1"]) == {"b 2", "d 1"}


def test_the_first_alternative_is_taken_unless_another_is_there():
    index = archive("a 1; Depends: x | y", "x 1", "y 1", "b 1; Depends: no (>= 2) | y")
    assert added(index, "a") == {"a 1", "x 1"}
    assert added(index, "a", installed=["y 1"]) == {"a 1"}
    assert added(index, "b") == {"b 1", "y 1"}


def test_a_virtual_package_comes_by_the_provider_of_the_highest_priority():
    index = archive(
        "a 1; Depends: mail",
        "exim 1; Provides: mail; Priority: optional",
        "mta 1; Provides: other, mail (= 3); Priority: important",
        "b 1; Depends: mail (>= 2)",
    )
    assert added(index, "a") == {"a 1", "mta 1"}
    assert added(index, "b") == {"b 1", "mta 1"}  # exim's has no version


def test_a_package_of_the_base_that_another_breaks_is_replaced_by_a_newer_one():
    index = archive("a 1; Breaks: b (<< 2)", "b 2")
    assert added(index, "a", installed=["b 1"]) == {"a 1", "b 2"}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["a 1; Depends: b"], "a needs b, which is missing"),
        (["a 1; Depends: b (>= 2)", "b 1"], "a needs b (>= 2), which is missing"),
        (["a 1; Depends: b, c", "b 1; Conflicts: c", "c 1"], "b breaks c 1"),
        (["b 1; Provides: a"], "a is a virtual package, or does not exist"),
        (["a 1; Depends: b, c (= 1)", "b 1; Depends: c (= 2)", "c 2"], "a needs c (= 1)"),
    ],
)
def test_what_cannot_be_is_said(lines, reason):
    with pytest.raises(Unresolvable, match=re.escape(reason)):
        added(archive(*lines), "a")


def test_a_package_may_conflict_with_what_it_provides_itself():
    index = archive("a 1; Provides: mail; Conflicts: mail", "c 1; Depends: c", "d 1; Depends: e")
    assert added(index, "a") == {"a 1"}
    assert added(index, "c") == {"c 1"}


def test_a_choice_is_not_revised_but_the_spec_may_name_another_alternative_before():
    index = archive("a 1; Depends: x | y, z", "x 1", "y 1", "z 1; Conflicts: x")
    with pytest.raises(Unresolvable, match="z breaks x 1"):
        added(index, "a")
    assert added(index, "y", "a") == {"y 1", "a 1", "z 1"}
