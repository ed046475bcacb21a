"""``capsule receipts``: who vouches for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli.common import JsonOption, guarded, print_json

if TYPE_CHECKING:
    from capsule.bundle.tally import Receipt, Receipts


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle that the receipts are about.")],
    receipts: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Receipts; default: every BUNDLE.*.receipt.json in the folder of the bundle."
        ),
    ] = None,
    *,
    keys: Annotated[
        list[Path] | None,
        typer.Option(
            "--key",
            help="Public key of the bundle's signer, or of a verifier you trust; may be repeated.",
        ),
    ] = None,
    allowed_signers: Annotated[
        list[Path] | None,
        typer.Option("--allowed-signers", help="Trust file in OpenSSH's form; may be repeated."),
    ] = None,
    revoked: Annotated[
        list[Path] | None,
        typer.Option("--revoked", help="Keys or fingerprints, one a line, that count no more."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say who re-executed a run, on what kinds of machine, and whether it was reproduced."""
    from capsule.bundle.receipts import receipts_beside
    from capsule.bundle.tally import read_original, read_receipts
    from capsule.bundle.trust import load_policy
    from capsule.experiment.errors import CapsuleError, ExitCode

    policy = load_policy(
        keys=keys or (), allowed_signers=allowed_signers or (), revoked=revoked or ()
    )
    original = read_original(bundle, policy)
    paths = receipts or receipts_beside(bundle)
    if not paths:
        raise CapsuleError(
            "CAP-B174",
            f"there is no {bundle.name}.*.receipt.json beside the bundle",
            fix="Name the receipts, or make one: capsule verify BUNDLE --sign KEY.",
            exit_code=ExitCode.USAGE,
        )
    found = read_receipts(original, paths, policy)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
    else:
        _show(found)
    raise typer.Exit(found.exit_code)


def _show(found: Receipts) -> None:
    from rich.console import Console
    from rich.table import Table

    from capsule.report.text import printable

    table = Table(box=None, pad_edge=False, show_header=False)
    ordered = sorted(found.receipts, key=lambda receipt: (not receipt.counts, receipt.file))
    rows = [_lines(receipt) for receipt in ordered]
    rows += [(("refused", item.code), (item.file, item.message, "")) for item in found.refused]
    for left, right in rows:
        table.add_row(*("\n".join(map(printable, lines)) for lines in (left, right)))
    console = Console()
    console.print(table, markup=False, highlight=False)
    console.print(f"claim id  {found.claim_id}", markup=False, highlight=False)
    console.print(found.summary, style="bold", markup=False, highlight=False)


def _lines(receipt: Receipt) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a receipt says, and who says it where."""
    signer = " ".join(filter(None, (receipt.signer, receipt.identity, receipt.rejection_reason)))
    machine = receipt.machine
    parts = (machine.processor_name, machine.gpu, machine.engine, receipt.time)
    place = ", ".join(part for part in parts if part)
    code = None if receipt.own_code else "supplied-code"
    accepted = None if receipt.image == "rebuilt" else receipt.image
    mode = ", ".join(filter(None, (receipt.mode, accepted, code)))
    return (receipt.verdict, mode, receipt.standing), (signer, place, receipt.file, "")
