"""R2D2's training strategies on tasks that need memory, with the paper's own measurements.

Kapturowski et al. 2019 compare four ways to treat the recurrent state of a replayed sequence: zero
or stored, each with and without burn-in (section 3), and a feed-forward agent (section 4). This
benchmark runs all five on small tasks with several seeds, and prints for each task the scores, the
Q-value discrepancies (section 3), parameter lag and replay ratio (appendix) and the evaluation with
truncated histories (Figure 5)::

    python benchmarks/r2d2_paper.py                       # everything, 5 seeds
    python benchmarks/r2d2_paper.py repeat-previous --seeds 2 --jobs 2

Each run is a process and writes a JSON file into ``--directory``. Runs with a file are not
repeated, so the benchmark can be interrupted. The tables are written to the same folder, and so are
the figures if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.experiment.files import write_atomic
from capsule.experiment.spec import Spec
from capsule.experiment.trainers.r2d2 import R2d2Trainer
from capsule.experiment.variables import environment_variables
from capsule.native import native_part
from capsule.verification.equivalence.statistics import interquartile_mean

EPISODES = 20  # of an evaluation
SEQUENCES = 512  # whose Q-values are compared
BASELINE = "feed-forward"


@dataclass(frozen=True)
class Task:
    """A task that needs memory.

    Attributes:
        environment: The section of the spec, without the suite.
        trainer: Settings that differ from :data:`TRAINER`.
        burn_in: Steps of burn-in, in the strategies that have it.
        histories: Lengths of the histories for the truncated evaluation.
        random: Mean return of random play.
        best: The highest possible return.
    """

    environment: dict[str, Any]
    trainer: dict[str, Any]
    burn_in: int
    histories: tuple[int, ...]
    random: float
    best: float


TRAINER: dict[str, Any] = {
    "algorithm": "r2d2",
    "network": "mlp",
    "recurrent_units": 32,
    "hidden_units": 32,
    "actors": 8,
    "update_interval": 5,
    "actor_update_interval": 20,
    "replay_capacity": 16_000,
    "replay_start": 2_400,
    "batch_size": 32,
    "micro_batches": [32],
    "adam_epsilon": 1e-6,
    "target_interval": 100,
    "exploration_base": 0.4,
    "exploration_exponent": 5.0,
}
TASKS = {
    "repeat-previous": Task(
        {"id": "popgym-RepeatPreviousEasy-v0", "modules": ["popgym"]},
        {
            "total_steps": 96_000,
            "sequence_length": 5,
            "sequence_stride": 5,
            "n_step": 1,
            "discount": 0.5,  # an action changes nothing but its own reward
            "rescaling_epsilon": None,
            "learning_rate": 3e-3,
        },
        burn_in=5,
        histories=(1, 2, 3, 4, 6, 10),
        random=-0.5,
        best=1.0,
    ),
    "cartpole-positions": Task(
        {"id": "CartPole-v1", "masked_observations": [1, 3], "max_episode_steps": 200},
        {
            "total_steps": 64_000,
            "sequence_length": 10,
            "sequence_stride": 10,
            "n_step": 3,
            "discount": 0.97,
            "learning_rate": 1e-3,
        },
        burn_in=5,
        histories=(1, 2, 3, 5, 10, 20),
        random=22,
        best=200,
    ),
}
STRATEGIES: dict[str, tuple[str, bool]] = {  # recurrent state, burn-in
    "zero": ("zero", False),
    "stored": ("stored", False),
    "zero + burn-in": ("zero", True),
    "stored + burn-in": ("stored", True),
    BASELINE: ("zero", False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"{', '.join(TASKS)}; all by default")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--directory", type=Path, default=Path(".cache/r2d2_paper"))
    parser.add_argument("--set", type=json.loads, default={}, help="JSON object of trainer fields")
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)  # a run's own process
    options = parser.parse_args()
    if options.only:
        work(options.only)
        return 0
    options.directory.mkdir(parents=True, exist_ok=True)
    runs = [
        (task, strategy, seed)
        for seed in range(options.seeds)
        for task in options.tasks or TASKS
        for strategy in options.strategies
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: launch(options.directory, *run, changes=options.set), runs))
    results = [json.loads(result_path(options.directory, *run).read_text()) for run in runs]
    text = report(results)
    (options.directory / "report.md").write_text(text)
    print(f"\n{text}")
    draw(results, options.directory)
    return 0


def make_spec(task: str, strategy: str, seed: int, changes: dict[str, Any]) -> Spec:
    """Return the experiment of one run."""
    of = TASKS[task]
    state, burns_in = STRATEGIES[strategy]
    trainer = {
        **TRAINER,
        **of.trainer,
        "recurrent_state": state,
        "burn_in": of.burn_in if burns_in else 0,
        **changes,
    }
    if strategy == BASELINE:
        trainer["recurrent_units"] = 0
    unit = trainer["actors"] * trainer["update_interval"]
    return Spec.model_validate_json(
        json.dumps(
            {
                "schema": "capsule/spec/v1",
                "name": f"r2d2-{task}",
                "environment": {"suite": "gymnasium", **of.environment},
                "trainer": trainer,
                "seeds": {"root": seed},
                "evaluation": {
                    "interval": trainer["total_steps"],
                    "starts": EPISODES,
                    "shortlist": EPISODES,
                    "candidates": EPISODES,
                    "min_actions": 0,
                    "max_actions": 0,
                },
                "recording": {
                    "trace_interval": 1000 * unit,
                    "tensor_interval": 10_000 * unit,
                    "checkpoint_interval": trainer["total_steps"],
                },
            }
        )
    )


def launch(
    directory: Path, task: str, strategy: str, seed: int, *, changes: dict[str, Any]
) -> None:
    """Execute one run in a separate process, unless its result exists."""
    path = result_path(directory, task, strategy, seed)
    spec = make_spec(task, strategy, seed, changes)
    document = {"task": task, "strategy": strategy, "seed": seed, "path": str(path)}
    text = spec.model_dump_json(by_alias=True)
    if path.exists() and json.loads(path.read_text())["spec"] == json.loads(text):
        return
    variables = {"LD_PRELOAD": str(native_part("libcapsule-math.so"))}
    with tempfile.TemporaryDirectory(prefix="r2d2-paper-") as folder:
        order = Path(folder) / "order.json"
        order.write_text(json.dumps({**document, "spec": json.loads(text)}))
        subprocess.run(
            [sys.executable, __file__, "--only", str(order)],
            env=os.environ | environment_variables(spec) | variables,
            check=True,
        )
    result = json.loads(path.read_text())
    print(
        f"{task:20} {strategy:17} seed {seed}: {result['score']:8.3f} in {result['seconds']:.0f} s",
        flush=True,
    )


def result_path(directory: Path, task: str, strategy: str, seed: int) -> Path:
    return directory / f"{task}-{strategy.replace(' + ', '-')}-{seed}.json"


def work(order: Path) -> None:
    """Train, measure, and write the result of one run."""
    import torch
    from r2d2_measures import (
        Schedule,
        TruncatedPolicy,
        make_recorded,
        parameter_lag,
        replay_ratio,
        truncated_evaluation,
    )

    from capsule.training.determinism import flags
    from capsule.training.evaluation.protocol import evaluate, evaluation_environments
    from capsule.training.state.streams import make_streams
    from capsule.training.state.trace import Trace
    from capsule.training.trainer import TrainerContext

    document = json.loads(order.read_text())
    complete = Spec.model_validate_json(json.dumps(document["spec"]))
    flags.apply(complete)
    spec = complete.training()
    trainer = spec.trainer
    if not isinstance(trainer, R2d2Trainer):
        raise TypeError(f"{trainer.algorithm} has no recurrent states")
    started = time.monotonic()
    trace = Trace(order.parent / "trace")
    trace.restore(None)
    streams = make_streams(spec.seeds)
    context = TrainerContext(
        order.parent, spec, spec.seeds, streams, trace, torch.device("cpu"), workers=1
    )
    learner, replay = make_recorded(context, trainer)
    curve = []
    while learner.step < trainer.total_steps:
        learner.train_step()
        if learner.step * 20 % trainer.total_steps == 0:
            curve.append([learner.step, learner.mean_return])
    seconds = time.monotonic() - started
    parameters = learner.online
    environments = evaluation_environments(spec.environment, spec.seeds, EPISODES)

    def play(policy: Any) -> list[float]:
        starts = ((),) * EPISODES
        point = evaluate(environments, starts, spec.evaluation, policy, learner.step)
        return [float.fromhex(score) for score in point.returns]

    points = truncated_evaluation(
        play,
        lambda: learner.policy(parameters),
        lambda history: TruncatedPolicy(learner.network, parameters.views, history),
        TASKS[document["task"]].histories,
    )
    path = Path(document.pop("path"))
    result = {
        **document,
        "seconds": seconds,
        "score": points[-1].score,
        "curve": curve,
        "histories": [point._asdict() for point in points],
        "lag": parameter_lag(replay.replayed, Schedule.of(trainer)),
        "replay_ratio": replay_ratio(replay.replayed, learner.step),
        "discrepancy": measure_discrepancies(learner, replay, trainer),
    }
    learner.close()
    write_atomic(path, json.dumps(result).encode())


def measure_discrepancies(learner: Any, replay: Any, trainer: Any) -> dict[str, float]:
    """Return the median first and last discrepancies under the run's own strategy."""
    import numpy as np
    from r2d2_measures import q_discrepancy

    from capsule.training.state.streams import Stream

    indices = replay.sample(Stream("report", 0), SEQUENCES).indices
    found = q_discrepancy(
        learner.network,
        learner.online.views,
        replay.gather(indices),
        replay.states(indices),
        layout=replay.layout,
        burn_in=trainer.burn_in,
        initial=trainer.recurrent_state,
    )
    return {name: float(np.median(values)) for name, values in found._asdict().items()}


def report(results: Sequence[dict[str, Any]]) -> str:
    """Return every table, as Markdown."""
    parts = []
    for task in dict.fromkeys(result["task"] for result in results):
        by_strategy = {
            strategy: [r for r in results if (r["task"], r["strategy"]) == (task, strategy)]
            for strategy in STRATEGIES
        }
        runs = {strategy: found for strategy, found in by_strategy.items() if found}
        parts += [strategy_table(task, runs), history_table(task, runs)]
    return "\n".join(parts)


def strategy_table(task: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return a row for each strategy: scores, discrepancies, lag and replay ratio."""
    of = TASKS[task]
    title = f"scores of {EPISODES} greedy episodes, {seeds_of(runs)}"
    lines = [
        f"**{task}**: {title}; random play {of.random:g}, best {of.best:g}",
        "",
        "| strategy | score | dQ first | dQ last | parameter lag | replay ratio |",
        "|---|---|---|---|---|---|",
    ]
    for strategy, found in runs.items():
        columns = [summary([run["score"] for run in found])]
        columns += [
            summary([run["discrepancy"][name] for run in found]) if strategy != BASELINE else "-"
            for name in ("first", "last")
        ]
        columns += [
            f"{interquartile_mean([run['lag'] for run in found]):.0f}",
            f"{interquartile_mean([run['replay_ratio'] for run in found]):.2f}",
        ]
        lines.append(f"| {strategy} | {' | '.join(columns)} |")
    return "\n".join([*lines, ""])


def history_table(task: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return a row for each strategy and measure of Figure 5, a column for each length."""
    lengths = [point["history"] for point in next(iter(runs.values()))[0]["histories"]]
    names = ["all" if length is None else str(length) for length in lengths]
    lines = [
        f"**{task}**: with the last k observations only",
        "",
        f"| strategy | k = | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for strategy, found in runs.items():
        for measure in ("score", "difference", "agreement"):
            columns = [
                f"{interquartile_mean([run['histories'][place][measure] for run in found]):.3g}"
                for place in range(len(names))
            ]
            lines.append(f"| {strategy} | {measure} | {' | '.join(columns)} |")
    return "\n".join([*lines, ""])


def seeds_of(runs: dict[str, list[dict[str, Any]]]) -> str:
    count = min(map(len, runs.values()))
    return f"{count} seed{'s' * (count > 1)}"


def summary(values: Sequence[float]) -> str:
    """Return the interquartile mean and its 95 % interval."""
    from r2d2_measures import bootstrap_interval

    low, high = bootstrap_interval(values)
    return f"{interquartile_mean(values):.3g} ({low:.3g} to {high:.3g})"


def draw(results: Sequence[dict[str, Any]], directory: Path) -> None:
    """Draw Figure 5 for each task, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no figures: matplotlib is not installed")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for task in dict.fromkeys(result["task"] for result in results):
        figure = Figure(figsize=(12, 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, measure in zip(
            figure.subplots(1, 3), ("score", "difference", "agreement"), strict=True
        ):
            for strategy in STRATEGIES:
                found = [r for r in results if (r["task"], r["strategy"]) == (task, strategy)]
                if found:
                    lengths = [point["history"] for point in found[0]["histories"]]
                    heights = [
                        interquartile_mean([run["histories"][place][measure] for run in found])
                        for place in range(len(lengths))
                    ]
                    names = ["all" if length is None else str(length) for length in lengths]
                    axes.plot(names, heights, marker="o", label=strategy)
            axes.set(xlabel="history k", title=f"{task}: {measure}")
        axes.legend()
        figure.savefig(directory / f"{task}.png")


if __name__ == "__main__":
    sys.exit(main())
