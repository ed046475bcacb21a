"""What 'capsule plan' says of a spec or a lock, and that it writes nothing that stays."""

import json

import pytest
from typer.testing import CliRunner

from capsule.bundle.bundle import open_bundle
from capsule.cli import main
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import ImpalaTrainer, PopulationSpec
from capsule.host.run_directory import LOCK, WORK
from capsule.host.spec_file import parse_spec
from capsule.image.cache import Cache
from capsule.image.lockfile import lock_path, write_lock
from capsule.image.resolution.wheels import ResolvedWheel
from capsule.planning import kept_states, make_plan, steps_text
from tests.report import runs
from tests.report.test_inspection import CORPUS

SPEC = """\
schema: capsule/spec/v1
name: planned
environment: {suite: gymnasium, id: CartPole-v1}
trainer: {algorithm: dqn, network: mlp, total_steps: 1000}
evaluation: {interval: 500, starts: 4, shortlist: 8, candidates: 16}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with the lock of a bundle, an empty cache, and no engine or index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("capsule.planning._engines", lambda _image: iter(()))
    with open_bundle(CORPUS / "dqn.capsule.tar", ()) as opened:
        lock = opened.read("spec/lock.json", Lock)
    write_lock(tmp_path / "dqn.lock.json", lock)
    return tmp_path


def answer(monkeypatch, **found):
    """Have the indexes know some wheels, by name, at an address and with a size."""

    def locate(_search, wheels):
        return {
            wheel.sha256: ResolvedWheel(
                wheel.name, wheel.version, wheel.filename, wheel.sha256, *found[wheel.name]
            )
            for wheel in wheels
            if wheel.name in found
        }

    monkeypatch.setattr("capsule.planning.locate", locate)


def plan(path):
    return make_plan(path, [], Cache(), path.parent / "runs", lambda _: None)


def everything_in(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_packages_are_in_the_cache_in_a_folder_or_to_be_downloaded(place, monkeypatch):
    (place / "torch.whl").write_bytes(bytes(1000))
    answer(
        monkeypatch,
        torch=((place / "torch.whl").as_uri(), None),
        numpy=("https://example.org/numpy.whl", 20_000),
    )
    lock = Lock.parse((place / "dqn.lock.json").read_bytes().rstrip())
    debian = lock.image.debian[0]
    cached = Cache().path(debian.sha256)
    cached.parent.mkdir(parents=True)
    cached.touch()
    before = everything_in(place)
    found = plan(place / "dqn.lock.json")
    assert everything_in(place) == before
    wheels = {each.name: (each.place, each.bytes) for each in found.wheels}
    assert wheels["torch"] == ("folder", 1000)
    assert wheels["numpy"] == ("download", 20_000)
    assert wheels["gymnasium"] == ("download", None)
    assert [each.place for each in found.debian].count("cache") == 1
    sizes = [each.size for each in lock.image.debian if each != debian]
    assert found.downloaded == 20_000 + sum(sizes)
    assert found.digest == lock.digest()
    rows = dict(found.rows)
    assert "1 in local folders (1000 B), 21 to download (at least 19.5 KiB)" in rows["wheels"]
    assert "gymnasium" in rows["unknown"]
    assert "numpy" not in rows["unknown"]


@pytest.mark.slow
def test_pins_of_the_lock_beside_a_spec_are_kept(place, monkeypatch):
    answer(monkeypatch)
    spec = place / "planned.yaml"
    spec.write_text(SPEC)
    lock = Lock.parse((place / "dqn.lock.json").read_bytes().rstrip())
    write_lock(lock_path(spec), lock)
    before = everything_in(place)
    done = CliRunner().invoke(main.app, ["plan", str(spec), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert everything_in(place) == before
    assert found["origin"] == "the lock file beside the spec"
    assert [each["name"] for each in found["packages"]] == [
        each.name for each in (*lock.image.wheels, *lock.image.debian)
    ]
    assert found["spec"]["trainer"]["total_steps"] == 1000
    text = CliRunner().invoke(main.app, ["plan", str(spec)]).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "1,000 agent steps, 3 evaluations of 4 starts" in text
    assert "not estimated" in text


def test_a_time_is_that_of_a_finished_run_of_the_same_lock(place, monkeypatch):
    answer(monkeypatch)
    lock = Lock.parse((place / "dqn.lock.json").read_bytes().rstrip())
    result = {
        "complete": True, "steps": 1, "episodes": 1, "trace_records": 1, "trace_head": "0" * 64,
        "parameters": "0" * 64,
    }  # fmt: skip
    for name, document, seconds in (("same", lock, 81.5), ("other", runs.make_lock(runs.DQN), 1.0)):
        folder = place / "runs" / name
        (folder / WORK).mkdir(parents=True)
        write_lock(folder / LOCK, document)
        (folder / f"{name}-01234567.capsule.tar").write_bytes(bytes(2_000))
        (folder / WORK / contract.RESULT).write_bytes(
            contract.Result(**result, seconds=seconds).document()
        )
    found = plan(place / "dqn.lock.json")
    assert found.measured == {str(place / "runs" / "same"): (81.5, 2_000)}
    rows = dict(found.rows)
    assert "82 s as measured in" in rows["time"]
    assert "2.0 KiB as measured in" in rows["bundle"]
    assert rows["states"].startswith("1 state for 'verify --challenge'; their size")


def test_a_program_does_not_say_how_many_steps_it_takes():
    assert steps_text(runs.make_lock(runs.PROGRAM).spec) == "determined by the program"


@pytest.mark.parametrize(
    ("interval", "initial", "evaluations"),
    [(500, True, 3), (300, True, 5), (300, False, 4), (2000, True, 2), (2000, False, 1)],
)
def test_the_evaluation_of_the_final_network_is_planned_after_any_number_of_steps(
    interval, initial, evaluations
):
    given = [f"evaluation.interval={interval}", f"evaluation.initial={initial}".lower()]
    spec = parse_spec(SPEC.encode(), "planned.yaml", given)
    assert f"1,000 agent steps, {evaluations} evaluation" in steps_text(spec)


def test_the_steps_of_a_population_are_those_of_each_member():
    trainer = ImpalaTrainer(algorithm="impala", population=PopulationSpec(members=3))
    spec = parse_spec(SPEC.encode(), "planned.yaml").model_copy(update={"trainer": trainer})
    assert steps_text(spec).startswith("50,000,000 agent steps of each of 3 members, ")


KEEPING = """\
schema: capsule/spec/v1
name: keeping
environment: {suite: atari, game: breakout}
trainer: {algorithm: dqn, total_steps: 1000000, replay_capacity: 60000}
recording: {checkpoint_interval: 250000, segment_states: true}
"""
FRAME = 84 * 84


@pytest.mark.parametrize(
    ("overrides", "states"),
    [
        ([], (3, 3 * 60_000 * FRAME)),
        (["recording.checkpoint_interval=50000"], (19, 19 * 50_000 * FRAME)),
        (["trainer.total_steps=1000004"], (4, 4 * 60_000 * FRAME)),
        (["recording.segment_states=false"], None),
        (
            ["environment={suite: gymnasium, id: CartPole-v1}", "trainer.network=mlp"],
            (3, 0),
        ),
    ],
)
def test_the_states_that_a_run_keeps_are_planned(overrides, states):
    assert kept_states(parse_spec(KEEPING.encode(), "s.yaml", overrides)) == states


@pytest.mark.parametrize(("replay", "steps"), [("null", 0), ("{unrolls: 1, capacity: 30}", 600)])
def test_an_actor_critic_keeps_the_frames_of_its_replay_memory(replay, steps):
    trainer = f"{{algorithm: impala, actors: 32, total_steps: 396800, replay: {replay}}}"
    intervals = "{trace_interval: 19840, tensor_interval: 19840, checkpoint_interval: 198400"
    given = [f"trainer={trainer}", f"recording={intervals}, segment_states: true}}"]
    spec = parse_spec(KEEPING.encode(), "s.yaml", [*given, "evaluation.interval=198400"])
    assert kept_states(spec) == (1, steps * FRAME)


@pytest.mark.network
@pytest.mark.slow
def test_the_planned_lock_is_the_one_that_is_made_and_nothing_is_written(tmp_path, monkeypatch):
    spec = tmp_path / "planned.yaml"
    spec.write_text(SPEC)
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    run = CliRunner().invoke
    planned = run(main.app, ["plan", str(spec), "--json"])
    assert planned.exit_code == 0, planned.output
    assert list(tmp_path.iterdir()) == [spec]
    locked = run(main.app, ["lock", str(spec), "--json"])
    found = json.loads(planned.stdout)
    assert found["origin"] == "the package indexes"
    assert found["lock"] == json.loads(locked.stdout)["lock"]
    assert found["download_bytes"] > 1 << 20
