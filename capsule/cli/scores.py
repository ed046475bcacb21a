"""``capsule scores``: show the final and best scores of runs, and statistics of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import JsonOption, KeysOption
from capsule.report.text import print_line, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from capsule.bundle.keys import PublicKey
    from capsule.report.scores import GroupScores, RunScores


@guarded
def command(
    bundles: Annotated[
        list[Path],
        typer.Argument(metavar="BUNDLE", help="Bundles. Those of the same game are grouped."),
    ],
    *,
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the final and best score of each run, and means per game.

    Nothing is executed. The scores are the signers' claims, which 'capsule verify' can confirm.

    Examples:
        # Compare several runs of the same experiment.
        capsule scores seed-1.capsule.tar seed-2.capsule.tar seed-3.capsule.tar
    """
    from capsule.bundle.trust import load_trusted
    from capsule.report.scores import group_scores

    trusted = load_trusted(keys or [])
    found = [_scores(path, trusted) for path in bundles]
    _check_different([scores[0] for scores in found])
    runs = [each for scores in found for each in scores]
    groups = group_scores(runs)
    if as_json:
        print_json(_document(runs, groups))
    else:
        _show(runs, groups)


def _scores(path: Path, keys: Sequence[PublicKey]) -> list[RunScores]:
    """Read the scores of a bundle, and check them against its other documents."""
    from capsule.bundle.bundle import open_bundle
    from capsule.host.errors import CapsuleError
    from capsule.report.scores import run_scores
    from capsule.report.subject import read_subject

    with open_bundle(path, keys) as bundle:
        subject = read_subject(bundle, str(path), [], keys)
    try:
        return run_scores(subject)
    except ValueError as error:
        raise CapsuleError(
            "CAP-S008",
            f"{path.name} cannot be scored: {error}",
            fix="Give bundles of runs that were evaluated, and whose returns are finite.",
        ) from error


def _check_different(runs: Sequence[RunScores]) -> None:
    """Reject a run that is given twice: it is one result, on whichever machine and engine.

    Args:
        runs: The scores of each bundle in one of its tasks.
    """
    from capsule.host.errors import CapsuleError

    bundles: dict[str, str] = {}
    for run in runs:
        if run.training in bundles:
            raise CapsuleError(
                "CAP-S013",
                f"{bundles[run.training]} and {run.bundle} are one run: their spec, seeds and "
                "results are the same",
                fix="Give each run once. A repetition on another machine or engine adds no result.",
            )
        bundles[run.training] = run.bundle


def _document(runs: Sequence[RunScores], groups: Sequence[GroupScores]) -> dict[str, Any]:
    from capsule.report.scores import DDOF, aggregates

    normalized = aggregates(groups)
    return {
        "schema": "capsule/scores/v1",
        "ddof": DDOF,
        "runs": [_of_run(run) for run in runs],
        "games": [_of_group(group) for group in groups],
        "human_normalized": normalized
        and {network: found._asdict() for network, found in normalized.items()},
    }


def _of_run(run: RunScores) -> dict[str, Any]:
    scores: dict[str, Any] = {
        network: {"step": score.step, "episodes": score.episodes, **score.summary._asdict()}
        for network, score in run.scores.items()
    }
    return {"bundle": run.bundle, "claim_id": run.claim_id, **run.task._asdict(), **scores}


def _of_group(group: GroupScores) -> dict[str, Any]:
    summaries: dict[str, Any] = {
        network: {**summary._asdict(), "human_normalized": group.human_normalized[network]}
        for network, summary in group.summaries.items()
    }
    return {**group.task._asdict(), "runs": group.runs, **summaries}


def _show(runs: Sequence[RunScores], groups: Sequence[GroupScores]) -> None:
    from capsule.report.scores import NOTE, aggregates
    from capsule.report.text import terminal_console

    console = terminal_console()
    _show_runs(runs, console)
    _show_groups(groups, console)
    for network, found in (aggregates(groups) or {}).items():
        print_line(
            console,
            f"human-normalised over games, {network}: median {found.median:.1%}, mean "
            f"{found.mean:.1%}, mean of at most 100 % each {found.capped_mean:.1%}",
        )
    print_line(console, NOTE)


def _show_runs(runs: Sequence[RunScores], console: Console) -> None:
    from rich.text import Text

    from capsule.report.scores import HEADS, cells

    numbers: dict[str, str] = {}
    table = _table("run", "game", "network", "step", "episodes", *HEADS)
    for run in runs:
        number = numbers.setdefault(run.bundle, str(len(numbers) + 1))
        for network, score in run.scores.items():
            name = Text(printable(run.task.name))
            shown = (f"{score.step:,}", str(score.episodes), *cells(score.summary))
            table.add_row(number, name, network, *shown)
    for bundle, number in numbers.items():
        print_line(console, f"run {number}: {printable(bundle)}")
    console.print(table)


def _show_groups(groups: Sequence[GroupScores], console: Console) -> None:
    from rich.text import Text

    from capsule.report.scores import HEADS, cells, percentage

    table = _table("game", "network", "runs", *HEADS, "human-normalised")
    for group in groups:
        for network, summary in group.summaries.items():
            share = percentage(group.human_normalized[network])
            name = Text(printable(group.task.name))
            table.add_row(name, network, str(group.runs), *cells(summary), share)
    console.print(table)


def _table(*heads: str) -> Table:
    """Return an empty table, which fits 80 columns; long names of games are broken."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*heads, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.columns[heads.index("game")].overflow = "fold"
    return table
