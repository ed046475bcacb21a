"""Checkpoints and states: where they are written, and what is refused when a run is resumed."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from capsule.experiment import contract
from capsule.experiment.contract import Checkpoint, CheckpointIndex
from capsule.experiment.errors import CapsuleError
from capsule.training.checkpointer import Checkpointer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import STATE_STEPS
from tests.training.conftest import CARTPOLE, finish_run, make_spec, read, start_variables


class Learner:
    """A trainer that only counts."""

    def __init__(self, names=("parameters/weight",)):
        self.step, self.restored, self.names = 0, None, names

    def tensor_names(self):
        return self.names

    def tensors(self):
        return {"parameters/weight": np.full(3, self.step, np.float32)}

    def state(self):
        return {"counted": self.step}

    def restore(self, *saved):
        self.restored = saved


@pytest.fixture
def begin(tmp_path):
    """A function that makes a checkpointer in a run directory, with what it works for."""
    traces = []

    def make(total=1_000, interval=400, *, keeps_states=False, learner=None):
        trainer = {"total_steps": total}
        recording = {"checkpoint_interval": interval}
        spec = make_spec(CARTPOLE, trainer=trainer, recording=recording).training()
        traces.append(Trace(tmp_path / contract.TRACE))
        learner, streams = learner or Learner(), make_streams(spec.seeds)
        checkpointer = Checkpointer(
            tmp_path, spec, learner, streams, traces[-1], keeps_states=keeps_states
        )
        checkpointer.restore()
        return SimpleNamespace(checkpointer=checkpointer, learner=learner, streams=streams)

    yield make
    for trace in traces:
        trace.close()


def test_checkpoints_are_claimed_at_every_interval_and_at_the_end(begin, tmp_path):
    run = begin()
    claimed = []
    for run.learner.step in range(200, 1_001, 200):
        if run.checkpointer.checkpoint(final=run.learner.step == 1_000):
            claimed.append(run.learner.step)
    assert claimed == [400, 800, 1_000]
    index = read(tmp_path, contract.CHECKPOINT_INDEX)["checkpoints"]
    assert [checkpoint["step"] for checkpoint in index] == claimed
    final = tmp_path / contract.CHECKPOINTS / f"{contract.checkpoint_name(1_000)}.safetensors"
    assert [path.name for path in final.parent.glob("*.safetensors")] == [final.name]


def test_a_state_is_saved_more_often_than_checkpoints_that_are_far_apart(begin, tmp_path):
    run = begin(total=4 * STATE_STEPS, interval=3 * STATE_STEPS)
    resume = tmp_path / contract.STATE / "resume.json"
    run.learner.step = STATE_STEPS - 4
    assert not run.checkpointer.checkpoint(final=False)
    assert not resume.exists()
    run.learner.step = STATE_STEPS
    assert not run.checkpointer.checkpoint(final=False)
    assert resume.exists()
    assert not (tmp_path / contract.CHECKPOINT_INDEX).exists()


def test_a_run_continues_from_the_state_that_was_saved_last(begin):
    first = begin()
    first.learner.step = 400
    first.checkpointer.checkpoint(final=False)
    first.learner.step, word = 500, first.streams["minibatch"].word()
    first.checkpointer.save_state()
    second = begin()
    step, state, tensors = second.learner.restored
    assert (step, state) == (500, {"counted": 500})
    assert tensors["parameters/weight"].tolist() == [500] * 3
    assert second.streams["minibatch"].draws == 1
    assert second.streams["minibatch"].word() != word
    second.learner.step = 800
    assert second.checkpointer.checkpoint(final=False)


NAMES = tuple(f"member {n // 118}/optimizer/square/block.{n % 118}.weight" for n in range(2_832))


def test_more_checkpoints_than_a_bundle_can_list_are_rejected_before_the_first_step(
    begin, monkeypatch
):
    digest = "0" * 64
    each = Checkpoint(step=82_000, tensors=dict.fromkeys(NAMES, digest), trace_head=digest)
    one, two = (len(CheckpointIndex(checkpoints=(each,) * n).document()) for n in (1, 2))
    size = one + 204 * (two - one)  # of 205 checkpoints
    monkeypatch.setattr("capsule.training.checkpointer.MAX_DOCUMENT_BYTES", size - 1)
    with pytest.raises(CapsuleError) as failure:
        begin(82_000, learner=Learner(NAMES))
    assert str(failure.value) == (
        "CAP-T134 recording.checkpoint_interval 400 gives 205 checkpoints of 2,832 tensors each, "
        "more than the 204 that a bundle can list"
    )
    assert failure.value.fix == "Make it at least 404."
    begin(82_000, 404, learner=Learner(NAMES))


def test_the_bound_of_checkpoints_is_what_readers_accept(begin):
    assert begin(82_000, 1_000, learner=Learner(NAMES))
    with pytest.raises(CapsuleError, match="CAP-T134"):
        begin(410_000, 1_000, learner=Learner(NAMES))


def test_states_of_segments_are_kept_at_claimed_checkpoints_but_the_last(begin, tmp_path):
    run = begin(keeps_states=True)
    for run.learner.step in range(200, 1_001, 200):
        run.checkpointer.checkpoint(final=run.learner.step == 1_000)
    kept = sorted(path.stem for path in (tmp_path / contract.SEGMENT_STATES).glob("*.json"))
    assert kept == [contract.checkpoint_name(400), contract.checkpoint_name(800)]


@pytest.mark.parametrize(
    ("name", "damage", "code"),
    [
        ("state/resume.json", lambda data: data[: len(data) // 2], "CAP-T132"),
        ("state/resume.json", lambda data: data.replace(b'"step":', b'"stop":'), "CAP-T132"),
        ("state/resume.json", lambda data: data.replace(b'"episodes":', b'"episode":'), "CAP-T132"),
        ("state/tensors-400.safetensors", lambda data: data[:-4], "CAP-T132"),
        ("state/tensors-400.safetensors", lambda data: data[:-4] + b"\0\0\0\1", "CAP-T132"),
        ("state/replay/frames.bin", lambda data: b"\1" * len(data), "CAP-T223"),
        ("trace.jsonl", lambda data: data[:100], "CAP-T121"),
        ("job.json", lambda data: data[:-2], "CAP-T111"),
        ("job.json", lambda data: data.replace(b'"root":0', b'"root":7'), "CAP-T133"),
    ],
)
@pytest.mark.slow
def test_a_damaged_directory_is_refused(saved_run, tmp_path, name, damage, code):
    directory = shutil.copytree(saved_run, tmp_path / "damaged")
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    status, errors = finish_run(
        directory, environment=start_variables(make_spec(CARTPOLE)), warm=True
    )
    assert (status, read(directory, contract.FAILURE)["code"]) == (6, code), errors
