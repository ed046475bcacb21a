"""The share of its arithmetic ceiling that DQN's learner reaches on a CPU.

Updates are those of Mnih et al. 2015: 32 transitions, the network ``nature``, centred RMSProp. The
learner draws its minibatches from a replay memory of Breakout, takes a single step in the game
after every 64 updates, and so does hardly anything else. It takes turns with matrix products
(``ceiling.py``), and ratios are medians over the rounds::

    python benchmarks/dqn_learner.py

On a machine that is busy with other work, ``--processor-time`` gives every contender one thread and
measures its processor time, which depends less on that work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ceiling import PLACES, PRODUCTS, figures, operations, print_products
from turns import median_ratio, serve, start, take_turns

LEARNER = "learner, capsule"
BATCH = 32
UPDATES = 64  # after every agent step, and in a segment
REPLAY_START = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_const",
        dest="clock",
        const="process_time",
        default="perf_counter",
        help="measure processor time, with one thread each",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock == "process_time":
        options.threads = 1
    if options.worker:
        work(options.worker, options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Let the learner and the products take turns, and print the share of the ceiling."""
    processes = {role: start_contender(role, options) for role in (*PRODUCTS, LEARNER)}
    speeds = take_turns(processes, options.rounds)
    updates, counted = speeds.pop(LEARNER), update_operations()
    print(f"{options.threads} threads, {options.rounds} rounds, clock {options.clock}")
    print(f"{counted / 1e9:.2f} billion operations per update\n")
    print_products(speeds)
    ceiling = max(speeds.values(), key=statistics.median)
    print(f"\n{'updates/s':34} {'median':>8} {'best':>8}")
    print(f"{LEARNER:34} {figures(updates)}")
    print(f"{counted * median_ratio(updates, ceiling):.1%} of the ceiling")


def update_operations() -> float:
    """Return the floating-point operations of one update."""
    from capsule.training.layers.backends import LIBRARY
    from capsule.training.networks.feedforward import make_network
    from capsule.training.state.frames import FrameLayout

    network = make_network(
        "nature",
        frame_stack=4,
        layout=FrameLayout((84, 84)),
        actions=4,
        hidden_units=512,
        products=LIBRARY,
    )
    return operations(network.shapes, PLACES, trained=BATCH)


def start_contender(role: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a contender, which then waits for its turn."""
    from capsule.experiment.variables import environment_variables
    from capsule.native import native_part

    command = [sys.executable, str(Path(__file__).resolve()), "--worker", role]
    command += ["--threads", str(options.threads)]
    command += ["--processor-time"] if options.clock == "process_time" else []
    environment = dict(os.environ)
    if role == LEARNER:
        environment |= environment_variables(spec_of(options.threads))
        environment["LD_PRELOAD"] = str(native_part("libcapsule-math.so"))
    return start(command, environment)


def work(role: str, options: argparse.Namespace) -> None:
    """Run segments on request; report the speed of each, per second."""
    threads = options.threads
    clock: Callable[[], float] = getattr(time, options.clock)
    segments = PRODUCTS[role](threads) if role in PRODUCTS else learner(threads)

    def measure() -> float:
        started, done = clock(), next(segments)
        return done / (clock() - started)

    serve(measure)


def learner(threads: int) -> Iterator[float]:
    """Make updates; yield the number of updates of each segment."""
    from capsule.training.determinism import flags

    spec = spec_of(threads)
    flags.prepare(spec)
    flags.apply(spec)
    from learners import make_learner

    trainer = make_learner(spec, workers=threads)
    while trainer.step < REPLAY_START:
        trainer.train_step()
    while True:
        trainer.train_step()
        yield UPDATES


def spec_of(threads: int) -> Any:
    """Return a spec with a shard of the minibatch for each thread."""
    from capsule.experiment.spec import Spec

    document = {
        "schema": "capsule/spec/v1",
        "name": "benchmark",
        "environment": {"suite": "atari", "game": "breakout"},
        "trainer": {
            "algorithm": "dqn",
            "batch_size": BATCH,
            "concurrent": False,
            "micro_batches": [BATCH // threads] * threads,
            "replay_capacity": 10 * REPLAY_START,
            "replay_start": REPLAY_START,
            "update_interval": 1,
            "updates": UPDATES,
        },
    }
    return Spec.model_validate_json(json.dumps(document))


if __name__ == "__main__":
    main()
