"""What ``scripts/gpu_acceptance.py`` packs, with steps that only seem to run."""

import json
import subprocess
import tarfile

import pytest

from capsule.bundle.keys import generate
from scripts import gpu_acceptance
from scripts.gpu_acceptance import KEY, NAMESPACE, Acceptance, Step, main


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


def test_the_report_is_signed_as_openssh_does(accepted, tmp_path):
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


def test_without_a_key_there_is_a_report_without_a_signature(accepted, tmp_path):
    class Keyless(Played):
        def do(self, name, *words):
            return super().do(name, *(word for word in words if word != "keygen"))

    status, notes, report = accepted(kinds=Keyless)
    assert status == 1
    assert "signature  none: CAP-" in notes
    assert f"attach     {tmp_path / 'report.tar.gz'}" in notes
    assert report["steps"]


def test_a_step_that_breaks_the_script_hides_nothing(accepted, tmp_path):
    class Broken(Played):
        def verify(self, *_):
            raise KeyError("verdict")

    status, notes, report = accepted(kinds=Broken)
    assert status == 1
    assert "KeyError: 'verdict'" in report["summary"][-1]
    assert f"attach     {tmp_path / 'report.tar.gz'}" in notes
