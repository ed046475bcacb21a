"""``capsule study``: many runs as one experiment."""

import typer

from capsule.cli.help import Command, Group
from capsule.cli.study import bundle, lock, member, report, run, starts, status, verify

app = typer.Typer(
    name="study",
    cls=Group,
    help="Lock, run, report and verify groups of runs as a study.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for module in (lock, starts, run, status, report, bundle, verify, member):
    app.command(module.__name__.rpartition(".")[2], cls=Command)(module.command)
