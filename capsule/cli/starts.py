"""``capsule starts``: the start sequences of a run, for others to be scored on the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli.common import JsonOption, KeysOption, guarded, print_json


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle of the run that ranked its starts.")],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for evaluation.start_set of other specs.")
    ] = Path("starts.json"),
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the start sequences of a run to a file, to pin them for other runs.

    They were ranked by that run's final network. Nothing is executed: 'capsule verify' shows that
    it did rank them.
    """
    from capsule.bundle import run_bundle
    from capsule.bundle.bundle import open_bundle
    from capsule.bundle.claims import claims_model
    from capsule.bundle.start_sets import start_set_of
    from capsule.bundle.trust import load_trusted
    from capsule.experiment.canonical import check_output, write_output
    from capsule.experiment.evaluation import digest_of_starts
    from capsule.experiment.lock import Lock

    check_output(output)
    with open_bundle(bundle, load_trusted(keys or [])) as opened:
        lock = opened.read(run_bundle.LOCK, Lock)
        claims = opened.read(run_bundle.CLAIMS, claims_model(lock))
    found = start_set_of(lock, claims)
    write_output(output, found.model_dump_json(by_alias=True, indent=None).encode() + b"\n")
    digest = digest_of_starts(found.starts)
    if as_json:
        facts = {"file": str(output), "starts": len(found.starts), "sha256": digest}
        print_json({"schema": "capsule/starts-written/v1", "run": found.run, **facts})
        return
    typer.echo(f"{len(found.starts)} starts, SHA-256 {digest}")
    typer.echo(f"written to {output}; name it in evaluation.start_set, relative to the spec file")
