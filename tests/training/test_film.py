"""The screens of environments, and the file in which those of an episode are."""

import io
import zlib
from typing import ClassVar

import ale_py
import gymnasium
import numpy as np
import pytest
from ale_py import roms

from capsule.experiment import contract
from capsule.experiment.contract import EpisodeOrder, Job
from capsule.experiment.errors import CapsuleError
from capsule.training.environments import make_environment
from capsule.training.evaluation.action_choice import choice_of
from capsule.training.evaluation.protocol import evaluate, evaluation_environments
from capsule.training.film import Camera, play
from capsule.training.state.checkpoint import save_tensors
from capsule.training.state.streams import make_streams
from tests.training.conftest import BREAKOUT, CARTPOLE, make_spec
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


def test_the_screen_of_an_atari_game_is_the_emulators():
    environment = environment_of(BREAKOUT)
    environment.reset()
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 0)
    ale.loadROM(roms.get_rom_path("breakout"))
    assert np.array_equal(environment.screen(), ale.getScreenRGB())
    assert environment.screen().shape == (210, 160, 3)
    assert environment.screen_rate == 15


def test_the_screen_of_minatar_shows_every_object_in_a_colour_of_its_own():
    environment = environment_of(MINATAR)
    frame, screen = environment.reset(), environment.screen()
    assert (screen.shape, screen.dtype) == ((10, 10, 3), np.uint8)
    assert np.array_equal(screen.any(axis=2), frame.any(axis=0))
    topmost = frame.argmax(axis=0)[frame.any(axis=0)]
    colours = [tuple(colour) for colour in screen[frame.any(axis=0)].tolist()]
    assert len(set(zip(topmost.tolist(), colours, strict=True))) == len(set(topmost.tolist()))
    assert len(set(colours)) == len(set(topmost.tolist()))


class Rendered(gymnasium.Env):
    """Renders how many steps were taken."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    picture = np.zeros((4, 6, 3), np.uint8)
    render_mode = None

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - the interface
        super().reset(seed=seed)
        self.picture = np.zeros((4, 6, 3), np.uint8)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.picture = self.picture + np.uint8(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        return self.picture if self.render_mode == "rgb_array" else None


class Unrendered(Rendered):
    """Renders text."""

    metadata: ClassVar = {"render_modes": ["ansi"]}

    def render(self):
        return "a picture"


gymnasium.register("Rendered-v0", entry_point=Rendered, max_episode_steps=9)
gymnasium.register("Unrendered-v0", entry_point=Unrendered, max_episode_steps=9)


def gymnasium_task(name):
    return environment_of({**CARTPOLE, "environment": {"suite": "gymnasium", "id": name}})


def test_the_screen_of_a_gymnasium_task_is_what_it_renders():
    environment = gymnasium_task("Rendered-v0")
    environment.reset()
    environment.step(1)
    assert environment.screen().tolist() == np.ones((4, 6, 3)).tolist()
    assert environment.screen_rate == 30


def test_a_task_without_pictures_says_so():
    environment = gymnasium_task("Unrendered-v0")
    environment.reset()
    with pytest.raises(CapsuleError, match=r"CAP-T217.*it renders str"):
        environment.screen()


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
