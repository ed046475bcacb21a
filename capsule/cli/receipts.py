"""``capsule receipts``: who vouches for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli.common import JsonOption, guarded, print_json

if TYPE_CHECKING:
    from capsule.bundle.receipts import Receipt, Receipts


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle that the receipts are about.")],
    receipts: Annotated[
        list[Path] | None,
        typer.Argument(help="Receipts; default: every BUNDLE.*.receipt.json beside the bundle."),
    ] = None,
    *,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--key", help="Public key of a verifier you trust; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say who re-executed a run, on what kinds of machine, and whether it was reproduced."""
    from capsule.bundle.bundle import open_bundle
    from capsule.bundle.receipts import read_receipts, receipts_beside
    from capsule.bundle.trust import load_trusted
    from capsule.experiment.errors import CapsuleError, ExitCode

    trusted = load_trusted(keys or [])
    with open_bundle(bundle, ()) as opened:
        claim_id, author = opened.claim_id, opened.fingerprint
    paths = receipts or receipts_beside(bundle)
    if not paths:
        raise CapsuleError(
            "CAP-B174",
            f"there is no {bundle.name}.*.receipt.json beside the bundle",
            fix="Name the receipts, or make one: capsule verify BUNDLE --sign KEY.",
            exit_code=ExitCode.USAGE,
        )
    found = read_receipts(claim_id, paths, trusted, author)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
    else:
        _show(found)
    raise typer.Exit(found.exit_code)


def _show(found: Receipts) -> None:
    from rich.console import Console
    from rich.table import Table

    from capsule.report.text import printable

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("receipt", "signer", "counts", "verdict", "mode", "machine", "time"):
        table.add_column(name, overflow="fold")
    for receipt in sorted(found.receipts, key=lambda receipt: (not receipt.counts, receipt.file)):
        table.add_row(*map(printable, _cells(receipt)))
    for refusal in found.refused:
        cells = (refusal.file, "-", "refused", refusal.code, "-", refusal.message, "-")
        table.add_row(*map(printable, cells))
    console.print(table, markup=False)
    console.print(f"\nclaim id  {found.claim_id}", markup=False, highlight=False)
    console.print(found.summary, style="bold", markup=False, highlight=False)


def _cells(receipt: Receipt) -> tuple[str, ...]:
    machine = receipt.machine
    place = ", ".join(filter(None, (machine.processor_name, machine.gpu, machine.engine)))
    return (
        receipt.file,
        receipt.signer,
        "yes" if receipt.counts else "no: not trusted" if not receipt.trusted else "no: the author",
        receipt.verdict,
        receipt.mode,
        place,
        receipt.time,
    )
