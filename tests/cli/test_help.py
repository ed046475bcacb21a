"""Help: examples that are right, options in groups, plain text that fits a terminal."""

import inspect
import re

import pytest
import typer

from tests.command_lines import APP, COMMANDS, parse


def shown(command):
    parent = typer.Context(APP, info_name="capsule", terminal_width=78)
    return typer.Context(COMMANDS[command], info_name=command, parent=parent).get_help() + "\n"


def examples(text):
    section = re.split(r"\n\n(?=\S)", text.partition("\nExamples:\n")[2])[0]
    return [line.strip() for line in section.splitlines() if line.strip()]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_come_before_the_options_and_are_accepted(command):
    lines = examples(shown(command))
    calls = [line for line in lines if not line.startswith("# ")]
    assert 1 <= len(calls) <= 3
    for comment, call in zip(lines[::2], lines[1::2], strict=True):
        assert comment.startswith("# ")
        assert call.startswith(f"capsule {command}")
        parse(call)


@pytest.mark.parametrize(
    "line",
    [
        "capsule verify",
        "capsule verify run.tar --unknown",
        "capsule verify run.tar --threshold 0",
        "capsule nonsense",
    ],
)
def test_the_check_of_examples_rejects_what_the_application_rejects(line):
    with pytest.raises(typer.TyperException):
        parse(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_text_of_at_most_80_columns(command):
    text = shown(command)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_description_and_no_group_is_long(command):
    context = typer.Context(COMMANDS[command], info_name=command)
    groups = {}
    for parameter in COMMANDS[command].get_params(context):
        name, description = parameter.get_help_record(context)
        assert description, name
        groups.setdefault(getattr(parameter, "rich_help_panel", None), []).append(name)
    assert max(map(len, groups.values())) <= 10


def test_verify_groups_its_options():
    text = shown("verify")
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Examples:",
        "Arguments:",
        "Options:",
        "What to check:",
        "Trusted keys and identities:",
        "Which bundle to accept:",
        "Where and what to execute:",
        "Receipt:",
        "Output:",
        "Help:",
    ]


@pytest.mark.parametrize("group", [APP, APP.commands["study"]], ids=["capsule", "study"])
def test_every_command_has_its_whole_summary_on_one_line_of_80_columns(group):
    text = typer.Context(group, info_name="capsule", terminal_width=78).get_help()
    assert "..." not in text.partition("COMMAND [ARGS]...")[2]
    assert max(map(len, text.splitlines())) <= 80
    for name, command in group.commands.items():
        summary = inspect.cleandoc(command.help).partition(".")[0]
        assert re.search(rf"^  {name} +{re.escape(summary)}\b", text, re.MULTILINE), name


def test_the_commands_are_in_groups_and_the_help_of_a_command_ends_with_help():
    text = typer.Context(APP, info_name="capsule", terminal_width=78).get_help()
    headings = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert headings == ["Options", "Author", "Reviewer", "Other tools", "Housekeeping", "Studies"]
    assert shown("run").endswith("\n\nHelp:\n  --help  Show this message and exit.\n")


def test_the_usage_line_reads_like_a_manual_page():
    assert shown("verify").startswith("Usage: capsule verify [OPTIONS] BUNDLE\n")
    assert " run [OPTIONS] [SPEC]\n" in shown("run")
    assert " scores [OPTIONS] BUNDLE...\n" in shown("scores")
    assert " receipts [OPTIONS] BUNDLE [RECEIPT]...\n" in shown("receipts")


def test_a_value_that_is_not_a_choice_is_answered_with_the_choice_that_it_resembles():
    with pytest.raises(typer.BadParameter) as caught:
        parse("capsule run --engine apptainr")
    assert caught.value.message.startswith("'apptainr' is not one of 'auto', ")
    assert caught.value.message.endswith(". Did you mean 'apptainer'?")
    with pytest.raises(typer.BadParameter, match="'cloud' is not one of "):
        parse("capsule study run study.yaml --engine cloud")
