"""Run directories: how each run stands, by what is in its folder."""

import math
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from capsule.engine.supervise import exclusive, is_held
from capsule.experiment import contract
from capsule.host.errors import CapsuleError
from capsule.host.run_directory import LOCK, STARTED, WORK
from capsule.image.lockfile import write_lock
from capsule.report.runs import _short, find_runs, read_run, runs_table
from tests.report import runs

START = datetime(2027, 1, 31, 12, 0, tzinfo=UTC)


def make_run(folder, name, document=runs.DQN, age=0):
    directory = folder / name
    directory.mkdir(parents=True)
    write_lock(directory / LOCK, runs.make_lock(document))
    seconds = (START - timedelta(seconds=age)).timestamp()
    os.utime(directory / LOCK, (seconds, seconds))
    return directory


def write_event(directory, **facts):
    (directory / WORK).mkdir(exist_ok=True)
    event = contract.Event(**{"time": 0.0, "kind": "progress", "step": 0, **facts})
    with (directory / WORK / contract.EVENTS).open("ab") as stream:
        stream.write(event.model_dump_json().encode() + b"\n")


def test_a_run_that_has_not_started(tmp_path):
    found = read_run(make_run(tmp_path, "one"))
    assert (found.state, found.step, found.claim, found.started) == (
        "not started",
        None,
        None,
        START,
    )
    assert found.bytes == (tmp_path / "one" / LOCK).stat().st_blocks * 512 > 0
    assert found.lock.spec.name == "small-dqn"


def test_an_interrupted_run_and_one_that_is_executed(tmp_path):
    directory = make_run(tmp_path, "one")
    write_event(directory, step=20, total_steps=400, episode_return=1.5)
    write_event(directory, kind="checkpoint", step=40, total_steps=400)
    found = read_run(directory)
    assert (found.state, found.step, found.total_steps) == ("interrupted", 40, 400)
    assert (found.episode_return, found.evaluation_return) == (1.5, None)
    with exclusive(directory / WORK):
        assert read_run(directory).state == "running"
    assert read_run(directory).state == "interrupted"


@pytest.mark.parametrize("text", ["yesterday", "2027-01-31T12:00:00"])  # no time; no time zone
def test_a_run_whose_beginning_cannot_be_read_is_damaged(tmp_path, text):
    make_run(tmp_path, "other")
    directory = make_run(tmp_path, "one")
    (directory / STARTED).write_text(text)
    found = {run.path.name: run for run in find_runs(tmp_path)}
    assert (found["one"].state, found["one"].started) == ("damaged", START)
    assert found["other"].state == "not started"


def test_a_bundle_that_was_renamed_states_no_claim_id(tmp_path):
    directory = make_run(tmp_path, "one")
    (directory / "paper-final-version.capsule.tar").touch()
    assert read_run(directory).document()["claim"] is None
    (directory / "paper-final-version.capsule.tar").rename(directory / "a-0123abcd.capsule.tar")
    assert read_run(directory).claim == "0123abcd"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_returns_that_are_not_finite_are_null_in_json(tmp_path, value):
    directory = make_run(tmp_path, "one")
    (directory / WORK).mkdir()
    point = contract.EvaluationPoint(step=1, returns=(value,), lengths=(1,))
    evaluation = contract.Evaluation(starts=((0,),), points=(point,))
    (directory / WORK / contract.EVALUATION).write_bytes(evaluation.document())
    event = '{"kind":"progress","step":1,"time":1.0,"episode_return":1e999}\n'
    (directory / WORK / contract.EVENTS).write_text(event)
    found = read_run(directory)
    assert not math.isfinite(found.evaluation_return)
    assert not math.isfinite(found.episode_return)
    document = found.document()
    assert (document["evaluation_return"], document["episode_return"]) == (None, None)


def test_returns_of_different_games_are_not_averaged(tmp_path):
    directory = make_run(tmp_path, "one", runs.POPULATION)
    write_event(directory, step=640, episode_return=12.0)
    evaluation = runs.evaluation({640: (-21.0, 40.0, -19.0, 50.0)})
    (directory / WORK / contract.EVALUATION).write_bytes(evaluation.document())
    found = read_run(directory)
    assert (found.evaluation_return, found.episode_return) == (None, None)


def test_looking_at_a_run_does_not_keep_it_from_starting(tmp_path):
    assert not is_held(tmp_path)
    with exclusive(tmp_path):
        assert is_held(tmp_path)
        with pytest.raises(CapsuleError, match="another Capsule process"), exclusive(tmp_path):
            pass


def test_a_failed_run_says_why(tmp_path):
    directory = make_run(tmp_path, "one")
    (directory / WORK).mkdir()
    failure = contract.Failure(code="CAP-T302", message="the program failed", fix="Correct it.")
    (directory / WORK / contract.FAILURE).write_bytes(failure.document())
    found = read_run(directory)
    assert (found.state, found.problem) == ("failed", "CAP-T302: the program failed")


def test_a_finished_run_has_the_claim_id_of_its_bundle_and_the_last_evaluation(bundles, tmp_path):
    packed = bundles["dqn"]
    directory = make_run(tmp_path, "one")
    (directory / packed.name).write_bytes(packed.read_bytes())
    (packed.parent / "run").rename(directory / WORK)
    try:
        found = read_run(directory)
    finally:
        (directory / WORK).rename(packed.parent / "run")
    assert found.state == "finished"
    assert f"-{found.claim}." in packed.name
    assert found.evaluation_return == sum(runs.RETURNS[400]) / 4
    assert found.episode_return == runs.STEPS / 10
    assert found.bytes > packed.stat().st_size


@pytest.mark.parametrize("name", [LOCK, f"{WORK}/{contract.FAILURE}"])
def test_a_damaged_run_does_not_hide_the_others(tmp_path, name):
    make_run(tmp_path, "sound")
    damaged = make_run(tmp_path, "damaged")
    (damaged / WORK).mkdir()
    (damaged / name).write_bytes(b"{")
    found = {run.path.name: run for run in find_runs(tmp_path)}
    assert found["sound"].state == "not started"
    assert found["damaged"].state == "damaged"
    assert found["damaged"].problem.startswith("CAP-")


def test_a_run_of_another_user_does_not_hide_the_others(tmp_path, monkeypatch):
    make_run(tmp_path, "mine")
    closed = make_run(tmp_path, "theirs")
    is_file = Path.is_file

    def denied(self):
        if closed in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self)

    monkeypatch.setattr(Path, "is_file", denied)
    assert [run.path.name for run in find_runs(tmp_path)] == ["mine"]


@pytest.mark.parametrize("facts", [{"step": 10**400}, {"step": 30, "total_steps": 10**400}])
def test_an_event_with_an_impossible_step_is_not_counted(tmp_path, facts):
    directory = make_run(tmp_path, "one")
    write_event(directory, step=20, total_steps=400)
    write_event(directory, **facts)
    found = find_runs(tmp_path)
    assert (found[0].step, found[0].total_steps) == (20, 400)
    runs_table(found, tmp_path, START)


def test_a_run_that_is_removed_meanwhile_is_left_out(tmp_path, monkeypatch):
    kept, removed = make_run(tmp_path, "kept"), tmp_path / "removed"
    monkeypatch.setattr("capsule.report.runs.run_directories", lambda _: [removed, kept])
    assert [run.path for run in find_runs(tmp_path)] == [kept]


def test_files_that_a_program_put_in_the_place_of_others_are_not_read(tmp_path):
    directory = make_run(tmp_path, "one")
    (directory / WORK).mkdir()
    os.mkfifo(directory / WORK / contract.EVENTS)
    assert read_run(directory).state == "damaged"


def test_the_newest_run_is_first_and_members_of_studies_are_found(tmp_path):
    make_run(tmp_path, "old", age=500)
    make_run(tmp_path, "new")
    make_run(tmp_path, "study/members/a.1", age=20)
    (tmp_path / "unrelated").mkdir()
    (tmp_path / "file").touch()
    assert [str(run.path.relative_to(tmp_path)) for run in find_runs(tmp_path)] == [
        "new",
        "study/members/a.1",
        "old",
    ]
    assert [run.path.name for run in find_runs(tmp_path / "study")] == ["a.1"]
    assert [run.path for run in find_runs(tmp_path / "new")] == [tmp_path / "new"]
    with pytest.raises(CapsuleError, match="is not a folder"):
        find_runs(tmp_path / "file")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999"),
        (1000, "1k"),
        (1_234_567, "1.23M"),
        (999_499, "999k"),
        (999_999, "1M"),
        (10**9 - 1, "1G"),
        (10**12, "1000G"),
    ],
)
def test_a_number_of_steps_is_short(number, text):
    assert _short(number) == text


def test_the_table_fits_80_columns_and_loses_nothing(tmp_path):
    name = "a-name-of-as-many-characters-as-a-spec-may-have-20270131T120000Z"
    directory = make_run(tmp_path, name)
    write_event(directory, step=1_234_567, total_steps=50_000_000, episode_return=-1234.5678)
    make_run(tmp_path, "short", runs.PROGRAM, age=7200)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(runs_table(find_runs(tmp_path), tmp_path, START), markup=False)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    first = lines[1].split()
    assert first[1:] == ["interrupted", "1.23M/50M", "(-1235)", "-", "0", "s", *first[-2:]]
    assert "".join(line.split()[0] for line in lines[1:-1]) == name
    assert lines[-1].split()[:7] == ["short", "not", "started", "-", "-", "-", "2"]


def test_the_return_of_a_program_is_that_of_its_last_evaluation(tmp_path):
    directory = make_run(tmp_path, "one", runs.PROGRAM)
    assert read_run(directory).evaluation_return is None  # it has no working folder yet
    outputs = directory / WORK / contract.WORKSPACE / "outputs"
    outputs.mkdir(parents=True)
    lines = ('{"step": 5, "returns": [1.0, 2.0]}\n', '{"step": 9, "returns": [3.0, 5.0]}\n')
    (outputs / "evaluation.jsonl").write_text("".join(lines))
    assert read_run(directory).evaluation_return == 4
