"""``capsule receipts``: count the signed receipts of a run's re-executions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.defaults import trusted_files
from capsule.cli.options import (
    TRUST,
    AllowedSignersOption,
    JsonOption,
    RevokedOption,
    SignatureOption,
    option,
)

if TYPE_CHECKING:
    from capsule.bundle.tally import Receipt, Receipts


@guarded
def command(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Bundle that the receipts are for.")
    ],
    receipts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RECEIPT",
            help="Receipts to read. By default, all files BUNDLE.*.receipt.json beside the bundle.",
        ),
    ] = None,
    *,
    keys: Annotated[
        list[Path] | None,
        option(
            "--key FILE",
            "Public key of the bundle's signer or of a verifier that you trust. May be repeated.",
            TRUST,
        ),
    ] = None,
    allowed_signers: AllowedSignersOption = None,
    revoked: RevokedOption = None,
    threshold: Annotated[
        int,
        option(
            "--threshold N",
            "Number of different trusted keys whose owners must have reproduced the run bit for "
            "bit.",
            TRUST,
            min=1,
        ),
    ] = 1,
    signatures: SignatureOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who re-executed a run, where, and with what result.

    A receipt is a signed statement of one verification ('capsule verify --sign'). Receipts by
    keys that you do not trust are listed but not counted.

    Examples:
        # Read the receipts beside the bundle, and count those of bob and carol.
        capsule receipts run.capsule.tar --key alice.pub --key bob.pub --key carol.pub

        # Succeed only if two independent verifiers reproduced the run bit for bit.
        capsule receipts run.capsule.tar --threshold 2
    """
    from capsule.bundle.receipts import receipts_beside
    from capsule.bundle.tally import read_original, read_receipts
    from capsule.bundle.trust import load_policy
    from capsule.host.errors import CapsuleError

    policy = load_policy(
        *trusted_files(keys, allowed_signers),
        revoked=revoked or (),
        signatures=signatures or (),
    )
    original = read_original(bundle, policy)
    for path in receipts or ():
        if not path.is_file():
            raise CapsuleError(
                "CAP-B174",
                f"the receipt {str(path)!a} is not a file",
                fix="Name existing files, or none, to read those beside the bundle.",
            )
    paths = receipts or receipts_beside(bundle)
    if not paths:
        raise CapsuleError(
            "CAP-B174",
            f"there is no {bundle.name}.*.receipt.json beside the bundle",
            fix="Name the receipts, or make one: capsule verify BUNDLE --sign KEY.",
        )
    found = read_receipts(original, paths, policy)
    if as_json:
        print_json(found.model_dump(mode="json", by_alias=True))
    else:
        _show(found)
    if found.bitwise < threshold and threshold > 1:
        typer.echo(
            f"{found.bitwise} of the {threshold} signers that --threshold requires", err=True
        )
    raise typer.Exit(found.exit_code(threshold))


def _show(found: Receipts) -> None:
    from rich.table import Table

    from capsule.report.text import printable, terminal_console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a long file name is broken, and nothing of it is left out
    ordered = sorted(found.receipts, key=lambda receipt: (not receipt.counts, receipt.file))
    rows = [_lines(receipt) for receipt in ordered]
    rows += [(("rejected", item.code), (item.file, item.message, "")) for item in found.refused]
    for left, right in rows:
        table.add_row(*("\n".join(map(printable, lines)) for lines in (left, right)))
    console = terminal_console()
    console.print(table, markup=False, highlight=False)
    console.print(f"claim id  {found.claim_id}", markup=False, highlight=False)
    console.print(found.summary, style="bold", markup=False, highlight=False)


def _lines(receipt: Receipt) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the two columns of a receipt: its result, and its signer and machine."""
    signer = " ".join(filter(None, (receipt.signer, receipt.identity, receipt.rejection_reason)))
    machine = receipt.machine
    parts = (machine.processor_name, machine.gpu, machine.engine, receipt.time)
    place = ", ".join(part for part in parts if part)
    code = None if receipt.own_code else "supplied-code"
    accepted = None if receipt.image == "rebuilt" else receipt.image
    mode = ", ".join(filter(None, (receipt.mode, accepted, code)))
    return (receipt.verdict, mode, receipt.standing), (signer, place, receipt.file, "")
