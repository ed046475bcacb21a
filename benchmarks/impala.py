"""Environment frames per second: IMPALA under its schedules, in turn beside a shared queue.

All play Breakout with the shallow network (Espeholt et al. 2018, figure 3), in unrolls of 20 steps,
16 to an update, always learning: Capsule in lockstep with a lag of 0, 1 and 2 and asynchronously,
recording its schedule; and the same algorithm as one writes it with ``torch.nn``, after MonoBeast's
design (Kuettler et al. 2019, arXiv:1910.03552): a process for each actor, which evaluates its own
observations one at a time, unrolls in shared memory, their numbers in two queues, and a learner.

Every contender stands still, with its processes, while it is not its turn (``turns.py``), and
ratios are medians over the rounds. ``--baseline`` adds stable-baselines3's A2C, from an environment
of its own as for ``dqn.py``, and ``--gpu`` the asynchronous trainer with its learner on an NVIDIA
GPU (gpu.md); ``--cost`` prints instead what more actors and more processes do, and writes a table
and a figure into ``results``. On a machine that is busy otherwise, where a contender of many
processes gets more of it, ``--processor-time`` is the fair clock, though it does not see who
waits::

    python benchmarks/impala.py --baseline /tmp/sb3/bin/python
    python benchmarks/impala.py --cost --processor-time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import DETERMINISTIC, OFF, accelerator_of, determinism_of
from turns import median_ratio, serve, start, take_turns

GAME = "breakout"
FRAMES = 4  # a step
UNROLL = 20
BATCH = 16
ACTORS = 32
WARM_UP = 3  # updates
RESULTS = Path(__file__).parent / "results"
COST_ACTORS = (1, 4, 16, 64, 256)
COST_PROCESSES = (1, 2, 4)


@dataclass(frozen=True)
class Contender:
    """One process: what it runs and how.

    Attributes:
        name: In the table.
        role: ``lockstep``, ``asynchronous``, ``recording``, ``shared queue`` or ``a2c``.
        lag: Of the schedule; for the asynchronous one the most.
        actors: How many.
        workers: Capsule's processes, and the threads that learn.
        batch: Unrolls of an update.
        gpu: Where and how Capsule learns: one of ``gpu.GPU_KINDS``, or on the CPU.
    """

    name: str
    role: str
    lag: int = 8
    actors: int = ACTORS
    workers: int = 2
    batch: int = BATCH
    gpu: str = ""


LOCKSTEP = tuple(Contender(f"capsule, lockstep, lag {lag}", "lockstep", lag) for lag in (0, 1, 2))
ASYNCHRONOUS = Contender("capsule, asynchronous", "asynchronous")
RECORDING = Contender("capsule, asynchronous", "recording")
QUEUES = tuple(
    Contender(f"shared queue, learner on {threads}", "shared queue", workers=threads)
    for threads in (1, 2)
)
A2C = Contender("stable-baselines3, A2C", "a2c", actors=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--baseline", help="python of the environment with stable-baselines3")
    parser.add_argument("--cost", action="store_true", help="cost of actors and of processes")
    parser.add_argument("--gpu", action="store_true", help="also learn on the NVIDIA GPU")
    parser.add_argument("--actors", type=int, default=ACTORS, help="of the contenders on the GPU")
    parser.add_argument("--workers", type=int, default=2, help="of the contenders on the GPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--segment", type=int, default=12, help="updates of 16 unrolls per segment")
    parser.add_argument(
        "--processor-time",
        action="store_const",
        dest="clock",
        const="processor",
        default="wall",
        help="count processor time, for a machine that has other work, too",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Contender(**json.loads(options.worker)), options.segment, options.clock)
    elif options.cost:
        measure_cost(options)
    else:
        compare(options)


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the module's documentation."""


def compare(options: argparse.Namespace) -> None:
    """Run every contender in turn and print a table."""
    contenders = [*LOCKSTEP, ASYNCHRONOUS, *QUEUES, *([A2C] if options.baseline else [])]
    if options.gpu:
        contenders += [
            Contender(
                f"capsule, asynchronous, {kind}",
                "asynchronous",
                max(8, 2 * options.actors // BATCH),
                options.actors,
                options.workers,
                gpu=kind,
            )
            for kind in (DETERMINISTIC, OFF)
        ]
    processes = {each.name: start_contender(each, options) for each in contenders}
    speeds = take_turns(processes, options.rounds)
    queue = max((speeds[each.name] for each in QUEUES), key=statistics.median)
    free = speeds[ASYNCHRONOUS.name]
    title = f"frames/s, {options.clock} clock"
    print(f"{title:44} {'median':>8} {'best':>8} {'/ asynchronous':>15} {'/ queue':>8}")
    for name, values in speeds.items():
        print(
            f"{name:44} {statistics.median(values):8.0f} {max(values):8.0f} "
            f"{median_ratio(values, free):15.2f} {median_ratio(values, queue):8.2f}"
        )
    shares = take_turns({"": start_contender(RECORDING, options)}, options.rounds)[""]
    print(f"recording: {statistics.median(shares):.3%} of the asynchronous trainer's time")
    print(f"load of the machine, last minute and last quarter: {load()}")


def load() -> str:
    newest, _, oldest = os.getloadavg()
    return f"{newest:.1f} and {oldest:.1f} on {os.cpu_count()} processors"


def start_contender(
    contender: Contender, options: argparse.Namespace, segment: int | None = None
) -> subprocess.Popen[str]:
    """Start a contender, which then waits for its turn; its segments may be others."""
    python = options.baseline if contender.role == "a2c" else sys.executable
    command = [python, str(Path(__file__).resolve()), "--worker", json.dumps(vars(contender))]
    environment = dict(os.environ)
    if contender.role in ("lockstep", "asynchronous", "recording"):
        environment |= variables_of(contender)
    command += ["--segment", str(segment or options.segment)]
    command += ["--processor-time"] if options.clock == "processor" else []
    return start(command, environment)


def variables_of(contender: Contender) -> dict[str, str]:
    from capsule.experiment.variables import environment_variables
    from capsule.native import native_part

    shim = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    return environment_variables(spec_of(contender)) | shim


def work(contender: Contender, segment: int, clock: str) -> None:
    """Run segments as they are asked for; tell the speed of each, in frames per second.

    Of ``recording`` it tells instead which part of the time goes into it.
    """
    runs = {"shared queue": shared_queue, "a2c": a2c}
    steps = runs.get(contender.role, capsule)(contender, segment * BATCH * UNROLL)
    watch = None
    if contender.role == "recording":
        next(steps)  # torch comes after the determinism of the run
        watch, clock = watch_recording(), "wall"

    def measure() -> float:
        with its_turn():
            before, started = watch.seconds if watch else 0.0, CLOCKS[clock]()
            taken = next(steps)
            seconds = CLOCKS[clock]() - started
        return (watch.seconds - before) / seconds if watch else taken * FRAMES / seconds

    try:
        serve(measure)
    finally:
        signal_processes(signal.SIGKILL)  # nothing that they do is wanted any more


@contextlib.contextmanager
def its_turn() -> Iterator[None]:
    """Let this process's own processes run meanwhile, and stand still afterwards."""
    signal_processes(signal.SIGCONT)
    try:
        yield
    finally:
        signal_processes(signal.SIGSTOP)


def processor_seconds() -> float:
    """Return what this process and its own processes have had of the processors."""
    ticks = 0
    for process in multiprocessing.active_children():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


CLOCKS = {"wall": time.perf_counter, "processor": processor_seconds}


def signal_processes(number: signal.Signals) -> None:
    for process in multiprocessing.active_children():
        if process.pid:
            os.kill(process.pid, number)


# Capsule


def capsule(contender: Contender, segment: int) -> Iterator[int]:
    """Run Capsule's trainer; yield the number of steps of each segment."""
    from capsule.training.determinism import flags

    spec = spec_of(contender)
    flags.prepare(spec)
    flags.apply(spec)
    from learners import make_learner

    learner = make_learner(spec, workers=contender.workers)
    until = WARM_UP * BATCH * UNROLL
    while True:
        before = learner.step
        while learner.step < until:
            learner.train_step()
        yield learner.step - before
        until = learner.step + segment


def spec_of(contender: Contender) -> Any:
    from capsule.experiment.spec import Spec

    first, second = contender.batch // 2, contender.batch - contender.batch // 2
    mode = "lockstep" if contender.role == "lockstep" else "recorded"
    update = contender.batch * UNROLL
    document = {
        "schema": "capsule/spec/v1",
        "name": "benchmark",
        "accelerator": accelerator_of(contender.gpu) if contender.gpu else {"kind": "cpu"},
        "determinism": determinism_of(contender.gpu),
        "environment": {"suite": "atari", "game": GAME},
        "trainer": {
            "algorithm": "impala",
            "actors": contender.actors,
            "batch_size": contender.batch,
            "unroll_length": UNROLL,
            "micro_batches": [size for size in (first, second) if size],
            "schedule": {"mode": mode, "policy_lag": contender.lag},
            "total_steps": update * 10**6,
        },
        "evaluation": {"interval": update * 10**6},
        "recording": {
            "trace_interval": update * 10,
            "tensor_interval": update * 100,
            "checkpoint_interval": update * 1_000,
        },
    }
    return Spec.model_validate_json(json.dumps(document))


class Stopwatch:
    """Counts the time that methods take from now on.

    Attributes:
        seconds: In all of them, so far.
    """

    def __init__(self, *methods: tuple[type, str]) -> None:
        """Watch methods, each a class and a name."""
        self.seconds = 0.0
        for owner, name in methods:
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def watch_recording() -> Stopwatch:
    """Watch what recording takes: the schedule, and the digests of unrolls."""
    from capsule.training.impala.actors.unrolls import Unroll
    from capsule.training.impala.schedule.recorder import ScheduleRecorder

    return Stopwatch((ScheduleRecorder, "append"), (Unroll, "digest"))


# A shared queue


def shared_queue(contender: Contender, segment: int) -> Iterator[int]:
    """Learn from processes that put unrolls into shared memory; yield as ``capsule`` does."""
    import torch

    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    acting = make_torch_network().share_memory()
    learning = make_torch_network()
    learning.load_state_dict(acting.state_dict())
    optimizer = torch.optim.RMSprop(learning.parameters(), lr=0.0006, alpha=0.99, eps=0.01)
    buffers = [make_buffer() for _ in range(2 * contender.actors)]
    free, full = context.SimpleQueue(), context.SimpleQueue()
    for index in range(len(buffers)):
        free.put(index)
    for seed in range(contender.actors):
        arguments = (seed, acting, buffers, free, full)
        context.Process(target=act, args=arguments, daemon=True).start()
    torch.set_num_threads(contender.workers)
    update, until = BATCH * UNROLL, WARM_UP * BATCH * UNROLL
    while True:
        for _ in range(until // update):
            indices = [full.get() for _ in range(BATCH)]
            batch = {
                name: torch.stack([buffers[index][name] for index in indices], 1)
                for name in buffers[0]
            }
            for index in indices:
                free.put(index)
            optimizer.zero_grad()
            torch_loss(learning, batch).backward()
            torch.nn.utils.clip_grad_norm_(learning.parameters(), 40.0)
            optimizer.step()
            acting.load_state_dict(learning.state_dict())
        yield until
        until = segment


def make_buffer() -> dict[str, Any]:
    """Return shared memory for an unroll: a row for each step, and one for the next."""
    import torch

    rows = UNROLL + 1
    buffer = {
        "observations": torch.zeros(rows, 4, 84, 84, dtype=torch.uint8),
        "rewards": torch.zeros(rows),
        "ended": torch.zeros(rows, dtype=torch.bool),
        "actions": torch.zeros(rows, dtype=torch.int64),
        "log_behaviour": torch.zeros(rows),
    }
    return {name: tensor.share_memory_() for name, tensor in buffer.items()}


def shallow_torso() -> Any:
    """Return the shallow network of figure 3 up to its dense layer, as one writes it in torch."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(4, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 9 * 9, 256),
        nn.ReLU(),
    )


def make_torch_network() -> Any:
    """Return the shallow network without an LSTM: observations to logits and baselines."""
    from torch import nn

    actions = len(minimal_actions())

    class Shallow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torso = shallow_torso()
            self.policy = nn.Linear(256, actions)
            self.baseline = nn.Linear(256, 1)

        def forward(self, observations: Any) -> Any:
            hidden = self.torso(observations.flatten(0, -4).float() / 255)
            shape = observations.shape[:-3]
            return self.policy(hidden).view(*shape, -1), self.baseline(hidden).view(shape)

    return Shallow()


def minimal_actions() -> Sequence[Any]:
    import ale_py
    from ale_py import roms

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.loadROM(roms.get_rom_path(GAME))
    return emulator.getMinimalActionSet()


def act(seed: int, network: Any, buffers: Any, free: Any, full: Any) -> None:
    """Be an actor: fill buffers as they get free."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    environment = make_gymnasium_game()
    seen = torch.from_numpy(environment.reset(seed=seed)[0])
    reward, ended = 0.0, True
    while True:
        index = free.get()
        buffer = buffers[index]
        for row in range(UNROLL + 1):
            buffer["observations"][row] = seen
            buffer["rewards"][row], buffer["ended"][row] = reward, ended
            if row == UNROLL:
                break
            with torch.no_grad():
                logits, _ = network(seen.unsqueeze(0))
                policy = torch.distributions.Categorical(logits=logits[0])
                action = policy.sample()
                buffer["log_behaviour"][row] = policy.log_prob(action)
            buffer["actions"][row] = action
            observation, gained, terminated, truncated, _ = environment.step(int(action))
            reward, ended = max(-1.0, min(float(gained), 1.0)), terminated or truncated
            if ended:
                observation, _ = environment.reset()
            seen = torch.from_numpy(observation)
        full.put(index)


def make_gymnasium_game() -> Any:
    """Return the game as Gymnasium's wrappers make it what Capsule's is."""
    import ale_py
    import gymnasium
    import numpy as np
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    game = gymnasium.make(f"ALE/{GAME.capitalize()}-v5", frameskip=1, repeat_action_probability=0)
    stacked = FrameStackObservation(AtariPreprocessing(game, terminal_on_life_loss=True), 4)
    return TransformObservation(stacked, np.asarray, stacked.observation_space)


def torch_loss(network: Any, batch: dict[str, Any]) -> Any:
    """Return the loss of unrolls, ``[UNROLL + 1, BATCH]``."""
    import torch

    logits, baselines = network(batch["observations"])
    policy = torch.distributions.Categorical(logits=logits[:-1])
    log_target = policy.log_prob(batch["actions"][:-1])
    rewards, discounts = batch["rewards"][1:], 0.99 * ~batch["ended"][1:]
    with torch.no_grad():
        ratios = (log_target - batch["log_behaviour"][:-1]).exp().clamp(max=1)
        errors = ratios * (rewards + discounts * baselines[1:] - baselines[:-1])
        differences = [torch.zeros(BATCH)]
        for error, ratio, discount in zip(
            reversed(errors), reversed(ratios), reversed(discounts), strict=True
        ):
            differences.append(error + discount * ratio * differences[-1])
        targets = baselines + torch.stack(differences[::-1])
        advantages = ratios * (rewards + discounts * targets[1:] - baselines[:-1])
    missed = targets[:-1] - baselines[:-1]
    return (
        -(log_target * advantages).sum()
        + 0.5 * 0.5 * missed.square().sum()
        - 0.01 * policy.entropy().sum()
    )


# stable-baselines3


def a2c(contender: Contender, segment: int) -> Iterator[int]:
    """Run stable-baselines3's A2C in a thread of control of its own; yield as ``capsule`` does."""
    import threading

    import ale_py
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    gymnasium.register_envs(ale_py)

    class Shallow(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 256)
            self.layers = shallow_torso()

        def forward(self, observations: Any) -> Any:
            return self.layers(observations)

    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Segments(BaseCallback):
        until = WARM_UP * BATCH * UNROLL

        def _on_step(self) -> bool:
            if self.num_timesteps == self.until:
                self.until += segment
                done.release()
                go.acquire()
            return True

    environments = VecFrameStack(
        make_atari_env(
            f"{GAME.capitalize()}NoFrameskip-v4",
            n_envs=contender.actors,
            seed=0,
            vec_env_cls=SubprocVecEnv,
            vec_env_kwargs={"start_method": "fork"},
        ),
        4,
    )
    model = stable_baselines3.A2C(
        "CnnPolicy",
        environments,
        learning_rate=0.0006,
        n_steps=UNROLL,
        policy_kwargs={"features_extractor_class": Shallow, "net_arch": []},
        seed=0,
        device="cpu",
    )

    def learn() -> None:
        torch.set_num_threads(contender.workers)  # OpenMP keeps the count per thread
        go.acquire()
        model.learn(10**9, callback=Segments())

    threading.Thread(target=learn, daemon=True).start()
    taken = WARM_UP * BATCH * UNROLL
    while True:
        go.release()
        done.acquire()
        yield taken
        taken = segment


# Cost of actors and processes


def measure_cost(options: argparse.Namespace) -> None:
    """Print and keep the speed of each number of actors and processes, one after the other."""
    speeds: dict[str, dict[int, float]] = {}
    for processes in COST_PROCESSES:
        speeds[str(processes)] = {}
        for actors in COST_ACTORS:
            batch = min(actors, BATCH)
            lag = max(8, 2 * actors // batch)
            contender = Contender("", "asynchronous", lag, actors, processes, batch)
            # Twice what all of them play at once, or a segment might learn what others played.
            segment = max(options.segment, 2 * actors // BATCH)
            process = start_contender(contender, options, segment)
            found = take_turns({"": process}, options.rounds)[""]
            speeds[str(processes)][actors] = statistics.median(found)
            print(f"{actors:3} actors, {processes} processes: {max(found):.0f}", flush=True)
    keep_cost(speeds, options.clock)


def keep_cost(speeds: dict[str, dict[int, float]], clock: str) -> None:
    """Write the table, the figure, and their numbers."""
    RESULTS.mkdir(exist_ok=True)
    document = {"frames_per_second": speeds, "clock": clock, "load": load()}
    (RESULTS / "impala-cost.json").write_text(json.dumps(document, indent=1) + "\n")
    print(cost_table(speeds))
    from chart import Axis, Panel, draw

    most = max(max(row.values()) for row in speeds.values())
    step = 10 ** (len(str(int(most))) - 1)
    top = step * (int(most / step) + 1)
    draw(
        RESULTS / "impala-cost.svg",
        [
            Panel(
                "IMPALA on Breakout",
                {f"processes: {name}": list(row.items()) for name, row in speeds.items()},
            )
        ],
        Axis("logical actors", 1, max(COST_ACTORS), COST_ACTORS, logarithmic=True),
        Axis(f"frames a second ({clock} clock)", 0, top, range(0, top + 1, step)),
    )


def cost_table(speeds: dict[str, dict[int, float]]) -> str:
    """Return frames a second as Markdown: a row for each number of actors."""
    lines = [
        f"| actors | {' | '.join(f'processes: {name}' for name in speeds)} |",
        f"|---|{'---|' * len(speeds)}",
    ]
    for actors in next(iter(speeds.values())):
        row = " | ".join(f"{row[actors]:.0f}" for row in speeds.values())
        lines.append(f"| {actors} | {row} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
