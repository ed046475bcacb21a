"""'capsule prune': what is shown, asked and deleted. No engine is asked."""

import json
import os

import pytest
from typer.testing import CliRunner

from capsule.cli import main
from capsule.host.owner import temporary_folder
from capsule.image.cache import Cache
from capsule.pruning import abandoned_folders


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with a layer and a package, and a folder for temporary files."""
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    cache = Cache()
    (tmp_path / "package").write_bytes(b"package")
    digest = "bc4a4b6a1b8b5f3d" * 4
    cache.path(digest).parent.mkdir(parents=True)
    cache.path(digest).write_bytes(b"package")
    (cache.root / "derived").mkdir()
    (cache.root / "derived" / "key.layer.json").write_bytes(b"{}")
    (cache.root / "derived" / "key.layer.tar").write_bytes(bytes(100_000))
    return cache


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    monkeypatch.setattr("capsule.pruning.removable_images", lambda: iter(()))


def prune(*options, **settings):
    return CliRunner().invoke(main.app, ["prune", *options], **settings)


def files(cache):
    return {path.name for path in cache.root.rglob("*") if path.is_file()} - {"use"}


def test_a_dry_run_shows_what_would_be_deleted(cache):
    before = files(cache)
    done = prune("--dry-run")
    assert done.exit_code == 0
    assert "layers" in done.stdout
    assert "packages" not in done.stdout
    assert "packages" in prune("--dry-run", "--all").stdout
    assert files(cache) == before
    assert not (cache.root / "use").exists()


def test_nothing_is_deleted_without_a_terminal_to_ask_on(cache):
    before = files(cache)
    done = prune(input="y\n")
    assert done.exit_code == 2
    assert "CAP-I310" in done.output
    assert files(cache) == before


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("n\n", 3)])
def test_the_answer_counts(cache, monkeypatch, answer, left):
    monkeypatch.setattr("capsule.cli.prune._agreed", lambda: answer == "y\n")
    assert prune().exit_code == 0
    assert len(files(cache)) == left


def test_the_question_of_json_is_about_what_was_shown(cache, monkeypatch):
    monkeypatch.setattr("capsule.cli.prune._agreed", lambda: False)
    done = prune("--json")
    assert not json.loads(done.stdout)["deleted"]
    assert "layers" in done.stderr
    assert prune("--json", "--dry-run").stderr == ""


def test_downloads_are_deleted_with_all_only(cache):
    done = prune("--yes", "--json")
    found = json.loads(done.stdout)
    assert found["deleted"]
    assert list(found["kinds"]) == ["layers"]
    assert len(files(cache)) == 1
    assert list(json.loads(prune("--yes", "--all", "--json").stdout)["kinds"]) == ["packages"]
    assert not files(cache)
    assert not json.loads(prune("--yes", "--all", "--json").stdout)["deleted"]


def test_a_cache_in_use_is_left_alone(cache):
    user = Cache()
    user.folder("derived")
    done = prune("--yes")
    assert done.exit_code == 2
    assert "CAP-I309" in done.output
    assert len(files(cache)) == 3
    assert prune("--dry-run").exit_code == 0


def test_other_commands_do_not_wait_while_the_user_is_asked(cache, monkeypatch):
    def answer():
        Cache().folder("derived")  # would wait for ever
        return True

    monkeypatch.setattr("capsule.cli.prune._agreed", answer)
    assert prune().exit_code == 0
    assert len(files(cache)) == 1


@pytest.mark.parametrize(
    "options", [("--keep-size", "5"), ("--keep-size", "x"), ("--older-than", "5")]
)
def test_sizes_and_ages_have_units(cache, options):
    done = prune("--dry-run", *options)
    if options == ("--keep-size", "5"):
        assert "layers" in done.stdout
    else:
        assert done.exit_code == 2
        assert "Write, for example," in done.output


def test_lately_used_layers_stay(cache):
    assert "layers" not in prune("--dry-run", "--older-than", "1h").stdout
    for path in (cache.root / "derived").iterdir():
        os.utime(path, (1, 1))
    assert "layers" in prune("--dry-run", "--older-than", "1h").stdout


def test_folders_of_killed_processes_are_deleted_and_others_stay(cache, tmp_path):
    left = tmp_path / "capsule-verify-x.capsule-held"
    left.mkdir()
    (left / "file").write_bytes(bytes(5000))
    with temporary_folder("capsule-verify-") as held:
        assert [folder for folder, _ in abandoned_folders()] == [left]
        assert prune("--yes", "--only", "folders").exit_code == 0
        assert held.exists()
    assert not left.exists()
    assert len(files(cache)) == 3
