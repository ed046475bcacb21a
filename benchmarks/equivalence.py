"""How often is a replica accepted that differs by exactly the tolerance? See docs/grades.md.

The percentile bootstrap keeps this frequency below alpha only for many starts. Each trial draws the
returns of two networks whose interquartile means differ by the tolerance in the population, and
tests whether the whole interval lies within the tolerance::

    python benchmarks/equivalence.py
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.stats import trim_mean

from capsule.verification.equivalence.returns import TRIMMED

ALPHA = 0.05
POPULATION = 1_000_000
TOLERANCE = 0.5  # in units of the returns' spread
RETURNS = ("normal", "exponential", "in steps of ten")

Returns = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--resamples", type=int, default=1_000)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print("| returns | starts | paired | accepted |\n|---|---|---|---|")
    for kind in RETURNS:
        recorded, found = draw(random, kind, POPULATION)
        apart = float(interquartile_means(found) - interquartile_means(recorded))
        tolerance = TOLERANCE * float(recorded.std())
        for starts in (11, 20, 50, 100):
            for paired in (True, False):
                accepted = sum(
                    accepts(random, kind, starts, tolerance, tolerance - apart, paired, options)
                    for _ in range(options.trials)
                )
                share = 100 * accepted / options.trials
                print(f"| {kind} | {starts} | {paired} | {share:.1f} % |", flush=True)


def draw(random: np.random.Generator, kind: str, size: int) -> tuple[Returns, Returns]:
    """Draw the returns of both networks from the same starts."""
    if kind == "normal":
        recorded = random.normal(0, 1, size)
        return recorded, recorded + random.normal(0, 0.5, size)
    if kind == "exponential":
        recorded = random.exponential(1, size)
        return recorded, recorded + random.exponential(0.5, size)
    rounds: Returns = random.integers(0, 6, size).astype(np.float64) * 10
    return rounds, rounds + random.choice([0, 0, 0, 10, -10, 20], size)


def interquartile_means(samples: Returns) -> Returns:
    """Return the means over the last axis. Capsule's own function takes one sample at a time."""
    middle: Returns = trim_mean(samples, TRIMMED, axis=-1)
    return middle


def accepts(
    random: np.random.Generator,
    kind: str,
    starts: int,
    tolerance: float,
    shift: float,
    paired: bool,
    options: argparse.Namespace,
) -> bool:
    """Tell whether one replica is accepted."""
    recorded, found = draw(random, kind, starts)
    if not paired:
        recorded, _ = draw(random, kind, starts)
    left = random.integers(0, starts, (options.resamples, starts))
    right = left if paired else random.integers(0, starts, left.shape)
    after, before = (found + shift)[right], recorded[left]
    differences = interquartile_means(after) - interquartile_means(before)
    low, high = np.quantile(differences, [ALPHA, 1 - ALPHA])
    return bool(-tolerance < low and high < tolerance)


if __name__ == "__main__":
    main()
