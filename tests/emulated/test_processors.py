"""The proof of the portable profiles: other processors give the same bits as this one.

QEMU computes RCPPS and RSQRTPS, the two instructions whose results Intel and AMD define
differently, in its own way, different from both: a stand-in for "another vendor".
"""

import json

import pytest

from capsule.experiment import contract
from capsule.experiment.contract import Job
from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.training.determinism.self_test import GOLDEN

pytestmark = pytest.mark.emulated

PROCESSORS = ("Haswell", "Broadwell", "Skylake-Server", "EPYC")
SWEEPS = [
    *(("portable-v3", processor) for processor in PROCESSORS),
    ("portable-v3-strict", "Haswell"),
    ("portable-v3-strict", "EPYC"),
    ("portable-v2", "Nehalem"),
    ("portable-v2", "EPYC"),
]
DQN = {
    "schema": "capsule/spec/v1",
    "name": "emulated",
    "environment": {"suite": "atari", "game": "breakout"},
    "trainer": {
        "algorithm": "dqn",
        "hidden_units": 64,
        "batch_size": 8,
        "micro_batches": [5, 3],
        "total_steps": 52,
        "replay_capacity": 60,
        "replay_start": 40,
        "target_interval": 8,
        "exploration_steps": 12,
    },
    "evaluation": {
        "interval": 52,
        "starts": 1,
        "candidates": 2,
        "shortlist": 1,
        "min_actions": 0,
        "max_actions": 2,
        "max_minutes": 0.003,
    },
    "recording": {"trace_interval": 4, "tensor_interval": 4, "checkpoint_interval": 52},
}


def golden(profile):
    return json.loads((GOLDEN / f"{profile}.json").read_text())["sets"]


def sweep(python, profile, processor=None):
    module = "capsule.training.determinism.self_test"
    return json.loads(python(profile, "-m", module, profile, processor=processor))


@pytest.mark.parametrize("profile", ["portable-v3", "portable-v3-strict", "portable-v2"])
def test_this_processor_gives_the_golden_answers(python, profile):
    found = sweep(python, profile)
    assert {"libraries": found["libraries"], "answers": found["answers"]} in golden(profile)


@pytest.mark.parametrize(("profile", "processor"), SWEEPS)
def test_operators_and_trainings_give_the_golden_answers_elsewhere(python, profile, processor):
    found = sweep(python, profile, processor)
    assert found["known"]
    assert found["different"] == []


@pytest.fixture(scope="module")
def dqn(python, tmp_path_factory):
    """Train our DQN, four updates; return what is claimed."""

    def train(processor=None):
        spec = Spec.model_validate_json(
            json.dumps({**DQN, "accelerator": {"kind": "cpu", "numerics": "portable-v3"}})
        )
        directory = tmp_path_factory.mktemp("dqn") / "run"
        directory.mkdir()
        job = Job(spec=spec, stop_after=None)
        (directory / contract.JOB).write_bytes(job.document())
        variables = environment_variables(spec)
        python("portable-v3", "-m", "capsule.training", directory, processor=processor, **variables)
        result = json.loads((directory / contract.RESULT).read_text())
        assert result.pop("seconds") > 0
        return result, (directory / contract.TRACE).read_bytes()

    return train


@pytest.fixture(scope="module")
def dqn_here(dqn):
    return dqn()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_dqn_learns_the_same_elsewhere(dqn, dqn_here, processor):
    assert dqn(processor) == dqn_here
