"""``capsule plan``: the plan of a spec or a lock. No engine and no package index is asked."""

import json
import os

import pytest

from capsule.experiment import contract
from capsule.experiment.errors import ExitCode
from capsule.experiment.lock import Lock
from capsule.host.run_directory import LOCK, WORK
from capsule.image.lockfile import write_lock
from capsule.image.pinning import Pins, locked_image
from capsule.image.recipe import recipe_for
from tests.cli.conftest import capsule
from tests.report import runs
from tests.study.small_studies import BASE

SPEC = runs.make_lock(runs.DQN).spec
LOCKED = Lock(spec=SPEC, image=locked_image(recipe_for(SPEC), Pins((), (), None), "0" * 64))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a lock and a spec, neither of which has packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("capsule.planning.answering_engines", lambda: iter(()))

    def find_pins(*_, progress, **__):
        progress("asking the package indexes")
        return Pins((), (), "0" * 64)

    monkeypatch.setattr("capsule.planning.find_pins", find_pins)
    write_lock(tmp_path / "dqn.lock.json", LOCKED)
    (tmp_path / "cart.yaml").write_text(BASE)
    return tmp_path


def everything_in(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def plan(*words):
    done = capsule("plan", *words)
    assert done.exit_code == 0, done.output
    return done


def test_both_forms_have_the_same_plan_and_nothing_is_written(place):
    before = everything_in(place)
    found = json.loads(plan("dqn.lock.json", "--json").stdout)
    assert found["schema"] == "capsule/plan/v1"
    assert (found["name"], found["origin"]) == ("small-dqn", "the lock file")
    assert found["lock"] == LOCKED.digest()
    assert (found["engines"], found["download_bytes"], found["measured_seconds"]) == ({}, 0, {})
    done = plan("dqn.lock.json")
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[0] != " ")
    assert rows["name"] == "small-dqn"
    assert rows["lock"] == found["lock"]
    assert rows["engine"].startswith("no container engine answers")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert everything_in(place) == before


def test_a_setting_is_in_the_plan_of_a_spec_and_in_no_file(place):
    before = everything_in(place)
    found = json.loads(plan("cart.yaml", "--set", "seeds.root=7", "--json").stdout)
    assert (found["spec"]["seeds"]["root"], found["origin"]) == (7, "the package indexes")
    other = json.loads(plan("cart.yaml", "--json").stdout)
    assert (other["spec"]["seeds"]["root"] == 7, other["lock"] == found["lock"]) == (False, False)
    assert everything_in(place) == before


def test_progress_is_on_standard_error_unless_it_should_be_quiet(place):
    done = plan("cart.yaml", "--json")
    assert "asking the package indexes" in done.stderr
    assert json.loads(done.stdout)
    assert plan("cart.yaml", "--quiet").stderr == ""


def test_a_time_is_looked_for_in_the_runs_of_the_current_folder(place, monkeypatch):
    directory = place / "runs" / "one"
    (directory / WORK).mkdir(parents=True)
    write_lock(directory / LOCK, LOCKED)
    (directory / "one-01234567.capsule.tar").write_bytes(bytes(2_000))
    result = contract.Result(
        complete=True, steps=400, episodes=1, trace_records=1, trace_head="0" * 64,
        parameters="0" * 64, seconds=81.5,
    )  # fmt: skip
    (directory / WORK / contract.RESULT).write_bytes(result.document())
    found = json.loads(plan("dqn.lock.json", "--json").stdout)
    one = os.path.join("runs", "one")  # noqa: PTH118
    assert found["measured_seconds"] == {one: 81.5}
    assert found["measured_bundle_bytes"] == {one: 2_000}
    assert f"2.0 KiB as measured in {one}" in plan("dqn.lock.json").stdout
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    found = json.loads(plan("../dqn.lock.json", "--json").stdout)
    assert found["measured_seconds"] == {}


def test_the_size_of_kept_states_is_in_the_plan_and_compared_with_the_limit(place):
    assert json.loads(plan("cart.yaml", "--json").stdout)["states"] is None
    (place / "states.yaml").write_text(
        "schema: capsule/spec/v1\nname: states\nenvironment: {suite: atari, game: breakout}\n"
        "trainer: {algorithm: dqn, total_steps: 1000000}\nrecording: {segment_states: true}\n"
    )
    states = {"number": 3, "least_bytes": 3 * 250_000 * 84 * 84}
    for limit, said in ((8_000, False), (4_000, True)):
        words = ("states.yaml", "--set", f"limits.disk_mb={limit}")
        assert json.loads(plan(*words, "--json").stdout)["states"] == states
        text = " ".join(plan(*words).stdout.split())
        assert "3 states for 'verify --challenge': before compression, at least 4.9 GiB" in text
        assert ("more than limits.disk_mb allows" in text) == said


def test_a_finished_run_without_its_working_folder_does_not_prevent_a_plan(place):
    directory = place / "runs" / "one"
    directory.mkdir(parents=True)
    write_lock(directory / LOCK, LOCKED)
    (directory / "one-01234567.capsule.tar").touch()
    assert json.loads(plan("dqn.lock.json", "--json").stdout)["measured_seconds"] == {}


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ((), "CAP-S001", "capsule.yaml"),
        (("absent.yaml",), "CAP-S001", "absent.yaml"),
        (("absent.lock.json",), "CAP-L001", "absent.lock.json"),
        (("cart.yaml", "--set", "seeds.rot=7"), "CAP-S003", "seeds.rot"),
    ],
)
def test_what_cannot_be_planned_is_named(place, words, code, named):
    done = capsule("plan", *words, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (2, code)
    assert named in document["message"]


def test_a_machine_that_executes_no_runs_makes_no_plan(place, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    done = capsule("plan", "dqn.lock.json", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["code"]) == (125, "CAP-E019")
    assert "on aarch64" in document["message"]


def test_settings_for_a_lock_are_refused(place):
    done = capsule("plan", "dqn.lock.json", "--set", "seeds.root=77")
    assert done.exit_code == ExitCode.USAGE
    assert "CAP-L003: dqn.lock.json is a lock file, whose pins cannot be changed" in done.stderr
