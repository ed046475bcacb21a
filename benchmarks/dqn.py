"""Agent steps per second: Capsule's DQN and stable-baselines3's, which take turns on this machine.

``--task breakout``: both play with the hyper-parameters of CleanRL's ``dqn_atari.py`` that affect
the speed (batch 32, an update every 4 steps, target network every 1,000, epsilon 0.01), and learn
at all times. The optimizers differ: Capsule uses DQN's centred RMSProp, and the baseline uses Adam.

``--task cartpole``: both have the hyper-parameters of ``specs/dqn-cartpole.yaml``, including Adam:
64 updates with minibatches of 256 after every 256 steps, and two hidden layers of 256 units. From
the first update on, epsilon has the final value of the spec.

``--task minatar``: both play MinAtar's Breakout with the network of Young and Tian 2019, an update
with a minibatch of 32 every 4 steps, and epsilon 0.01. The baseline uses Adam here, too.

Every contender is one process. They take turns (``turns.py``), and ratios are medians over the
rounds.

The baseline has its own virtual environment, and its thread count is the better of 1 and 2::

    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install stable-baselines3 ale-py gymnasium opencv-python-headless torch
    python benchmarks/dqn.py --baseline /tmp/sb3/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import GPU_KINDS, accelerator_of, determinism_of, speed_table
from turns import median_ratio, serve, start, take_turns

WARM_UP_STEPS = 1_200
REPLAY = 10_000
GAME = "breakout"
SPECS = Path(__file__).parents[1] / "specs"
CARTPOLE = SPECS / "dqn-cartpole.yaml"
MINATAR = SPECS / "dqn-minatar.yaml"
EPSILON = 0.01
MINATAR_SETTINGS = {
    "trainer.replay_capacity": REPLAY,
    "trainer.replay_start": 1_000,
    "trainer.exploration_initial": EPSILON,
    "trainer.exploration_final": EPSILON,
    "trainer.micro_batches": [32],  # so small a network is computed by one thread
}


@dataclass(frozen=True)
class Contender:
    """One process, and its settings."""

    name: str
    role: str
    threads: int = 2
    numerics: str = "portable-v3"
    device: str = "cpu"
    gpu: str = ""  # one of GPU_KINDS, of Capsule's


OURS = Contender("capsule, portable-v3", "capsule")
CONTENDERS = (
    OURS,
    Contender("capsule, native", "capsule", numerics="native"),
    Contender("capsule, portable-v3, one core", "capsule", threads=1),
    Contender("capsule, portable-v3, untraced", "untraced"),
)
BASELINES = (
    Contender("stable-baselines3, 1 thread", "baseline", threads=1),
    Contender("stable-baselines3, 2 threads", "baseline", threads=2),
)
ON_GPU = tuple(Contender(f"capsule, {k}", "capsule", device="cuda", gpu=k) for k in GPU_KINDS)
BASELINE_ON_GPU = Contender("stable-baselines3, GPU", "baseline", device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=["breakout", "cartpole", "minatar"], default="breakout")
    parser.add_argument("--baseline", help="interpreter that has stable-baselines3")
    parser.add_argument("--gpu", action="store_true", help="add contenders on the NVIDIA GPU")
    parser.add_argument(
        "--gpu-only", action="store_true", help="run only the contenders on the GPU"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--segment", type=int, default=200, help="agent steps per segment")
    parser.add_argument("--shards", default="20,12", help="micro_batches of Capsule, e.g. 18,14")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Contender(**json.loads(options.worker)), options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run every contender in turn and print a table."""
    if options.gpu_only:
        baseline = [BASELINE_ON_GPU] if options.baseline else []
        processes = {each.name: start_contender(each, options) for each in (*ON_GPU, *baseline)}
        print(speed_table(take_turns(processes, options.rounds), "agent steps/s"))
        return
    ours = (*CONTENDERS, *ON_GPU) if options.gpu else CONTENDERS
    baselines = (*BASELINES, BASELINE_ON_GPU) if options.gpu else BASELINES
    contenders = [*ours, *(baselines if options.baseline else ())]
    processes = {contender.name: start_contender(contender, options) for contender in contenders}
    speeds = take_turns(processes, options.rounds)
    found = [speeds[each.name] for each in baselines if each.name in speeds]
    best = max(found, key=statistics.median, default=None)
    print(f"{'agent steps/s':32} {'median':>8} {'best':>8}   ratio to the best baseline")
    for name, values in speeds.items():
        line = f"{name:32} {statistics.median(values):8.1f} {max(values):8.1f}"
        if best:
            line += f"   {median_ratio(values, best):6.2f}"
        print(line)


def start_contender(
    contender: Contender, options: argparse.Namespace, launcher: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a contender, which then waits for its turn; ``launcher`` goes before its command."""
    python = options.baseline if contender.role == "baseline" else sys.executable
    command = [python, str(Path(__file__).resolve()), "--worker", json.dumps(vars(contender))]
    command += ["--task", options.task, "--shards", options.shards]
    command += ["--segment", str(options.segment), "--settings", cartpole_settings()]
    environment = dict(os.environ)
    if contender.role != "baseline":
        from capsule.experiment.variables import environment_variables
        from capsule.native import native_part

        environment |= environment_variables(spec_of(contender, options))
        environment["LD_PRELOAD"] = str(native_part("libcapsule-math.so"))
    return start([*launcher, *command], environment)


def cartpole_settings() -> str:
    """Return the section ``trainer`` of the spec, for an environment without Capsule."""
    from capsule.host.spec_file import load_spec

    return load_spec(CARTPOLE).trainer.model_dump_json()


def work(contender: Contender, options: argparse.Namespace) -> None:
    """Run segments on request; report the speed of each, in agent steps per second."""
    run = _baseline if contender.role == "baseline" else _capsule
    steps = run(contender, options)

    def measure() -> float:
        started, taken = time.perf_counter(), next(steps)
        return taken / (time.perf_counter() - started)

    serve(measure)


def _capsule(contender: Contender, options: argparse.Namespace) -> Iterator[int]:
    """Run Capsule's trainer; yield the number of steps of each segment."""
    from capsule.training.determinism import flags

    spec = spec_of(contender, options)
    flags.prepare(spec)
    flags.apply(spec)
    from learners import make_learner

    traced = contender.role != "untraced"
    learner = make_learner(spec, workers=contender.threads, traced=traced)
    until = WARM_UP_STEPS
    while True:
        before = learner.step
        while learner.step < until:
            learner.train_step()
        yield learner.step - before
        until += options.segment


def spec_of(contender: Contender, options: argparse.Namespace) -> Any:
    from capsule.experiment.spec import Spec
    from capsule.host.spec_file import load_spec

    sections = {
        "accelerator": _accelerator(contender),
        "determinism": determinism_of(contender.gpu),
    }
    if options.task == "cartpole":
        epsilon = json.loads(options.settings or cartpole_settings())["exploration_final"]
        return load_spec(CARTPOLE, _changes(sections | {"trainer.exploration_initial": epsilon}))
    if options.task == "minatar":
        return load_spec(MINATAR, _changes(sections | MINATAR_SETTINGS))
    document = {
        "schema": "capsule/spec/v1",
        "name": "benchmark",
        **sections,
        "environment": {"suite": "atari", "game": GAME},
        "trainer": {
            "algorithm": "dqn",
            "replay_capacity": REPLAY,
            "replay_start": 1_000,
            "target_interval": 1_000,
            "learning_rate": 0.0001,
            "exploration_initial": EPSILON,
            "exploration_final": EPSILON,
            "micro_batches": [int(size) for size in options.shards.split(",")],
        },
    }
    return Spec.model_validate_json(json.dumps(document))


def _changes(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return fields of a spec as ``--set`` takes them."""
    return tuple(f"{name}={json.dumps(value)}" for name, value in fields.items())


def _accelerator(contender: Contender) -> dict[str, Any]:
    if contender.device == "cpu":
        return {"kind": "cpu", "numerics": contender.numerics}
    return accelerator_of(contender.gpu)


def _baseline(contender: Contender, options: argparse.Namespace) -> Iterator[int]:
    """Run stable-baselines3's DQN in another thread; yield as ``_capsule`` does."""
    import threading

    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(contender.threads)
    if options.task == "cartpole":
        model = _baseline_on_cartpole(contender, json.loads(options.settings))
    elif options.task == "minatar":
        from minatar_curves import make_dqn

        model = make_dqn(
            GAME,
            buffer_size=REPLAY,
            learning_starts=1_000,
            exploration_initial_eps=EPSILON,
            exploration_final_eps=EPSILON,
            device=contender.device,
        )
    else:
        model = _baseline_on_atari(contender)
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Segments(BaseCallback):
        until = WARM_UP_STEPS

        def _on_step(self) -> bool:
            if self.num_timesteps == self.until:
                self.until += options.segment
                done.release()
                go.acquire()
            return True

    def learn() -> None:
        torch.set_num_threads(contender.threads)  # OpenMP keeps the count per thread
        go.acquire()
        model.learn(10**9, callback=Segments())

    threading.Thread(target=learn, daemon=True).start()
    taken = WARM_UP_STEPS
    while True:
        go.release()
        done.acquire()
        yield taken
        taken = options.segment


def _baseline_on_atari(contender: Contender) -> Any:
    import ale_py
    import gymnasium
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    environment = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=1, seed=0), 4)
    return DQN(
        "CnnPolicy",
        environment,
        learning_rate=1e-4,
        buffer_size=REPLAY,
        learning_starts=1_000,
        batch_size=32,
        gamma=0.99,
        train_freq=4,
        target_update_interval=1_000,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        seed=0,
        device=contender.device,
    )


def _baseline_on_cartpole(contender: Contender, settings: dict[str, Any]) -> Any:
    from stable_baselines3 import DQN

    return DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=settings["learning_rate"],
        buffer_size=settings["replay_capacity"],
        learning_starts=settings["replay_start"],
        batch_size=settings["batch_size"],
        gamma=settings["discount"],
        train_freq=settings["update_interval"],
        gradient_steps=settings["updates"],
        target_update_interval=settings["target_interval"],
        exploration_initial_eps=settings["exploration_final"],
        exploration_final_eps=settings["exploration_final"],
        max_grad_norm=settings["max_gradient_norm"],
        policy_kwargs={"net_arch": [settings["hidden_units"]] * 2},
        seed=0,
        device=contender.device,
    )


if __name__ == "__main__":
    main()
