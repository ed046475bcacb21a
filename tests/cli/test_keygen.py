"""``capsule keygen``: key pairs, where they go, and their passphrases."""

import json
import shutil
import subprocess

import pytest

from capsule.bundle.keys import ENCRYPTED, load_private, load_public
from capsule.host.errors import CapsuleError
from tests.cli.conftest import capsule

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAPSULE_KEY", raising=False)
    return tmp_path


def test_keygen_writes_two_files_and_never_overwrites(folder):
    made = capsule("keygen", "alice", "--json")
    assert made.exit_code == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["fingerprint"].startswith("SHA256:")
    assert (found["private"], found["public"]) == ("alice", "alice.pub")
    assert (folder / "alice").stat().st_mode & 0o777 == 0o600
    before = (folder / "alice").read_bytes()
    again = capsule("keygen", "alice")
    assert (again.exit_code, "CAP-B135: alice exists already" in again.stderr) == (2, True)
    assert (folder / "alice").read_bytes() == before


def test_keygen_makes_keys_of_both_types(folder):
    made = capsule("keygen", "alice", "--type", "ecdsa-p256", "--json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["type"] == "ecdsa-p256"
    assert (folder / "alice.pub").read_text().startswith("ecdsa-sha2-nistp256 ")
    assert capsule("keygen", "bob", "--type", "rsa").exit_code == 2
    assert not (folder / "bob").exists()


def test_the_public_file_of_another_key_is_not_overwritten(folder):
    (folder / "alice.pub").write_text("another")
    assert "CAP-B135: alice.pub exists already" in capsule("keygen", "alice").stderr
    assert not (folder / "alice").exists()
    assert (folder / "alice.pub").read_text() == "another"


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa-p256"])
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_openssh_reads_the_public_key_and_finds_the_same_fingerprint(folder, kind):
    shown = capsule("keygen", "alice", "--type", kind).stdout
    words = ["ssh-keygen", "-l", "-f", folder / "alice.pub"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]
    assert f"fingerprint  {found}\n" in shown


def test_without_a_name_it_is_the_own_key_which_commands_then_use(folder, monkeypatch):
    monkeypatch.setenv("CAPSULE_CONFIG", str(folder / "home"))
    made = capsule("keygen")
    assert made.exit_code == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    assert lines[0][:3] == ["private", "key", str(folder / "home" / "key")]
    assert lines[1][:3] == ["public", "key", str(folder / "home" / "key.pub")]
    public = load_public(folder / "home" / "key.pub")
    assert load_private(folder / "home" / "key").public == public
    assert lines[2] == ["fingerprint", public.fingerprint]


def test_a_passphrase_is_typed_twice(folder):
    made = capsule("keygen", "alice", "--passphrase", input=f"{SECRET}\n{SECRET}\n")
    assert made.exit_code == 0, made.stderr
    assert SECRET not in made.output
    assert load_private(folder / "alice", SECRET).public == load_public(folder / "alice.pub")
    with pytest.raises(CapsuleError) as caught:
        load_private(folder / "alice")
    assert caught.value.code == ENCRYPTED


def test_a_question_that_is_not_answered_makes_no_key(folder):
    made = capsule("keygen", "alice", "--passphrase", input=f"{SECRET}\n")
    assert made.exit_code == 130
    assert list(folder.iterdir()) == []


def test_a_passphrase_from_a_file_that_others_may_read_makes_no_key(folder):
    (folder / "passphrase").write_text(f"{SECRET}\n")
    (folder / "passphrase").chmod(0o644)
    words = ["keygen", "alice", "--passphrase-file", "passphrase"]
    assert "CAP-B137" in capsule(*words).stderr
    assert not (folder / "alice").exists()
    (folder / "passphrase").chmod(0o600)
    assert capsule(*words).exit_code == 0
    assert load_private(folder / "alice", SECRET).public


def test_a_folder_that_cannot_be_made_is_named(folder):
    (folder / "file").touch()
    done = capsule("keygen", "file/alice", "--json")
    document = json.loads(done.stdout)
    assert (document["code"], document["exit_code"], done.exit_code) == ("CAP-B135", 2, 2)
    assert "file/alice" in document["message"]


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_key_without_a_file_name_is_not_made(folder, name):
    done = capsule("keygen", name)
    assert done.exit_code == 2
    assert done.stderr.startswith("CAP-B135: ")
    assert list(folder.iterdir()) == []
