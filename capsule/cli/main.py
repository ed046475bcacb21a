"""The ``capsule`` command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from capsule import __version__
from capsule.cli import (
    build,
    completion,
    diagnose,
    diff,
    doctor,
    export,
    init,
    keygen,
    lock,
    plan,
    prune,
    pull,
    push,
    receipts,
    replay,
    report,
    run,
    schema,
    scores,
    show,
    sign,
    starts,
    study,
    verify,
)
from capsule.cli import list as list_runs
from capsule.cli.help import Command, Group
from capsule.cli.output import lossy_standard_error, lossy_standard_output, standard_input

EPILOG = (
    "Exit status: 0 success, 1 results differ, 2 wrong usage or spec, 3 tampered or untrusted, "
    "4 inconclusive, 5 build failed, 6 training failed, 70 internal error, 125 no engine, "
    "130 interrupted."
)

app = typer.Typer(
    name="capsule",
    cls=Group,
    help="Make deep-RL results checkable: pin an experiment, run it, sign its results and "
    "reproduce them bit for bit.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    # Typer's own tracebacks may show local variables, among which a passphrase can be.
    pretty_exceptions_enable=False,
    # Any other mode imports rich for every help text and error (see Command).
    rich_markup_mode=None,
)
_GROUPS = {
    "Author": (init, schema, lock, plan, build, run, list_runs, diagnose, starts),
    "Reviewer": (show, verify, replay, receipts, sign, diff, report, scores),
    "Other tools": (export, push, pull),
    "Housekeeping": (keygen, doctor, prune, completion),
}
for heading, modules in _GROUPS.items():
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        app.command(name, cls=Command, rich_help_panel=heading)(module.command)
app.add_typer(study.app, rich_help_panel="Studies")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"capsule {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options that go before the command."""
    if debug:
        os.environ["CAPSULE_DEBUG"] = "1"


def main() -> None:
    """Run the command line. Its exit status is valid even if its output cannot be written."""
    if completion.VARIABLE in os.environ:
        # This is what makes Typer answer a shell. Its options that write into files of the user
        # (add_completion) are not wanted.
        from typer.completion import get_completion_inspect_parameters

        get_completion_inspect_parameters()
    # The option is accepted after the name of a command, too, and is moved before it here.
    if "--debug" in sys.argv[1:]:
        sys.argv = [sys.argv[0], "--debug", *(each for each in sys.argv[1:] if each != "--debug")]
    with standard_input(), lossy_standard_error(), lossy_standard_output():
        app()
