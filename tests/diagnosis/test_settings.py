"""Settings as remedies: which are in force, which are possible, which are given up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from capsule.diagnosis.findings import CATALOGUE, finding
from capsule.diagnosis.settings import (
    described,
    given_up,
    in_force,
    tailored,
    unexplained,
    with_settings,
)
from tests.diagnosis.conftest import PROGRAM, SYSTEM_CLOCK, parsed


@pytest.mark.parametrize("code", CATALOGUE)
def test_nothing_is_recommended_that_is_in_force(code):
    item = tailored(finding(code, ""), parsed(PROGRAM))
    assert item.patch == {}
    assert item.mitigation == CATALOGUE[code].fix


def test_what_is_not_in_force_is_recommended():
    item = tailored(finding("CAP-D102", ""), parsed(PROGRAM, **SYSTEM_CLOCK))
    assert item.patch == {"entropy.clock": "virtual"}
    assert "entropy.clock: virtual" in item.mitigation
    uncurable = finding("CAP-D102", "", curable=False)
    assert tailored(uncurable, parsed(PROGRAM, **SYSTEM_CLOCK)).patch == {}


def test_a_field_that_the_spec_may_not_hold_is_not_recommended():
    assert with_settings(parsed(PROGRAM), {"recording.trace_interval": 8}) is None
    assert with_settings(parsed(PROGRAM), {"entropy.clock": "fixed"}).entropy.clock == "fixed"
    native = finding("CAP-D102", "").model_copy(update={"patch": {"recording.trace_interval": 8}})
    assert tailored(native, parsed(PROGRAM)).patch == {}


def test_the_default_clock_is_in_force_without_being_written():
    assert in_force(parsed(PROGRAM), "entropy.clock") == "virtual"
    assert in_force(parsed(PROGRAM), "determinism.threads") == 1


def test_every_guarantee_that_is_given_up_is_a_candidate():
    assert given_up(parsed(PROGRAM)) == []
    weak = {
        "entropy": {"clock": "system", "mode": "system", "address_randomization": True},
        "determinism": {"threads": None, "algorithms": "warn", "sorted_listings": False},
    }
    (item,) = given_up(parsed(PROGRAM, **weak))
    assert item.patch == {
        "entropy.mode": "virtual",
        "entropy.address_randomization": False,
        "entropy.clock": "virtual",
        "determinism.threads": 1,
        "determinism.algorithms": "error",
        "determinism.sorted_listings": True,
    }
    assert "entropy.clock: system" in item.message
    assert "determinism.threads: null" in item.message


def test_settings_are_tried_with_the_rest_of_the_spec_as_it_is():
    spec = parsed(PROGRAM, **SYSTEM_CLOCK)
    changed = with_settings(spec, {"entropy.clock": "virtual"})
    assert changed.entropy.clock == "virtual"
    assert changed.model_copy(update={"entropy": spec.entropy}) == spec


# --- settings as a spec writes them -------------------------------------------------------------


SETTINGS = st.one_of(st.booleans(), st.integers(), st.sampled_from(["virtual", "error", "off"]))


@settings(max_examples=20)
@given(SETTINGS)
def test_a_described_setting_is_read_back_from_yaml(value):
    """YAML 1.2, as a spec: 'off' is a word, and only 'true' and 'false' are truth values."""
    field, text = "entropy.clock", described({"entropy.clock": value})
    assert YAML(typ="safe").load(text) == {field: value}


def test_settings_are_described_in_their_order():
    patch = {"b": True, "a.c": 0, "a.b": "virtual"}
    assert described(patch) == "b: true, a.c: 0, a.b: virtual"
    assert described({}) == ""


# --- what the spec has --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "field", "value"),
    [
        ({"determinism": {"hash_seed": None}}, "determinism.hash_seed", None),
        ({"determinism": {"threads": 3}}, "determinism.threads", 3),
        ({"entropy": {"clock": "fixed"}}, "entropy.clock", "fixed"),
        ({"entropy": {"mode": "system"}}, "entropy.mode", "system"),
    ],
)
def test_the_value_in_force_is_the_one_that_the_spec_states(sections, field, value):
    assert in_force(parsed(PROGRAM, **sections), field) == value


@pytest.mark.parametrize(
    "patch",
    [
        {"entropy.mode": "no such mode"},
        {"entropy.no_such_field": True},
        {"no_such_section.field": True},
        {"determinism.threads": -1},
        {"entropy.mode": "virtual", "determinism.threads": "many"},
    ],
)
def test_a_spec_that_cannot_have_the_settings_is_not_made(patch):
    assert with_settings(parsed(PROGRAM), patch) is None


def test_the_spec_itself_is_not_changed_by_trying_settings():
    spec = parsed(PROGRAM)
    digest = spec.digest()
    changed = with_settings(spec, {"determinism.threads": 2, "entropy.mode": "system"})
    assert (changed.determinism.threads, changed.entropy.mode) == (2, "system")
    assert spec.digest() == digest
    assert with_settings(spec, {}) == spec


# --- guarantees that are given up ---------------------------------------------------------------

WEAK = {
    "entropy.mode": "system",
    "entropy.address_randomization": True,
    "entropy.clock": "system",
    "determinism.hash_seed": None,
    "determinism.threads": None,
    "determinism.algorithms": "off",
    "determinism.fill_uninitialized_memory": False,
    "determinism.sorted_listings": False,
}


@pytest.mark.parametrize("field", WEAK)
def test_each_guarantee_that_is_given_up_is_named_with_its_value_and_its_remedy(field):
    section, name = field.split(".")
    (item,) = given_up(parsed(PROGRAM, **{section: {name: WEAK[field]}}))
    assert (item.code, item.level) == ("CAP-D110", "warning")
    assert item.message == f"the spec says {described({field: WEAK[field]})}"
    assert list(item.patch) == [field]


def test_the_settings_of_the_finding_give_every_guarantee_back():
    weak = with_settings(parsed(PROGRAM), WEAK)
    (item,) = given_up(weak)
    assert item.patch.keys() == WEAK.keys()
    assert given_up(with_settings(weak, item.patch)) == []


# --- causes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], True),
        (["CAP-D101"], True),
        (["CAP-D101", "CAP-D109"], True),
        (["CAP-D101", "CAP-D202", "CAP-D304"], True),  # a warning and a note name no cause
        (["CAP-D101", "CAP-D105"], False),
        (["CAP-D101", "CAP-D108"], False),
        (["CAP-D109", "CAP-D111"], False),
    ],
)
def test_a_difference_is_unexplained_as_long_as_no_finding_names_a_cause(codes, expected):
    assert unexplained(finding(code, "") for code in codes) == expected


def test_a_cause_at_the_level_of_a_warning_is_only_a_candidate():
    assert unexplained([finding("CAP-D105", "", level="warning")])
