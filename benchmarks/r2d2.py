"""The speed of R2D2: the learner at the paper's sizes, its share of the ceiling, and the actors.

Updates are those of Kapturowski et al. 2019, Table 2: 64 sequences of 40 steps of burn-in and 80
trained steps, 5-step targets, the network of Mnih et al. 2015 with an LSTM and dueling layers of
512 units, in two shards of 32. The replay memory contains noise. The ceiling is the rate of large
matrix products (``ceiling.py``), measured in the same run.

16 actors play Breakout and fill the replay memory. Both are compared with ``plain_r2d2.py``, a
plain implementation in torch's own modules, at its better thread count.

Every contender is one process (with Capsule's actors as its children). They take turns
(``turns.py``), and ratios are medians over the rounds. Four rounds take five minutes::

    python benchmarks/r2d2.py

On a machine that is busy with other work, ``--processor-time`` gives every learner one thread and
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ceiling import PLACES, PRODUCTS, figures, operations, print_products
from gpu import GPU_KINDS, accelerator_of, determinism_of, speed_table
from turns import median_ratio, serve, start, take_turns

SEQUENCES = 256  # in the replay memory
ACTORS = 16
ACTOR_STEPS = 25  # of each in a segment: the paper's interval between updates


@dataclass(frozen=True)
class Contender:
    """One process, its role, and its number of threads or processes."""

    role: str
    workers: int
    gpu: str = ""  # one of GPU_KINDS, or on the CPU
    clock: Literal["perf_counter", "process_time"] = "perf_counter"

    @property
    def name(self) -> str:
        """The role, the device, and the number of threads or processes."""
        where = self.gpu or f"{self.workers} at once"
        return f"{self.role}, {where}"


LEARNER, PLAIN_LEARNER = "learner, capsule", "learner, plain torch"
ACTING, PLAIN_ACTING = "actors, capsule", "actors, plain torch"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--workers", type=int, default=2, help="threads of a learner, processes of actors"
    )
    parser.add_argument("--only", choices=["learner", "actors"], help="measure only this part")
    parser.add_argument(
        "--processor-time", action="store_true", help="measure learners with one thread each"
    )
    parser.add_argument("--gpu", action="store_true", help="add learners on the NVIDIA GPU")
    parser.add_argument("--gpu-only", action="store_true", help="run only the learners on the GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Contender(**json.loads(options.worker)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run every contender in turn and print the speeds."""
    if options.processor_time:
        options.workers, options.only = 1, "learner"
    on_gpu = [Contender(LEARNER, 1, kind) for kind in GPU_KINDS]
    if options.gpu_only:
        learners = {each.name: start_contender(each) for each in on_gpu}
        print(speed_table(take_turns(learners, options.rounds), "updates/s"))
        return
    counts = sorted({1, options.workers})
    contenders: list[Contender] = []
    if options.only != "actors":
        contenders += [Contender(role, options.workers) for role in (*PRODUCTS, LEARNER)]
        contenders += [Contender(PLAIN_LEARNER, count) for count in counts]
        if options.gpu:
            contenders += on_gpu
    if options.only != "learner":
        contenders += [Contender(r, count) for r in (ACTING, PLAIN_ACTING) for count in counts]
    if options.processor_time:
        contenders = [replace(contender, clock="process_time") for contender in contenders]
    processes = {contender.name: start_contender(contender) for contender in contenders}
    found = take_turns(processes, options.rounds)
    speeds = {contender: found[contender.name] for contender in contenders}
    if options.only != "actors":
        report_learner(speeds)
    if options.only != "learner":
        report(speeds, ACTING, PLAIN_ACTING, "agent steps/s")


def report_learner(speeds: Mapping[Contender, Sequence[float]]) -> None:
    """Print the ceiling and the learners."""
    counted = update_operations()
    print(f"{counted / 1e9:.0f} billion operations per update\n")
    print_products({each.name: v for each, v in speeds.items() if each.role in PRODUCTS})
    ceiling = best(speeds, [*PRODUCTS])
    print()
    report(speeds, LEARNER, PLAIN_LEARNER, "updates/s")
    for contender, values in speeds.items():
        if contender.role in (LEARNER, PLAIN_LEARNER) and not contender.gpu:
            share = counted * median_ratio(values, ceiling)
            print(f"{contender.name:34} {share:8.1%} of the ceiling")
    print()


def report(speeds: Mapping[Contender, Sequence[float]], ours: str, plain: str, unit: str) -> None:
    """Print a table of two roles, with ratios to the better contender of the role ``plain``."""
    baseline = best(speeds, (plain,))
    print(f"{unit:34} {'median':>8} {'best':>8}   ratio to the best of plain torch")
    for contender, values in speeds.items():
        if contender.role in (ours, plain):
            ratio = median_ratio(values, baseline)
            print(f"{contender.name:34} {figures(values)}   {ratio:6.2f}")


def best(speeds: Mapping[Contender, Sequence[float]], roles: Sequence[str]) -> Sequence[float]:
    """Return the values of the contender with the highest median among ``roles``."""
    values = (found for contender, found in speeds.items() if contender.role in roles)
    return max(values, key=statistics.median)


def update_operations() -> float:
    """Return the floating-point operations of one update of the learner being measured."""
    from capsule.training.layers.backends import LIBRARY
    from capsule.training.networks.recurrent import make_recurrent_network
    from capsule.training.state.frames import FrameLayout

    trainer = spec_of(Contender(LEARNER, 1)).trainer
    network = make_recurrent_network(
        trainer.network,
        frame_stack=4,
        layout=FrameLayout((84, 84)),
        actions=18,
        recurrent_units=trainer.recurrent_units,
        hidden_units=trainer.hidden_units,
        products=LIBRARY,
    )
    return operations(
        network.shapes,
        PLACES,
        burn_in=trainer.batch_size * trainer.burn_in,
        trained=trainer.batch_size * trainer.sequence_length,
        beyond=trainer.batch_size * trainer.n_step,
    )


# --- contenders -----------------------------------------------------------------------------------


def start_contender(contender: Contender) -> subprocess.Popen[str]:
    """Start a contender, which then waits for its turn."""
    from capsule.experiment.variables import environment_variables
    from capsule.native import native_part

    command = [sys.executable, str(Path(__file__).resolve())]
    command += ["--worker", json.dumps(vars(contender))]
    environment = dict(os.environ)
    if contender.role in (LEARNER, ACTING):
        environment |= environment_variables(spec_of(contender))
        environment["LD_PRELOAD"] = str(native_part("libcapsule-math.so"))
    return start(command, environment)


def work(contender: Contender) -> None:
    """Run segments on request; report the speed of each, per second."""
    roles: dict[str, Callable[[Contender], Iterator[float]]] = {
        LEARNER: _learner,
        PLAIN_LEARNER: _plain_learner,
        ACTING: _actors,
        PLAIN_ACTING: _plain_actors,
    }
    products = PRODUCTS.get(contender.role)
    segments = products(contender.workers) if products else roles[contender.role](contender)
    clock: Callable[[], float] = getattr(time, contender.clock)

    def measure() -> float:
        started, done = clock(), next(segments)
        return done / (clock() - started)

    serve(measure)


def spec_of(contender: Contender) -> Any:
    """Return Capsule's spec: Table 2, except for the replay memory and the number of actors."""
    from capsule.experiment.spec import Spec

    steps = ACTORS * ACTOR_STEPS
    document = {
        "schema": "capsule/spec/v1",
        "name": "benchmark",
        "accelerator": accelerator_of(contender.gpu) if contender.gpu else {"kind": "cpu"},
        "determinism": determinism_of(contender.gpu),
        "environment": {
            "suite": "atari",
            "game": "breakout",
            "terminal_on_life_loss": False,
            "full_action_set": True,
            "clip_rewards": False,
        },
        "trainer": {
            "algorithm": "r2d2",
            "actors": ACTORS,
            "update_interval": ACTOR_STEPS,
            "total_steps": 250_000 * steps,
            "replay_capacity": 250 * steps,
            "replay_start": 250 * steps,
        },
        "recording": {"trace_interval": steps, "tensor_interval": 250 * steps},
    }
    return Spec.model_validate_json(json.dumps(document))


def _prepared(contender: Contender) -> Any:
    """Return the spec, after preparing this process for it."""
    from capsule.training.determinism import flags

    spec = spec_of(contender)
    flags.prepare(spec)
    flags.apply(spec)
    return spec


def _learner(contender: Contender) -> Iterator[float]:
    """Make updates with actors that never act; yield after each."""
    spec = _prepared(contender)
    from learners import make_context

    from capsule.training.environments import make_environment
    from capsule.training.r2d2.factory import make_network, replay_options
    from capsule.training.r2d2.learner import R2D2
    from capsule.training.r2d2.replay import SequenceReplay
    from capsule.training.state.streams import make_streams

    class Absent:
        """No actors."""

        def begin(self, *_: object) -> None:
            """Do nothing."""

        def finish(self) -> list[Any]:
            return []

    context, trainer = make_context(spec, workers=contender.workers), spec.trainer
    example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
    network = make_network(trainer, example, spec.accelerator)
    options = replay_options(context, trainer, example, network)
    replay = SequenceReplay(context.directory / "replay", **options)
    _fill(replay, example, network.state_shape)
    learner = R2D2(context, trainer, network, Absent(), replay)  # type: ignore[arg-type]
    learner.step = trainer.replay_start
    while True:
        learner.train_step()
        yield 1.0


def _fill(replay: Any, example: Any, state_shape: tuple[int, ...]) -> None:
    """Add noise until there are enough sequences, each of priority 1."""
    import numpy as np

    noise = np.random.default_rng(0)
    while replay.sequences < SEQUENCES:
        for actor in range(replay.actors):
            finished = replay.append(
                actor,
                noise.integers(0, 256, example.frame_shape, np.uint8),
                int(noise.integers(example.actions)),
                float(noise.standard_normal()),
                terminal=False,
                ended=False,
                state=np.zeros(state_shape, np.float32),
            )
            replay.update_priorities(np.array(finished, np.int64), np.ones(len(finished)))


def _plain_learner(contender: Contender) -> Iterator[float]:
    import torch
    from plain_r2d2 import Learner, Replay, synthetic_sequences

    torch.set_num_threads(contender.workers)
    sizes = _sizes(contender)
    learner = Learner(sizes, Replay(sizes, synthetic_sequences(sizes, SEQUENCES)))
    while True:
        learner.update()
        yield 1.0


def _sizes(contender: Contender) -> Any:
    from dataclasses import fields

    from plain_r2d2 import Sizes

    trainer = spec_of(contender).trainer
    names = (field.name for field in fields(Sizes) if field.name != "actions")
    return Sizes(actions=18, **{name: getattr(trainer, name) for name in names})


def _actors(contender: Contender) -> Iterator[float]:
    """Act and fill the replay memory, in intervals before learning starts."""
    spec = _prepared(contender)
    from learners import make_learner

    learner = make_learner(spec, workers=contender.workers)
    while learner.step < spec.trainer.replay_start:
        before = learner.step
        learner.train_step()
        yield learner.step - before


def _plain_actors(contender: Contender) -> Iterator[float]:
    import torch
    from plain_r2d2 import act

    from capsule.experiment.spec import SeedsSpec
    from capsule.training.environments import make_environment
    from capsule.training.state.streams import make_streams

    torch.set_num_threads(contender.workers)
    spec = spec_of(contender)
    environments = [
        make_environment(spec.environment, make_streams(SeedsSpec(root=actor)), training=True)
        for actor in range(ACTORS)
    ]
    return act(_sizes(contender), environments, ACTOR_STEPS)


if __name__ == "__main__":
    main()
