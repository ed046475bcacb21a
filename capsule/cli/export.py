"""``capsule export``: write a run in the format of another tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded
from capsule.cli.options import OUTPUT, KeysOption, option

if TYPE_CHECKING:
    from capsule.export.runs import ExportedRun

Format = Literal["csv", "tensorboard", "mlflow", "wandb"]


@guarded
def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="Bundle of a run or of a study, or a run directory."),
    ],
    *,
    form: Annotated[
        Format, option("--to FORMAT", "csv, tensorboard, mlflow or wandb (offline).", OUTPUT)
    ],
    output: Annotated[Path, option("--output -o PLACE", "File (csv) or folder to write.", OUTPUT)],
    keys: KeysOption = None,
) -> None:
    """Write the metrics of a run, or of each member of a study, for another tool.

    Nothing is executed and nothing is sent anywhere.

    Examples:
        # See the learning curves in TensorBoard.
        capsule export run.capsule.tar --to tensorboard -o logs

        # Load the metrics into a data frame.
        capsule export runs/dqn-cartpole-20270101T120000Z --to csv -o metrics.csv
    """
    from capsule.bundle.trust import load_policy
    from capsule.export.runs import read_runs
    from capsule.host.errors import CapsuleError

    runs = read_runs(path, load_policy(keys=keys or ()))
    try:
        _writer(form)(runs, output)
    except OSError as error:
        raise CapsuleError(
            "CAP-P203",
            f"{output} cannot be written: {error.strerror}",
            fix="Name a place that you may write to.",
        ) from error
    count = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    typer.echo(f"wrote {count} to {output}", err=True)


def _writer(form: Format) -> Callable[[Sequence[ExportedRun], Path], None]:
    from capsule.export import mlflow, table, tensorboard, wandb

    writers: dict[Format, Callable[[Sequence[ExportedRun], Path], None]] = {
        "csv": table.export_table,
        "tensorboard": tensorboard.export_tensorboard,
        "mlflow": mlflow.export_mlflow,
        "wandb": wandb.export_wandb,
    }
    return writers[form]
