"""Completion in real shells, on a terminal of their own; and what is offered for settings."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer._click.shell_completion import split_arg_string
from typer.testing import CliRunner

from capsule.cli import main
from capsule.host.completion import complete_setting, spec_settings

SECONDS = 600  # a shell that does not answer by then has failed
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--interactive"],
}
LOAD = {
    "bash": "source completion",
    "zsh": "autoload -Uz compinit; compinit -u -D; source ./completion",
    "fish": "source completion",
}


class Terminal:
    """A shell on a pseudo-terminal, with Capsule's completion loaded."""

    def __init__(self, shell, folder):
        (folder / "completion").write_text(script(shell))
        (folder / "results.capsule.tar").touch()
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            variables = {"PATH": path, "HOME": str(folder), "TERM": "xterm", "PS1": "$ "}
            os.execvpe(SHELLS[shell][0], SHELLS[shell], variables)  # noqa: S606 - it is the shell
        self._folder = folder
        assert self.echo(LOAD[shell] + "; echo", "") == "\n"

    def complete(self, line):
        """Type a line and the tabulator key, and return the line then."""
        return self.echo(f"{line}\t", "\x01echo \x05").removesuffix("\n")

    def echo(self, typed, then):
        """Type keys, and return what the line that they make prints."""
        result = self._folder / "result"
        os.write(self._terminal, f"{typed}{then} > {result}\r".encode())
        deadline = time.monotonic() + SECONDS
        while not (result.exists() and result.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            if select.select([self._terminal], [], [], 0.1)[0]:
                os.read(self._terminal, 4096)  # else the shell would wait for its terminal
        text = result.read_text()
        result.unlink()
        return text

    def close(self):
        os.close(self._terminal)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def script(shell):
    done = CliRunner().invoke(main.app, ["completion", shell])
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture(params=[name for name in SHELLS if shutil.which(name)])
def terminal(request, tmp_path):
    opened = Terminal(request.param, tmp_path)
    yield opened
    opened.close()


@pytest.mark.slow
def test_the_tabulator_key_completes(terminal):
    """Commands, options, choices, fields of a spec, games and files."""
    for typed, rest in (
        ("capsule veri", "fy"),
        ("capsule study stat", "us"),
        ("capsule verify --challen", "ge"),
        ("capsule run --engine pod", "man"),
        ("capsule lock --set environment.game=breako", "ut"),
        ("capsule lock --set seeds.ro", "ot="),
        ("capsule show resu", "lts.capsule.tar"),
    ):
        assert terminal.complete(typed) == typed + rest


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_valid(shell, tmp_path):
    assert "_CAPSULE_COMPLETE" in script(shell)
    if shutil.which(shell):
        (tmp_path / "script").write_text(script(shell))
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_bash_breaks_no_word_at_an_equals_sign(tmp_path):
    """The words that bash asks for are those after the last '='."""
    (tmp_path / "capsule").write_text('#!/bin/sh\necho "$COMP_WORDS|$COMP_CWORD"\n')
    (tmp_path / "capsule").chmod(0o755)
    calls = (
        script("bash")
        + """
COMP_LINE="capsule lock --set a.b=c rest" COMP_POINT=24
_capsule_completion capsule
printf '%s\n' "${COMPREPLY[@]}"
"""
    )
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", calls]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "capsule lock --set a.b=c|3\n"


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("capsule run --eng", 2),
        ('capsule run "my spec.yaml" --eng', 3),
        ("capsule run 'my spec.yaml' --eng", 3),
        (r"capsule run my\ spec.yaml --eng", 3),
        (r'capsule run "a\"b c" --eng', 3),
        ("""capsule run "it's one" 'a "word"' --eng""", 4),
        ("capsule run 'my sp", 2),
        ('capsule run "my spec.yaml" ', 3),
    ],
)
def test_bash_counts_a_path_in_quotation_marks_as_one_word(tmp_path, line, number):
    (tmp_path / "capsule").write_text('#!/bin/sh\necho "$COMP_CWORD"\n')
    (tmp_path / "capsule").chmod(0o755)
    calls = f"{script('bash')}\n_capsule_completion capsule\nprintf '%s' \"${{COMPREPLY[@]}}\""
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = ["bash", "--norc", "-c", calls]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == str(number)
    # Typer splits the same words.
    assert len(split_arg_string(line)) in (number, number + 1)


def test_options_of_typer_that_write_into_files_of_the_user_are_not_offered():
    asked = {"_CAPSULE_COMPLETE": "complete_bash", "COMP_WORDS": "capsule --", "COMP_CWORD": "1"}
    command = [Path(sys.executable).with_name("capsule")]
    done = subprocess.run(
        command, env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"--debug", "--version", "--help"}


@pytest.mark.slow
def test_fields_are_offered_and_values_of_a_single_one():
    assert complete_setting("seeds.ro") == ["seeds.root="]
    assert complete_setting("trainer.algorithm") == [
        f"trainer.algorithm={name}" for name in ("dqn", "r2d2", "impala")
    ]
    assert complete_setting("environment.game=brea") == ["environment.game=breakout"]
    assert complete_setting("environment.game=") > ["environment.game="]
    assert complete_setting("evaluation.initial=") == [
        "evaluation.initial=true",
        "evaluation.initial=false",
    ]
    assert complete_setting("nothing") == complete_setting("seeds.nothing=1") == []
    assert set(complete_setting("")) == {f"{field}=" for field in spec_settings()}


def test_every_setting_names_a_field_of_the_schema():
    settings = spec_settings()
    assert {"name", "seeds.root", "trainer.total_steps", "limits.minutes"} <= set(settings)
    assert "pong" in settings["environment.game"]
    assert "asterix" in settings["environment.game"]
    assert "schema" not in settings
