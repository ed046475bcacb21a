r"""Environment frames per second: IMPALA under its schedules, and its competitors, in turns.

All play Breakout with the shallow network (Espeholt et al. 2018, figure 3), with unrolls of 20
steps, 16 unrolls per update, and learning at all times: Capsule in lockstep with a lag of 0, 1 and
2, and asynchronously with a recorded schedule; and a plain implementation of the same algorithm in
``torch.nn``, with a process for each actor (``plain_impala.py``). ``--baseline`` adds A2C of
stable-baselines3, which is installed in another virtual environment, as for ``dqn.py``.
``--competitors`` adds EnvPool with a torch learner, and Sample Factory (``competitors.py``), from a
virtual environment that has both. All of their settings take turns first, and the fastest setting
of each takes part in the comparison.

ALE alone, and the emulators, the actors and the learner of Capsule alone, also take part
(``impala_parts.py``), which shows the highest speed that the whole trainer could reach.

All processes of a contender are stopped during the turns of the others (``turns.py``), and ratios
are medians over the rounds. ``--gpu`` adds the asynchronous trainer with its learner on an NVIDIA
GPU (gpu.md). ``--cost`` measures the cost of more actors and more processes instead, and writes a
table and a figure into ``results``. On a machine with other work, a contender with many processes
gets a larger share of the processors. There, ``--processor-time`` is fairer, although it does not
count waiting::

    python -m venv /tmp/competitors
    /tmp/competitors/bin/pip install envpool sample-factory ale-py torch
    python benchmarks/impala.py --baseline /tmp/sb3/bin/python --competitors \
        /tmp/competitors/bin/python
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import competitors
import gpu
from plain_impala import BATCH, FRAMES, GAME, UNROLL, WARM_UP, Pauses, shallow_torso, shared_queue
from turns import median_ratio, serve, start, take_turns

ACTORS = 32
TRIES = 2  # rounds of a competitor's settings
RESULTS = Path(__file__).parent / "results"
COST_ACTORS = (1, 4, 16, 64, 256)
COST_PROCESSES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Contender:
    """One process, and its settings.

    Attributes:
        name: Name in the table.
        role: One of ``CAPSULE``, ``PARTS``, ``COMPETITORS``, ``shared queue`` or ``a2c``.
        lag: Policy lag of the schedule; the maximum for the asynchronous one.
        actors: Number of actors.
        workers: Number of Capsule's processes, or of the threads that learn.
        batch: Number of unrolls in an update.
        gpu: One of ``gpu.GPU_KINDS`` if Capsule learns on the GPU.
        settings: Settings of a competitor.
    """

    name: str
    role: str
    lag: int = 8
    actors: int = ACTORS
    workers: int = 2
    batch: int = BATCH
    gpu: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


CAPSULE = ("lockstep", "asynchronous", "recording")
PARTS = ("ale", "emulators", "actors", "learner")  # functions of impala_parts.py
COMPETITORS = ("envpool", "envpool_alone", "sample_factory")  # functions of competitors.py


LOCKSTEP = tuple(Contender(f"capsule, lockstep, lag {lag}", "lockstep", lag) for lag in (0, 1, 2))
ASYNCHRONOUS = Contender("capsule, asynchronous", "asynchronous")
RECORDING = Contender("capsule, asynchronous", "recording")
QUEUES = tuple(
    Contender(f"shared queue, learner on {threads}", "shared queue", workers=threads)
    for threads in (1, 2)
)
A2C = Contender("stable-baselines3, A2C", "a2c", actors=BATCH)
ALE = Contender("ALE alone", "ale")
EMULATORS, ACTING, LEARNING = (Contender(f"capsule, {part} alone", part) for part in PARTS[1:])
POOL_ALONE = Contender("EnvPool alone", "envpool_alone", settings={"num_envs": ACTORS})


def in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


POOLS = tuple(
    Contender(f"EnvPool, torch: {in_words(each)}", "envpool", settings=each)
    for each in competitors.ENVPOOL_SETTINGS
)
FACTORIES = tuple(
    Contender(f"Sample Factory: {in_words(each)}", "sample_factory", settings=each)
    for each in competitors.SAMPLE_FACTORY_SETTINGS
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", help="interpreter that has stable-baselines3")
    parser.add_argument("--competitors", help="interpreter that has EnvPool and Sample Factory")
    parser.add_argument("--cost", action="store_true", help="measure more actors and processes")
    parser.add_argument("--gpu", action="store_true", help="add contenders on the NVIDIA GPU")
    parser.add_argument(
        "--gpu-only", action="store_true", help="run only the contenders on the GPU"
    )
    parser.add_argument(
        "--actors", type=int, default=ACTORS, help="actors of contenders on the GPU"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of contenders on the GPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--segment", type=int, default=12, help="updates of 16 unrolls per segment")
    parser.add_argument(
        "--processor-time",
        action="store_const",
        dest="clock",
        const="processor",
        default="wall",
        help="measure processor time, for a machine with other work",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Contender(**json.loads(options.worker)), options.segment, options.clock)
    elif options.cost:
        measure_cost(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run every contender in turn and print tables."""
    if options.gpu_only:
        processes = {each.name: start_contender(each, options) for each in on_gpu(options)}
        print(gpu.speed_table(take_turns(processes, options.rounds), "frames/s"))
        return
    rivals = [*QUEUES, *([A2C] if options.baseline else [])]
    others = [ALE, EMULATORS, ACTING, LEARNING]
    if options.competitors:
        rivals += [fastest(settings, options) for settings in (POOLS, FACTORIES)]
        others.append(POOL_ALONE)
    if options.gpu:
        others += on_gpu(options)
    contenders = [*LOCKSTEP, ASYNCHRONOUS, *rivals, *others]
    processes = {each.name: start_contender(each, options) for each in contenders}
    speeds = take_turns(processes, options.rounds)
    print(f"frames/s, {options.clock} clock, {options.rounds} rounds\n")
    print(speed_table(speeds, [each.name for each in rivals]))
    print(f"\n{ceiling(speeds)}")
    shares = take_turns({"": start_contender(RECORDING, options)}, options.rounds)[""]
    print(f"recording: {statistics.median(shares):.3%} of the asynchronous trainer's time")
    print(f"load of the machine, last minute and last quarter: {load()}")


def on_gpu(options: argparse.Namespace) -> list[Contender]:
    lag = max(8, 2 * options.actors // BATCH)
    return [
        Contender(
            f"capsule, asynchronous, {kind}",
            "asynchronous",
            lag,
            options.actors,
            options.workers,
            gpu=kind,
        )
        for kind in (gpu.DETERMINISTIC, gpu.OFF)
    ]


def fastest(contenders: Sequence[Contender], options: argparse.Namespace) -> Contender:
    """Let all settings of a competitor take turns, print their speeds, return the fastest."""
    processes = {each.name: start_contender(each, options) for each in contenders}
    speeds = {name: statistics.median(v) for name, v in take_turns(processes, TRIES).items()}
    for name, speed in speeds.items():
        print(f"{speed:8.0f} frames/s: {name}", flush=True)
    return max(contenders, key=lambda each: speeds[each.name])


def speed_table(speeds: Mapping[str, Sequence[float]], rivals: Sequence[str]) -> str:
    """Return speeds as Markdown, with ratios to the asynchronous trainer, the queue and a rival."""
    queue, rival = (
        max((speeds[name] for name in names), key=statistics.median)
        for names in ([each.name for each in QUEUES], rivals)
    )
    lines = [
        "| contender | median | best | / asynchronous | / queue | / fastest competitor |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in speeds.items():
        columns = (speeds[ASYNCHRONOUS.name], queue, rival)
        ratios = " | ".join(f"{median_ratio(values, each):.2f}" for each in columns)
        median = statistics.median(values)
        lines.append(f"| {name} | {median:.0f} | {max(values):.0f} | {ratios} |")
    return "\n".join(lines)


def ceiling(speeds: Mapping[str, Sequence[float]]) -> str:
    """Return the share of the speeds of its parts that the asynchronous trainer reaches."""
    parts = zip(speeds[ACTING.name], speeds[LEARNING.name], strict=True)
    best = [1 / (1 / acting + 1 / learning) for acting, learning in parts]
    whole = speeds[ASYNCHRONOUS.name]
    return (
        f"ceiling of actors and learner on the same processors: {statistics.median(best):.0f}, "
        f"of which the trainer reaches {median_ratio(whole, best):.1%}; it reaches "
        f"{median_ratio(whole, speeds[ALE.name]):.1%} of ALE's own speed, and "
        f"{median_ratio(whole, speeds[EMULATORS.name]):.1%} of the emulators' speed, of which its "
        f"actors reach {median_ratio(speeds[ACTING.name], speeds[EMULATORS.name]):.1%}"
    )


def load() -> str:
    newest, _, oldest = os.getloadavg()
    return f"{newest:.1f} and {oldest:.1f} on {os.cpu_count()} processors"


def start_contender(
    contender: Contender, options: argparse.Namespace, segment: int | None = None
) -> subprocess.Popen[str]:
    """Start a contender, which then waits for its turn; its segments may be others."""
    pythons = {"a2c": options.baseline, **dict.fromkeys(COMPETITORS, options.competitors)}
    python = pythons.get(contender.role, sys.executable)
    command = [python, str(Path(__file__).resolve()), "--worker", json.dumps(vars(contender))]
    environment = dict(os.environ)
    if contender.role in (*CAPSULE, *PARTS):
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
    """Run segments on request; report the speed of each, in frames per second.

    For ``recording``, report the share of the time that recording takes instead.
    """
    steps = segments(contender, segment * BATCH * UNROLL)
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


def segments(contender: Contender, segment: int) -> Iterator[int]:
    """Begin to run a contender; yield the number of steps of each segment."""
    role = contender.role
    if role in COMPETITORS:
        return getattr(competitors, role)(segment, **contender.settings)
    if role in PARTS:
        spec = prepared(contender)
        import impala_parts  # after the determinism of the run, because it imports torch

        return getattr(impala_parts, role)(segment, spec, contender.workers)
    if role == "shared queue":
        return shared_queue(segment, actors=contender.actors, threads=contender.workers)
    return a2c(contender, segment) if role == "a2c" else capsule(contender, segment)


@contextlib.contextmanager
def its_turn() -> Iterator[None]:
    """Let the children of this process run in its turn, and stop them afterwards."""
    signal_processes(signal.SIGCONT)
    try:
        yield
    finally:
        signal_processes(signal.SIGSTOP)


def processor_seconds() -> float:
    """Return the processor time of this process and its children, in seconds."""
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
    spec = prepared(contender)
    from learners import make_learner

    learner = make_learner(spec, workers=contender.workers)
    until = WARM_UP * BATCH * UNROLL
    while True:
        before = learner.step
        while learner.step < until:
            learner.train_step()
        yield learner.step - before
        until = learner.step + segment


def prepared(contender: Contender) -> Any:
    """Return a contender's spec, after preparing this process for it."""
    from capsule.training.determinism import flags

    spec = spec_of(contender)
    flags.prepare(spec)
    flags.apply(spec)
    return spec


def spec_of(contender: Contender) -> Any:
    from capsule.experiment.spec import Spec

    first, second = contender.batch // 2, contender.batch - contender.batch // 2
    mode = "lockstep" if contender.role == "lockstep" else "recorded"
    update = contender.batch * UNROLL
    document = {
        "schema": "capsule/spec/v1",
        "name": "benchmark",
        "accelerator": gpu.accelerator_of(contender.gpu) if contender.gpu else {"kind": "cpu"},
        "determinism": gpu.determinism_of(contender.gpu),
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
        seconds: Time in all of these methods so far.
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
    """Watch the methods that record: the schedule, and the digests of unrolls."""
    from capsule.training.impala.actors.unrolls import Unroll
    from capsule.training.impala.schedule.recorder import ScheduleRecorder

    return Stopwatch((ScheduleRecorder, "append"), (Unroll, "digest"))


# stable-baselines3


def a2c(contender: Contender, segment: int) -> Iterator[int]:
    """Run stable-baselines3's A2C in another thread, and yield as ``capsule`` does."""
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

    pauses = Pauses(segment)

    class Segments(BaseCallback):
        def _on_step(self) -> bool:
            pauses.reached(self.num_timesteps)
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
        model.learn(10**9, callback=Segments())

    yield from pauses.segments(learn)


# Cost of actors and processes


def measure_cost(options: argparse.Namespace) -> None:
    """Print and store the speed for each number of actors and processes, one after the other."""
    speeds: dict[str, dict[int, float]] = {}
    for processes in COST_PROCESSES:
        speeds[str(processes)] = {}
        for actors in COST_ACTORS:
            batch = min(actors, BATCH)
            lag = max(8, 2 * actors // batch)
            contender = Contender("", "asynchronous", lag, actors, processes, batch)
            # Twice the unrolls that all actors play at once. Otherwise a segment might learn
            # unrolls that were played in an earlier one.
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
    lines = {f"processes: {name}": list(row.items()) for name, row in speeds.items()}
    up = Axis(f"frames a second ({clock} clock)", 0, top, range(0, top + 1, step))
    across = Axis("logical actors", 1, max(COST_ACTORS), COST_ACTORS, logarithmic=True)
    draw(RESULTS / "impala-cost.svg", [Panel("IMPALA on Breakout", lines, up)], across)


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
