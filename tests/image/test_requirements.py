"""Requirements by anyone are parsed without deep recursion."""

import sys

import pytest

from capsule.image.requirements import MAX_PARENTHESES, read_requirement


def nested(count):
    return f"torch >= 2; {'(' * count}os_name == 'posix'{')' * count}"


def test_a_requirement_is_parsed():
    found = read_requirement("torch[a] (>= 2); (os_name == 'posix')")
    assert (found.name, found.extras, str(found.specifier)) == ("torch", {"a"}, ">=2")


def test_markers_may_have_parentheses_up_to_a_bound():
    found = read_requirement(nested(MAX_PARENTHESES))
    assert found.marker.evaluate({"os_name": "posix"})
    with pytest.raises(ValueError, match="more than 100 parentheses"):
        read_requirement(nested(MAX_PARENTHESES + 1))


def test_a_marker_that_is_parsed_is_also_evaluated_and_written_where_the_stack_is_deep():
    found = read_requirement(nested(MAX_PARENTHESES))

    def deep(calls):
        if calls:
            return deep(calls - 1)
        return found.marker.evaluate({"os_name": "posix"}) and str(found)

    assert deep(sys.getrecursionlimit() // 2).startswith("torch")


@pytest.mark.parametrize("text", ["", "torch >", "torch; os_name ==", "a b"])
def test_what_is_not_a_requirement_is_an_error_of_its_value(text):
    with pytest.raises(ValueError, match="Expected"):
        read_requirement(text)
