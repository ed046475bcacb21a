"""Settings as remedies: which are in force, which are possible, which are given up."""

import pytest

from capsule.diagnosis.findings import CATALOGUE, finding
from capsule.diagnosis.settings import given_up, in_force, tailored, with_settings
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
