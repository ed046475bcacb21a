"""The evaluation of a run's networks: which are kept, how it stops, and how it continues."""

from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.contract import Evaluation
from capsule.experiment.errors import CapsuleError
from capsule.training import evaluator
from capsule.training.evaluation.protocol import Reactive
from capsule.training.evaluator import NETWORKS, Evaluator, evaluated_steps
from capsule.training.networks.feedforward import Parameters
from capsule.training.state.run_directory import Interrupted
from capsule.training.state.streams import make_streams
from tests.training.conftest import CARTPOLE, make_spec

SPEC = make_spec(CARTPOLE).training()


class Learner:
    """A trainer whose policy prefers the action that its only parameter names."""

    actions = 2

    def __init__(self):
        self.step, self.asked = 0, []
        self.online = Parameters({"preferred": (1,)}, torch.device("cpu"))

    def policy(self, parameters):
        preferred = float(parameters.flat[0])
        self.asked.append(preferred)
        values = np.array([-preferred, preferred], np.float32)
        return Reactive(lambda observations: np.tile(values, (len(observations), 1)))


@pytest.fixture
def run(tmp_path):
    """An evaluator whose networks of steps 0, 800 and 1,600 are kept, with its learner."""
    learner, stop = Learner(), Event()

    def begin():
        stream = make_streams(SPEC.seeds)["evaluation"]
        return Evaluator(tmp_path, SPEC, learner, SPEC.seeds, stream, stop, workers=2)

    keeper = begin()
    for learner.step in range(0, 1_601, 400):
        learner.online.flat[0] = learner.step - 700
        keeper.keep_network()
    return SimpleNamespace(begin=begin, learner=learner, stop=stop, directory=tmp_path)


def test_networks_are_kept_where_they_are_evaluated(run):
    kept = (run.directory / contract.STATE / NETWORKS).iterdir()
    assert sorted(int(path.stem) for path in kept) == [0, 800, 1_600] == evaluated_steps(SPEC)


def test_the_network_before_training_is_left_out_where_the_spec_says_so():
    spec = make_spec(CARTPOLE, evaluation={"initial": False}).training()
    assert evaluated_steps(spec) == [800, 1_600]


def test_an_interrupted_evaluation_continues_to_the_same_bytes(run):
    assert list(run.begin().evaluate()) == [800, 1_600]
    # The first chose the starts; two threads share the rest.
    assert run.learner.asked[0] == 900
    assert sorted(run.learner.asked[1:]) == [-700, 100, 900]
    path = run.directory / contract.EVALUATION
    whole = path.read_bytes()
    assert [point.step for point in Evaluation.model_validate_json(whole).points] == [0, 800, 1_600]
    path.unlink()
    (run.directory / contract.STATE / "evaluation.json").unlink()
    first = run.begin().evaluate()
    assert next(first) == 800
    run.stop.set()
    with pytest.raises(Interrupted):
        next(first)
    run.stop.clear()
    run.learner.asked.clear()
    assert list(run.begin().evaluate()) == [1_600]
    assert run.learner.asked == [900]
    assert path.read_bytes() == whole


def test_candidates_are_checked_before_training_and_nothing_is_drawn_for_it(run):
    keeper = run.begin()
    keeper.check_starts()
    assert keeper._stream.draws == 0
    run.stop.set()
    with pytest.raises(Interrupted):
        keeper.check_starts()


def test_no_progress_is_saved_after_a_failed_allocation(run, monkeypatch):
    def fail(device):
        raise CapsuleError("CAP-T116", str(device), fix="")

    monkeypatch.setattr(evaluator, "check_memory", fail)
    with pytest.raises(CapsuleError, match="CAP-T116 cpu"):
        next(run.begin().evaluate())
    assert not (run.directory / contract.STATE / "evaluation.json").exists()


def test_a_damaged_progress_is_refused(run):
    next(run.begin().evaluate())
    path = run.directory / contract.STATE / "evaluation.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CapsuleError, match=r"state/evaluation\.json is not a saved") as refused:
        next(run.begin().evaluate())
    assert refused.value.code == "CAP-T132"
