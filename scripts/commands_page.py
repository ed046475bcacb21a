# ruff: noqa: INP001
"""Write docs/commands.md, the reference of every command, from the program itself.

Run this script after every change of a command or an option; a test compares the page with its
output.

usage: python scripts/commands_page.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import typer

from capsule.cli import main
from capsule.cli.help import grouped

PLACE = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Command reference

Every command with its arguments and options, as `capsule COMMAND --help` shows them.
`scripts/commands_page.py` writes this page.

"""


def page() -> str:
    """Return the page."""
    app = typer.main.get_group(main.app)
    commands = dict(_commands(app, "capsule"))
    names = [name.removeprefix("capsule ") for name in commands]
    contents = ", ".join(f"[{name}](#capsule-{name.replace(' ', '-')})" for name in names)
    parts = [HEAD, f"Commands: {contents}.\n\n", "## capsule\n\n", *_options(app, "capsule")]
    parts.append(f"{app.epilog} [exit-codes.md](exit-codes.md) has the details.\n")
    for name, command in commands.items():
        parts += [f"\n## {name}\n\n", *_command(command, name)]
    return "".join(parts).replace("\n\n\n", "\n\n").rstrip("\n") + "\n"


def _commands(
    group: typer.core.TyperGroup, prefix: str
) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from _commands(command, f"{prefix} {name}")
        elif isinstance(command, typer.core.TyperCommand):
            yield f"{prefix} {name}", command


def _command(command: typer.core.TyperCommand, name: str) -> Iterator[str]:
    """Yield the description of a command, its usage and examples, and its arguments and options."""
    context = typer.Context(command, info_name=name)
    description, _, examples = inspect.cleandoc(command.help or "").partition("\n\nExamples:\n")
    yield f"{_text(description)}\n\n"
    yield f"Usage: `{name} {' '.join(command.collect_usage_pieces(context))}`\n\n"
    if examples:
        yield f"```sh\n{inspect.cleandoc(examples)}\n```\n\n"
    yield from _options(command, name)


def _options(command: typer.core.TyperCommand | typer.core.TyperGroup, name: str) -> Iterator[str]:
    """Yield a table of the arguments and one of each group of options."""
    context = typer.Context(command, info_name=name)
    for group, records in grouped(command, context).items():
        yield f"| {group} | |\n|---|---|\n"
        for words, meaning in records:
            yield f"| `{_cell(words)}` | {_cell(_text(meaning))} |\n"
        yield "\n"


def _text(words: str) -> str:
    """Return a text as Markdown, with all markup characters escaped."""
    return words.replace("<", "\\<").replace("*", "\\*").replace("[", "\\[")


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


if __name__ == "__main__":
    PLACE.write_text(page())
