"""``capsule export``: write a run in the format of another tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded
from capsule.cli.options import OUTPUT, KeysOption, option

if TYPE_CHECKING:
    from capsule.bundle.trust import TrustPolicy
    from capsule.export.deposit import Details
    from capsule.export.runs import ExportedRun

Format = Literal["csv", "tensorboard", "mlflow", "wandb", "zenodo", "huggingface"]
MetricsWriter = Callable[[Sequence["ExportedRun"], Path], None]
DepositWriter = Callable[[Path, "TrustPolicy", "Details", Path], None]

DEPOSIT = "Deposit (zenodo, huggingface)"


@guarded
def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="Bundle of a run or a study, or a folder with runs."),
    ],
    *,
    form: Annotated[
        Format,
        option(
            "--to FORMAT",
            "csv, tensorboard, mlflow or wandb (offline): the metrics. zenodo or huggingface: a "
            "folder to upload.",
            OUTPUT,
        ),
    ],
    output: Annotated[Path, option("--output -o PLACE", "File (csv) or folder to write.", OUTPUT)],
    title: Annotated[str | None, option("--title TEXT", "Title of the deposit.", DEPOSIT)] = None,
    creators: Annotated[
        list[str] | None,
        option("--creator NAME", "Creator, as 'Family, Given'. May be repeated.", DEPOSIT),
    ] = None,
    licence: Annotated[
        str | None, option("--licence ID", "SPDX identifier, e.g. CC-BY-4.0.", DEPOSIT)
    ] = None,
    related: Annotated[
        list[str] | None,
        option(
            "--related RELATION=ID",
            "Related work, e.g. isSupplementTo=10.1234/x. May be repeated.",
            DEPOSIT,
        ),
    ] = None,
    citation: Annotated[
        Path | None,
        option("--citation FILE", "CITATION.cff with the creators and the licence.", DEPOSIT),
    ] = None,
    keys: KeysOption = None,
) -> None:
    """Export metrics, or a bundle as a deposit, to other tools.

    Nothing is executed and nothing is sent anywhere.

    Examples:
        # See the learning curves in TensorBoard.
        capsule export run.capsule.tar --to tensorboard -o logs

        # Load the metrics into a data frame.
        capsule export runs/dqn-cartpole-20270101T120000Z --to csv -o metrics.csv

        # Make a folder to upload to Zenodo.
        capsule export run.capsule.tar --to zenodo -o deposit --citation CITATION.cff
    """
    from capsule.bundle.trust import load_policy
    from capsule.export import huggingface, mlflow, table, tensorboard, wandb, zenodo
    from capsule.export.deposit import Details
    from capsule.export.runs import read_runs
    from capsule.host.errors import coded
    from capsule.host.outputs import require_other
    from capsule.host.wording import counted

    metrics: dict[Format, MetricsWriter] = {
        "csv": table.export_table,
        "tensorboard": tensorboard.export_tensorboard,
        "mlflow": mlflow.export_mlflow,
        "wandb": wandb.export_wandb,
    }
    deposits: dict[Format, DepositWriter] = {
        "zenodo": zenodo.export_zenodo,
        "huggingface": huggingface.export_huggingface,
    }
    cited = () if citation is None else (citation,)
    require_other(output, (path, *(keys or ()), *cited))
    policy = load_policy(keys=keys or ())
    details = Details.of(
        title=title,
        creators=creators or (),
        licence=licence,
        related=related or (),
        citation=citation,
    )
    fix = "Name a place that you may write to."
    with coded("CAP-P203", f"{output} cannot be written", fix=fix):
        if form in deposits:
            deposits[form](path, policy, details, output)
            what = "the deposit"
        else:
            details.require_none(form)
            runs = read_runs(path, policy)
            metrics[form](runs, output)
            what = counted(len(runs), "run")
            if empty := sum(not run.metrics for run in runs):
                what += f", {empty} of them without metrics,"
    typer.echo(f"wrote {what} to {output}", err=True)
