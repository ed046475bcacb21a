"""Human-normalised scores of Atari-57 and DMLab-30, and their aggregates.

A score of 0 is that of random play, 1 (100 %) that of a human player. The papers do not agree on
the last digits of all references. Those in ``data/`` are from these papers:

* ``atari57.csv``, up to 30 no-ops at the start of an episode: ``human`` from Kapturowski et al.
  2019, OpenReview r1lyTjAqYX, table 4; ``random`` from Mitrovic et al. 2021 (arXiv:2010.07922),
  table 10, because Espeholt et al. 2018 (arXiv:1802.01561) and Kapturowski et al. do not print it.
* ``dmlab30.csv``: both columns from Espeholt et al. 2018, table B.1, with names spelled as in
  Kapturowski et al. 2019, table 3.

The two references of Double Dunk are 2.2 points apart, so the rounding of their last digit is 2 %
of the score. With these references, the published scores of IMPALA and R2D2 give means over 57
games that differ from the published means by up to 0.4 percentage points. The median of R2D2,
which is its score in Double Dunk, is 1922.7 % instead of 1920.6 %. The mean of Ape-X is 1684.5 %
instead of 1695.6 %, for an unknown reason.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from capsule.experiment.errors import CapsuleError

_DATA = Path(__file__).parent / "data"
# ALE/Breakout-v5, Breakout-v4, BreakoutNoFrameskip-v4, BreakoutDeterministic-v0
_GYMNASIUM_ID = re.compile(r"(?:ALE/)?([A-Z][A-Za-z]*?)(?:NoFrameskip|Deterministic)?-v\d+")


class ReferenceScores(NamedTuple):
    """Scores of random play and of a human player in one game or task, in its own points.

    They normalise returns: the first score becomes 0, and the second becomes 1.
    """

    random: float
    human: float


class Aggregate(NamedTuple):
    """Aggregates of the human-normalised scores of several games.

    Attributes:
        median: Median over the games: the measure for Atari-57.
        mean: Mean over the games.
        capped_mean: Mean over the games of scores capped at 1: the measure for DMLab-30 (Espeholt
            et al. 2018, appendix B).
    """

    median: float
    mean: float
    capped_mean: float


def _references(name: str) -> dict[str, ReferenceScores]:
    with (_DATA / name).open(encoding="ascii", newline="") as stream:
        return {
            row["task"]: ReferenceScores(float(row["random"]), float(row["human"]))
            for row in csv.DictReader(stream)
        }


ATARI_57: Mapping[str, ReferenceScores] = _references("atari57.csv")
DMLAB_30: Mapping[str, ReferenceScores] = _references("dmlab30.csv")
_ALL = {**ATARI_57, **DMLAB_30}


def task_name(identifier: str) -> str:
    """Return the name of a game or task in the tables of references.

    Args:
        identifier: A ROM name as in a spec, such as ``up_n_down``; a Gymnasium id, such as
            ``ALE/UpNDown-v5``; or a level of DMLab-30.

    Raises:
        CapsuleError: CAP-S007, it is in no table.
    """
    name = _name_of(identifier)
    if name in _ALL:
        return name
    near = difflib.get_close_matches(name, _ALL, n=3)
    raise CapsuleError(
        "CAP-S007",
        f"no human score is known for {identifier!r}",
        fix=f"Did you mean {' or '.join(near)}?"
        if near
        else "Name a game of Atari-57, such as 'breakout', or a level of DMLab-30.",
    )


def reference_of(identifier: str) -> ReferenceScores | None:
    """Return the references of a game or task, if any. See :func:`task_name` for its name."""
    return _ALL.get(_name_of(identifier))


def _name_of(identifier: str) -> str:
    matched = _GYMNASIUM_ID.fullmatch(identifier)
    # Ids are in camel case, and the references have ROM names: UpNDown, up_n_down.
    return re.sub(r"(?<!^)(?=[A-Z])", "_", matched[1]).lower() if matched else identifier


def human_normalized(identifier: str, score: float) -> float:
    """Return ``(score - random) / (human - random)``.

    Args:
        identifier: Game or task, as :func:`task_name` takes it.
        score: Mean return of its episodes, in the game's own points.

    Raises:
        CapsuleError: CAP-S007, the game is unknown.
    """
    reference = _ALL[task_name(identifier)]
    return (score - reference.random) / (reference.human - reference.random)


def aggregate(scores: Mapping[str, float]) -> Aggregate:
    """Aggregate scores over games, all of which have the same weight.

    Args:
        scores: Game or task, as :func:`task_name` takes it, to its score in its own points.

    Raises:
        CapsuleError: CAP-S007, a game is unknown.
        ValueError: There are no scores.
    """
    normalized = [human_normalized(identifier, score) for identifier, score in scores.items()]
    return Aggregate(
        median=median(normalized),
        mean=fmean(normalized),
        capped_mean=fmean(min(1.0, value) for value in normalized),
    )
