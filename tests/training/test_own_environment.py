"""An environment of one's own that shows an image and numbers: each trainer learns it, exactly."""

import re

import pytest

from capsule.experiment import contract
from tests.training.conftest import (
    CARTPOLE,
    ROOT,
    claimed,
    finish_run,
    kill_when_traced,
    make_spec,
    merge,
    new_run,
    read,
    start_variables,
)

MODULE = """\
import gymnasium
import numpy as np
from gymnasium import spaces


class Hunt(gymnasium.Env):
    \"\"\"Walk to a cell that only the numbers name.\"\"\"

    observation_space = spaces.Dict({
        "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
        "target": spaces.Box(0.0, 1.0, (2,), np.float32),
        "mood": spaces.Discrete(3),
    })
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.target = self.np_random.integers(0, 4, (2, 2))
        return self.seen(), {}

    def step(self, action):
        move = [(0, 1), (1, 0), (0, -1), (-1, 0)][action]
        self.place = np.clip(self.place + move, 0, 3)
        found = bool((self.place == self.target).all())
        return self.seen(), float(found), found, False, {}

    def seen(self):
        image = np.zeros((4, 4, 1), np.uint8)
        image[tuple(self.place)] = 255
        target = (self.target / 3).astype(np.float32)
        return {"image": image, "target": target, "mood": int(self.place[0]) % 3}


gymnasium.register("Hunt-v0", Hunt, max_episode_steps=20)
"""
HUNT = merge(
    CARTPOLE,
    {
        "name": "hunt",
        "environment": {
            "id": "Hunt-v0",
            "modules": ["hunting"],
            "frames": "image",
            "observation": "image",
            "numbers": ["target", "mood"],
            "frame_stack": 2,
        },
        "code": {"path": "tree"},
    },
)
LAYERS = {"convolutions": [{"filters": 4, "kernel": 2}], "dense": [16]}
TRAINERS = {
    "dqn": {
        "algorithm": "dqn", "network": LAYERS, "total_steps": 1_600, "replay_capacity": 600,
        "replay_start": 200, "target_interval": 100, "exploration_steps": 600,
    },
    "r2d2": {
        "algorithm": "r2d2", "network": LAYERS, "total_steps": 1_600, "actors": 2,
        "replay_capacity": 800, "replay_start": 400, "recurrent_units": 8, "hidden_units": 8,
        "sequence_length": 8, "sequence_stride": 4, "burn_in": 4, "batch_size": 4,
        "micro_batches": [4], "update_interval": 4, "actor_update_interval": 8,
    },
    "impala": {
        "algorithm": "impala", "network": LAYERS, "total_steps": 1_600, "actors": 4,
        "batch_size": 2, "micro_batches": [2], "unroll_length": 4, "recurrent_units": 8,
    },
}  # fmt: skip


PAGE = (ROOT / "docs" / "environments.md").read_text()
(NETS,) = re.findall(r"^```python\n(import torch\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MODULE_SPEC = {"module": "nets:make", "dense": [8]}


def spec_of(algorithm, network=LAYERS):
    trainer = {**TRAINERS[algorithm], "network": network}
    numerics = "native" if network is MODULE_SPEC else "portable-v3"
    accelerator = {"kind": "cpu", "numerics": numerics}
    return make_spec({**HUNT, "trainer": trainer, "accelerator": accelerator})


@pytest.fixture
def environment(tmp_path):
    """Return a function that returns the variables of a run, which name the source tree."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "hunting.py").write_text(MODULE)
    (tmp_path / "tree" / "nets.py").write_text(NETS)

    def variables(spec):
        return {**start_variables(spec), contract.PROJECT_VARIABLE: str(tmp_path / "tree")}

    return variables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "network"),
    [
        ("dqn", LAYERS),
        pytest.param("dqn", MODULE_SPEC, marks=pytest.mark.soak),
        pytest.param("r2d2", MODULE_SPEC, marks=pytest.mark.soak),
        ("impala", MODULE_SPEC),
    ],
    ids=["dqn-layers", "dqn-module", "r2d2-module", "impala-module"],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    environment, tmp_path, one_core, algorithm, network
):
    spec = spec_of(algorithm, network)
    whole, killed = (new_run(tmp_path / name, spec) for name in ("whole", "killed"))
    status, errors = finish_run(whole, environment=environment(spec))
    assert status == 0, errors
    size = (whole / contract.TRACE).stat().st_size
    kill_when_traced(killed, size / 2, environment=environment(spec), warm=True)
    assert finish_run(killed, environment=environment(spec), warm=True)[0] == 0
    assert claimed(killed) == claimed(whole)


OVERPAID = """

class Overpaid(Hunt):
    paid = 0

    def step(self, action):
        seen, reward, *rest = super().step(action)
        Overpaid.paid += 1
        return seen, float("nan") if Overpaid.paid > {finite} else reward, *rest


gymnasium.register("Overpaid-v0", Overpaid, max_episode_steps=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("after", "step"), [(300, 300), (400, 400)], ids=["training", "start"])
def test_a_run_whose_environment_gives_a_reward_that_is_not_finite_fails_by_name(
    environment, tmp_path, after, step
):
    """The first reward that is not finite comes during training, or in the evaluation after it."""
    module = tmp_path / "tree" / "hunting.py"
    checked = 13  # steps of the check of the evaluation's starts, before training
    module.write_text(MODULE + OVERPAID.format(finite=checked + after))
    trainer = {**TRAINERS["dqn"], "total_steps": 400}
    spec = make_spec({**merge(HUNT, {"environment": {"id": "Overpaid-v0"}}), "trainer": trainer})
    directory = new_run(tmp_path / "run", spec)
    status, errors = finish_run(directory, environment=environment(spec), warm=True)
    failure = read(directory, contract.FAILURE)
    assert (status, failure["code"], failure["step"]) == (6, "CAP-T151", step), errors
    assert "environment.id 'Overpaid-v0' gave the reward nan for step " in failure["message"]
    assert "Traceback" not in errors


@pytest.mark.parametrize("numerics", ["portable-v3", "portable-v2"])
def test_no_portable_profile_takes_a_module(numerics):
    accelerator = {"kind": "cpu", "numerics": numerics}
    trainer = {**TRAINERS["dqn"], "network": MODULE_SPEC}
    with pytest.raises(ValueError, match=r"trainer\.network\.module 'nets:make' requires"):
        make_spec({**HUNT, "trainer": trainer, "accelerator": accelerator})


@pytest.mark.parametrize("module", ["nets", "nets:", ":make", "a b:make", "nets:make:it"])
def test_a_module_is_named_by_its_function(module):
    trainer = {**TRAINERS["dqn"], "network": {"module": module}}
    with pytest.raises(ValueError, match="module"):
        make_spec({**HUNT, "trainer": trainer, "accelerator": {"numerics": "native"}})
