"""Private keys that are encrypted, as the commands take them."""

import os
import pty
import subprocess
import sys

import pytest

from capsule.bundle.keys import generate, load_private
from capsule.cli.passphrase import unlock
from capsule.host.errors import CapsuleError
from tests.hostile import genuine

SECRET = "correct horse"


@pytest.fixture
def files(tmp_path):
    """A bundle, a passphrase in a file, and a key that it protects."""
    genuine.packed(genuine.training(), tmp_path / "run.capsule.tar")
    (tmp_path / "passphrase").write_text(f"{SECRET}\n")
    (tmp_path / "passphrase").chmod(0o600)
    made = capsule(tmp_path, "keygen", "bob", "--passphrase-file", "passphrase")
    assert made.returncode == 0, made.stderr
    return tmp_path


def capsule(folder, *arguments, **options):
    command = [sys.executable, "-m", "capsule", *arguments]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, **options}
    return subprocess.run(command, cwd=folder, text=True, **options)


def test_a_command_that_does_not_ask_for_a_passphrase_does_not_advise_to_use_a_terminal(tmp_path):
    generate(tmp_path / "bob", passphrase=SECRET)
    with pytest.raises(CapsuleError, match="CAP-B138") as asked:
        unlock(tmp_path / "bob", None)
    assert "on a terminal" in asked.value.fix
    with pytest.raises(CapsuleError, match="CAP-B138") as caught:
        unlock(tmp_path / "bob", None, ask=False)
    assert caught.value.fix == (
        "Pass --passphrase-file FILE. This command does not ask for a passphrase."
    )


@pytest.mark.slow
def test_a_key_is_made_and_used_without_ever_being_in_clear_text(files):
    assert b"ENCRYPTED" in (files / "bob").read_bytes()
    assert load_private(files / "bob", SECRET).public
    arguments = "sign", "run.capsule.tar", "--key", "bob", "--passphrase-file"
    signed = capsule(files, *arguments, "passphrase", "-o", "one")
    assert signed.returncode == 0, signed.stderr
    piped = capsule(files, *arguments, "/dev/stdin", "-o", "two", stdin=None, input=SECRET)
    assert piped.returncode == 0, piped.stderr
    assert (files / "one").read_bytes() == (files / "two").read_bytes()


@pytest.mark.slow
def test_without_a_terminal_the_message_says_how_to_give_the_passphrase(files):
    done = capsule(files, "sign", "run.capsule.tar", "--key", "bob")
    assert done.returncode == 2
    assert "CAP-B138" in done.stderr
    assert "--passphrase-file" in done.stderr


@pytest.mark.slow
def test_on_a_terminal_the_passphrase_is_asked_for(files):
    command = [sys.executable, "-m", "capsule", "sign", "run.capsule.tar", "--key", "bob"]
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.chdir(files)
            os.execv(sys.executable, [*command, "-o", "s"])  # noqa: S606
        finally:
            os._exit(127)
    shown = b""
    while not shown.endswith(b"Passphrase of bob: "):  # what is typed earlier is thrown away
        shown += os.read(terminal, 1024)
    os.write(terminal, f"{SECRET}\n".encode())
    with pytest.raises(OSError, match="Input/output"):  # so a terminal ends
        while True:
            shown += os.read(terminal, 1024)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown
    assert (files / "s").exists()
    assert SECRET.encode() not in shown
