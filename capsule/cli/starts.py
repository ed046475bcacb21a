"""``capsule starts``: extract the start sequences of a run's evaluation for use in other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import OUTPUT, JsonOption, KeysOption, option

DEFAULT = Path("starts.json")


@guarded
def command(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="Bundle of the run that ranked its start sequences."),
    ],
    *,
    output: Annotated[
        Path | None,
        option(
            "--output -o FILE",
            "File to write, for evaluation.start_set of other specs. By default it is "
            "./starts.json, unless that file has other starts.",
            OUTPUT,
        ),
    ] = None,
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the start sequences of a run to a file for other runs.

    The final network of the run ranked them. Nothing is executed. 'capsule verify' confirms the
    ranking.

    Examples:
        # Write starts.json, then name it as evaluation.start_set in other specs.
        capsule starts run.capsule.tar --key alice.pub -o starts.json
    """
    from capsule.bundle.start_sets import start_set_of
    from capsule.bundle.trust import load_trusted
    from capsule.experiment.evaluation import digest_of_starts
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import require_file, write_file

    place = DEFAULT if output is None else output
    require_file(place, (bundle, *(keys or ())))
    found = start_set_of(bundle, load_trusted(keys or []))
    data = found.model_dump_json(by_alias=True).encode() + b"\n"
    if output is None and place.exists() and place.read_bytes() != data:
        raise CapsuleError(
            "CAP-X004",
            f"{place} exists already, and has other content",
            fix="Name another file with --output, or name this file to replace it.",
        )
    write_file(place, data)
    digest = digest_of_starts(found.starts)
    if as_json:
        facts = {"file": str(place), "starts": len(found.starts), "sha256": digest}
        print_json({"schema": "capsule/starts-written/v1", "run": found.run, **facts})
        return
    typer.echo(f"starts  {len(found.starts)}\ndigest  sha256:{digest}")
    typer.echo(f"file    {place}")
    typer.echo("next: set evaluation.start_set to this file, relative to the spec", err=True)
