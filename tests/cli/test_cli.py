"""The command line: help, exit statuses, errors. No engine needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capsule.cli import main
from capsule.experiment.spec import CodeSpec
from capsule.experiment.trainers import CommandTrainer
from capsule.host.spec_file import load_spec
from tests.command_lines import COMMANDS

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "specs" / "dqn-breakout-small.yaml"


def capsule(*arguments, cwd=None, **variables):
    return subprocess.run(
        [sys.executable, "-m", "capsule", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = CliRunner().invoke(main.app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_help_lists_every_command_and_the_exit_statuses():
    done = capsule("--help")
    assert all(f"\n  {command.split()[0]} " in done.stdout for command in COMMANDS)
    assert "130 interrupted" in done.stdout


def options_of(command):
    """Return the long options that a command's help shows."""
    shown = CliRunner().invoke(main.app, [*command, "--help"]).output
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown))


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
    done = capsule("--help", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    heavy = {"pydantic", "docker", "rich", "cryptography", "torch", "numpy", "ruamel.yaml"}
    assert "typer" in imported
    assert not heavy & imported


def test_version():
    assert capsule("--version").stdout.startswith("capsule ")


@pytest.mark.slow
def test_init_writes_a_spec_that_is_valid_and_never_overwrites(tmp_path):
    assert capsule("init", cwd=tmp_path).returncode == 0
    written = (tmp_path / "capsule.yaml").read_bytes()
    again = capsule("init", cwd=tmp_path)
    assert again.returncode == 2
    assert "CAP-S005" in again.stderr
    assert (tmp_path / "capsule.yaml").read_bytes() == written == SMALL.read_bytes()


@pytest.mark.slow
def test_init_writes_a_spec_for_an_own_program(tmp_path):
    done = capsule("init", "--template", "own-program", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"schema": "capsule/init/v1", "spec": "capsule.yaml"}
    spec = load_spec(tmp_path / "capsule.yaml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert "{seed}" in spec.trainer.command
    assert spec.code == CodeSpec(path=".")
    plain = capsule("init", "other.yaml", "--template", "own-program", cwd=tmp_path)
    assert "put your command into it" in plain.stderr


@pytest.mark.slow
def test_init_writes_specs_of_all_algorithms(tmp_path):
    for name in ("dqn", "r2d2", "impala"):
        done = capsule("init", f"{name}.yaml", "--template", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert load_spec(tmp_path / f"{name}.yaml").trainer.algorithm == name


def test_the_specs_of_the_papers_are_their_defaults():
    """What these specs write out is what the papers' tables say; one has choices of its own."""
    for name, chosen in (
        ("dqn-breakout", ()),
        ("r2d2-atari", ()),
        (
            "impala-atari",
            (
                *("actors", "annealing", "hidden_units", "initialization", "network"),
                *("schedule", "truncation"),
            ),
        ),
    ):
        trainer = load_spec(SMALL.with_name(f"{name}.yaml")).trainer
        choice = {field: getattr(trainer, field) for field in chosen}
        assert trainer == type(trainer)(algorithm=trainer.algorithm, **choice)


@pytest.mark.slow
def test_an_unknown_template_is_refused_and_the_known_ones_are_named(tmp_path):
    done = capsule("init", "--template", "ppo", cwd=tmp_path)
    assert done.returncode == 2
    assert "own-program" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "own-program" in capsule("init", "--help").stdout


def test_schema_is_json_schema():
    schema = json.loads(capsule("schema").stdout)
    assert schema["$schema"].endswith("2020-12/schema")
    assert "trainer" in schema["properties"]


@pytest.mark.slow
def test_a_bad_spec_ends_with_status_2_and_no_traceback(tmp_path):
    spec = tmp_path / "s.yaml"
    spec.write_text(SMALL.read_text().replace("discount", "discont").replace("game:", "gamme:"))
    done = capsule("build", spec, "--json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "environment.gamme is not a known key" in done.stderr
    assert "fix:" in done.stderr
    assert json.loads(done.stdout)["code"] == "CAP-S003"
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


@pytest.mark.slow
def test_a_traceback_is_shown_on_request(tmp_path):
    done = capsule("--debug", "build", tmp_path / "absent.yaml")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.slow
def test_usage_errors_have_status_2():
    assert capsule("verify").returncode == 2
    assert capsule("run", SMALL).returncode == 2
    assert capsule("nonsense").returncode == 2


@pytest.mark.slow
def test_a_missing_bundle_or_mode_is_named(tmp_path):
    done = capsule("verify", tmp_path / "none.tar", "--mode", "prefix:x", cwd=tmp_path)
    assert done.returncode == 2
    assert "CAP-V001" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", b"not a lock", b"{}", b'{"schema":"capsule/lock/v1"}'])
def test_a_damaged_lock_is_refused(tmp_path, data):
    lock = tmp_path / "x.lock.json"
    lock.write_bytes(data)
    done = capsule("build", lock)
    assert done.returncode == 2
    assert "CAP-L002" in done.stderr
    assert lock.read_bytes() == data


@pytest.mark.slow
def test_run_refuses_an_unusable_key_before_it_does_anything(tmp_path):
    key = tmp_path / "key"
    key.write_text("no key")
    done = capsule("run", SMALL, "--key", key, "--output", tmp_path / "runs")
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_is_wrong_with_a_command_line_is_found_before_anything_is_made(tmp_path):
    for words, code in (
        (("run",), "CAP-S001"),
        (("run", "--resume", "nowhere"), "CAP-S012"),
        (("run", SMALL, "--cluster", "docker:2"), "CAP-E018"),
        (("verify", SMALL, "--allow-untrusted"), "CAP-B114"),
    ):
        done = capsule(*words, cwd=tmp_path)
        assert (done.returncode, code in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_public_key_does_not_sign(tmp_path):
    assert capsule("keygen", "alice", cwd=tmp_path).returncode == 0
    done = capsule("run", SMALL, "--key", "alice.pub", cwd=tmp_path)
    assert done.returncode == 2
    assert "alice.pub is a public key" in done.stderr


@pytest.mark.slow
def test_debug_may_stand_behind_the_command(tmp_path):
    done = capsule("build", "absent.yaml", "--debug", cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert "CAP-S001" in done.stderr


@pytest.mark.slow
def test_run_tries_the_ssh_key_before_it_does_anything(tmp_path):
    assert capsule("keygen", "alice", cwd=tmp_path).returncode == 0
    options = ("--key", "alice", "--ssh-key", "missing", "--output", "runs")
    done = capsule("run", SMALL, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "CAP-B156" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_keygen_writes_two_files_and_never_overwrites(tmp_path):
    made = capsule("keygen", "alice", "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["fingerprint"].startswith("SHA256:")
    assert (tmp_path / "alice").stat().st_mode & 0o777 == 0o600
    before = (tmp_path / "alice").read_bytes()
    assert capsule("keygen", "alice", cwd=tmp_path).returncode == 2
    assert (tmp_path / "alice").read_bytes() == before


@pytest.mark.slow
def test_keygen_makes_keys_of_both_types(tmp_path):
    made = capsule("keygen", "alice", "--type", "ecdsa-p256", "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["type"] == "ecdsa-p256"
    assert (tmp_path / "alice.pub").read_text().startswith("ecdsa-sha2-nistp256 ")
    assert capsule("keygen", "bob", "--type", "rsa", cwd=tmp_path).returncode == 2
    assert not (tmp_path / "bob").exists()
