"""The screens of environments, and the file in which those of an episode are."""

import io
import zlib

import numpy as np
import pytest

from capsule.experiment import contract
from capsule.experiment.contract import EpisodeOrder, Job
from capsule.training.environments import make_environment
from capsule.training.evaluation.action_choice import choice_of
from capsule.training.evaluation.protocol import evaluate, evaluation_environments
from capsule.training.film import Camera, play
from capsule.training.state.checkpoint import save_tensors
from capsule.training.state.streams import make_streams
from tests.training.conftest import CARTPOLE, make_spec
from tests.training.impala.trainers import IMPALA, NATIVE
from tests.training.r2d2.test_learner import TASK as R2D2

MINATAR = {
    **CARTPOLE,
    "environment": {"suite": "minatar", "game": "breakout"},
    "trainer": {**CARTPOLE["trainer"], "network": "small-conv"},
}


def environment_of(base):
    spec = make_spec(base)
    return make_environment(spec.environment, make_streams(spec.seeds), training=False)


def test_a_camera_writes_the_screens_of_its_episode_only():
    first, second = environment_of(MINATAR), environment_of(MINATAR)
    stream, screens = io.BytesIO(), []
    camera = Camera(1, stream)
    for environment in (first, second):
        environment.reset()
    for action in (1, 3, 0):
        camera(0, first)
        camera(1, second)
        screens.append(second.screen())
        first.step(action)
        second.step(action)
    camera.close()
    assert zlib.decompress(stream.getvalue()) == np.stack(screens).tobytes()
    assert (camera.screens, camera.size, camera.rate) == (3, (10, 10), 10.0)


@pytest.mark.parametrize("document", [CARTPOLE, R2D2, IMPALA], ids=["dqn", "r2d2", "impala"])
def test_an_evaluation_is_played_again_without_replay_memory_and_actors(
    open_trainer, tmp_path, document
):
    changes = NATIVE | {"seeds": {"root": 5}}
    trainer = open_trainer(document, **changes)
    directory, starts, step = tmp_path / "film", ((), (1, 0), (0,)), 1_600
    save_tensors(
        directory / contract.CHECKPOINTS / f"{contract.checkpoint_name(step)}.safetensors",
        trainer.tensors(),
    )
    job = Job(spec=make_spec(document, **changes), tree={})
    order = EpisodeOrder(seed=5, step=step, starts=starts, episode=0)
    unused = Camera(len(starts), io.BytesIO())
    played = play(directory, job, order, unused)
    spec = job.spec.training()
    assert played == evaluate(
        evaluation_environments(spec.environment, spec.seeds, spec.evaluation.starts),
        starts,
        spec.evaluation,
        trainer.policy(trainer.online),
        step,
        choice_of(spec.evaluation, spec.seeds, len(starts)),
    )
    assert [path.name for path in directory.iterdir()] == [contract.CHECKPOINTS]
