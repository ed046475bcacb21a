"""``capsule list``: the runs in a folder, and how each of them stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import JsonOption


@guarded
def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder with run directories, or of a study."),
    ] = Path("runs"),
    *,
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, the newest first.

    A run is finished, running, interrupted ('capsule run --resume' continues it), failed, not
    started or damaged. Its return is the mean of the last evaluation or, in parentheses, of the
    last 100 episodes of the training.

    Examples:
        # List the runs in ./runs.
        capsule list
    """
    from datetime import UTC, datetime

    from capsule.host.wording import counted
    from capsule.report.runs import find_runs, runs_table
    from capsule.report.text import printable, terminal_console

    runs = find_runs(folder)
    if as_json:
        found = [run.document() for run in runs]
        print_json({"schema": "capsule/runs/v1", "folder": str(folder), "runs": found})
        return
    if not runs:
        typer.echo(
            f"{folder} has no runs; name the folder that 'capsule run --output' was given, by "
            "default 'runs'",
            err=True,
        )
        return
    terminal_console().print(runs_table(runs, folder, datetime.now(UTC)), markup=False)
    for run in runs:
        if run.problem is not None:
            problem = f"{printable(run.path.name)} {run.state}: {printable(run.problem)}"
            typer.echo(problem, err=True)
    typer.echo(counted(len(runs), "run"), err=True)
