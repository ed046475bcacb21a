"""What a comparison finds is counted, kept within bounds and judged by its gravest part."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from capsule.verification.content.parts import (
    HARMLESS,
    MAX_DEPTH,
    MAX_EQUAL,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    SHOWN_CHARACTERS,
    Budget,
    Comparison,
    Context,
    Findings,
    NotComparableError,
    Part,
    shown,
)
from tests.verification.content.comparing import TIMES

GRAVITY = {"packaging": 0, "date": 1, "order": 2, "content": 3}
NOTES = st.lists(st.sampled_from(sorted(GRAVITY)), max_size=MAX_PARTS + 5)


def noted(natures):
    found = Findings("test")
    for number, nature in enumerate(natures):
        found.differs(f"part {number}", (number, -number), nature)
    return found


@given(NOTES)
def test_every_part_counts_and_the_gravest_decides(natures):
    found = noted(natures).comparison()
    if not natures:
        assert (found.nature, found.count, len(found.parts)) == ("packaging", 1, 1)
        return
    assert found.count == len(natures)
    assert [part.nature for part in found.parts] == natures[:MAX_PARTS]
    assert GRAVITY[found.nature] == max(map(GRAVITY.get, natures))


def test_a_grave_part_decides_although_it_is_not_kept():
    found = noted(["date"] * MAX_PARTS + ["content"]).comparison()
    assert {part.nature for part in found.parts} == {"date"}
    assert (found.nature, found.count) == ("content", MAX_PARTS + 1)


def test_only_packaging_and_dates_are_harmless():
    assert {nature for nature in GRAVITY if GRAVITY[nature] <= 1} == HARMLESS


@settings(max_examples=50)
@given(NOTES, NOTES)
def test_the_parts_within_a_part_are_included_under_its_name(outer, inner):
    found = noted(outer)
    found.include("member", noted(inner).comparison())
    result = found.comparison()
    assert result.count == len(outer) + max(1, len(inner))
    assert len(result.parts) == min(MAX_PARTS, result.count)
    included = [part.where for part in result.parts[len(outer) :]]
    names = [f"member: part {number}" for number in range(len(inner))] or ["member"]
    assert included == names[: len(included)]


def test_the_first_names_of_equal_parts_are_kept():
    found = Findings("test")
    for number in range(MAX_EQUAL + 5):
        found.same(str(number))
    assert found.comparison().equal == tuple(map(str, range(MAX_EQUAL)))
    assert found.comparison().nature == "packaging"


@given(st.text())
def test_a_value_is_shown_up_to_a_bound(text):
    found = shown(text)
    if len(text) <= SHOWN_CHARACTERS:
        assert found == text
    else:
        assert found == text[:80] + "…"


@pytest.mark.parametrize(
    ("equal", "before"), [(0, ""), (60, "x" * 60), (61, "…" + "x" * 20), (900, "…" + "x" * 20)]
)
def test_the_first_difference_of_long_values_is_shown(equal, before):
    found = Findings("test")
    found.differs("line", ("x" * equal + "a" * 100, "x" * equal + "b" * 100))
    (part,) = found.parts
    left, right = (80 - len(before.strip("…"))) * "a", (80 - len(before.strip("…"))) * "b"
    assert (part.claimed, part.found) == (f"{before}{left}…", f"{before}{right}…")


def test_values_that_fit_are_shown_in_full():
    found = Findings("test")
    found.differs("line", ("x" * 79, "x" * 79 + "y"))
    (part,) = found.parts
    assert (part.claimed, part.found) == ("x" * 79, "x" * 79 + "y")


def test_the_name_of_a_part_is_kept_up_to_a_bound():
    found, name = Findings("test"), "x" * MAX_NAME_CHARACTERS
    for where in (name, name + "y"):
        found.same(where)
        found.differs(where, (1, 2))
        found.include(where, noted(["date"]).comparison())
    result = found.comparison()
    assert result.equal == (name, name + "…")
    # The last character of a name within a part is beyond the bound, too.
    assert [part.where for part in result.parts] == [name, *[name + "…"] * 3]


def test_values_of_any_type_are_shown():
    assert [shown(value) for value in (1.5, [1], b"a")] == ["1.5", "[1]", "b'a'"]


def test_words_of_json_are_shown_as_in_the_file():
    assert [shown(value) for value in (None, True, False)] == ["null", "true", "false"]


def test_a_comparison_is_read_as_it_was_written():
    found = noted(["date", "content"]).comparison()
    assert Comparison.parse(found.document()) == found


@pytest.mark.parametrize("change", [{"nature": "harmless"}, {"count": "2"}, {"more": 1}])
def test_a_comparison_with_another_field_or_value_is_rejected(change):
    with pytest.raises(ValidationError, match=next(iter(change))):
        Comparison(**{"format": "test", "parts": (), "count": 0, "nature": "date", **change})


def test_a_part_is_content_unless_its_nature_is_known():
    assert Part(where="", claimed="a", found="b").nature == "content"


def test_a_budget_is_spent_to_its_last_byte():
    budget = Budget(10)
    budget.spend(4)
    budget.spend(6)
    assert budget.left == 0
    with pytest.raises(NotComparableError, match="more than 4 GiB"):
        budget.spend(1)


def test_files_within_files_are_deeper_and_share_the_budget():
    seen = []

    def compare(name, left, right, context):
        seen.append((name, left, right, context))
        context.budget.spend(3)
        if context.depth <= MAX_DEPTH:
            return context.inner(f"{name}+", left, right)
        return noted([]).comparison()

    outermost = Context(TIMES, compare, Budget(100))
    outermost.inner("a", b"1", b"2")
    assert [(name, context.depth) for name, _, _, context in seen] == [
        ("a", 1),
        ("a+", 2),
        ("a++", 3),
        ("a+++", 4),
    ]
    assert {(left, right) for _, left, right, _ in seen} == {(b"1", b"2")}
    assert outermost.budget.left == 100 - 4 * 3
    assert outermost.depth == 0
