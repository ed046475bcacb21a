"""Options as annotated types: their names, values, limits and groups in the help."""

import re
from pathlib import Path
from typing import Annotated, get_args

import pytest
import typer
from typer.testing import CliRunner

from capsule.cli import options
from capsule.cli.help import Command
from capsule.cli.options import option
from tests.cli.conftest import capsule
from tests.command_lines import COMMANDS


def call(annotation, default, *words):
    """Call a command with this one option; return what it prints of the value."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def command(value=default):
        typer.echo(repr(value))

    command.__annotations__["value"] = annotation
    app.command(cls=Command)(command)
    return CliRunner().invoke(app, words)


def text_option(*arguments, **settings):
    return Annotated[str, option(*arguments, **settings)]


@pytest.mark.parametrize("words", [["--output", "here"], ["-o", "here"], ["--output=here"]])
def test_every_name_of_an_option_gives_its_value(words):
    annotation = text_option("--output -o FILE", "File to write.")
    assert call(annotation, "there", *words).stdout == "'here'\n"
    assert call(annotation, "there").stdout == "'there'\n"


def test_the_last_word_stands_for_the_value_in_the_help():
    shown = call(text_option("--output -o FILE", "File to write."), "there", "--help").stdout
    assert re.search(r"^  (-o, )?--output(, -o)? FILE  +File to write\.", shown, re.MULTILINE)


def test_a_value_may_have_a_form_of_several_parts():
    shown = call(text_option("--expect FILE|DIGEST", "What is expected."), "", "--help").stdout
    assert "--expect FILE|DIGEST" in shown


def test_a_switch_has_no_value_and_no_opposite():
    annotation = Annotated[bool, option("--quiet -q", "Show nothing.")]
    assert call(annotation, False).stdout == "False\n"
    assert call(annotation, False, "-q").stdout == "True\n"
    assert call(annotation, False, "--no-quiet").exit_code == 2


def test_an_option_is_in_its_group_of_the_help():
    shown = call(text_option("--one WORD", "First.", "What to check"), "", "--help").stdout
    assert shown.index("What to check:") < shown.index("--one") < shown.index("Help:")
    assert "Options:" not in shown
    assert "Options:" in call(text_option("--one WORD", "First."), "", "--help").stdout


@pytest.mark.parametrize(("word", "status"), [("2", 0), ("1", 2), ("-3", 2), ("x", 2)])
def test_a_number_below_the_smallest_is_refused(word, status):
    annotation = Annotated[int, option("--number N", "How many.", min=2)]
    assert call(annotation, 5, "--number", word).exit_code == status


def test_a_shell_is_offered_what_the_function_returns(monkeypatch):
    found = option("--one WORD", "First.", complete=lambda incomplete: [f"{incomplete}ward"])
    assert found.autocompletion("for") == ["forward"]
    assert option("--one WORD", "First.").autocompletion is None


def test_settings_are_completed():
    (found,) = get_args(options.SetOption)[1:]
    assert found.autocompletion("seeds.ro") == ["seeds.root="]


@pytest.mark.parametrize("name", COMMANDS)
def test_options_have_a_long_name_and_a_word_for_the_value_unless_they_are_switches(name):
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            first, *others = parameter.opts
            assert re.fullmatch("--[a-z][a-z-]+", first)
            assert all(re.fullmatch("-[a-z]", other) for other in others)
            assert (parameter.metavar is None) == parameter.is_flag, first


def test_no_two_options_of_a_command_have_one_name():
    for name, command in COMMANDS.items():
        names = [word for parameter in command.params for word in parameter.opts]
        assert len(names) == len(set(names)), name


@pytest.mark.parametrize("option_name", ["--learners", "--replicas"])
def test_a_run_has_at_least_one_process_of_each_kind(option_name):
    done = capsule("run", "absent.yaml", option_name, "0")
    assert (done.exit_code, option_name in done.stderr) == (2, True)


def test_the_spec_of_a_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "cannot read spec capsule.yaml" in capsule("lock").stderr
    assert Path("capsule.yaml") == options.DEFAULT_SPEC
