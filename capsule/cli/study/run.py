"""``capsule study run``: run the members of a study, each to a signed bundle."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli import options
from capsule.cli.common import guarded, print_json, shell_word
from capsule.cli.options import OUTPUT, option
from capsule.cli.reports import tell
from capsule.cli.study.arguments import OnOption, StudyArgument, locked_study
from capsule.host.wording import agreeing, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from capsule.study.directory import StudyDirectory


@guarded
def command(
    study: StudyArgument,
    *,
    key: options.SigningKeyOption = None,
    passphrase_file: options.PassphraseFileOption = None,
    on: OnOption = "local",
    only: Annotated[
        list[str] | None, option("--only GROUP", "Run only this group. May be repeated.")
    ] = None,
    resume: Annotated[
        bool, option("--resume", "Run the missing members in an existing folder.")
    ] = False,
    engine: options.EngineOption = "auto",
    output: Annotated[
        Path | None,
        option("--output -o FOLDER", "Folder of the study; default: studies/NAME.", OUTPUT),
    ] = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Run the members of a study.

    Each member is an ordinary run with its own signed bundle. If a member fails, the reason is
    printed and the others continue. You can stop a study at any moment and continue it with
    --resume, which also runs failed and lost members again.

    Examples:
        # Run every member, two at a time.
        capsule study run study.yaml --key alice --on local:2

        # Continue after an interruption, with one group first.
        capsule study run study.yaml --key alice --resume --only slow

        # Run each member as a Slurm job; the folder must be on a shared file system.
        capsule study run study.yaml --key alice --on slurm
    """
    from capsule.cli.defaults import checked_key
    from capsule.host.errors import CapsuleError
    from capsule.image.cache import Cache
    from capsule.report.progress import open_reporter
    from capsule.study.backends import parse_backend
    from capsule.study.directory import CONSOLE, StudyDirectory
    from capsule.study.progress import progress_of, show
    from capsule.study.running import MemberBatch, RunOptions

    backend = parse_backend(on, lambda text: None if quiet else typer.echo(text, err=True))
    # No passphrase is asked for, because the members read the key themselves, without a terminal.
    signing_key = checked_key(key, passphrase_file, ask=False)
    # The reporter ends before the table begins, as rich shows one live display at a time.
    with open_reporter(quiet=quiet) as reporter:
        file, lock = locked_study(study, Cache(), progress=reporter.note)
    folder = output or Path("studies") / file.study.name
    # A wrong --only is found before the folder is made.
    chosen = StudyDirectory(folder, lock).chosen(only or [])
    directory = StudyDirectory.create(folder, lock, resume=resume)
    key_file, _ = signing_key()  # before hours of work
    names = directory.missing(only or [])
    if names:
        with nullcontext(lambda: None) if quiet else _shown(directory, names) as poll:
            batch = MemberBatch(directory, names, RunOptions(key_file, passphrase_file, engine))
            try:
                backend.run(batch, poll)
            except KeyboardInterrupt:
                typer.echo("next: the same command with --resume continues the study", err=True)
                raise
    progress = progress_of(directory)
    if as_json:
        print_json(progress.document())
    else:
        from rich.console import Console

        show(progress, Console())
    left = [name for name in names if directory.bundle(name) is None]
    if left:
        error = CapsuleError(
            "CAP-Y012",
            f"{len(left)} of {counted(len(chosen), 'member')} failed, "
            f"{agreeing(len(left), 'was', 'were')} stopped or did not begin; the first is "
            f"{left[0]}",
            fix=f"Correct the cause, then add --resume. See {directory.folder(left[0]) / CONSOLE}.",
        )
        tell(error)
        raise typer.Exit(error.exit_code)
    typer.echo(f"next: capsule study report {shell_word(folder)}", err=True)


@contextmanager
def _shown(directory: StudyDirectory, names: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Keep the table of the study's progress up to date on a terminal; elsewhere, print lines."""
    from rich.console import Console
    from rich.live import Live

    from capsule.report.text import printable
    from capsule.study.progress import MemberChanges, progress_of, table

    if sys.stderr.isatty():
        with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
            yield lambda: live.update(table(progress_of(directory)), refresh=True)
        return
    changes = MemberChanges(directory, names)

    def print_changes() -> None:
        for line in changes.lines():
            typer.echo(f"  {printable(line)}", err=True)

    try:
        yield print_changes
    finally:
        print_changes()  # members that ended after the last call
