"""Write rliable.json: what rliable 1.2.0 gives for the scores of these tests.

rliable has no wheel, so the tests do not install it. To repeat the record::

    pip install rliable==1.2.0
    python tests/study/statistics/record_rliable.py
"""

import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np

RECORD = Path(__file__).with_name("rliable.json")
SHAPES = ((1, 1), (1, 5), (1, 8), (3, 5), (26, 10))  # tasks, runs
TARGETS = (1, -2.5)  # of an optimality gap
THRESHOLDS = (-15.0, -4.0, 0.0, 3.0, 11.0)  # of a profile
AGGREGATES = ("iqm", "mean", "median")
RESAMPLES, RESAMPLES_OF_TWO, RESAMPLES_OF_A_PROFILE = 4_000, 1_000, 2_000


def make_scores(seed, tasks, runs):
    """Return scores, tasks x runs, by a generator that is not under test."""
    return (10 * np.random.default_rng(seed).normal(size=(tasks, runs))).tolist()


def pair_with_a_tie(tasks, runs):
    """Return two samples, the second with one run more; a score of the first is one of it."""
    first, second = make_scores(1, tasks, runs), make_scores(2, tasks, runs + 1)
    first[0][0] = second[0][0]
    return first, second


def columns(scores):
    """Return scores as rliable has them: runs x tasks."""
    return np.array(scores).T


def main():
    # arch 7 as a whole cannot be imported with pandas 3, and rliable needs only its bootstrap.
    package = types.ModuleType("arch")
    package.__path__ = find_spec("arch").submodule_search_locations
    sys.modules["arch"] = package
    from rliable import library, metrics

    aggregates = {name: getattr(metrics, f"aggregate_{name}") for name in AGGREGATES}
    record = {"aggregates": {}, "improvements": {}, "intervals": {}}
    for tasks, runs in SHAPES:
        runs_by_tasks = columns(make_scores(tasks * runs, tasks, runs))
        found = {name: float(each(runs_by_tasks)) for name, each in aggregates.items()}
        for target in TARGETS:
            gap = metrics.aggregate_optimality_gap(runs_by_tasks, target)
            found[f"optimality gap to {target}"] = float(gap)
        record["aggregates"][f"{tasks}x{runs}"] = found
    for tasks, runs in ((1, 5), (4, 6)):
        first, second = pair_with_a_tie(tasks, runs)
        share = metrics.probability_of_improvement(columns(first), columns(second))
        record["improvements"][f"{tasks}x{runs}"] = float(share)

    def interval(seed, scores, statistic, resamples):
        np.random.seed(seed)
        _, bounds = library.get_interval_estimates({"x": scores}, statistic, reps=resamples)
        return bounds["x"].ravel().tolist()

    sample = columns(make_scores(1, 4, 8))
    for name, each in aggregates.items():
        record["intervals"][name] = interval(
            1, sample, lambda runs, each=each: np.array([each(runs)]), RESAMPLES
        )
    pair = columns(make_scores(2, 3, 7)), columns(make_scores(3, 3, 9))
    record["intervals"]["improvement"] = interval(
        2,
        pair,
        lambda x, y: np.array([metrics.probability_of_improvement(x, y)]),
        RESAMPLES_OF_TWO,
    )
    np.random.seed(1)
    shares, bands = library.create_performance_profile(
        {"x": columns(make_scores(1, 5, 8))}, list(THRESHOLDS), reps=RESAMPLES_OF_A_PROFILE
    )
    record["profile"] = {"shares": shares["x"].tolist(), "bands": bands["x"].tolist()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
