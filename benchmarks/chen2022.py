"""The case study of Chen et al. (ICSE 2022) on the CPU: Tables 3 and 4, for PyTorch.

Trains each model of ``examples/supervised`` 16 times, as 8 pairs, under each CPU setup of the
paper's Table 2:

- C1: the program without changes, without a seed and without a recording;
- C2: a seed for each pair;
- C3: the first run of each pair records its randomness, and the second run replays it;
- C4, C5, C6: the same with another torch version, that of ``--other``, an interpreter that has
  torch, numpy, safetensors and scikit-learn.

A pair is reproduced if its evaluation metrics, its process metrics (loss of every epoch, number of
epochs; not the time) and its weights are identical to the last bit. The setups take turns, so that
changes of the machine's speed affect all of them equally. All runs have one maths thread. The exit
status is 1 if a pair of C3 or C6 differs::

    python benchmarks/chen2022.py                                       # everything: an hour
    python benchmarks/chen2022.py --models lenet1 --pairs 2 --epochs 2  # two minutes
    python benchmarks/chen2022.py --models lenet1 --other /tmp/other/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scipy.stats import mannwhitneyu

from capsule.entropy.launch import REPLAYED, launch_arguments
from capsule.entropy.profile import check_consumed, merge, parse
from capsule.host.spec_file import load_spec
from capsule.machine.fingerprint import take_fingerprint
from capsule.native import native_part
from capsule.verification.equivalence.statistics import cliffs_delta

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "supervised" / "train.py"
SETUPS = (("C1", "C2", "C3"), ("C4", "C5", "C6"))  # original, seeded, recorded; by torch version
SEEDS = (0, 42, 1, 1234, 123, 2, 10, 5)  # of the pairs in C2; the paper names the first two
RESNET = "digits --image-size 16 --batch-size 16 --learning-rate 0.02 --epochs 2"
MODELS = {
    "lenet1": "digits --epochs 6",
    "lenet4": "digits --epochs 6",
    "lenet5": "digits --epochs 6",
    "resnet38": RESNET,
    "resnet56": RESNET,
    "lstm": "series",
}


@dataclass(frozen=True)
class Run:
    """The outputs of one training.

    Attributes:
        results: ``results.json``: evaluation and process metrics.
        weights: ``model.safetensors``.
        training_seconds: Time of the training loop.
        wall_seconds: Time of the whole process.
    """

    results: dict[str, Any]
    weights: bytes
    training_seconds: float
    wall_seconds: float

    @property
    def evaluation(self) -> dict[str, Any]:
        """The evaluation metrics, floats still in hexadecimal."""
        evaluation: dict[str, Any] = self.results["evaluation"]
        return evaluation

    @property
    def epochs(self) -> int:
        """The number of epochs of the training."""
        return int(self.results["process"]["epochs"])


@dataclass(frozen=True)
class Pair:
    """Two runs that are compared.

    Attributes:
        first: The target; in C3 the recorded run.
        second: The reproduction; in C3 the replay.
        profile_bytes: Size of the random profile in bytes; 0 without a profile.
    """

    first: Run
    second: Run
    profile_bytes: int = 0

    @property
    def reproduced(self) -> bool:
        """Whether everything but the time is identical."""
        return self.first.results == self.second.results and (
            self.first.weights == self.second.weights
        )


Setups = tuple[str, str, str]
Pairs = Mapping[str, Mapping[str, Sequence[Pair]]]  # by model and setup


def main() -> int:
    options = arguments()
    pythons = [sys.executable, *([options.other] if options.other else [])]
    pairs = {
        model: study(model, options.pairs, options.epochs, pythons) for model in options.models
    }
    print_machine()
    for python, names in zip(pythons, SETUPS, strict=False):
        print_versions(python, names)
        print_table3(pairs, names)
        print_table4(pairs, names)
        print_reproduced(pairs, names)
    if options.other:
        print_between(pairs)
    recorded = [names[2] for names in SETUPS[: len(pythons)]]
    return int(
        not all(
            p.reproduced for setups in pairs.values() for name in recorded for p in setups[name]
        )
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=8, choices=range(2, len(SEEDS) + 1))
    parser.add_argument("--epochs", type=int, help="number of epochs of every model")
    parser.add_argument("--other", help="interpreter with another torch version")
    return parser.parse_args()


def study(
    model: str, count: int, epochs: int | None, pythons: Sequence[str]
) -> dict[str, list[Pair]]:
    """Train one model under every setup of every interpreter, in turns."""
    words = ["--model", model, "--data", *MODELS[model].split()]
    words += ["--epochs", str(epochs)] if epochs else []
    pairs: dict[str, list[Pair]] = {}
    for index in range(count):
        for python, names in zip(pythons, SETUPS, strict=False):
            with tempfile.TemporaryDirectory(prefix="capsule-chen2022-") as folder:
                found = train_pairs(words, SEEDS[index], Path(folder), python)
            for setup, pair in zip(names, found, strict=True):
                pairs.setdefault(setup, []).append(pair)
        states = ", ".join(
            f"{setup} {'equal' if done[-1].reproduced else 'differ'}"
            for setup, done in pairs.items()
        )
        print(f"{model} pair {index + 1}/{count}: {states}", file=sys.stderr, flush=True)
    return pairs


def train_pairs(arguments: list[str], seed: int, folder: Path, python: str) -> list[Pair]:
    """Train one pair each: without changes, with a seed, and recorded and replayed."""
    train = partial(run, arguments, folder, python=python)
    recording, replay = folder / "recording", folder / "replay"
    seeded = ["--seed", str(seed)]
    firsts = train(), train(seeded), train(launcher=launch(recording))
    profile = merge(recording)
    seconds = train(), train(seeded), train(launcher=launch(replay, profile))
    check_consumed(replay, parse(profile))
    sizes = 0, 0, len(profile)
    return list(map(Pair, firsts, seconds, sizes))


def launch(directory: Path, profile: bytes | None = None) -> list[str]:
    """Return the beginning of a command that records into a new folder, or replays ``profile``.

    The numerics are the same as without Capsule, so that C3 differs from C1 in nothing else.
    """
    directory.mkdir()
    if profile is not None:
        (directory / REPLAYED).write_bytes(profile)
    numerics = ["accelerator.kind=cpu", "accelerator.numerics=native"]
    spec = load_spec(SCRIPT.with_name("lenet5.yaml"), numerics)
    native = str(native_part("capsule-launch").parent)
    return launch_arguments(
        spec, native=native, directory=str(directory), replay=profile is not None
    )


def run(
    arguments: Sequence[str],
    folder: Path,
    options: Sequence[str] = (),
    launcher: Sequence[str] = (),
    python: str = sys.executable,
) -> Run:
    """Train once, in a separate process."""
    timing = folder / "timing.json"
    files = ["--output", str(folder), "--timing", str(timing)]
    command = [*launcher, python, str(SCRIPT), *arguments, *options, *files]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    started = time.perf_counter()
    subprocess.run(command, env=os.environ | threads, stdout=subprocess.DEVNULL, check=True)
    return Run(
        results=json.loads((folder / "results.json").read_text()),
        weights=(folder / "model.safetensors").read_bytes(),
        training_seconds=json.loads(timing.read_text())["training_seconds"],
        wall_seconds=time.perf_counter() - started,
    )


def differences(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Return, by evaluation criterion, the differences between the two runs of each pair.

    These are absolute differences of the overall accuracy and of the mean absolute error (one per
    pair) and of the per-class accuracy (one per pair and class). For the predictions, it is the
    number of instances on which the two models disagree.
    """
    found: dict[str, list[float]] = {}
    for pair in pairs:
        first, second = pair.first.evaluation, pair.second.evaluation
        for name, one, other in ((name, first[name], second[name]) for name in first):
            if name == "predictions":
                apart = [float(sum(a != b for a, b in zip(one, other, strict=True)))]
            else:
                ones, others = (v if isinstance(v, list) else [v] for v in (one, other))
                exact = zip(map(float.fromhex, ones), map(float.fromhex, others), strict=True)
                apart = [abs(a - b) for a, b in exact]
            found.setdefault(name, []).extend(apart)
    return found


def magnitude(delta: float) -> str:
    """Name the size of an effect by the thresholds of Romano et al. 2006."""
    for name, bound in (("negligible", 0.147), ("small", 0.33), ("medium", 0.474)):
        if abs(delta) < bound:
            return name
    return "large"


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of Wilcoxon's rank-sum test, which is Mann and Whitney's U test."""
    return float(mannwhitneyu(first, second, alternative="two-sided").pvalue)


def print_machine() -> None:
    """Print the facts of the machine on which the times and the bits depend."""
    machine = take_fingerprint(None)
    print(f"{machine.cpu.name}, {machine.cpu.logical_cores} cores, Linux {machine.kernel}")


def print_versions(python: str, names: Setups) -> None:
    """Print the versions of the libraries, as the interpreter of the setups reports them."""
    packages = "torch", "numpy", "scikit-learn"
    script = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    told = subprocess.check_output([python, "-c", script, *packages], text=True).split()
    versions = ", ".join(map(" ".join, zip(packages, told, strict=True)))
    print(f"\n{names[0]} to {names[2]}: {versions}")


def print_table3(pairs: Pairs, names: Setups = SETUPS[0]) -> None:
    """Print the overhead in time and storage."""
    original, _, recorded = names
    print(f"\nTable 3. Time(O): mean seconds of training in {original}; Time(R): in {recorded},")
    print("recording and replaying together, if all runs have the same number of epochs.")
    print("(*): p < 0.001 and a large effect. RP: random profile.\n")
    titles = (
        "model|Time(O)|Time(R)|recording|replaying|median R/O|p|Cliff's delta|whole process R/O"
    )
    _print_header(*titles.split("|"), "model size", "RP size", "RP / model")
    for model, setups in pairs.items():
        size = len(setups[recorded][0].first.weights)
        profile = statistics.fmean(pair.profile_bytes for pair in setups[recorded])
        cells = _overhead(setups[original], setups[recorded])
        cells += [f"{size / 1000:.1f} kB", f"{profile / 1000:.1f} kB", f"{profile / size:.1%}"]
        print(f"| {model} | {' | '.join(cells)} |")


def _overhead(original: Sequence[Pair], ours: Sequence[Pair]) -> list[str]:
    """Return the cells of Table 3 that compare times; dashes if the numbers of epochs differ."""
    if len({run.epochs for pair in (*original, *ours) for run in (pair.first, pair.second)}) > 1:
        return ["-"] * 8
    theirs, times = _times(original), _times(ours)
    whole = _ratio(_times(ours, "wall_seconds"), _times(original, "wall_seconds"))
    p, delta = rank_sum(times, theirs), cliffs_delta(theirs, times)
    mark = " (*)" if p < 0.001 and magnitude(delta) == "large" else ""
    means = map(statistics.fmean, (theirs, times, times[::2], times[1::2]))
    seconds = [f"{mean:.3f}" for mean in means]
    seconds[1] += mark
    effect = f"{delta:+.2f} ({magnitude(delta)})"
    return [*seconds, f"{_ratio(times, theirs):.3f}", f"{p:.3f}", effect, f"{whole:.3f}"]


def _print_header(*titles: str) -> None:
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")


def _times(pairs: Sequence[Pair], name: str = "training_seconds") -> list[float]:
    """Return the seconds of all runs: first, second, first, second, ..."""
    return [getattr(run, name) for pair in pairs for run in (pair.first, pair.second)]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios between adjacent runs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


SPREADS: dict[str, Callable[[Sequence[float]], float]] = {"Diff": max, "SDev": statistics.stdev}
CRITERIA: dict[str, tuple[str, Callable[[float], str]]] = {
    "accuracy": ("Overall acc.", lambda value: f"{value:.2%}"),
    "per_class_accuracy": ("Per-class acc.", lambda value: f"{value:.2%}"),
    "mean_absolute_error": ("MAE", lambda value: f"{value:.4g}"),
    "predictions": ("Predictions", lambda value: f"{value:.4g}"),
}


def print_table4(pairs: Pairs, names: Setups = SETUPS[0]) -> None:
    """Print the variance of each evaluation criterion under each setup."""
    original, seeded, recorded = names
    print(f"\nTable 4. Ours: {recorded}, seeded: {seeded}, original: {original}. Diff: largest")
    print("difference within a pair; SDev: standard deviation of the differences; 0 is exactly")
    print("zero.\n")
    columns = [f"{name}: {value}" for name in ("ours", "seeded", "original") for value in SPREADS]
    _print_header("criterion", "model", *columns)
    _print_criteria(
        {model: [setups[name] for name in reversed(names)] for model, setups in pairs.items()}
    )


def print_between(pairs: Pairs) -> None:
    """Print the differences between two torch versions that train with the same seeds."""
    one, other = (names[1] for names in SETUPS)
    print(f"\nDifferences between the torch versions of {one} and {other}, with the same seed.")
    print("Diff and SDev as in Table 4.\n")
    _print_header("criterion", "model", *SPREADS)
    _print_criteria(
        {model: [_across(setups[one], setups[other])] for model, setups in pairs.items()}
    )


def _across(ones: Sequence[Pair], others: Sequence[Pair]) -> list[Pair]:
    """Pair the first runs of two setups."""
    return [Pair(one.first, other.first) for one, other in zip(ones, others, strict=True)]


def _print_criteria(columns: Mapping[str, Sequence[Sequence[Pair]]]) -> None:
    """Print a row for each criterion and model, with Diff and SDev of each column's pairs."""
    for criterion, (title, shown) in CRITERIA.items():
        for model, groups in columns.items():
            found = map(differences, groups)
            cells = [
                shown(value) if (value := spread(apart[criterion])) else "0"
                for apart in found
                if criterion in apart
                for spread in SPREADS.values()
            ]
            if cells:
                print(f"| {title} | {model} | {' | '.join(cells)} |")


def print_reproduced(pairs: Pairs, names: Setups = SETUPS[0]) -> None:
    """Print the paper's verdict: pairs with identical metrics, and here also weights."""
    print("\nPairs whose evaluation metrics, process metrics and weights are identical.\n")
    _print_header("model", *names, "epochs", f"mean of {names[0]}'s accuracy or MAE")
    for model, setups in pairs.items():
        done = [setups[name] for name in names]
        counts = [f"{sum(pair.reproduced for pair in each)} of {len(each)}" for each in done]
        runs = [run for pair in done[0] for run in (pair.first, pair.second)]
        epochs = sorted({run.epochs for run in runs})
        span = f"{epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else str(epochs[0])
        name = next(name for name in CRITERIA if name in runs[0].evaluation)
        quality = statistics.fmean(float.fromhex(run.evaluation[name]) for run in runs)
        print(f"| {model} | {' | '.join(counts)} | {span} | {CRITERIA[name][1](quality)} |")


if __name__ == "__main__":
    sys.exit(main())
