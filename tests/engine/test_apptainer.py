"""The engine apptainer, as far as that takes no Apptainer; tests/end_to_end has the rest."""

import csv
import errno
import json
import os
from dataclasses import replace
from unittest.mock import Mock

import pytest

from capsule.engine import apptainer, gpu, supervise
from capsule.engine.apptainer import ApptainerEngine
from capsule.engine.cluster import OnCluster
from capsule.engine.interface import RemoteCluster
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.machine.devices import Device
from tests.engine.conftest import interrupt_once_there

CUDA = {"kind": "cuda", "cuda": "13.0", "cudnn": "9.20", "driver": "580.65"}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program called apptainer that only knows its version, and a user who is not root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "apptainer"
    path.write_text("#!/bin/sh\necho apptainer version 1.4.5\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("os.getuid", lambda: 1001)
    return path


def refused():
    with pytest.raises(CapsuleError) as raised:
        ApptainerEngine()
    assert (raised.value.code, raised.value.exit_code) == ("CAP-E001", ExitCode.NO_ENGINE)
    return raised.value.message


def test_without_apptainer_or_with_one_that_fails(program, monkeypatch):
    program.write_text("#!/bin/sh\necho starter is missing >&2\nexit 255\n")
    assert "starter is missing" in refused()
    program.unlink()
    monkeypatch.setenv("PATH", str(program.parent))
    assert refused() == "apptainer is not on the PATH"


def test_singularity_will_do(program):
    program.rename(program.with_name("singularity"))
    assert ApptainerEngine().describe()["version"] == "1.4.5"


def test_root_is_refused(program, monkeypatch):
    assert program.exists()
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert "not available to root" in refused()


def test_what_a_container_confines_more_is_said(program, make_image, make_lock, cache, monkeypatch):
    assert program.exists()
    image, said = make_image(), []
    engine = ApptainerEngine()
    engine.prepare(make_lock(), image, cache, progress=said.append)
    assert engine.describe() == {
        "name": "apptainer",
        "version": "1.4.5",
        "seccomp": "profile",
        "memory": "watched",
        "temporary": "unlimited",
        "user": "own",
    }
    assert "programs see your user id" in said[-1]
    monkeypatch.setattr(apptainer, "compiled_profile", lambda: None)
    engine = ApptainerEngine()
    engine.prepare(make_lock(), image, cache, progress=said.append)
    assert engine.describe()["seccomp"] == "none"
    assert "not filtered" in said[-1]


def test_a_gpu_needs_a_driver_and_clusters_are_refused(program, make_lock, monkeypatch, tmp_path):
    assert program.exists()
    engine = ApptainerEngine()
    monkeypatch.setattr(gpu, "_LOADED", (str(tmp_path / "version"),))
    with pytest.raises(CapsuleError) as raised:
        engine.check(make_lock(accelerator=CUDA))
    assert raised.value.code == "CAP-E003"
    (tmp_path / "version").touch()
    engine.check(make_lock(accelerator=CUDA))
    with pytest.raises(CapsuleError) as raised:
        OnCluster(engine, RemoteCluster("head:6379", None))
    assert raised.value.code == "CAP-E016"


@pytest.fixture
def words(program, make_image, make_lock, make_task, cache, run_directory):
    """A function that returns the words of a command, which ends before it starts anything."""
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo apptainer version 1.4.5 && exit\n'
        "for word; do printf '%s\\0' \"$word\"; done\nexit 255\n"
    )
    engine = ApptainerEngine()
    image = make_image()
    engine.prepare(make_lock(), image, cache, progress=lambda _: None)
    root = engine._root
    (root / "etc" / "passwd").write_text("capsule:x:61183:61183:capsule:/tmp:/bin/sh\n")
    (root / "etc" / "group").write_text("capsule:x:61183:\n")

    def run(*, run_directory=run_directory, **options):
        task = replace(make_task("exit 0", **options), run_directory=run_directory)
        with pytest.raises(CapsuleError) as raised:
            engine.run(task)
        assert raised.value.code == "CAP-E005"
        said = (run_directory / "output.log").read_bytes().decode().split("\0")[:-1]
        return said, said.index(str(root))

    return run


def test_the_command_line_that_is_documented(words, run_directory):
    """As 'apptainer exec --help' of Apptainer 1.4.5 has it."""
    words, at = words()
    assert words[:2] == ["--silent", "exec"]
    for option in ("--userns", "--containall", "--no-init", "--no-privs", "--cleanenv"):
        assert option in words
    assert words[words.index("--network") + 1] == "none"
    mounts = mounts_of(words)
    assert ["type=bind", f"source={run_directory.resolve()}", "destination=/out"] in mounts
    assert ["type=bind", "source=/proc/sys", "destination=/proc/sys", "ro"] in mounts
    assert "--nv" not in words
    assert words[at + 1 : at + 5] == ["/usr/bin/python3", "-I", "-S", "-c"]
    asked = json.loads(words[at + 6])
    assert asked["command"] == ["busybox", "sh", "-c", "exit 0"]
    assert asked["limits"]["nproc"] == 32


@pytest.mark.parametrize("name", ["lr=0.1,seed=2", "12:30", 'a "quoted" name', "two\nlines"])
def test_paths_may_have_any_name(words, run_directory, data, name):
    """An option --bind would give the task another folder of the user to write in."""
    renamed = run_directory.with_name(name)
    run_directory.rename(renamed)
    file = data["labels/a=b.csv"].rename(run_directory.parent / f"{name}.csv")
    words, _ = words(run_directory=renamed, data={"labels/a,b:c.csv": file})
    mounts = mounts_of(words)
    assert ["type=bind", f"source={renamed.resolve()}", "destination=/out"] in mounts
    labels = [f"source={file.resolve()}", "destination=/data/labels/a,b:c.csv", "ro"]
    assert ["type=bind", *labels] in mounts


def mounts_of(words):
    """The mounts of a command line, which Apptainer reads as lines of CSV (RFC 4180)."""
    lines = [words[at + 1] for at, word in enumerate(words) if word == "--mount"]
    return [next(csv.reader([line])) for line in lines]


@pytest.fixture
def ending(program, make_image, make_lock, make_task, cache):
    """A function that runs a task that has ended with a status before it is seen."""
    engine = ApptainerEngine()
    engine.prepare(make_lock(), make_image(), cache, progress=lambda _: None)
    for name in ("passwd", "group"):
        (engine._root / "etc" / name).touch()

    def run(status):
        program.write_text(f"#!/bin/sh\necho the last line\nexit {status}\n")
        return engine.run(make_task(""))

    return run


@pytest.mark.parametrize("status", [0, 87])
def test_a_task_that_ends_before_it_is_seen_has_its_own_status(ending, status):
    assert (ending(status).status, ending(status).reason) == (status, "exited")


@pytest.mark.parametrize("status", [1, 125, 255])
def test_a_task_that_is_not_started_is_reported_with_what_apptainer_printed(ending, status):
    with pytest.raises(CapsuleError, match=r"CAP-E005 .*the last line"):
        ending(status)


def test_a_task_whose_output_a_full_disk_cannot_hold_is_reported_as_such(ending, monkeypatch):
    monkeypatch.setattr(supervise, "write_atomic", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    for status in (0, 255):
        with pytest.raises(CapsuleError, match="CAP-X003"):
            ending(status)


@pytest.fixture
def hanging(program, make_image, make_lock, make_task, cache, tmp_path):
    """A function that runs a task with an Apptainer that starts nothing, as on a dead disk."""
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo apptainer version 1.4.5 && exit\n'
        f": >{tmp_path}/ready\nexec sleep 600\n"
    )
    engine = ApptainerEngine()
    engine.prepare(make_lock(), make_image(), cache, progress=lambda _: None)
    for name in ("passwd", "group"):
        (engine._root / "etc" / name).touch()
    return lambda: engine.run(make_task("exit 0"))


def test_a_start_that_hangs_can_be_interrupted(hanging, tmp_path):
    interrupt_once_there(tmp_path / "ready")
    ended = hanging()
    assert (ended.status, ended.reason) == (143, "interrupted")


def test_a_start_that_hangs_ends_with_the_time_of_the_task(hanging, monkeypatch):
    monkeypatch.setattr(supervise, "MINUTE", 0.05)
    with pytest.raises(CapsuleError) as raised:
        hanging()
    assert raised.value.code == "CAP-E005"
    assert "limits.minutes" in raised.value.message


def test_a_gpu_comes_with_its_drivers_libraries(words):
    """As 'apptainer exec --nv' of Apptainer 1.4.5 binds them."""
    second = Device(1, "1", "GPU-0b0a", "NVIDIA H200", "9.0", 2)
    words, at = words(gpus=(second,))
    assert "--nv" in words[:at]
    variables = json.loads(words[at + 6])["variables"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0b0a"
    assert variables["LD_LIBRARY_PATH"] == "/.singularity.d/libs"
