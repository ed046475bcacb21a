"""'capsule prune': what is shown, asked and deleted. No engine is asked."""

import io
import json
import os
import time

import pytest
import typer.testing

from capsule.host.owner import temporary_folder
from capsule.image.cache import Cache
from tests.cli.conftest import capsule


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
    (cache.root / "derived" / f"{digest}.layer.json").write_bytes(b"{}")
    (cache.root / "derived" / f"{digest}.layer.tar").write_bytes(bytes(100_000))
    return cache


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    monkeypatch.setattr("capsule.pruning.answering_engines", lambda: iter(()))


class Terminal(io.BytesIO):
    """Standard input of a user who types an answer once something was done."""

    def __init__(self, answer, before):
        super().__init__(answer)
        self._before = before

    def isatty(self):
        return True

    def read1(self, size=-1):
        self._before()
        return super().read1(size)


@pytest.fixture
def answer(monkeypatch):
    """Return a function that has the user type an answer, after something else was done."""

    def answer(text, before=lambda: None):
        monkeypatch.setattr(
            typer.testing, "make_input_stream", lambda *_: Terminal(text.encode(), before)
        )

    return answer


def prune(*options, **settings):
    return capsule("prune", *options, **settings)


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


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--yes"]])
def test_a_file_in_the_place_of_the_cache_is_rejected(cache, monkeypatch, options):
    (cache.root.parent / "file").touch()
    monkeypatch.setenv("CAPSULE_CACHE", str(cache.root.parent / "file"))
    done = prune(*options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "CAP-I308" in done.stderr
    assert "a file is in its place" in done.stderr


def test_without_a_cache_there_is_nothing_to_delete(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "none"))
    assert prune("--yes").exit_code == 0
    assert not (tmp_path / "none").exists()


def test_nothing_is_deleted_without_a_terminal_to_ask_on(cache):
    before = files(cache)
    done = prune(input="y\n")
    assert done.exit_code == 2
    assert "CAP-I310" in done.output
    assert files(cache) == before


@pytest.mark.parametrize(
    ("text", "left", "said"), [("y\n", 1, "deleted"), ("n\n", 3, "nothing was deleted")]
)
def test_the_answer_counts(cache, answer, text, left, said):
    answer(text)
    done = prune()
    assert (done.exit_code, len(files(cache))) == (0, left)
    assert done.stderr == f"Delete this? [y/N]: {text}{said}\n"
    assert "layers" in done.stdout


def test_an_interruption_of_the_question_deletes_nothing(cache, answer):
    answer("")
    assert prune().exit_code == 130
    assert len(files(cache)) == 3


def test_the_question_of_json_is_about_what_was_shown(cache, answer):
    answer("n\n")
    done = prune("--json")
    assert done.stdout.startswith("{")
    assert not json.loads(done.stdout)["deleted"]
    assert "layers" in done.stderr
    assert done.stderr.endswith("Delete this? [y/N]: n\n")
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


def test_a_malformed_age_is_found_before_the_cache_is_held(cache):
    user = Cache()
    user.folder("derived")  # which keeps others from deleting
    done = prune("--older-than", "30")
    assert "CAP-I310: --older-than '30' is not an age" in done.stderr


def test_other_commands_do_not_wait_while_the_user_is_asked(cache, answer):
    asked = []

    def use():
        asked.append(Cache().folder("derived"))  # would wait for ever

    answer("y\n", before=use)
    assert prune().exit_code == 0
    assert asked
    assert len(files(cache)) == 1


def layers(*options):
    """Return how many layers would be deleted."""
    kinds = json.loads(prune("--dry-run", "--json", *options).stdout)["kinds"]
    return kinds.get("layers", {"number": 0})["number"]


@pytest.mark.parametrize("size", ["5", "0", "99K", "99KB", "99KiB", "0M", "0T"])
def test_the_cache_is_brought_to_a_size(cache, size):
    """Its one layer takes at least 100,000 bytes, so 99 KiB of 1024 bytes are too few for both."""
    assert layers("--keep-size", size) == 1


@pytest.mark.parametrize("size", ["1M", "1MB", "1MiB", "1G", "1T", "999999T", "999999K"])
def test_a_cache_that_is_small_enough_stays(cache, size):
    assert layers("--keep-size", size) == 0


@pytest.mark.parametrize("age", ["59m", "59h", "6d", "3w"])
def test_what_was_used_before_an_age_is_deleted(cache, age):
    """The layer was used 60 minutes, 60 hours, a week or four weeks ago."""
    unused = {"m": 3600, "h": 216_000, "d": 604_800, "w": 4 * 604_800}[age[-1]]
    use_layer(cache, unused)
    assert layers("--older-than", age) == 1
    use_layer(cache, unused // 2)
    assert layers("--older-than", age) == 0


def use_layer(cache, seconds_ago):
    moment = time.time() - seconds_ago
    for path in (cache.root / "derived").iterdir():
        os.utime(path, (moment, moment))


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        *(
            ("--keep-size", value, "a size")
            for value in ("x", "", "5X", "-5G", "5 G", "1.5G", "5g")
        ),
        *(("--keep-size", value, "a size") for value in ("1234567G", "5GG", "5iBG", "５G")),
        *(("--older-than", value, "an age") for value in ("5", "", "1y", "-1d", "30D", "1h30m")),
        *(("--older-than", value, "an age") for value in ("1.5d", "1234567d", "30d\n")),
    ],
)
def test_a_malformed_size_or_age_is_named_with_examples(cache, option, value, what):
    before = files(cache)
    done = prune("--yes", "--json", option, value)
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, "CAP-I310")
    assert document["message"] == f"{option} {value!r} is not {what}"
    assert document["fix"].startswith("Write, for example, ")
    assert files(cache) == before


@pytest.mark.parametrize(("option", "good"), [("--keep-size", 3), ("--older-than", 4)])
def test_the_examples_of_the_message_are_accepted(cache, option, good):
    fix = json.loads(prune("--dry-run", "--json", option, "x").stdout)["fix"]
    examples = (
        fix.removeprefix("Write, for example, ").rstrip(".").replace(" or ", ", ").split(", ")
    )
    assert len(examples) == good
    for example in examples:
        assert prune("--dry-run", option, example).exit_code == 0


@pytest.mark.parametrize("only", ["images", "folders"])
@pytest.mark.parametrize("option", [["--older-than", "1h"], ["--keep-size", "1G"], ["--all"]])
def test_an_option_of_the_cache_is_rejected_without_it(cache, only, option):
    done = prune("--dry-run", "--only", only, *option)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-X005")


def test_images_of_engines_stay_if_only_the_unused_is_deleted(cache, monkeypatch):
    monkeypatch.setattr("capsule.pruning.removable_images", lambda: pytest.fail("they were listed"))
    assert prune("--dry-run", "--older-than", "1h").exit_code == 0
    assert prune("--dry-run", "--keep-size", "1G").exit_code == 0
    assert prune("--dry-run", "--only", "cache").exit_code == 0
    assert prune("--dry-run", "--only", "folders").exit_code == 0


def test_the_table_has_the_sum_of_its_rows(cache):
    lines = [line.split() for line in prune("--dry-run", "--all").stdout.splitlines()]
    assert lines[0] == ["what", "number", "size"]
    assert sorted(line[0] for line in lines[1:-1]) == ["layers", "packages"]
    assert lines[-1][0] == "all"
    document = json.loads(prune("--dry-run", "--all", "--json").stdout)
    assert document["schema"] == "capsule/pruned/v1"
    assert document["bytes"] == sum(kind["bytes"] for kind in document["kinds"].values())


def test_without_anything_to_delete_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "absent"))
    done = prune("--only", "cache")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "nothing to delete\n")
    assert not (tmp_path / "absent").exists()


def test_lately_used_layers_stay(cache):
    assert "layers" not in prune("--dry-run", "--older-than", "1h").stdout
    for path in (cache.root / "derived").iterdir():
        os.utime(path, (1, 1))
    assert "layers" in prune("--dry-run", "--older-than", "1h").stdout


def test_folders_of_killed_processes_are_deleted_and_others_stay(cache, tmp_path):
    with temporary_folder("capsule-verify-") as left:
        pass
    left.mkdir()
    (left / "file").write_bytes(bytes(5000))
    with temporary_folder("capsule-verify-") as held:
        assert prune("--yes", "--only", "folders").exit_code == 0
        assert held.exists()
    assert not left.exists()
    assert len(files(cache)) == 3
