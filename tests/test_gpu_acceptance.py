"""What ``scripts/gpu_acceptance.py`` packs, with steps that only seem to run."""

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from capsule.bundle.keys import generate
from scripts import gpu_acceptance
from scripts.gpu_acceptance import KEY, MEMBER_BYTES, NAMESPACE, Acceptance, Step, main

ROOT = Path(__file__).parents[1]


class Played(Acceptance):
    """An acceptance whose steps do nothing, but for the key; what they print can be set."""

    outputs: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed

    def do(self, name, *words):
        if "keygen" in words:
            generate(self.folder / KEY)
        step = Step(name, [str(word) for word in words], 0, 1.0, self.outputs.get(name, ""), "")
        self.steps.append(step)
        return step


@pytest.fixture
def accepted(tmp_path, monkeypatch, capsys):
    """Return a function that does everything, and returns the status, notes and packed report."""

    def play(kind="cuda", kinds=Played):
        monkeypatch.setattr(gpu_acceptance, "Acceptance", kinds)
        status = main(kind, tmp_path / "report")
        with tarfile.open(tmp_path / "report.tar.gz") as archive:
            report = json.load(archive.extractfile("report/report.json"))
        return status, capsys.readouterr().err, report

    return play


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets the number of visible GPUs."""
    monkeypatch.setattr(gpu_acceptance, "read_devices", lambda _: ())

    def visible(number):
        monkeypatch.setattr(gpu_acceptance, "visible_devices", lambda *_: (None,) * number)

    visible(1)
    return visible


def test_the_report_is_signed_as_openssh_does(accepted, tmp_path, gpus):
    accepted()
    signature = ("-s", tmp_path / "report.tar.gz.sig")
    with (tmp_path / "report.tar.gz").open("rb") as archive:
        done = subprocess.run(
            ["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, *signature],
            stdin=archive,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert 'Good "capsule-gpu-acceptance" signature' in done.stdout


def test_without_a_key_there_is_a_report_without_a_signature(accepted, tmp_path, gpus):
    class Keyless(Played):
        def do(self, name, *words):
            return super().do(name, *(word for word in words if word != "keygen"))

    status, notes, report = accepted(kinds=Keyless)
    assert status == 1
    assert "signature  none: CAP-" in notes
    assert f"attach     {tmp_path / 'report.tar.gz'}" in notes
    assert report["steps"]


def test_a_step_that_breaks_the_script_hides_nothing(accepted, tmp_path, gpus):
    class Broken(Played):
        def verify(self, *_):
            raise KeyError("verdict")

    status, notes, report = accepted(kinds=Broken)
    assert status == 1
    assert "KeyError: 'verdict'" in report["summary"][-1]
    assert f"attach     {tmp_path / 'report.tar.gz'}" in notes


def printed(documents):
    return {name: json.dumps(document) for name, document in documents.items()}


TRAINED = ("dqn", "r2d2", "impala")


def played(networks=()):
    """Return what the steps print where every run is reproduced; bundles are named by their runs.

    Args:
        networks: Digest of the final network by the name of a run; "a" otherwise.
    """
    names = [f"{name}: {title}" for name in TRAINED for title in
             ("run", "run 1 without flags", "run 2 without flags")]  # fmt: skip
    names += ["dqn: run 1 with TF32", "dqn: run 2 with TF32", "impala: run with two learners"]
    names += [f"{name}: run with CUDA graphs" for name in ("dqn", "r2d2")]
    found = {name: {"bundle": name} for name in names}
    for name in names:
        facts = {"claims": {"parameters": dict(networks).get(name, "a")}}
        found[f"show {name}"] = facts | {"observations": {"steps_per_second": 1234.0}}
    return printed(
        found | {f"{name}: verify": {"verdict": "reproduced-bitwise"} for name in TRAINED}
    )


def test_everything_that_is_open_is_tried(accepted, gpus, monkeypatch):
    others = {"r2d2: run 2 without flags": "b", "r2d2: run with CUDA graphs": "c"}
    monkeypatch.setattr(Played, "outputs", played(others))
    status, _, report = accepted()
    assert status == 0
    summary = "\n".join(report["summary"])
    for name in TRAINED:
        assert f"- **{name}: reproduced-bitwise**" in summary
    assert "- dqn without flags: the same network twice; 1,234 agent steps/s in the" in summary
    assert "- r2d2 without flags: another network each time" in summary
    assert "- dqn with TF32: the same network twice" in summary
    assert "- dqn with CUDA graphs: the same network; 1,234 agent steps/s in the first" in summary
    assert "- r2d2 with CUDA graphs: **another network**" in summary
    assert "- impala with two learners: not tested, because visible GPUs: 1" in summary
    steps = {step["name"]: step["command"] for step in report["steps"]}
    assert {*gpu_acceptance.QUESTIONS, "dqn: build", "dqn: benchmark", "r2d2: benchmark"} < {*steps}
    assert steps["dqn: run as a plain process"][-5:-3] == ["--engine", "process"]
    assert "limits.memory_mb=16384" in steps["dqn: run"]
    flags = {word for word in steps["dqn: run 1 without flags"] if word.startswith("determinism.")}
    assert "accelerator.cuda_graphs=true" in steps["dqn: run with CUDA graphs"]
    assert flags == {"determinism.algorithms=off", "determinism.cudnn_benchmark=true"}


def test_two_gpus_share_a_gradient(accepted, gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(Played, "outputs", played())
    _, _, report = accepted()
    shared = "- impala with two learners: the same network"
    assert any(line.startswith(shared) for line in report["summary"])
    steps = {step["name"]: step["command"] for step in report["steps"]}
    assert "--learners" in steps["impala: run with two learners"]


def test_without_a_gpu_the_same_runs_are_made_and_no_gpu_is_asked_for(accepted, monkeypatch):
    monkeypatch.setattr(Played, "outputs", played())
    status, _, report = accepted("cpu")
    assert status == 0
    steps = {step["name"] for step in report["steps"]}
    assert not steps & {*gpu_acceptance.QUESTIONS}
    assert {"dqn: build", "dqn: verify", "impala: run 2 without flags"} < steps


def test_a_run_that_fails_leaves_what_explains_it(accepted, tmp_path, gpus):
    class Failing(Played):
        def build(self, name):
            work = self.folder / "runs" / name / "work"
            work.mkdir(parents=True)
            (work / "runtime.json").write_text("{}")
            (work / "output.log").write_text("x" * gpu_acceptance.LOG_BYTES + "the end")
            if name == "impala":  # the only one with a bundle
                with tarfile.open(work.parent / "impala.capsule.tar", "w") as bundle:
                    for each, size in {"claims.json": 2, "big": MEMBER_BYTES + 1}.items():
                        member = tarfile.TarInfo(each)
                        member.size = size
                        bundle.addfile(member, io.BytesIO(b"x" * size))
            return super().build(name)

    status, _, _ = accepted(kinds=Failing)
    assert status == 1
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        names = {name.removeprefix("report/") for name in archive.getnames()}
        end = archive.extractfile("report/runs/dqn/end-of-output.log").read()
    assert len(end) == gpu_acceptance.LOG_BYTES
    assert end.endswith(b"the end")
    assert "runs/r2d2/work/runtime.json" in names
    assert "runs/impala/impala.capsule.tar/claims.json" in names
    assert "runs/impala/impala.capsule.tar/big" not in names
    assert not any("impala/work" in name or "impala/end" in name for name in names)


def test_an_installation_that_failed_is_made_again(tmp_path):
    """The commands that the script calls write down that they were called, and do nothing more."""
    programs = {
        "scripts/setup.sh": "mkdir -p .cache",
        "bin/python3": "mkdir -p .cache/gpu-venv/bin; cp bin/done .cache/gpu-venv/bin/python",
        "bin/done": "echo accepted >>calls",
        ".venv/bin/python": "echo install >>calls; test -e network",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "train.txt").write_text("numpy==2.4.6 --hash=x\n")
    script = shutil.copy(ROOT / "scripts" / "gpu-acceptance.sh", tmp_path / "scripts")
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert subprocess.run(["bash", script], env=path, capture_output=True).returncode != 0
    (tmp_path / "network").touch()
    for _ in range(2):
        subprocess.run(["bash", script], env=path, capture_output=True, check=True)
    calls = (tmp_path / "calls").read_text().split()
    assert calls == ["install", "install", "install", "accepted", "accepted"]
