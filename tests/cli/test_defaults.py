"""The own key, which the first command makes, and whom the user trusts."""

import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from capsule.bundle import keys
from capsule.bundle.archive import open_archive
from capsule.bundle.keys import generate, load_public
from capsule.bundle.trust import load_policy
from capsule.cli import defaults
from capsule.cli.defaults import configuration_folder, own_key, signing_key, trusted_files
from capsule.cli.main import app
from capsule.host import outputs
from capsule.host.errors import CapsuleError
from tests.verification.runs import honest, honest_bundle, key

__all__ = ["honest", "honest_bundle", "key"]  # fixtures
SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty configuration folder, which does not exist yet."""
    folder = tmp_path / "home" / "capsule"
    monkeypatch.setenv("CAPSULE_CONFIG", str(folder))
    monkeypatch.delenv(defaults.KEY, raising=False)
    monkeypatch.delenv(defaults.ALLOWED_SIGNERS, raising=False)
    return folder


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("", "/xdg", "/xdg/capsule"),
        ("", "relative", "/home/ada/.config/capsule"),
        ("", "", "/home/ada/.config/capsule"),
    ],
)
def test_where_the_configuration_folder_is(monkeypatch, own, xdg, expected):
    monkeypatch.setenv("CAPSULE_CONFIG", own)
    monkeypatch.setenv("XDG_CONFIG_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/ada")
    assert configuration_folder() == Path(expected)


def test_the_own_key_is_made_at_first_use_and_said(folder, capsys):
    path, key = signing_key(None, None)
    assert path == own_key() == folder / "key"
    said = capsys.readouterr().err
    assert str(path) in said
    assert key.public.fingerprint in said
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    _, again = signing_key(None, None)
    assert again.public == key.public
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_first_uses_at_one_time_make_one_key(folder):
    program = (
        "from capsule.cli.defaults import signing_key;"
        "print(signing_key(None, None)[1].public.fingerprint)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    fingerprints = {process.communicate()[0] for process in processes}
    assert fingerprints == {load_public(folder / "key.pub").fingerprint + "\n"}


@pytest.mark.parametrize("name", ["key", "key.pub"])
def test_another_command_uses_or_makes_the_key_before_a_file_is_written(folder, name, monkeypatch):
    """Both sign with the same key, which stays."""
    others = []

    def write_new(path, *args, **kwargs):
        if path.name == name and not others:
            others.append(None)
            others[0] = signing_key(None, None)[1]
        outputs.write_new(path, *args, **kwargs)

    monkeypatch.setattr(keys, "write_new", write_new)
    path, key = signing_key(None, None)
    assert key.public == others[0].public == load_public(folder / "key.pub")
    assert keys.load_private(path).public == key.public


def test_the_public_half_is_written_again(folder):
    _, key = signing_key(None, None)
    (folder / "key.pub").unlink()
    signing_key(None, None)
    assert load_public(folder / "key.pub") == key.public


def test_a_key_signs_without_its_public_half(folder, tmp_path, monkeypatch):
    _, key = signing_key(None, None)
    (folder / "key.pub").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(defaults, "write_output", Mock(side_effect=PermissionError))  # read-only
        assert signing_key(None, None)[1].public == key.public
    shutil.move(folder / "key", tmp_path / "lab")
    monkeypatch.setenv(defaults.KEY, str(tmp_path / "lab"))
    assert signing_key(None, None)[1].public == key.public
    assert not (tmp_path / "lab.pub").exists()


def test_the_variable_names_the_key_and_never_makes_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(defaults.KEY, str(tmp_path / "lab"))
    with pytest.raises(CapsuleError, match="CAP-B131"):
        signing_key(None, None)
    public = generate(tmp_path / "lab")
    assert signing_key(None, None)[1].public == public
    assert trusted_files(None, None).keys == [tmp_path / "lab.pub"]
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_named(monkeypatch):
    monkeypatch.setenv("CAPSULE_CONFIG", "/dev/null/none")
    with pytest.raises(CapsuleError, match="CAP-B135 cannot make a signing key in /dev/null/none"):
        signing_key(None, None)


def test_what_a_command_line_names_replaces_the_defaults(folder, tmp_path):
    signing_key(None, None)
    other = [tmp_path / "other.pub"]
    assert trusted_files(other, None) == (other, ())
    assert trusted_files(None, other) == ((), other)
    assert trusted_files(None, None, others=True) == ((), ())


def test_the_own_key_and_the_trust_file_are_trusted(folder, tmp_path, monkeypatch, capsys):
    assert trusted_files(None, None) == ([], [])
    signing_key(None, None)
    assert trusted_files(None, None) == ([folder / "key.pub"], [])
    (folder / "allowed_signers").write_text(f"ada {generate(tmp_path / 'ada').openssh()}")
    found = trusted_files(None, None)
    assert found == ([folder / "key.pub"], [folder / "allowed_signers"])
    assert f"trusting by default: {folder / 'allowed_signers'}" in capsys.readouterr().err
    assert len(load_policy(keys=found.keys, allowed_signers=found.allowed_signers).candidates) == 2
    monkeypatch.setenv(defaults.ALLOWED_SIGNERS, str(tmp_path / "missing"))
    with pytest.raises(CapsuleError, match="CAP-B150"):
        load_policy(allowed_signers=trusted_files(None, None).allowed_signers)


@pytest.mark.slow
def test_commands_make_and_trust_the_own_key(folder, honest_bundle, key, tmp_path, monkeypatch):
    made = CliRunner().invoke(app, ["keygen"])
    assert made.exit_code == 0, made.output
    assert str(folder / "key.pub") in made.stdout
    assert CliRunner().invoke(app, ["keygen"]).exit_code == 2  # it is never overwritten
    command = ["verify", str(honest_bundle), "--mode", "integrity", "--report", "/dev/null"]
    stranger = CliRunner().invoke(app, command)
    assert (stranger.exit_code, "CAP-B125" in stranger.output) == (3, True)
    monkeypatch.setenv(defaults.KEY, str(key))
    own = CliRunner().invoke(app, command)
    assert own.exit_code == 0, own.output
    assert f"trusting by default: {key}.pub" in own.stderr
    signed = CliRunner().invoke(app, ["sign", str(honest_bundle), "-o", str(tmp_path / "sig")])
    assert signed.exit_code == 0, signed.output


def test_a_command_that_fails_first_makes_no_key(folder, tmp_path, monkeypatch):
    missing = CliRunner().invoke(app, ["sign", str(tmp_path / "missing.tar")])
    assert (missing.exit_code, "CAP-B101" in missing.output) == (2, True)

    def refuse(*_, **__):
        raise CapsuleError("CAP-L110", "no such game", fix="Name one.")

    monkeypatch.setattr("capsule.image.pinning.obtain_lock", refuse)
    spec = tmp_path / "catch.yaml"
    spec.write_bytes((SPECS / "impala-catch.yaml").read_bytes())
    command = ["run", str(spec), "--engine", "process", "--output", str(tmp_path / "runs")]
    unlocked = CliRunner().invoke(app, command)
    assert "CAP-L110" in unlocked.output
    for subcommand in ("run", "bundle"):
        study = CliRunner().invoke(app, ["study", subcommand, str(tmp_path / "missing")])
        assert study.exit_code == 2
    assert not folder.exists()


def test_a_named_key_is_checked_before_anything_else(folder, tmp_path):
    done = CliRunner().invoke(
        app, ["run", str(SPECS / "impala-catch.yaml"), "--key", str(tmp_path / "k")]
    )
    assert "CAP-B131" in done.output


def test_an_address_is_no_file():
    with pytest.raises(CapsuleError, match=r"'https:.* is an address") as caught:
        open_archive(Path("https://example.org/run.tar"))
    assert caught.value.code == "CAP-B101"
    assert caught.value.fix.endswith("curl -LO https://example.org/run.tar")
