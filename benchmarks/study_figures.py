"""Figures of a study for a page of Markdown, drawn from its bundle.

    python benchmarks/study_figures.py results/nagarajan2019-small

The script writes ``curves.svg`` next to the bundle, with the scores of every run by groups (figure
1 of Nagarajan et al. 2019), or, if groups have many settings, ``settings.svg``, with their final
scores from high to low (figure E.2 of Espeholt et al. 2018).
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from statistics import fmean

from chart import COLOURS, Axis, Panel, draw, score_axis

from capsule.bundle.trust import TrustPolicy
from capsule.study.results import StudyResults
from capsule.study.study_bundle import open_study
from capsule.study.tables import StudyTables


def main() -> None:
    """Draw the figures of one folder of results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    (path,) = folder.glob("*.capsule-study.tar")
    with open_study(path, TrustPolicy.of([])) as (_, study):
        sizes = Counter(member.plan.group for member in study.results.members)
        if max(sizes.values()) <= len(COLOURS):
            draw_curves(folder / "curves.svg", study.results)
        else:
            draw_settings(folder / "settings.svg", study.claims.tables)


def draw_curves(path: Path, results: StudyResults) -> None:
    """Draw a panel for each group, and a line for each of its runs."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for member in results.members:
        ((_, networks),) = member.tasks
        line = [(float(network.step), fmean(network.returns)) for network in networks]
        lines = groups.setdefault(member.plan.group, {})
        lines[f"run {len(lines) + 1}"] = line
    steps = max(x for lines in groups.values() for line in lines.values() for x, _ in line)
    highest = max(y for lines in groups.values() for line in lines.values() for _, y in line)
    across = Axis("agent steps", 0, steps, (0, steps / 2, steps))
    panels = [Panel(group, lines, score_axis(highest)) for group, lines in groups.items()]
    draw(path, panels, across, columns=3)


def draw_settings(path: Path, tables: StudyTables) -> None:
    """Draw a line for each group: the scores of its settings, from high to low."""
    groups: dict[str, list[float]] = {}
    for row in tables.settings:
        groups.setdefault(row.group, []).append(row.score)
    lines = {
        group: list(enumerate(sorted(scores, reverse=True), 1)) for group, scores in groups.items()
    }
    count = max(map(len, lines.values()))
    across = Axis("setting, by rank in its group", 1, count, (1, count))
    highest = max(y for line in lines.values() for _, y in line)
    draw(path, [Panel("final score", lines, score_axis(highest))], across)


if __name__ == "__main__":
    main()
