"""Command lines that are shown to users, parsed by the application without executing anything."""

import shlex

import typer

from capsule.cli import main

APP = typer.main.get_command(main.app)
# Every command by its words, such as "verify" or "study run".
COMMANDS = {
    f"{prefix}{name}": command
    for prefix, group in (("", APP), ("study ", APP.commands["study"]))
    for name, command in group.commands.items()
    if not hasattr(command, "commands")
}


def parse(line):
    """Parse ``capsule ...`` up to a pipe or redirection.

    Raises:
        typer.TyperException: The application would reject the line.
    """
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", "||")), len(words))
    program, *arguments = words[:end]
    assert program == "capsule"
    command, context = APP, APP.make_context(program, list(arguments))
    while context._protected_args:
        name, *rest = [*context._protected_args, *context.args]
        _, command, _ = command.resolve_command(context, [name])
        if "--help" in rest:
            return
        context = command.make_context(name, rest, parent=context)
