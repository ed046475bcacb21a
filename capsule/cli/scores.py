"""``capsule scores``: human-normalised Atari scores of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsule.cli.common import JsonOption, guarded, print_json

if TYPE_CHECKING:
    from capsule.bundle.keys import PublicKey


@guarded
def command(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles; several of a game are averaged.")],
    *,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--key", help="Public key you trust (OpenSSH or PEM); may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score the last evaluation of runs on Atari, 100 % being a human's score.

    Nothing is executed: without 'capsule verify' these are the signers' claims.
    """
    from statistics import fmean

    from capsule.bundle.keys import load_public
    from capsule.experiment.scores import aggregate, human_normalized

    trusted = [load_public(path) for path in keys or []]
    returns: dict[str, list[float]] = {}
    for path in bundles:
        for game, score in _scores(path, trusted):
            returns.setdefault(game, []).append(score)
    means = {game: fmean(scores) for game, scores in sorted(returns.items())}
    normalized = {game: human_normalized(game, mean) for game, mean in means.items()}
    summary = aggregate(means)._asdict()
    if as_json:
        document = {"scores": means, "human_normalized": normalized, **summary}
        print_json({"schema": "capsule/scores/v1", **document})
        return
    _show(means, normalized, summary)


def _scores(path: Path, keys: list[PublicKey]) -> Iterator[tuple[str, float]]:
    """Yield each game of a bundle's run, and the mean return of its last evaluation."""
    from statistics import fmean

    from capsule.bundle import run_bundle
    from capsule.bundle.bundle import open_bundle
    from capsule.bundle.claims import TrainingClaims, claims_model
    from capsule.experiment.errors import CapsuleError, ExitCode
    from capsule.experiment.lock import Lock
    from capsule.experiment.spec import AtariEnvironment, tasks_of

    with open_bundle(path, keys) as bundle:
        lock = bundle.read(run_bundle.LOCK, Lock)
        claims = bundle.read(run_bundle.CLAIMS, claims_model(lock))
    environment = lock.spec.environment
    if not isinstance(claims, TrainingClaims) or not isinstance(environment, AtariEnvironment):
        raise CapsuleError(
            "CAP-S008",
            f"{path.name} is not a run on Atari",
            fix="Give bundles of runs whose spec has environment.suite: atari.",
            exit_code=ExitCode.USAGE,
        )
    games = [task.model_dump()["game"] for task in tasks_of(environment)]
    returns = [float.fromhex(score) for score in claims.evaluation.points[-1].returns]
    for number, game in enumerate(games):
        yield game, fmean(returns[number :: len(games)])


def _show(
    means: Mapping[str, float], normalized: Mapping[str, float], summary: Mapping[str, Any]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("game", "score", "human-normalised")
    for game, mean in means.items():
        table.add_row(game, f"{mean:,.1f}", f"{normalized[game]:.1%}")
    table.add_section()
    for name, value in summary.items():
        table.add_row(name.replace("_", " "), "", f"{value:.1%}")
    Console().print(table)
