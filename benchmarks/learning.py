"""Do the trainers learn, and does V-trace correct for a behaviour policy that lags behind?

This benchmark trains small tasks, each with its spec (in ``specs`` of the project or beside this
file), and, for figure E.1 of Espeholt et al. 2018, ``specs/impala-lag.yaml`` in lockstep with
policy lags of 0 to 500 under each correction. A result has two scores: the mean return of the last
100 training episodes, which include exploration, and the mean return of the final network's
evaluation according to the spec::

    python benchmarks/learning.py                    # every task, 5 seeds
    python benchmarks/learning.py dqn-cartpole       # one
    python benchmarks/learning.py lag --seeds 2      # figure E.1

Results are stored in ``results``, and existing ones are not trained again, so the benchmark can be
interrupted. The tables are printed, and figure E.1 is drawn next to its data. The exit status is 1
if the median evaluation of a task is below its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule.experiment.files import write_atomic
from capsule.experiment.spec import Spec, TrainingSpec
from capsule.experiment.trainers.impala import ImpalaTrainer
from capsule.experiment.variables import environment_variables
from capsule.host.spec_file import load_spec
from capsule.native import native_part

if TYPE_CHECKING:
    from capsule.training.trainer import Trainer

HERE = Path(__file__).resolve().parent
SPECS = (HERE.parent / "specs", HERE / "specs")
RESULTS = HERE / "results"
LAGS = (0, 1, 10, 100, 500)
CORRECTIONS = ("v-trace", "one-step", "epsilon", "none")
LAG = "lag"
POINTS = 20  # of a learning curve


@dataclass(frozen=True)
class Bar:
    """The score above which a task counts as learned.

    Attributes:
        random: Mean return of random play.
        score: Minimum of the median, over seeds, of the final network's mean return.
    """

    random: float
    score: float


TASKS = {
    "dqn-cartpole": Bar(random=22, score=475),
    "dqn-minatar": Bar(random=0.5, score=6),
    "impala-cartpole": Bar(random=22, score=475),
    "impala-catch": Bar(random=-0.6, score=0.9),
    "impala-minatar": Bar(random=0.5, score=5),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: Name of the task and of its spec.
        changes: Overrides of the spec, ``section.field=value``.
        seed: Root seed.
    """

    name: str
    changes: tuple[str, ...]
    seed: int

    def spec(self) -> Spec:
        """Return the spec that is trained."""
        seeded = (*self.changes, f"seeds.root={self.seed}")
        name = f"impala-{LAG}" if self.name == LAG else self.name
        paths = (folder / f"{name}.yaml" for folder in SPECS)
        return load_spec(next(path for path in paths if path.exists()), seeded)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tasks", nargs="*", help=f"{', '.join([*TASKS, LAG])}; all but the last by default"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_specs(sys.stdin)
        return 0
    options.results.mkdir(exist_ok=True)
    missed = 0
    for task in options.tasks or TASKS:
        runs = list(runs_of(task, options.seeds))
        name = f"impala-{LAG}" if task == LAG else task
        results = train_all(runs, options.results / f"{name}.json")
        if task == LAG:
            print(lag_table(results))
            draw_figure(results, spec_of(results[0]).trainer.total_steps, options.results)
        else:
            scores = [result["evaluated"] for result in results]
            missed += statistics.median(scores) < TASKS[task].score
            print(task_row(task, results))
    return min(missed, 1)


def runs_of(task: str, seeds: int) -> Iterator[Run]:
    """Yield the runs of a task, all of a seed before those of the next."""
    variants = [()] if task != LAG else [*map(changes_of, *zip(*lag_variants(), strict=True))]
    for seed in range(seeds):
        for changes in variants:
            yield Run(task, changes, seed)


def lag_variants() -> list[tuple[str, int]]:
    return [(correction, lag) for correction in CORRECTIONS for lag in LAGS]


def changes_of(correction: str, lag: int) -> tuple[str, ...]:
    schedule = f"{{mode: lockstep, policy_lag: {lag}}}"
    return (f"trainer.correction={correction}", f"trainer.schedule={schedule}")


def train_all(runs: Sequence[Run], path: Path) -> list[dict[str, Any]]:
    """Return the result of each run; those that are not in ``path`` are trained in one process."""
    kept = json.loads(path.read_text()) if path.exists() else []
    known = {json.dumps(result["spec"]): result for result in kept}
    wanted = {run: said(run.spec()) for run in runs}
    missing = [run for run in runs if json.dumps(wanted[run]) not in known]
    for run, result in zip(missing, train_elsewhere(missing), strict=True):
        print(f"{run.name} {' '.join(run.changes)} seed {run.seed}: {result['score']}", flush=True)
        known[json.dumps(wanted[run])] = {"spec": wanted[run], **result}
        lines = ",\n".join(map(json.dumps, known.values()))
        write_atomic(path, f"[\n{lines}\n]\n".encode())
    return [known[json.dumps(wanted[run])] for run in runs]


def said(spec: Spec) -> dict[str, Any]:
    """Return the fields of a spec that differ from their defaults."""
    return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def train_elsewhere(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Train in a process that is started like that of a run; yield results as they arrive."""
    if not runs:
        return
    specs = [run.spec() for run in runs]
    shim = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    with subprocess.Popen(
        [sys.executable, __file__, "--train"],
        env=os.environ | environment_variables(specs[0]) | shim,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process was started without pipes")
        for spec in specs:
            process.stdin.write(spec.model_dump_json(by_alias=True) + "\n")
            process.stdin.flush()
            yield json.loads(process.stdout.readline())


def train_specs(lines: Iterable[str]) -> None:
    """Train the spec of each line; print its result as one."""
    from capsule.training.determinism import flags

    for line in lines:
        spec = Spec.model_validate_json(line)
        flags.apply(spec)
        print(json.dumps(train(spec)), flush=True)


def train(spec: Spec) -> dict[str, Any]:
    """Train in this process; return the score, the learning curve, and the time taken."""
    from learners import make_learner

    started, worked = time.monotonic(), time.process_time()
    learner = make_learner(spec.training(), workers=1)
    total = spec.training().trainer.total_steps
    curve: list[tuple[int, float | None]] = []
    while learner.step < total:
        learner.train_step()
        if learner.step * POINTS >= (len(curve) + 1) * total:
            curve.append((learner.step, learner.mean_return))
    result = {
        "score": learner.mean_return,
        "curve": curve,
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(time.process_time() - worked, 1),
    }
    if not spec.training().evaluation.max_actions:
        result["evaluated"] = evaluated(learner, spec.training())
    learner.close()
    return result


def evaluated(learner: Trainer, spec: TrainingSpec) -> float:
    """Return the mean score of the current network, from starts without random actions."""
    from capsule.training.evaluation.action_choice import choice_of
    from capsule.training.evaluation.protocol import evaluate, evaluation_environments

    starts = ((),) * spec.evaluation.starts
    make = evaluation_environments(spec.environment, spec.seeds, len(starts))
    choose = choice_of(spec.evaluation, spec.seeds, len(starts))
    policy = learner.policy(learner.online)
    point = evaluate(make, starts, spec.evaluation, policy, learner.step, choose)
    return statistics.mean(map(float.fromhex, point.returns))


# Tables and the figure


def task_row(task: str, results: Sequence[dict[str, Any]]) -> str:
    """Return a row of Markdown: steps, evaluations, their median, training, random play, time."""
    steps = spec_of(results[0]).trainer.total_steps
    scores = ", ".join(f"{result['evaluated']:.4g}" for result in results)
    middle, training, seconds = (
        statistics.median(result[name] for result in results)
        for name in ("evaluated", "score", "processor_seconds")
    )
    of = TASKS[task]
    return (
        f"| {task} | {steps:,} | {scores} | {middle:.4g} | {training:.4g} | {of.random:g} | "
        f"{of.score:g} | {seconds:.0f} |"
    )


def spec_of(result: dict[str, Any]) -> TrainingSpec:
    return Spec.model_validate_json(json.dumps(result["spec"])).training()


def by_variant(results: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the results of each correction and lag, with one result per seed."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {pair: [] for pair in lag_variants()}
    for result in results:
        trainer = spec_of(result).trainer
        if not isinstance(trainer, ImpalaTrainer):
            raise TypeError(f"{trainer.algorithm} has no lag")
        found[trainer.correction, trainer.schedule.policy_lag].append(result)
    return found


def lag_table(results: Sequence[dict[str, Any]]) -> str:
    """Return mean, minimum and maximum as Markdown: a row per correction, a column per lag."""
    found = by_variant(results)
    seeds = len(found[lag_variants()[0]])
    lines = [
        f"| correction ({seeds} seeds) | {' | '.join(f'lag {lag}' for lag in LAGS)} |",
        f"|---|{'---|' * len(LAGS)}",
    ]
    for correction in CORRECTIONS:
        cells = []
        for lag in LAGS:
            scores = [result["score"] for result in found[correction, lag]]
            mean = statistics.mean(scores)
            cells.append(f"{mean:.2f} ({min(scores):.2f} to {max(scores):.2f})")
        lines.append(f"| {correction} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_curve(results: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the curve of means over seeds, from the point where all have finished an episode."""
    points = zip(*(result["curve"] for result in results), strict=True)
    known = [point for point in points if all(value is not None for _, value in point)]
    return [(point[0][0], statistics.mean(value for _, value in point)) for point in known]


def draw_figure(results: Sequence[dict[str, Any]], steps: int, directory: Path) -> None:
    """Draw figure E.1: a panel for each correction, a learning curve for each lag."""
    from chart import Axis, Panel, draw

    found = by_variant(results)
    up = Axis("mean return", -1, 1, (-1, -0.5, 0, 0.5, 1))
    panels = [
        Panel(correction, {f"lag {lag}": mean_curve(found[correction, lag]) for lag in LAGS}, up)
        for correction in CORRECTIONS
    ]
    across = Axis("environment steps", 0, steps, (0, steps // 2, steps))
    draw(directory / "impala-lag.svg", panels, across)


if __name__ == "__main__":
    sys.exit(main())
