"""An environment with two cameras and nested numbers: each trainer repeats its bits on it."""

import pytest
from safetensors.numpy import load_file

from capsule.experiment import contract
from tests.training.conftest import (
    claimed,
    finish_run,
    make_spec,
    merge,
    new_run,
    start_variables,
)
from tests.training.test_own_environment import HUNT, LAYERS, TRAINERS

MODULE = """\
import gymnasium
import numpy as np
from gymnasium import spaces


class Cameras(gymnasium.Env):
    \"\"\"Walk to a cell that one camera shows; another camera shows the walker.\"\"\"

    observation_space = spaces.Dict({
        "camera": spaces.Tuple([
            spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Box(0, 255, (5, 7), np.uint8),
        ]),
        "body": spaces.Dict({
            "move": spaces.MultiDiscrete([3, 3]), "far": spaces.Box(0.0, 9.0, (1,), np.float32),
        }),
        "name": spaces.Text(9),
    })
    action_space = spaces.MultiDiscrete([3, 3], start=[-1, -1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.target = self.np_random.integers(0, 4, (2, 2))
        self.move = np.zeros(2, np.int64)
        return self.seen(), {}

    def step(self, action):
        self.move = action
        self.place = np.clip(self.place + action, 0, 3)
        found = bool((self.place == self.target).all())
        return self.seen(), float(found), found, False, {}

    def seen(self):
        near, wide = np.zeros((4, 4, 3), np.uint8), np.zeros((5, 7), np.uint8)
        near[tuple(self.target)] = (255, 200, 0)
        wide[tuple(self.place)] = 255
        far = np.abs(self.place - self.target).sum(keepdims=True).astype(np.float32)
        return {
            "camera": (near, wide), "body": {"move": self.move + 1, "far": far}, "name": "cameras",
        }


gymnasium.register("Cameras-v0", Cameras, max_episode_steps=20)
"""
CAMERAS = merge(
    HUNT,
    {
        "environment": {
            "id": "Cameras-v0",
            "modules": ["cameras"],
            "images": ["camera/0", "camera/1"],
            "numbers": ["body"],
            "frame_stack": 2,
        },
    },
)
CAMERAS["environment"].pop("observation")


def trained(tmp_path, name, spec, **options):
    """Train in a process of its own; return the run directory."""
    directory = new_run(tmp_path / name, spec)
    variables = {**start_variables(spec), contract.PROJECT_VARIABLE: str(tmp_path / "tree")}
    status, errors = finish_run(directory, environment=variables, **options)
    assert status == 0, errors
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dqn", "r2d2", "impala"])
def test_two_processes_give_the_same_bytes(tmp_path, algorithm):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "cameras.py").write_text(MODULE)
    trainer = {**TRAINERS[algorithm], "network": LAYERS, "total_steps": 800}
    spec = make_spec({**CAMERAS, "trainer": trainer})
    first = trained(tmp_path, "first", spec)
    second = trained(tmp_path, "second", spec, warm=True)
    assert claimed(first) == claimed(second)
    (checkpoint,) = (first / contract.CHECKPOINTS).glob("*.safetensors")
    tensors = load_file(checkpoint)
    for image, channels in (("image1", 3), ("image2", 1)):
        assert tensors[f"parameters/{image}.conv1.weight"].shape == (4, 2 * channels, 2, 2)
        # The mean of the squares of its gradients: the image has an effect on the loss.
        assert tensors[f"optimizer/square/{image}.conv1.weight"].any()
