"""The section ``determinism``: the range of each layer, as Python and the C library have it."""

import json
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import DeterminismSpec


def parse(**fields):
    return DeterminismSpec.model_validate_json(json.dumps(fields))


def refusal(**fields):
    with pytest.raises(ValidationError) as caught:
        parse(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"hash_seed": 0}, {"hash_seed": 2**32 - 1}, {"hash_seed": None},
        {"threads": 1}, {"threads": None}, {"cores": 1}, {"cores": 1024}, {"cores": None},
        {"algorithms": "off"}, {"cublas_workspace": None}, {"tf32": True},
    ],
)  # fmt: skip
def test_what_is_in_range_is_read_back(fields):
    found = parse(**fields)
    assert DeterminismSpec.parse(found.document()) == found
    ((name, value),) = fields.items()
    assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hash_seed", -1), ("hash_seed", 2**32), ("hash_seed", "random"), ("hash_seed", 1.0),
        ("threads", 0), ("threads", -1), ("threads", True), ("cores", 0), ("cores", 1025),
        ("algorithms", "strict"), ("algorithms", True), ("algorithms", None),
        ("cublas_workspace", ":4096:2"), ("cublas_workspace", ""), ("tf32", 0), ("tf32", "false"),
        ("propagation", None), ("cudnn_benchmark", None), ("batch_invariance", "yes"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_rejected_by_its_field(name, value):
    message = refusal(**{name: value})
    assert f"\n{name}" in message


@pytest.mark.parametrize(("seed", "accepted"), [(0, True), (2**32 - 1, True), (2**32, False)])
def test_the_range_of_hash_seeds_is_that_of_python(seed, accepted):
    done = subprocess.run(
        [sys.executable, "-S", "-c", ""],
        env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": str(seed)},
        capture_output=True,
    )
    assert (done.returncode == 0) is accepted


def test_the_defaults_are_the_strictest_that_torch_has():
    default = DeterminismSpec()
    assert default.algorithms == "error"
    assert not default.cudnn_benchmark
    assert not default.tf32
    assert None not in (default.hash_seed, default.threads, default.cublas_workspace)
