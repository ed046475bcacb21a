"""The whole way of ``capsule diagnose``: two real runs, compared and explained."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from capsule.diagnosis.diagnose import _shortened, compare_runs, diagnose, read_reports
from capsule.experiment.contract import Output, Outputs
from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import Lock
from capsule.report.diagnosis import show_diagnosis
from capsule.report.progress import SilentReporter
from capsule.training.instruments.report import InstrumentReport, Location, OperatorUse
from tests.conftest import one_processor
from tests.diagnosis.conftest import PROGRAM, parsed

DQN = {
    "name": "micro",
    "accelerator": {"kind": "cpu", "numerics": "native"},
    "environment": {"suite": "atari", "game": "breakout"},
    "trainer": {
        "algorithm": "dqn",
        "batch_size": 8,
        "micro_batches": [8],
        "total_steps": 400,
        "replay_capacity": 400,
        "replay_start": 200,
        "target_interval": 200,
    },
    "limits": {"memory_mb": 4096},
}

R2D2 = {
    "name": "sequences",
    "accelerator": {"kind": "cpu", "numerics": "native"},
    "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
    "trainer": {
        "algorithm": "r2d2",
        "network": "mlp",
        "total_steps": 4000,
        "recurrent_units": 8,
        "hidden_units": 8,
        "actors": 8,
        "update_interval": 5,
        "actor_update_interval": 20,
        "burn_in": 3,
        "sequence_length": 12,
        "sequence_stride": 6,
        "replay_capacity": 4000,
        "replay_start": 2000,
        "batch_size": 8,
        "micro_batches": [8],
    },
    "evaluation": {"interval": 4000, "min_actions": 0, "max_actions": 5},
    "recording": {"trace_interval": 40, "tensor_interval": 40, "checkpoint_interval": 4000},
    "limits": {"memory_mb": 4096},
}
IMPALA = {
    "name": "unrolls",
    "environment": {"suite": "gymnasium", "id": "CartPole-v1"},
    "trainer": {"algorithm": "impala", "network": "mlp", "total_steps": 64_000},
    "evaluation": {"interval": 6400},
    "recording": {"trace_interval": 640, "tensor_interval": 640, "checkpoint_interval": 6400},
}


def shown(diagnosis):
    stream = io.StringIO()
    show_diagnosis(diagnosis, Console(file=stream, width=100))
    return stream.getvalue()


@pytest.mark.slow
def test_deep_q_learning_gives_no_finding(diagnosed):
    diagnosis = diagnosed(spec=DQN, steps=96)
    assert diagnosis.equal
    assert diagnosis.findings == ()
    assert diagnosis.exit_code == 0
    assert diagnosis.operators.repeated > 500
    assert diagnosis.operators.differing == 0
    assert "96 steps: equal bits" in shown(diagnosis)


@pytest.mark.slow
def test_r2d2_learns_in_as_few_steps_as_fit_it(diagnosed):
    with one_processor():
        diagnosis = diagnosed(spec=R2D2, steps=None)
    assert diagnosis.equal
    assert diagnosis.steps == 320  # twice 8 actors times the 20 steps of a sequence


@pytest.mark.slow
def test_a_program_with_a_fault_is_diagnosed_to_the_line(diagnosed):
    diagnosis = diagnosed(
        """\
        import pathlib

        features = {"angle", "speed", "height", "mass", "drag", "lift", "torque"}
        columns = list(features)
        pathlib.Path("columns.txt").write_text(" ".join(columns))
        """,
        determinism={"hash_seed": None},
        entropy={"mode": "system"},
    )
    assert not diagnosis.equal
    assert diagnosis.exit_code == 1
    facts = [(item.code, item.where and str(item.where)) for item in diagnosis.findings]
    assert facts == [
        ("CAP-D101", None),
        ("CAP-D105", "train.py:4"),
        ("CAP-D301", None),
    ]
    text = shown(diagnosis)
    assert "columns.txt differs in line 1: " in text
    assert "CAP-D105  train.py:4" in text
    assert "columns = list(features)" in text
    assert "--apply tries determinism.hash_seed: 0" in text


@pytest.mark.slow
def test_a_second_run_that_takes_another_path_is_a_difference(diagnosed):
    diagnosis = diagnosed(
        """\
        import time
        from capsule.training import arrivals

        arrivals.as_completed([], name=f"at {time.monotonic_ns()}")
        """,
        torch=False,
    )
    assert not diagnosis.equal
    assert diagnosis.exit_code == 1
    different, asked = diagnosis.findings
    assert different.code == "CAP-D101"
    assert different.message.startswith("the second run ended with CAP-T381: the program does not")
    assert (asked.code, str(asked.where)) == ("CAP-D108", "train.py:4")


@pytest.mark.slow
def test_where_no_cause_was_observed_a_race_is_suspected(diagnosed):
    diagnosis = diagnosed(
        """\
        import subprocess

        subprocess.run(["cat", "/proc/uptime"], check=True)
        """,
        torch=False,
    )
    assert [(item.code, item.level) for item in diagnosis.findings] == [
        ("CAP-D101", "error"),
        ("CAP-D111", "warning"),
    ]
    assert "capsule.training.arrivals" in diagnosis.findings[1].mitigation


PUT = OperatorUse(
    operator="aten::put_",
    device="cpu",
    status="raises",
    documented="torch.Tensor.put_ when accumulate=False",
    calls=1,
    repeated=0,
    differing=0,
    first_difference=None,
    stack=(Location(file="/run/workspace/train.py", line=3, function="<module>"),),
)


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Let the first run end with an error after its instruments have seen some operators."""

    def work(*operators):
        def execute(_lock, _engine, directory, _options, **_reporter):
            report = InstrumentReport(
                algorithms="error",
                threads=1,
                operator_calls=len(operators),
                operators=operators,
                warnings=(),
                sources=(),
                variables=(),
                truncated=False,
                text={},
            )
            (directory / "instruments").mkdir(parents=True)
            (directory / "instruments/000.json").write_text(report.model_dump_json(by_alias=True))
            raise CapsuleError("CAP-T302", "status 1", fix="")

        monkeypatch.setattr("capsule.execution.execute", execute)
        lock = Lock.model_construct(spec=parsed(PROGRAM))
        engine = SimpleNamespace(name="docker")
        return diagnose(lock, engine, tmp_path, steps=64, reporter=SilentReporter())

    return work


def test_the_second_run_repeats_all_that_the_first_one_recorded(monkeypatch, tmp_path):
    names = {"replay": "entropy.profile", "arrivals": "arrivals.json", "schedule": "schedule.log"}
    asked = []

    def execute(_lock, _engine, directory, options, **_reporter):
        asked.append({field: getattr(options, field) for field in names})
        if len(asked) == 2:
            raise CapsuleError("CAP-E012", "interrupted", fix="")
        directory.mkdir()
        for name in names.values():
            (directory / name).touch()

    monkeypatch.setattr("capsule.execution.execute", execute)
    lock, engine = Lock.model_construct(spec=parsed(PROGRAM)), SimpleNamespace(name="docker")
    with pytest.raises(CapsuleError, match="CAP-E012"):
        diagnose(lock, engine, tmp_path, steps=None, reporter=SilentReporter())
    first = {field: tmp_path / "run-1" / name for field, name in names.items()}
    assert asked == [dict.fromkeys(names), first]


def test_an_operator_that_stops_the_run_is_a_finding(failing):
    (item,) = failing(PUT).findings
    assert (item.code, item.level, str(item.where)) == ("CAP-D203", "error", "train.py:3")
    assert item.operator == "aten::put_"


def test_a_run_that_fails_for_another_reason_is_an_error(failing):
    with pytest.raises(CapsuleError) as caught:
        failing()
    assert caught.value.code == "CAP-T302"


@pytest.mark.parametrize("content", ["{}", ""])
def test_a_missing_or_damaged_report_is_named(tmp_path, content):
    (tmp_path / "instruments").mkdir()
    (tmp_path / "instruments/000.json").write_text(content)
    with pytest.raises(CapsuleError) as caught:
        read_reports(tmp_path)
    assert caught.value.code == "CAP-D002"


def test_reports_behind_a_link_are_not_read(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/000.json").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/instruments").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CapsuleError, match=r"000\.json") as caught:
        read_reports(tmp_path / "run")
    assert caught.value.code == "CAP-D002"


def test_everything_that_is_claimed_of_a_program_is_compared(tmp_path):
    file = Output(size=1, sha256="0" * 64)
    facts = (
        {"files": {"a": file}, "standard_output": file},
        {"files": {}, "deleted": ("b",), "empty_folders": ("c",), "standard_output": None},
    )
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, fact in zip(folders, facts, strict=True):
        folder.mkdir()
        (folder / "outputs.json").write_bytes(Outputs(**fact).document())
    assert compare_runs(*folders) == [
        f"a differs: 1 byte, sha256:{'0' * 64} / no output",
        "b differs: no output / deleted",
        "c differs: no output / an empty folder",
        f"/dev/stdout differs: 1 byte, sha256:{'0' * 64} / no output",
    ]
    assert compare_runs(folders[1], folders[1]) == []


@pytest.mark.parametrize("steps", [0, -8, 8, 97, 4000])
def test_steps_must_fit_the_trainer(tmp_path, steps):
    lock = Lock.model_construct(spec=parsed(DQN))
    with pytest.raises(CapsuleError) as caught:
        diagnose(lock, None, tmp_path, steps=steps, reporter=SilentReporter())
    assert caught.value.code == "CAP-D001"
    if steps == 4000:
        assert caught.value.message.endswith("trainer.total_steps, which is 400")
        assert caught.value.fix.startswith("Use, for example, --steps 400,")


@pytest.mark.parametrize(
    ("total", "steps"), [(200, 200), (400, 256)], ids=["short run", "long run"]
)
def test_no_more_steps_are_stated_than_the_run_has(total, steps):
    trainer = DQN["trainer"] | {"total_steps": total, "replay_start": 100, "target_interval": 100}
    changed = {"trainer": trainer, "evaluation": {"interval": total}}
    lock = Lock.model_construct(spec=parsed({**DQN, **changed}))
    assert _shortened(lock, None)[1] == steps


@pytest.mark.parametrize(
    ("spec", "batch", "steps"),
    [(DQN, 32, 256), (DQN, 200, 400), (R2D2, 8, 320), (IMPALA, 32, 1280)],
)
def test_without_a_number_as_few_steps_are_run_as_fit_the_trainer(
    tmp_path, monkeypatch, spec, batch, steps
):
    parts = {"batch_size": batch, "micro_batches": [batch]}
    lock = Lock.model_construct(spec=parsed({**spec, "trainer": {**spec["trainer"], **parts}}))
    asked = []

    def execute(_lock, _engine, _directory, options, *, reporter):
        asked.append(options.stop_after)
        raise CapsuleError("CAP-E012", "interrupted", fix="")

    monkeypatch.setattr("capsule.execution.execute", execute)
    with pytest.raises(CapsuleError, match="CAP-E012"):
        diagnose(
            lock, SimpleNamespace(name="docker"), tmp_path, steps=None, reporter=SilentReporter()
        )
    assert asked == [steps]
