"""Whole runs on a GPU are repeated, and are killed and resumed. Each attempt is a new process."""

import pytest

from capsule.experiment import contract
from tests.training.conftest import (
    ANY_GPU,
    BREAKOUT,
    CARTPOLE,
    claimed,
    finish_run,
    kill_when_traced,
    make_spec,
    merge,
    new_run,
)
from tests.training.impala.trainers import IMPALA
from tests.training.r2d2.test_learner import BREAKOUT as R2D2

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHALLOW = {
    **BREAKOUT,
    "name": "shallow",
    "trainer": {
        "algorithm": "impala",
        "network": "shallow",
        "total_steps": 1_600,
        "actors": 8,
        "unroll_length": 20,
        "batch_size": 4,
        "micro_batches": [2, 2],
        "schedule": {"mode": "lockstep", "policy_lag": 2},
    },
    "evaluation": {**BREAKOUT["evaluation"], "interval": 800},
    "recording": {"trace_interval": 80, "tensor_interval": 400, "checkpoint_interval": 400},
}
CASES = {
    "dqn": BREAKOUT,
    "dqn-adam": merge(CARTPOLE, {"trainer": {"optimizer": "adam", "max_gradient_norm": 10.0}}),
    "r2d2": R2D2,
    "impala": IMPALA,
    "impala-shallow": SHALLOW,
    "impala-residual": merge(SHALLOW, {"trainer": {"network": "residual", "recurrent_units": 16}}),
}
WITH_GRAPHS = ("dqn", "dqn-adam", "r2d2")


def on_gpu(name, **accelerator):
    """Return a case's spec with its networks on this machine's GPU."""
    return make_spec(CASES[name], accelerator=ANY_GPU | accelerator)


def whole(directory, spec):
    """Run a spec to its end in a new process; return what a re-execution must give again."""
    status, errors = finish_run(new_run(directory, spec), warm=False)
    assert status == 0, errors
    return claimed(directory)


@pytest.mark.parametrize("name", CASES)
def test_a_run_has_the_same_bits_again_and_when_it_was_killed(tmp_path, name):
    spec = on_gpu(name)
    expected = whole(tmp_path / "first", spec)
    assert whole(tmp_path / "second", spec) == expected
    killed = new_run(tmp_path / "killed", spec)
    kill_when_traced(killed, (tmp_path / "first" / contract.TRACE).stat().st_size * 0.6, warm=False)
    assert finish_run(killed, warm=False)[0] == 0
    assert claimed(killed) == expected


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_a_run_with_graphs_has_the_bits_of_a_run_without_them(tmp_path, name):
    expected = whole(tmp_path / "without", on_gpu(name))
    assert whole(tmp_path / "with", on_gpu(name, cuda_graphs=True)) == expected
