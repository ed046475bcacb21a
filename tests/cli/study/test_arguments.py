"""The lock of a study, which commands keep up to date."""

import pytest

from capsule.cli.study.arguments import locked_study
from capsule.host.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache
from capsule.study.lock import read_study_lock
from tests.cli.conftest import capsule
from tests.cli.study.conftest import run, study
from tests.study.small_studies import STUDY


@pytest.mark.slow
def test_the_lock_of_the_base_is_kept(place):
    capsule("lock", "cart.yaml")
    written = (place / "cart.lock.json").read_bytes()
    study("lock", "tiny.yaml")
    assert run().exit_code == 0
    assert (place / "cart.lock.json").read_bytes() == written


def test_refresh_resolves_again(place, resolutions):
    capsule("lock", "cart.yaml")
    study("lock", "tiny.yaml")
    assert len(resolutions.made) == 1
    study("lock", "tiny.yaml", "--refresh")
    assert len(resolutions.made) == 2


def test_an_edited_lock_is_not_overwritten(place):
    study("lock", "tiny.yaml")
    path = place / "tiny.study.lock.json"
    path.write_bytes(
        edited := path.read_bytes().replace(b'"deterministic.2"', b'"deterministic.3"')
    )
    done = run()
    assert (done.exit_code, "CAP-Y003" in done.stderr) == (ExitCode.USAGE, True)
    assert path.read_bytes() == edited


REPEATED = (
    "group deterministic varies no seed, so its {} runs of each setting repeat one "
    "experiment; with 'vary: [root]', each run has its own seeds"
)


@pytest.fixture
def lock_of(place):
    """Return a function that locks the study: its file, its lock, and what was reported."""

    def lock_of(**options):
        notes = []
        path = place / "tiny.yaml"
        return *locked_study(path, Cache(), progress=notes.append, **options), notes

    return lock_of


def test_the_lock_is_written_once_and_follows_the_study(lock_of, place):
    path = place / "tiny.study.lock.json"
    file, lock, notes = lock_of()
    assert (file.study.name, notes) == ("tiny", [f"wrote {path}", REPEATED.format(2)])
    assert path.read_bytes() == lock.document() + b"\n"
    assert read_study_lock(path) == lock
    before = path.stat().st_mtime_ns
    assert lock_of()[1:] == (lock, [])
    assert path.stat().st_mtime_ns == before
    (place / "tiny.yaml").write_text(STUDY.replace("runs: 2", "runs: 3"))
    _, more, notes = lock_of()
    assert (len(more.members), len(lock.members)) == (6, 4)
    assert notes == [f"wrote {path}", REPEATED.format(3)]
    assert more.pins == lock.pins
    assert path.read_bytes() == more.document() + b"\n"


def test_a_group_with_one_run_or_with_seeds_of_its_own_is_no_repetition(lock_of, place):
    path = place / "tiny.yaml"
    for text in (
        STUDY.replace("runs: 2", "runs: 1"),
        STUDY.replace("deterministic: {}", "deterministic: {vary: [root]}"),
    ):
        path.write_text(text)
        assert lock_of()[2] == [f"wrote {place / 'tiny.study.lock.json'}"]


def test_a_refreshed_lock_has_new_pins(lock_of, resolutions):
    _, lock, _ = lock_of()
    _, other, notes = lock_of(refresh=True)
    assert len(resolutions.made) == 2
    assert notes[0].startswith("wrote ")
    assert other.pins != lock.pins


def test_a_refresh_replaces_a_damaged_lock(lock_of, place):
    (place / "tiny.study.lock.json").write_text("{}")
    with pytest.raises(CapsuleError) as caught:
        lock_of()
    assert caught.value.code == "CAP-Y003"
    _, lock, _ = lock_of(refresh=True)
    assert read_study_lock(place / "tiny.study.lock.json") == lock


def test_without_the_starts_that_it_asks_for_no_lock_is_written(lock_of, place):
    (place / "tiny.yaml").write_text(STUDY + "starts: {set: {seeds.root: 1000}}\n")
    with pytest.raises(CapsuleError) as caught:
        lock_of()
    assert caught.value.code == "CAP-Y004"
    assert "tiny.starts.json" in caught.value.message
    assert f"capsule study starts {place / 'tiny.yaml'}" in caught.value.fix
    assert not (place / "tiny.study.lock.json").exists()


@pytest.mark.parametrize(
    ("command", "word"),
    [("lock", "STUDY"), ("starts", "STUDY"), ("status", "FOLDER"), ("report", "RESULTS")],
)
def test_a_missing_argument_is_named_as_in_the_help(command, word):
    done = study(command)
    assert (done.exit_code, f"Missing argument '{word}'" in done.stderr) == (ExitCode.USAGE, True)
    assert f" study {command} [OPTIONS] {word}" in done.stderr
