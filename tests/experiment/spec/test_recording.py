"""The sections ``recording`` and ``limits``: intervals and sizes within their bounds."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import (
    MAX_MEBIBYTES,
    MAX_MINUTES,
    MAX_PROCESSES,
    LimitsSpec,
    RecordingSpec,
)

MODELS = (RecordingSpec, LimitsSpec)
INTERVALS = ("trace_interval", "tensor_interval", "checkpoint_interval")
MOST = {
    "memory_mb": MAX_MEBIBYTES,
    "disk_mb": MAX_MEBIBYTES,
    "temporary_mb": MAX_MEBIBYTES,
    "processes": MAX_PROCESSES,
    "minutes": MAX_MINUTES,
}


def refusal(model, **fields):
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(fields))
    return str(caught.value)


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", None])
def test_an_interval_is_a_number_of_steps(name, value):
    assert f"{name}\n" in refusal(RecordingSpec, **{name: value})
    assert getattr(RecordingSpec(**{name: 1}), name) == 1


def test_the_default_intervals_are_multiples_of_one_another():
    """So that a spec may leave them out (capsule/experiment/spec/consistency.py)."""
    default = RecordingSpec()
    assert default.tensor_interval % default.trace_interval == 0
    assert default.checkpoint_interval % default.tensor_interval == 0


def test_every_limit_is_tried():
    assert MOST.keys() == LimitsSpec.model_fields.keys()


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_a_limit_includes_its_bounds(name, most):
    for value in (1, most):
        limits = LimitsSpec(**{name: value})
        assert getattr(limits, name) == value
        assert LimitsSpec.parse(limits.document()) == limits
    for value in (0, -1, most + 1, 1.5, None):
        message = refusal(LimitsSpec, **{name: value})
        assert f"{name}\n" in message


def test_the_largest_limits_are_those_of_the_kernel_and_of_exact_arithmetic():
    """Bytes stay below 2**63, and minutes in seconds below 2**31."""
    assert MAX_MEBIBYTES << 20 < 2**63
    assert MAX_MINUTES * 60 < 2**31
    largest = Path("/proc/sys/kernel/pid_max")
    assert int(largest.read_text()) <= MAX_PROCESSES


@pytest.mark.parametrize("model", MODELS)
def test_the_defaults_are_a_document(model):
    assert model.parse(model().document()) == model()
