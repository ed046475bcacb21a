"""Command lines that are shown to users, parsed by the application without executing anything."""

import shlex

import typer

from capsule.cli import main

APP = typer.main.get_command(main.app)


def parse(line):
    """Parse ``capsule ...`` up to a pipe or redirection.

    Raises:
        typer.TyperException: The application would reject the line.
    """
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", "||")), len(words))
    program, *arguments = words[:end]
    assert program == "capsule"
    group = APP.make_context(program, list(arguments))
    if group._protected_args:
        name, *rest = [*group._protected_args, *group.args]
        _, command, _ = APP.resolve_command(group, [name])
        if "--help" not in rest:
            command.make_context(name, rest, parent=group)
