"""Version constraints: one grammar, held against the one of Python's packages."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from pydantic import TypeAdapter, ValidationError

from capsule.experiment.fields import VersionConstraint
from capsule.experiment.versions import CONSTRAINT, satisfies

FIELD = TypeAdapter(VersionConstraint)

releases = st.lists(st.integers(0, 15), min_size=1, max_size=4).map(
    lambda numbers: ".".join(map(str, numbers))
)
clauses = st.one_of(
    st.builds(
        "{}{}{}".format, st.sampled_from(["", "==", "!="]), releases, st.sampled_from(["", ".*"])
    ),
    st.builds("{}{}".format, st.sampled_from([">=", "<=", ">", "<"]), releases),
    st.builds("~={}.{}".format, releases, st.integers(0, 15)),
)


def written_out(constraint):
    """Return a constraint as PEP 440 has it, where a bare release is an error."""
    return ",".join(
        f"=={clause.removesuffix('.*')}.*" if clause[0].isdigit() else clause
        for clause in map(str.strip, constraint.split(","))
    )


@settings(max_examples=500)
@given(releases, st.lists(clauses, min_size=1, max_size=3).map(",".join))
@pytest.mark.slow
def test_constraints_mean_what_they_mean_to_pip(version, constraint):
    assert FIELD.validate_python(constraint) == constraint
    expected = SpecifierSet(written_out(constraint)).contains(version)
    assert satisfies(version, constraint) is expected


@pytest.mark.slow
@settings(max_examples=300)
@given(st.from_regex(r"(==|!=|>=|<=|>|<|~=|=|)[0-9][0-9.*]*(, ?[0-9<>=~!.*]*)?", fullmatch=True))
def test_what_the_field_takes_pip_takes_as_well(constraint):
    try:
        FIELD.validate_python(constraint)
    except ValidationError:
        assert not re.match(CONSTRAINT, constraint)
    else:
        SpecifierSet(written_out(constraint))
        assert satisfies("13.0.96", constraint) in (True, False)


@pytest.mark.parametrize(
    ("version", "constraint", "met"),
    [
        ("13.0.96", "13.0", True),  # CUDA's wheel, and what torch says of it
        ("13.0.96", ">=13.0.48", True),
        ("9.10.2.21", "9.10.2", True),
        ("9.10.2.21", "!=9.10.1", True),
        ("580.65.06", ">=580.65,<590", True),
        ("580.65.06-grid", "580", True),
        ("590.10", ">=580.65, <590", False),
        ("", ">=1", False),
        ("unknown", ">=1", False),
        ("13.1", "13.0", False),
        ("12.4", "==12.4.0", True),
    ],
)
def test_versions_of_drivers_and_libraries(version, constraint, met):
    assert satisfies(version, constraint) is met


@pytest.mark.parametrize("constraint", ["", "=13", "~=13", ">=13.*", "13,", "v13", "13.x", ">= 13"])
def test_anything_else_is_refused_where_the_spec_is_read(constraint):
    with pytest.raises(ValidationError):
        FIELD.validate_python(constraint)
