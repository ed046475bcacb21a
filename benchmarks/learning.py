"""Does it learn? CartPole and MinAtar Breakout through the same trainer, several seeds each.

Prints, per task and seed, the mean return of the last 100 training episodes (epsilon-greedy play)
beside what random play scores, and fails where a run stays below its task's bar::

    python benchmarks/learning.py            # both tasks, seeds 0 to 2, about ten minutes
    python benchmarks/learning.py cartpole --seeds 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.experiment import contract
from capsule.experiment.contract import Event, Job
from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.native import native_part


@dataclass(frozen=True)
class Task:
    """What to learn, and what counts as learned.

    Attributes:
        environment: The spec's section.
        trainer: The spec's section, without the algorithm.
        random: Mean return of random play.
        bar: Least mean return of the last 100 training episodes.
    """

    environment: dict[str, Any]
    trainer: dict[str, Any]
    random: float
    bar: float


TASKS = {
    "cartpole": Task(
        {"suite": "gymnasium", "id": "CartPole-v1"},
        {
            "network": "mlp",
            "hidden_units": 64,
            "total_steps": 25_000,
            "replay_capacity": 10_000,
            "replay_start": 500,
            "update_interval": 2,
            "target_interval": 250,
            "exploration_final": 0.05,
            "exploration_steps": 3_500,
        },
        random=22,
        bar=75,
    ),
    "minatar": Task(
        {"suite": "minatar", "game": "breakout"},
        {
            "network": "small-conv",
            "hidden_units": 128,
            "total_steps": 120_000,
            "replay_capacity": 50_000,
            "replay_start": 5_000,
            "target_interval": 1_000,
            "exploration_final": 0.05,
            "exploration_steps": 55_000,
        },
        random=0.5,
        bar=3,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], default=[])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    missed = 0
    for name in options.tasks or TASKS:
        for seed in range(options.seeds):
            score, seconds = learn(TASKS[name], seed)
            missed += score < TASKS[name].bar
            print(
                f"{name:9} seed {seed}: {score:6.1f} (random play {TASKS[name].random}, "
                f"bar {TASKS[name].bar}) in {seconds:.0f} s",
                flush=True,
            )
    return min(missed, 1)


def learn(task: Task, seed: int) -> tuple[float, float]:
    """Train once, without the evaluation; return the score and the seconds."""
    total = task.trainer["total_steps"]
    document = {
        "schema": "capsule/spec/v1",
        "name": "learning",
        "environment": task.environment,
        # One interval more than is trained: a prefix skips the evaluation.
        "trainer": {"algorithm": "dqn", **task.trainer, "total_steps": total + 4},
        "seeds": {"root": seed},
    }
    spec = Spec.model_validate_json(json.dumps(document))
    shim = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    with tempfile.TemporaryDirectory(prefix="capsule-learning-") as name:
        directory = Path(name)
        job = Job(spec=spec, stop_after=total)
        (directory / contract.JOB).write_text(job.model_dump_json(by_alias=True))
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "capsule.training", name],
            env=os.environ | environment_variables(spec) | shim,
            check=True,
        )
        seconds = time.monotonic() - started
        last = (directory / contract.EVENTS).read_bytes().splitlines()[-1]
    return Event.model_validate_json(last).episode_return or 0.0, seconds


if __name__ == "__main__":
    sys.exit(main())
