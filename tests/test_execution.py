"""Preparing an execution, its options, and what a program sees around it."""

import json
from types import SimpleNamespace

import pytest

from capsule import execution
from capsule.engine.containers import ContainerEngine
from capsule.engine.gpu import no_gpu
from capsule.engine.interface import ChangedEngine, Exit
from capsule.entropy.report import FAILURE, REPORT
from capsule.execution import VariedSurroundings, look
from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.files import write_atomic
from capsule.experiment.spec import SourcesSpec
from capsule.host.run_directory import LOCK, WORK
from capsule.image.lockfile import write_lock
from capsule.machine.devices import Device
from capsule.report.progress import SilentReporter
from capsule.report.runs import read_run
from tests.diagnosis.conftest import PROGRAM, LocalEngine, locked, parsed
from tests.verification.runs import CARTPOLE, IMPALA, make_lock, merged

CUDA = {"accelerator": {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9", "driver": ">=580"}}


class Refusing:
    """An engine that can make everything ready, and run nothing."""

    name = "process"

    def __init__(self):
        self.prepared = []

    def check(self, _lock):
        raise no_gpu("there is none")

    def prepare(self, lock, image, _cache, *, progress):  # noqa: ARG002 - the interface
        self.prepared.append(lock)


def test_an_image_is_built_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(execution, "_obtain", lambda *_: None)
    engine, lock = Refusing(), make_lock(CARTPOLE)
    facts = {"sources": SourcesSpec(), "reporter": SilentReporter()}
    with pytest.raises(CapsuleError, match="CAP-E003"):
        execution.prepare(lock, engine, None, **facts)
    assert engine.prepared == []
    execution.prepare(lock, engine, None, to_run=False, **facts)
    assert engine.prepared == [lock]


class Outdated(ContainerEngine):
    """A container engine with a runtime and a toolkit from which programs are known to escape."""

    def __init__(self):
        pass

    def check(self, lock):
        pass

    def prepare(self, *_, **__):
        pass

    def components(self):
        return {"runc": "1.1.5", "nvidia-container-toolkit": "1.17.7"}

    @property
    def name(self):
        return "docker"


@pytest.mark.parametrize(
    ("changes", "to_run", "warnings"), [(CUDA, True, 2), (CUDA, False, 0), ({}, True, 0)]
)
def test_a_run_on_a_gpu_warns_of_an_engine_from_which_programs_escape(
    monkeypatch, changes, to_run, warnings
):
    monkeypatch.setattr(execution, "build_image", lambda *_, **__: None)
    lock = make_lock(merged(CARTPOLE, changes) if changes else CARTPOLE)
    for engine in (Outdated(), ChangedEngine(Outdated())):
        notes = []
        reporter = SimpleNamespace(note=notes.append)
        sources = SourcesSpec()
        execution.prepare(lock, engine, None, sources=sources, to_run=to_run, reporter=reporter)
        assert len(notes) == warnings
        assert all(note.startswith("warning: ") for note in notes)


class Reporting:
    """An engine whose tasks print a line, which it keeps."""

    def __init__(self, line, reason="exited"):
        self._line, self._reason = line, reason

    def run(self, task, **_):
        self.task = task
        (task.run_directory / contract.LOG).write_text(f"a warning\n{self._line}\n")
        return Exit(1, self._reason)


@pytest.mark.parametrize("reason", ["disk-full", "timed-out", "interrupted"])
def test_an_error_that_the_task_cannot_report_is_left_for_those_who_look_later(tmp_path, reason):
    directory = tmp_path / "run"
    engine, lock = Reporting("Killed", reason), make_lock(CARTPOLE)
    write_lock(directory / LOCK, lock)
    with pytest.raises(CapsuleError) as caught:
        execution.execute(lock, engine, directory / WORK, reporter=SilentReporter())
    found = read_run(directory)
    if reason == "interrupted":
        assert (found.state, found.problem) == ("interrupted", None)
    else:
        assert (found.state, found.problem) == ("failed", f"CAP-E010: {caught.value.message}")


SEEN = {"locale": "C", "timezone": "UTC", "hostname": "there", "processors": "0", "told": 4}


def test_what_a_program_reports_of_its_surroundings_is_read_back(tmp_path):
    engine, lock = Reporting(json.dumps(SEEN)), make_lock(CARTPOLE)
    surroundings = VariedSurroundings(hostname="there", processors="0", variables={"TZ": "A-1"})
    seen = look(lock, engine, tmp_path / "look", lock.spec.limits, surroundings)
    assert seen.model_dump() == SEEN
    assert (engine.task.hostname, engine.task.processors) == ("there", "0")
    assert (engine.task.environment["TZ"], engine.task.environment["LANG"]) == ("A-1", "C.UTF-8")


def test_a_long_list_of_processors_is_read_back(tmp_path):
    seen = SEEN | {"processors": ",".join(map(str, range(0, 4_096, 2))), "told": 2_048}
    engine, lock = Reporting(json.dumps(seen)), make_lock(CARTPOLE)
    surroundings = VariedSurroundings()
    found = look(lock, engine, tmp_path / "look", lock.spec.limits, surroundings)
    assert found.model_dump() == seen


def test_the_error_of_a_look_shows_the_beginning_of_a_long_line(tmp_path):
    engine, lock = Reporting("x" * 5_000), make_lock(CARTPOLE)
    with pytest.raises(CapsuleError, match=r"last output: 'x{300}'"):
        look(lock, engine, tmp_path / "look", lock.spec.limits, VariedSurroundings())


@pytest.mark.parametrize("line", ["Traceback", "{}", json.dumps(SEEN | {"told": 0})])
def test_a_program_that_reports_nothing_of_its_surroundings_decides_nothing(tmp_path, line):
    engine, lock = Reporting(line), make_lock(CARTPOLE)
    with pytest.raises(CapsuleError, match="CAP-E043") as caught:
        look(lock, engine, tmp_path / "look", lock.spec.limits, VariedSurroundings())
    assert caught.value.exit_code == ExitCode.INCONCLUSIVE


def test_an_interrupted_look_at_the_surroundings_is_an_interruption(tmp_path):
    engine, lock = Reporting("", "interrupted"), make_lock(CARTPOLE)
    with pytest.raises(CapsuleError, match="CAP-E012 the check of the surroundings") as caught:
        look(lock, engine, tmp_path / "look", lock.spec.limits, VariedSurroundings())
    assert caught.value.exit_code == ExitCode.INTERRUPTED


def test_a_replay_gets_the_data_sets_of_the_run_and_hashes_them_before_and_after(tmp_path):
    class Data:
        """A data set that counts how often it is hashed."""

        path, below, checks = tmp_path / "levels", "", 0

        def check(self, *_):
            self.checks += 1

    class Filming(Reporting):
        def run(self, task, **_):
            point = contract.EvaluationPoint(step=8, returns=("0x1p+0",), lengths=(1,))
            played = contract.Film(point=point, screens=1, rows=1, columns=1, rate=60.0)
            (task.run_directory / contract.FILM).write_bytes(played.document())
            assert data.checks == 1
            super().run(task)
            return Exit(0, "exited")

    data, engine, lock = Data(), Filming(""), make_lock(CARTPOLE)
    tensors = tmp_path / "tensors"
    tensors.touch()
    film = execution.film(
        lock,
        engine,
        tmp_path / "film",
        contract.EpisodeOrder(seed=7, step=8, starts=((0,),), episode=0),
        tensors,
        limits=lock.spec.limits,
        data={"levels": data},
        reporter=SilentReporter(),
    )
    assert (engine.task.data, data.checks) == ({"levels": tmp_path / "levels"}, 2)
    assert film.point.step == 8


class Twice:
    """An engine in whose runs another process starts the same run again."""

    name = "process"

    def run(self, task, **_):
        before = contents(task.run_directory)
        with pytest.raises(CapsuleError, match="CAP-E008"):
            run_interrupted(self, task.run_directory, learners=2)
        assert contents(task.run_directory) == before
        return Exit(130, "interrupted")


def run_interrupted(engine, directory, **options):
    options = execution.ExecutionOptions(**options)
    execution.execute(make_lock(IMPALA), engine, directory, options, reporter=SilentReporter())


def contents(directory):
    return {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def test_a_second_process_changes_nothing_in_a_run_directory(tmp_path):
    for _ in range(2):  # the directory is free again
        with pytest.raises(CapsuleError, match="CAP-E012"):
            run_interrupted(Twice(), tmp_path / "work")


@pytest.mark.parametrize(
    "name", [contract.WORKSPACE, contract.EVENTS, contract.FAILURE, contract.ENTROPY_STARTS]
)
def test_a_run_whose_program_put_a_link_into_its_directory_is_not_resumed(tmp_path, name):
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / name).symlink_to(elsewhere)
    # An engine without run(): nothing is executed.
    with pytest.raises(CapsuleError, match=f"CAP-E041 the task replaced {name}"):
        run_interrupted(Refusing(), work)
    assert [*contents(work)] == [work / name]
    assert contents(elsewhere) == {}


SERVED = {"schedule": {"mode": "recorded"}, "inference": {"mode": "server"}}


@pytest.mark.parametrize(
    ("trainer", "options", "needed"),
    [
        ({}, {"learners": 2}, "--learners 2 requires trainer.algorithm 'impala'"),
        ({}, {"replicas": 2}, "--replicas 2 requires trainer.inference.mode 'server'"),
        (SERVED, {"learners": 2, "replicas": 2}, None),
        ({}, {"learners": 1, "replicas": 1}, None),
    ],
)
def test_learners_and_replicas_are_for_trainers_that_can_use_them(trainer, options, needed):
    spec = make_lock(merged(IMPALA, {"trainer": trainer}) if trainer else CARTPOLE).spec
    check = execution.ExecutionOptions(**options).check
    if needed is None:
        check(spec)
        return
    with pytest.raises(CapsuleError, match=f"CAP-S009 {needed}"):
        check(spec)


def test_replicas_are_for_a_server_only():
    spec = make_lock(IMPALA).spec
    execution.ExecutionOptions(learners=2).check(spec)
    with pytest.raises(CapsuleError, match="CAP-S009 --replicas 2"):
        execution.ExecutionOptions(replicas=2).check(spec)


@pytest.mark.parametrize("name", [contract.ENDED, contract.RESULT])
def test_what_ended_is_finished_only_with_a_report_of_its_launcher(tmp_path, name):
    start = tmp_path / contract.ENTROPY_STARTS / "start-0001"
    start.mkdir(parents=True)
    (tmp_path / name).touch()
    (start / REPORT).touch()
    assert execution.has_ended(tmp_path)
    (start / REPORT).unlink()
    assert not execution.has_ended(tmp_path)
    assert (tmp_path / name).exists()  # nothing is removed by a question
    execution._discard_end(tmp_path)
    assert not (tmp_path / name).exists()  # it continues from its last state


FIRST, SECOND = (f"GPU-11111111-0000-4000-8000-00000000000{number}" for number in (1, 2))


class OnGpu:
    """An engine whose tasks end at once, and write that they used a GPU."""

    name = "process"

    def __init__(self, used):
        self.used, self.given = used, []

    def describe(self):
        return {"name": self.name}

    def run(self, task, **_):
        work = task.run_directory
        self.given.append([gpu.uuid for gpu in task.gpus])
        if not (work / contract.RESULT).exists():
            (start,) = (work / contract.ENTROPY_STARTS).glob(f"start-{len(self.given):04}")
            (start / REPORT).touch()
            device = {"uuid_sha256": contract.gpu_identity(self.used)}
            runtime = contract.Runtime(flags={}, libraries={}, device=device)
            write_atomic(work / contract.RUNTIME, runtime.document())
            (work / contract.TRACE).touch()
            result = contract.Result(
                complete=True,
                steps=1,
                episodes=0,
                trace_records=0,
                trace_head="0" * 64,
                parameters="0" * 64,
                seconds=1.0,
            )
            write_atomic(work / contract.RESULT, result.document())
        return Exit(0, "exited")


@pytest.fixture
def run_on(tmp_path, monkeypatch):
    """Runs the same experiment for CUDA where the only GPU is the named one."""
    lock = make_lock(merged(CARTPOLE, CUDA))

    def run(engine, gpu):
        devices = (Device(0, "0", gpu, "NVIDIA H200", "9.0", 1),)
        monkeypatch.setattr(execution, "devices_for", lambda *_: devices)
        return execution.execute(lock, engine, tmp_path / "work", reporter=SilentReporter())

    return run


def test_a_run_that_has_ended_is_finished_without_its_gpu(run_on, monkeypatch):
    engine = OnGpu(FIRST)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(execution.Attempt, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        run_on(engine, FIRST)
    monkeypatch.setattr(execution.Attempt, "finish", lambda *_, **__: None)
    monkeypatch.setattr(execution, "_write_ledger", lambda *_: None)
    assert run_on(engine, SECOND).steps == 1
    assert engine.given == [[FIRST], []]


def test_the_end_of_a_run_on_another_gpu_does_not_count_when_it_is_resumed(run_on):
    engine = OnGpu(SECOND)
    for _ in range(2):
        with pytest.raises(CapsuleError, match="CAP-E048"):
            run_on(engine, FIRST)
    assert engine.given == [[FIRST], [FIRST]]


@pytest.mark.slow
def test_the_ledger_has_the_engine_that_the_bundle_will_name(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    lock = locked(parsed(PROGRAM), tmp_path / "project")
    engine = LocalEngine(tmp_path, tmp_path / "project", torch=False)
    compute, engines = execution.compute_ledger, []

    def compute_ledger(evidence):
        engines.append(evidence.engine)
        return compute(evidence)

    monkeypatch.setattr(execution, "compute_ledger", compute_ledger)
    elsewhere = {"name": "docker", "cluster": "docker:2"}
    for name, described in (("here", None), ("elsewhere", elsewhere)):
        options = execution.ExecutionOptions(described=described)
        execution.execute(lock, engine, tmp_path / name, options, reporter=SilentReporter())
    assert engines == [engine.describe(), elsewhere]


def test_what_ended_while_its_launcher_failed_continues_from_its_last_state(tmp_path):
    start = tmp_path / contract.ENTROPY_STARTS / "start-0001"
    start.mkdir(parents=True)
    for path in (tmp_path / contract.ENDED, start / REPORT, start / FAILURE):
        path.touch()
    assert not execution.has_ended(tmp_path)
