"""The cost of a numerics profile: each profile and ``native``, in turns on this machine.

There are three kinds of update: an interval of Capsule's DQN on Breakout (four steps and an update
of batch 32), an LSTM (20 steps of 32 sequences, 256 units, Adam), and an MLP (batch 256, two layers
of 256, Adam). A further task is sqrt, log and exp of a million numbers, which are vector functions
of oneMKL by default.

"native, AVX2" approximates ``native`` on a processor without AVX-512. The difference between it and
a profile is the cost of the profile, without that of the shorter vectors.

Every contender has a process for each task. They take turns (``turns.py``), and ratios are medians
over the rounds. All use one thread. The benchmark measures processor time, which depends least on
other work on the machine::

    python benchmarks/numerics.py                    # about ten minutes
    python benchmarks/numerics.py lstm --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from turns import median_ratio, serve, start, take_turns

from capsule.experiment.spec import Spec
from capsule.experiment.variables import environment_variables
from capsule.native import native_part

CONTENDERS = ("native", "native, AVX2", "portable-v3", "portable-v3-strict", "portable-v2")
# The choice of the libraries on a processor without AVX-512.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
SECONDS = 0.5  # of processor time in a segment, about


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(_spec(options.worker), TASKS[options.tasks[0]])
        return
    print(f"{'processor ms':18}" + "".join(f"{contender:>28}" for contender in CONTENDERS))
    for task in options.tasks:
        compare(task, options.rounds)


def compare(task: str, rounds: int) -> None:
    """Time a task under every profile in turn, and print a line."""
    processes = {contender: _start(contender, task) for contender in CONTENDERS}
    times = take_turns(processes, rounds)
    line = f"{task:18}"
    for values in times.values():
        ratio = median_ratio(values, times["native"])
        line += f"{statistics.median(values):10.3f} best {min(values):7.3f} {ratio:4.2f}x"
    print(line, flush=True)


def _start(contender: str, task: str) -> subprocess.Popen[str]:
    profile, _, restricted = contender.partition(", ")
    variables = environment_variables(_spec(profile)) | (AVX2_ONLY if restricted else {})
    if profile != "native":
        variables["LD_PRELOAD"] = str(native_part("libcapsule-math.so"))
    command = [sys.executable, __file__, "--worker", profile, task]
    return start(command, {**os.environ, **variables})


def work(spec: Any, task: Callable[[Any], Callable[[], None]]) -> None:
    """Run segments on request; report the time of a repetition in each, in ms."""
    from capsule.training.determinism import flags

    flags.prepare(spec)
    flags.apply(spec)
    repeat = task(spec)

    def measure() -> float:
        started, repetitions = time.process_time(), 0
        while (seconds := time.process_time() - started) < SECONDS:
            repeat()
            repetitions += 1
        return 1000 * seconds / repetitions

    serve(measure)


def _spec(profile: str) -> Any:
    document = {
        "schema": "capsule/spec/v1",
        "name": "benchmark",
        "accelerator": {"kind": "cpu", "numerics": profile},
        "environment": {"suite": "atari", "game": "breakout"},
        "trainer": {
            "algorithm": "dqn",
            "replay_capacity": 5_000,
            "replay_start": 64,
            "target_interval": 1_000,
            "exploration_steps": 936,
        },
    }
    return Spec.model_validate_json(json.dumps(document))


def dqn(spec: Any) -> Callable[[], None]:
    """Return four steps and an update of Capsule's trainer, on one core."""
    from learners import make_learner

    learner = make_learner(spec, workers=1)
    while learner.step < spec.trainer.replay_start:
        learner.train_step()
    return learner.train_step


def lstm(_spec: Any) -> Callable[[], None]:
    import torch

    network = torch.nn.LSTM(64, 256)
    optimizer = torch.optim.Adam(network.parameters())
    inputs = torch.randn(20, 32, 64)

    def update() -> None:
        optimizer.zero_grad()
        network(inputs)[0].square().mean().backward()
        optimizer.step()

    return update


def mlp(_spec: Any) -> Callable[[], None]:
    import torch
    from torch import nn

    layers = nn.Linear(17, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 6)
    network = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(network.parameters())
    inputs = torch.randn(256, 17)

    def update() -> None:
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()

    return update


def _function(name: str) -> Callable[[Any], Callable[[], None]]:
    def prepared(_spec: Any) -> Callable[[], None]:
        import torch

        numbers = torch.rand(1_000_000) + 0.5
        result = torch.empty_like(numbers)
        function = getattr(torch, name)
        return lambda: function(numbers, out=result)

    return prepared


TASKS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "dqn": dqn,
    "lstm": lstm,
    "mlp": mlp,
    "sqrt": _function("sqrt"),
    "log": _function("log"),
    "exp": _function("exp"),
}


if __name__ == "__main__":
    main()
