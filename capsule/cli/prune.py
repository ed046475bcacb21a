"""``capsule prune``: free disk space."""

from __future__ import annotations

import re
import sys
import time
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from capsule.cli.common import guarded, no_effect, print_json
from capsule.cli.options import JsonOption, option

if TYPE_CHECKING:
    from capsule.image.cache import Cache
    from capsule.pruning import Pruning

_SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_TIMES = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@guarded
def command(
    *,
    everything: Annotated[
        bool,
        option(
            "--all",
            "Also delete data that may not be available again: packages, package indexes, the "
            "source trees of programs and data sets.",
        ),
    ] = False,
    older_than: Annotated[
        str | None,
        option("--older-than AGE", "Delete only files of the cache unused for, e.g., 12h or 30d."),
    ] = None,
    keep_size: Annotated[
        str | None,
        option("--keep-size SIZE", "Delete only until the cache has at most, e.g., 500M or 5G."),
    ] = None,
    only: Annotated[
        Literal["all", "cache", "images", "folders"],
        option(
            "--only WHERE",
            "Restrict the command to one place: cache, images (with containers) or folders.",
        ),
    ] = "all",
    dry_run: Annotated[
        bool, option("--dry-run", "Show what would be deleted, and delete nothing.")
    ] = False,
    yes: Annotated[bool, option("--yes -y", "Delete without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Free disk space in the cache and in container engines.

    The command shows what can be deleted, with sizes, and asks for confirmation. By default, it
    deletes only data that Capsule can make again without a download: layers, environments,
    unpacked images and bytecode in the cache, Capsule's images that no container uses, and
    containers and temporary folders of killed processes. With --older-than or --keep-size, images
    of engines are kept, because engines do not report when an image was last used.

    Examples:
        # Show what can be deleted.
        capsule prune --dry-run

        # Delete everything that was not used for a month, including downloads.
        capsule prune --all --older-than 30d --yes
    """
    from capsule.image.cache import Cache

    given = {"--older-than": older_than, "--keep-size": keep_size, "--all": everything or None}
    for name, value in given.items():
        if value is not None and only not in ("all", "cache"):
            raise no_effect(name, f"--only {only}", "It is for files of the cache.")
    before = None if older_than is None else time.time() - _seconds(older_than)
    keep = None if keep_size is None else _bytes(keep_size)
    cache = Cache()
    exists = cache.exists()
    # A dry run writes nothing, not even the file on which processes lock the cache.
    with cache.exclusive() if exists and not dry_run else nullcontext():
        pruning = _pruning(cache, only, before, keep, everything=everything)
    asks = bool(pruning.rows) and not dry_run and not yes
    if asks or not as_json:
        _show(pruning, err=as_json)
    deleted = _agreed() if asks else bool(pruning.rows) and not dry_run
    if deleted:
        # The cache was not held while the user was asked: other commands would have had to wait.
        with cache.exclusive() if exists else nullcontext():
            pruning.delete(lambda message: typer.echo(message, err=True))
    if as_json:
        print_json({"schema": "capsule/pruned/v1", "deleted": deleted, **pruning.document()})
    elif pruning.rows:
        typer.echo("deleted" if deleted else "nothing was deleted", err=True)


def _pruning(
    cache: Cache, only: str, before: float | None, keep: int | None, *, everything: bool
) -> Pruning:
    """Find what is to be deleted."""
    from capsule.image.cache_items import DERIVED, DOWNLOADED, cache_items, chosen
    from capsule.pruning import (
        Pruning,
        abandoned_containers,
        abandoned_folders,
        removable_images,
    )

    kinds = (*DERIVED, *DOWNLOADED) if everything else DERIVED
    unfiltered = before is None and keep is None
    return Pruning(
        items=chosen(cache_items(cache), kinds, before=before, keep=keep)
        if only in ("all", "cache")
        else (),
        images=list(removable_images()) if only in ("all", "images") and unfiltered else (),
        folders=abandoned_folders(cache) if only in ("all", "folders") else (),
        containers=list(abandoned_containers()) if only in ("all", "images") else (),
    )


def _show(pruning: Pruning, *, err: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from capsule.report.text import bytes_text, terminal_console

    if not pruning.rows:
        typer.echo("nothing to delete", err=True)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("what")
    table.add_column("number", justify="right")
    table.add_column("size", justify="right")
    for row in pruning.rows:
        table.add_row(row.kind, f"{row.number:,}", bytes_text(row.bytes))
    table.add_row("all", "", bytes_text(sum(row.bytes for row in pruning.rows)))
    (Console(stderr=True) if err else terminal_console()).print(table)


def _agreed() -> bool:
    """Ask on the terminal.

    Raises:
        CapsuleError: CAP-I310, the command was not started from a terminal.
    """
    from capsule.host.errors import CapsuleError

    if not sys.stdin.isatty():
        raise CapsuleError(
            "CAP-I310",
            "nothing was deleted, because confirmation requires a terminal",
            fix="Add --yes to delete without asking, or --dry-run.",
        )
    # With err=True alone, click still writes the space after the question to standard output, where
    # it would precede the document of --json.
    with redirect_stdout(sys.stderr):
        return typer.confirm("Delete this?", err=True)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,6})([KMGT]?)(?:i?B)?", text)
    if match is None:
        raise _malformed("--keep-size", text, "500M, 5G or 5GiB")
    return int(match[1]) << _SIZES[match[2]]


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", text)
    if match is None:
        raise _malformed("--older-than", text, "90m, 12h, 30d or 4w")
    return int(match[1]) * _TIMES[match[2]]


def _malformed(name: str, text: str, examples: str) -> Exception:
    from capsule.host.errors import CapsuleError

    return CapsuleError(
        "CAP-I310",
        f"{name} {text!r} is not {'a size' if name == '--keep-size' else 'an age'}",
        fix=f"Write, for example, {examples}.",
    )
