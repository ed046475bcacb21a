"""The cost of each determinism layer: IMPALA with and without the layer, in turns on this machine.

The layers are those of verl's full determinism and Capsule's own (``docs/papers/verl2026.md``). For
each, two processes train ``specs/impala-breakout-small.yaml`` under the launcher, as in a run. They
differ only in the layer. They take turns (``turns.py``), and all processes of one are stopped
during the turn of the other. The ratio is the speed with the layer divided by the speed without it,
as a median over the rounds, so 0.9 is a loss of a tenth::

    python benchmarks/layers.py                             # on a quiet machine
    python benchmarks/layers.py --processor-time            # on a busy one; does not count waiting
    python benchmarks/layers.py --layers entropy tracing --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impala import CLOCKS, its_turn, signal_processes
from turns import median_ratio, serve, start, take_turns

if TYPE_CHECKING:
    from capsule.experiment.spec import Spec

SPEC = Path(__file__).resolve().parent.parent / "specs" / "impala-breakout-small.yaml"
LOCKSTEP = ("trainer.schedule.mode=lockstep", "trainer.schedule.policy_lag=1")
ENDLESS = ("trainer.total_steps=16000000", "evaluation.interval=16000000")
SERVED = ("trainer.inference.mode=server", "trainer.inference.rows=16")
WARM_UP = 4  # updates


@dataclass(frozen=True)
class Setup:
    """One contender.

    Attributes:
        overrides: Overrides of the spec, in the form of ``--set``.
        replicas: Processes that answer the actors; 0: the processes that play answer themselves.
        traced: Whether the trace is written.
    """

    overrides: tuple[str, ...] = ()
    replicas: int = 0
    traced: bool = True


@dataclass(frozen=True)
class Layer:
    """A layer: the contender that has it, and the one that does not."""

    on: Setup
    off: Setup


ON = Setup()


def switch(*overrides: str) -> Layer:
    """Return a layer that is on by default, and off with overrides of the spec."""
    return Layer(ON, Setup(overrides))


def served(replicas: int, *overrides: str) -> Setup:
    """Return a contender whose actors are answered by separate processes."""
    return Setup((*SERVED, *overrides), replicas)


LAYERS = {
    "algorithms": switch("determinism.algorithms=off"),
    "fill_uninitialized_memory": switch("determinism.fill_uninitialized_memory=false"),
    "threads": switch("determinism.threads=null"),
    "hash_seed": switch("determinism.hash_seed=null"),
    "propagation": switch("determinism.propagation=false"),
    "cores": switch("determinism.cores=null"),
    "sorted_listings": switch("determinism.sorted_listings=false"),
    "batch_invariance": switch("determinism.batch_invariance=false"),
    "request_seeds": switch("determinism.request_seeds=false"),
    "deterministic_routing": Layer(served(2), served(2, "determinism.deterministic_routing=false")),
    "replicas": Layer(served(2), ON),
    "numerics": switch("accelerator.kind=cpu", "accelerator.numerics=native"),
    "entropy": switch("entropy.mode=system"),
    "supervisor": switch("entropy.supervised=false"),
    "tracing": Layer(ON, replace(ON, traced=False)),
    "lockstep": switch("trainer.schedule.mode=recorded", "trainer.schedule.policy_lag=4"),
    "all": Layer(
        ON,
        Setup(
            (
                "determinism.algorithms=off",
                "determinism.fill_uninitialized_memory=false",
                "determinism.hash_seed=null",
                "determinism.cores=null",
                "determinism.sorted_listings=false",
                "determinism.batch_invariance=false",
                "determinism.request_seeds=false",
                "determinism.deterministic_routing=false",
                "accelerator.kind=cpu",
                "accelerator.numerics=native",
                "entropy.mode=system",
                "entropy.supervised=false",
                "trainer.schedule.mode=recorded",
                "trainer.schedule.policy_lag=4",
            ),
            traced=False,
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--segment", type=int, default=6, help="updates per segment")
    parser.add_argument("--workers", type=int, default=2, help="processes that play actors")
    parser.add_argument(
        "--processor-time", action="store_const", dest="clock", const="processor", default="wall"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        document = json.loads(options.worker)
        work(Setup(**{**document, "overrides": tuple(document["overrides"])}), options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Let both contenders of each layer take turns, and print a table."""
    print(f"agent steps/s by the {options.clock} clock, {options.rounds} rounds\n")
    print("| layer | on | off | on / off | lowest | highest |\n|---|---|---|---|---|---|")
    for name in options.layers:
        on, off = measure(LAYERS[name], options)
        ratios = sorted(one / other for one, other in zip(on, off, strict=True))
        speeds = " | ".join(f"{statistics.median(values):.1f}" for values in (on, off))
        spread = f"{ratios[0]:.3f} | {ratios[-1]:.3f}"
        print(f"| {name} | {speeds} | {median_ratio(on, off):.3f} | {spread} |", flush=True)
    newest, _, oldest = os.getloadavg()
    print(f"\nload of the machine: {newest:.1f} (last minute), {oldest:.1f} (last quarter)")


def measure(layer: Layer, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the speeds of a layer's two contenders, with one value per round."""
    with tempfile.TemporaryDirectory(prefix="capsule-benchmark-") as scratch:
        processes = {
            name: start_contender(setup, options, Path(scratch, name))
            for name, setup in (("on", layer.on), ("off", layer.off))
        }
        found = take_turns(processes, options.rounds)
    return found["on"], found["off"]


def start_contender(
    setup: Setup, options: argparse.Namespace, folder: Path
) -> subprocess.Popen[str]:
    """Start a contender under the launcher; it then waits for its turn."""
    from capsule.entropy.launch import launch_arguments
    from capsule.experiment.variables import environment_variables
    from capsule.native import FOLDER

    folder.mkdir()
    spec = spec_of(setup)
    launcher = launch_arguments(spec, native=str(FOLDER), directory=str(folder), replay=False)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(vars(setup))]
    command += ["--segment", str(options.segment), "--workers", str(options.workers)]
    command += ["--processor-time"] if options.clock == "processor" else []
    return start([*launcher, *command], os.environ | environment_variables(spec))


def spec_of(setup: Setup) -> Spec:
    """Return the small spec with the overrides of a contender."""
    from capsule.host.spec_file import load_spec

    return load_spec(SPEC, [*LOCKSTEP, *ENDLESS, *setup.overrides])


def work(setup: Setup, options: argparse.Namespace) -> None:
    """Run segments on request; report the speed of each, in agent steps per second."""
    clock = CLOCKS[options.clock]
    steps = segments(setup, options)

    def measured() -> float:
        with its_turn():
            started, taken = clock(), next(steps)
            return taken / (clock() - started)

    try:
        serve(measured)
    finally:
        signal_processes(signal.SIGCONT)
        steps.close()


def segments(setup: Setup, options: argparse.Namespace) -> Generator[int, None, None]:
    """Train; yield the number of steps of each segment, the first of which warms up."""
    from capsule.training.determinism import flags

    spec = spec_of(setup).training()
    flags.prepare(spec)
    flags.apply(spec)
    from learners import make_context

    from capsule.training.registry import make_trainer

    context = make_context(spec, workers=options.workers, traced=setup.traced)
    learner: Any = make_trainer(replace(context, replicas=max(1, setup.replicas)))
    until = WARM_UP * spec.trainer.interval_steps
    try:
        while True:
            before = learner.step
            while learner.step < until:
                learner.train_step()
            yield learner.step - before
            until = learner.step + options.segment * spec.trainer.interval_steps
    finally:
        learner.close()


if __name__ == "__main__":
    main()
