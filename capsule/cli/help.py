"""Help as plain text: the examples of a command first, then its options in groups."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from typing import TYPE_CHECKING

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter


SUMMARY = 62  # characters of a command's summary: with its name, less than a line of a terminal


class Command(TyperCommand):
    """A command that shows the examples of its docstring, and its options by ``rich_help_panel``.

    Typer groups options only if rich renders the help, which costs 0.1 s at every start and draws
    boxes into pipes.
    """

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the arguments; of a value that is not a choice, name the choice it resembles."""
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            error.message = _plain(error.message)
            raise

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return what follows the name of the command in its usage line."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_help_text(
        self,
        ctx: Context,  # noqa: ARG002 - Typer passes it
        formatter: HelpFormatter,
    ) -> None:
        """Write the description, then the examples as they stand."""
        text = inspect.cleandoc(self.help or "")
        description, _, examples = text.partition("\n\nExamples:\n")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(description)
        if examples:
            with formatter.section("Examples"):
                # write_text() would join the lines of the examples to paragraphs.
                formatter.write(textwrap.indent(textwrap.dedent(examples), "  ") + "\n")

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the arguments, the options without a group, then each group; --help is the last."""
        _write_groups(grouped(self, ctx), formatter)
        help_option = self.get_help_option(ctx)
        record = None if help_option is None else help_option.get_help_record(ctx)
        if record is not None:
            with formatter.section("Help"):
                formatter.write_dl([record])


class Group(TyperGroup):
    """A group that shows its commands by ``rich_help_panel``, each with one whole line."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write each group of commands in the order in which their first ones were added."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            groups.setdefault(heading, []).append((name, command.get_short_help_str(SUMMARY)))
        width = max(map(len, self.commands))  # the summaries of all groups start in one column
        groups = {
            heading: [(name.ljust(width), text) for name, text in records]
            for heading, records in groups.items()
        }
        _write_groups(groups, formatter)


def grouped(command: TyperCommand | TyperGroup, ctx: Context) -> dict[str, list[tuple[str, str]]]:
    """Return the arguments and options of a command by their group, each with its help."""
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None or parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            groups["Arguments"].append((_name(parameter), record[1]))
        else:
            heading = getattr(parameter, "rich_help_panel", None) or "Options"
            groups.setdefault(heading, []).append(record)
    return {heading: records for heading, records in groups.items() if records}


def _write_groups(groups: dict[str, list[tuple[str, str]]], formatter: HelpFormatter) -> None:
    for heading, records in groups.items():
        with formatter.section(heading):
            formatter.write_dl(records)


def _plain(message: str) -> str:
    """Return a message about a value without pydantic's words, and with a suggestion."""
    message = message.removeprefix("Value error, ")
    given, _, choices = message.partition(" is not one of ")
    close = difflib.get_close_matches(given, re.findall(r"'[^']*'", choices), n=1)
    return f"{message} Did you mean {close[0]}?" if close else message


def _name(argument: Parameter) -> str:
    return argument.metavar or str(argument.name).upper()


def _usage(argument: Parameter) -> str:
    """Write an argument as manual pages do: ``NAME``, ``[NAME]``, ``NAME...``."""
    name = _name(argument) if argument.required else f"[{_name(argument)}]"
    return name if argument.nargs == 1 else f"{name}..."
