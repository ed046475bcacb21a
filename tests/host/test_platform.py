"""The wheel without native parts, on interpreters that look like those of a Mac and of Windows."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.platform import require_execution
from tests.host import reviewer

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"
BUNDLE = CORPUS / "dqn.capsule.tar"
KEY = ("--key", CORPUS / "author.pub")
VERIFIER = ("--key", CORPUS / "verifier.pub")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel for every platform."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "CAPSULE_WHEEL": "pure"},
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture
def mac(wheel, tmp_path):
    """Run a command of the wheel's Capsule: its exit status, and its output with its errors."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    path = os.pathsep.join(map(str, [Path(__file__).parent / "mac", tmp_path / "installed"]))

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "capsule", *map(str, arguments)],
            cwd=tmp_path,
            env={"PYTHONPATH": path, "HOME": str(tmp_path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_wheel_for_every_platform_has_no_native_parts(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith("capsule/native/lib")]
    assert "capsule/data/images/releases.json" in names


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["verify", BUNDLE, *KEY, "--mode", "integrity"], "signed by a trusted key"),
        (["show", BUNDLE], "400 agent steps of DQN"),
        (["report", BUNDLE, "-o", "page.html"], ""),
        (["diff", BUNDLE, BUNDLE], "equal"),
        (
            ["receipts", BUNDLE, f"{BUNDLE}.verifier.receipt.json", *KEY, *VERIFIER],
            "reproduced-bitwise",
        ),
        (["study", "verify", CORPUS / "study.capsule-study.tar", *KEY], "intact"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_executes_nothing_works(mac, arguments, output):
    status, said = mac(*arguments)
    assert status == ExitCode.OK, said
    assert output in said


def test_a_verification_that_cannot_execute_is_inconclusive(mac, tmp_path):
    status, said = mac("verify", BUNDLE, *KEY)
    assert status == ExitCode.INCONCLUSIVE, said
    report = json.loads((tmp_path / "verify-report.json").read_text())
    assert (report["verdict"], report["error"]["code"]) == ("inconclusive", "CAP-E019")
    assert report["summary"].startswith("nothing was executed")
    assert "signed by a trusted key" in said


@pytest.mark.parametrize("command", ["lock", "build", "run"])
def test_what_needs_native_parts_says_where_it_works(mac, command):
    assert mac("init", "mine.yaml")[0] == ExitCode.OK
    status, said = mac(command, "mine.yaml")
    assert status == ExitCode.NO_ENGINE, said
    assert "CAP-E019: nothing was executed: this machine has Darwin on arm64" in said
    assert "--mode integrity" in said
    assert "made a signing key" not in said


def test_doctor_checks_the_platform_first(mac):
    status, said = mac("doctor")
    assert status != ExitCode.OK
    assert "Capsule builds images and executes runs on Linux on x86_64 only" in said
    assert "CAP-X001" not in said


@pytest.fixture(scope="module")
def windows(wheel, tmp_path_factory):
    """Execute a reviewer's commands: the folder, and the exit status and the output of each."""
    folder = tmp_path_factory.mktemp("windows")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    shutil.copytree(CORPUS, folder / "corpus")
    path = os.pathsep.join(map(str, [Path(__file__).parent / "windows", folder / "installed"]))
    subprocess.run(
        [sys.executable, reviewer.__file__, "results.json"],
        cwd=folder,
        env={"PYTHONPATH": path, "HOME": str(folder), "COLUMNS": "200"},
        check=True,
    )
    return folder, json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("number", range(len(reviewer.COMMANDS)))
def test_what_a_reviewer_does_works_on_windows(windows, number):
    arguments, status, said = reviewer.COMMANDS[number]
    found, output = windows[1][number]
    assert found == status, (arguments, output)
    assert said in output


@pytest.mark.parametrize("name", reviewer.WRITTEN)
def test_what_is_written_on_windows_has_the_line_ends_of_others(windows, name):
    written = (windows[0] / name).read_bytes()
    assert written
    assert b"\r" not in written


@pytest.mark.parametrize(
    ("system", "processor"), [("linux", "aarch64"), ("darwin", "x86_64"), ("win32", "AMD64")]
)
def test_only_linux_on_x86_64_executes(monkeypatch, system, processor):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    require_execution()
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    with pytest.raises(CapsuleError, match="Linux on x86_64 only") as refused:
        require_execution()
    assert refused.value.code == "CAP-E019"
