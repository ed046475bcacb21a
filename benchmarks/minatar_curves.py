"""Learning curves for MinAtar's five games: Capsule's, and those of stable-baselines3.

Trains stable-baselines3's A2C and DQN for 1.6 million frames of each game, one seed, and draws
their evaluations next to those of the studies of IMPALA and DQN, which are read from the signed
files in ``results`` if these are published. Each agent plays 100 episodes with the greedy policy
after every 400,000 frames, and has the network of Young and Tian 2019 (arXiv:1903.03176): 16
filters of 3x3 and 128 hidden units. All games have six actions, which are repeated with probability
0.1, and an episode ends after 5,000 frames, as in Capsule.

stable-baselines3's A2C has the settings of rl-baselines3-zoo for Atari games. Its DQN has the
replay memory, the length of the exploration and the learning rate of Young and Tian. As in
Obando-Ceron and Castro 2021 (arXiv:2011.14826) its optimizer is Adam. The final exploration rate of
2 % and the update after every four frames are those of Capsule's DQN. The baselines have their own
virtual environment::

    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install stable-baselines3 minatar torch
    python benchmarks/minatar_curves.py --baseline /tmp/sb3/bin/python

The evaluations are stored in ``results/minatar-curves.json``. Existing ones are not repeated, so
the benchmark can be interrupted. Without ``--baseline``, only the figure is drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chart import Line

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "minatar-curves.json"
STUDIES = {
    "minatar-dqn": "Capsule's DQN",
    "minatar-dqn-freeway-seaquest": "Capsule's DQN",
    "minatar": "Capsule's IMPALA",
    "minatar-breakout": "Capsule's IMPALA, another entropy cost",
    "minatar-freeway": "Capsule's IMPALA, another entropy cost",
}
BASELINES = {"a2c": "stable-baselines3's A2C", "dqn": "stable-baselines3's DQN"}
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
FRAMES = 1_600_000
INTERVAL = 400_000  # frames between evaluations
EPISODES = 100
LIMIT = 5_000  # frames of an episode
STICKY = 0.1
AT_ONCE = 10  # games that are evaluated together
EVALUATION_SEED = 1_000  # far from those of training: the seed 0 and those after it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", help="interpreter that has stable-baselines3")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(*options.train)))
        return
    if options.baseline:
        train_missing(options.baseline)
    draw_curves(json.loads(RESULTS.read_text()), RESULTS.with_suffix(".svg"))


# Training of the baselines


def train_missing(python: str) -> None:
    """Train the agents without evaluations in ``RESULTS``, and add their evaluations to the file.

    Each agent is trained in a separate process.
    """
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {(result["agent"], result["game"]) for result in kept}
    for agent in BASELINES:
        for game in GAMES:
            if (agent, game) in known:
                continue
            words = [python, __file__, "--train", agent, game]
            told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            kept.append(json.loads(told.stdout))
            RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
            print(f"{agent} at {game}: {kept[-1]['curve'][-1][1]}", flush=True)


def train(agent: str, game: str) -> dict[str, Any]:
    """Train an agent of stable-baselines3; return its evaluations."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)  # a run of the studies has one core, too
    curve: list[tuple[int, float]] = []

    class Evaluations(BaseCallback):
        def _on_training_start(self) -> None:
            self._on_step()

        def _on_step(self) -> bool:
            if self.num_timesteps % INTERVAL == 0:
                curve.append((self.num_timesteps, evaluated(self.model, game)))
            return True

    {"a2c": make_a2c, "dqn": make_dqn}[agent](game).learn(FRAMES, callback=Evaluations())
    return {
        "agent": agent,
        "game": game,
        "curve": curve,
        "versions": {name: version(name) for name in ("minatar", "stable-baselines3", "torch")},
    }


def make_dqn(game: str, **others: Any) -> Any:
    """Return stable-baselines3's DQN, with the settings that the module's docstring describes.

    Args:
        game: One of :data:`GAMES`.
        others: Settings that replace these.
    """
    from stable_baselines3 import DQN

    settings = {
        "learning_rate": 0.00025,
        "buffer_size": 100_000,
        "learning_starts": 5_000,
        "batch_size": 32,
        "gamma": 0.99,
        "train_freq": 4,
        "target_update_interval": 1_000,
        "exploration_fraction": 100_000 / FRAMES,
        "exploration_final_eps": 0.02,
        "policy_kwargs": network(),
        "seed": 0,
        "device": "cpu",
    }
    return DQN("MlpPolicy", games(game, 1), **(settings | others))


def make_a2c(game: str) -> Any:
    """Return stable-baselines3's A2C with the settings of rl-baselines3-zoo for Atari games."""
    from stable_baselines3 import A2C
    from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

    optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
    return A2C(
        "MlpPolicy",
        games(game, 16),
        ent_coef=0.01,
        vf_coef=0.25,
        policy_kwargs=network() | optimizer,
        seed=0,
        device="cpu",
    )


def network() -> dict[str, Any]:
    """Return the arguments of a policy with the network of Young and Tian below a linear layer."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    class Torso(BaseFeaturesExtractor):
        def __init__(self, observation_space: Any) -> None:
            super().__init__(observation_space, features_dim=128)
            channels = observation_space.shape[0]
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU()
            )

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            return self.layers(observations)

    return {"features_extractor_class": Torso, "net_arch": []}


def games(game: str, count: int) -> Any:
    """Return games that are played together, in a single process."""
    import numpy as np
    from gymnasium.spaces import Box
    from gymnasium.wrappers import TimeLimit, TransformObservation
    from minatar.gym import BaseEnv
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    def planes(grid: Any) -> Any:
        return grid.transpose(2, 0, 1).astype(np.float32)

    def make() -> Any:
        environment = BaseEnv(game, sticky_action_prob=STICKY)
        height, width, channels = environment.observation_space.shape
        space = Box(0, 1, (channels, height, width), np.float32)
        return Monitor(TimeLimit(TransformObservation(environment, planes, space), LIMIT))

    return DummyVecEnv([make] * count)


def evaluated(model: Any, game: str) -> float:
    """Return the mean return of episodes with the greedy policy."""
    from stable_baselines3.common.evaluation import evaluate_policy

    environments = games(game, AT_ONCE)
    environments.seed(EVALUATION_SEED)
    mean, _ = evaluate_policy(model, environments, EPISODES)
    return float(mean)


# The figure


def draw_curves(baselines: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each game: the means over the runs of each agent."""
    from chart import Axis, Panel, draw, score_axis

    lines = [*study_lines(), *baseline_lines(baselines)]
    panels = []
    for game in GAMES:
        here = {name: line for name, of, line in lines if of == game}
        highest = max(score for line in here.values() for _, score in line)
        panels.append(Panel(game.replace("_", " ").title(), here, score_axis(highest)))
    across = Axis("frames", 0, FRAMES, (0, FRAMES // 2, FRAMES))
    draw(path, panels, across, columns=3)


def study_lines() -> Iterator[tuple[str, str, Line]]:
    """Yield the agent, the game and the mean curve of each group of the published studies."""
    from capsule.bundle.trust import TrustPolicy
    from capsule.study.study_bundle import open_study

    for folder, name in STUDIES.items():
        published = HERE.parent / "results" / folder
        if not published.is_dir():
            continue
        (path,) = published.glob("*.capsule-study.tar")
        with open_study(path, TrustPolicy.of([])) as (_, study):
            curves: dict[str, list[dict[int, float]]] = {}
            for member in study.results.members:
                ((task, networks),) = member.tasks
                curve = {network.step: statistics.fmean(network.returns) for network in networks}
                curves.setdefault(task.name, []).append(curve)
        for game, runs in curves.items():
            yield name, game, [(step, statistics.fmean(r[step] for r in runs)) for step in runs[0]]


def baseline_lines(results: list[dict[str, Any]]) -> Iterator[tuple[str, str, Line]]:
    """Yield the agent, the game and the curve of each training of stable-baselines3."""
    for result in results:
        yield BASELINES[result["agent"]], result["game"], result["curve"]


if __name__ == "__main__":
    main()
