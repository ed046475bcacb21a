"""The command line as a whole: help, version, options before the command, exit statuses."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from capsule import __version__
from capsule.__main__ import main as program
from capsule.cli import main
from capsule.host.errors import ExitCode
from tests.cli.conftest import SMALL, capsule
from tests.command_lines import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(monkeypatch, capfd):
    """Return a function that calls what the program 'capsule' calls: status, output, errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["capsule", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code, *capfd.readouterr()

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = capsule(*command.split(), "--help")
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_help_lists_every_command_and_the_exit_statuses():
    shown = capsule("--help").stdout
    assert all(f"\n  {command.split()[0]} " in shown for command in COMMANDS)
    assert "130 interrupted" in shown


@pytest.mark.parametrize("words", [(), ("study",)], ids=["capsule", "study"])
def test_without_a_command_the_help_is_shown_and_nothing_succeeds(words):
    done = capsule(*words)
    assert done.exit_code == 2
    assert done.output.startswith("Usage: ")
    assert "\n  verify " in done.output


def options_of(command):
    """Return the long options that a command's help shows."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsule(*command, "--help").output))


def documents():
    """Return the texts of all pages but the reference, which is made of the help."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return "\n".join(path.read_text() for path in paths if path.name != "commands.md")


@pytest.mark.slow
def test_documented_options_are_those_of_help_and_conversely():
    known = {command: options_of(command.split()) for command in COMMANDS}
    general = options_of([])
    documented = documents()
    mentioned = set(re.findall(r"--[a-z][a-z-]*", documented))
    assert set().union(general, *known.values()) <= mentioned | {"--help", "--version"}
    unquoted = re.sub(r"\"[^\"\n]*\"", "", documented.replace("\\\n", " "))
    calls = re.findall(
        r"(?:^ +(?:\$ )?|`)capsule ((?:study )?[a-z]+)\b([^`\n#]*)", unquoted, re.MULTILINE
    )
    assert {command for command, _ in calls} == set(COMMANDS)
    for command, words in calls:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", words))
        assert options <= known[command] | general, f"capsule {command}{words}"


def test_help_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-m", "capsule", "--help"],
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    heavy = {"pydantic", "docker", "rich", "cryptography", "torch", "numpy", "ruamel.yaml"}
    assert "typer" in imported
    assert not heavy & imported


def test_version():
    assert capsule("--version").stdout == f"capsule {__version__}\n"


def test_version_comes_before_everything_else():
    done = capsule("--version", "nonsense")
    assert (done.exit_code, done.stdout) == (0, f"capsule {__version__}\n")


def test_a_traceback_is_shown_on_request(tmp_path):
    silent = capsule("build", tmp_path / "absent.yaml")
    assert (silent.exit_code, "Traceback" in silent.stderr) == (2, False)
    done = capsule("--debug", "build", tmp_path / "absent.yaml")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr


def test_debug_may_stand_behind_the_command(call, tmp_path):
    status, _, errors = call("build", tmp_path / "absent.yaml", "--debug")
    assert status == 2
    assert "Traceback" in errors
    assert "CAP-S001" in errors


def test_usage_errors_have_status_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert capsule("verify").exit_code == 2
    assert capsule("run", SMALL, "--learners", "0").exit_code == 2
    assert capsule("nonsense").exit_code == 2
    assert capsule("--debug").exit_code == 2


def test_a_usage_error_has_no_document():
    done = capsule("verify", "--nonsense", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "No such option: --nonsense" in done.stderr


def test_the_program_ends_with_the_status_of_the_command(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("init")[:2] == (0, "wrote capsule.yaml\n")
    status, output, errors = call("init")
    assert (status, output) == (2, "")
    assert errors.startswith("CAP-S005: capsule.yaml already exists")


class Interrupted:
    """A finder of modules that is interrupted when the command line is imported."""

    @staticmethod
    def find_spec(name, _path=None, _target=None):
        if name == "capsule.cli.main":
            raise KeyboardInterrupt


def test_an_interruption_of_the_imports_is_no_traceback(monkeypatch, capfd):
    monkeypatch.delitem(sys.modules, "capsule.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        program()
    assert (ended.value.code, capfd.readouterr().err) == (ExitCode.INTERRUPTED, "interrupted\n")


def test_an_interruption_before_the_command_begins_is_no_traceback(monkeypatch, capfd):
    monkeypatch.setattr("typer.main.get_command", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        program()
    assert (ended.value.code, capfd.readouterr().err) == (ExitCode.INTERRUPTED, "interrupted\n")


def test_the_program_is_the_module():
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert document["project"]["scripts"] == {"capsule": "capsule.__main__:main"}


def test_the_output_of_the_program_may_be_lost(monkeypatch, tmp_path, capfd):
    """A full device is no bug, and no success either."""
    monkeypatch.setattr(sys, "argv", ["capsule", "--version"])
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main.main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("CAP-X002: ")


AT_THE_END = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 10_000))
from capsule.__main__ import main
sys.argv = ["capsule", "--version"]
main()
"""


def test_a_command_rarely_looks_for_garbage_and_not_at_all_at_its_end():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert done.stdout == f"capsule {__version__}\n10000 True\n"
