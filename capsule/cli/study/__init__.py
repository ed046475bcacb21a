"""``capsule study``: many runs as one experiment."""

import typer

from capsule.cli.help import Command
from capsule.cli.study import bundle, lock, member, report, run, starts, status, verify

app = typer.Typer(
    name="study",
    help="Lock, run, report and verify a study: groups of runs of one experiment.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for module in (lock, starts, run, status, report, bundle, verify, member):
    app.command(module.__name__.rpartition(".")[2], cls=Command)(module.command)
