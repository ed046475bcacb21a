"""The checks of 'capsule doctor' on machines that lack something, and what is mended."""

import errno
import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import requests
from typer.testing import CliRunner

from capsule import checkup
from capsule.bundle.keys import generate
from capsule.checkup import Check, check_machine, numerics_check, repair
from capsule.cli import main
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_12
from capsule.machine.devices import Device
from capsule.machine.fingerprint import Cpu
from capsule.machine.gpu import Driver, Gpu, RemappedRows
from capsule.machine.self_test import SelfTest

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder of its own for everything, and no engine, index or mirror."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{tmp_path}/podman.sock")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(checkup, "compile_wheels", lambda *_: [])
    monkeypatch.setattr(checkup, "fetch_debian", lambda *_: None)
    return tmp_path


def by_name(keys=()):
    return {check.name: check for check in check_machine(keys)}


def doctor(*options):
    return CliRunner().invoke(main.app, ["doctor", "--profile", "none", *options])


def refuse(*_):
    raise CapsuleError("CAP-L105", "it cannot be reached", fix="Check the network.")


def test_every_check_has_a_result_and_every_fault_a_remedy(machine):
    checks = by_name()
    assert {"Python", "docker", "podman", "processor", "GPU", "disk", "cache", "git"} <= set(checks)
    for check in checks.values():
        assert (check.fix is None) == (check.status == "ok"), check


@pytest.mark.slow
def test_one_container_engine_is_enough(machine, monkeypatch):
    def connect(name):
        if name == "podman":
            raise CapsuleError("CAP-E001", "no podman engine answers", fix="Start it.")
        return FakeClient()

    assert by_name()["docker"].status == by_name()["podman"].status == "warning"
    monkeypatch.setattr(checkup, "connect", connect)
    monkeypatch.setattr("capsule.engine.connection.connect", connect)
    checks = by_name()
    assert checks["docker"] == Check("docker", "ok", "28.0, rootless")
    assert checks["podman"].status == "ok"
    assert "not needed" in checks["podman"].found


class FakeClient:
    def version(self):
        return {"Components": [{"Name": "Engine", "Version": "28.0"}]}

    def info(self):
        return {"SecurityOptions": ["name=rootless"]}

    def close(self):
        pass


@pytest.mark.slow
def test_an_engine_that_fails_is_a_warning_and_the_other_checks_follow(machine, monkeypatch):
    class Failing:
        def version(self):
            raise requests.ConnectionError("500 storage driver failed")

        def close(self):
            """Nothing is open."""

    monkeypatch.setattr(checkup, "connect", lambda _: Failing())
    checks = by_name()
    assert checks["docker"].status == checks["podman"].status == "warning"
    assert "storage driver failed" in checks["docker"].found
    assert "cache" in checks


def test_a_check_that_cannot_be_made_is_a_problem_and_others_follow(machine, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checkup, "existing_folder", denied)
    monkeypatch.setattr(checkup, "check_gpus", refuse)
    checks = by_name()
    assert (checks["disk"].status, checks["cache"].status) == ("problem", "problem")
    assert "Permission denied" in checks["disk"].found
    assert checks["GPU"] == Check("GPU", "problem", "it cannot be reached", "Check the network.")
    assert "git" in checks


def test_the_current_folder_may_be_deleted(machine, monkeypatch):
    gone = machine / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    checks = by_name()
    assert (checks["disk"].status, checks["cache"].status) == ("problem", "ok")
    assert checks["disk"].fix == "Change to an existing folder that you may read."


def test_without_a_home_directory_the_checks_follow(machine, monkeypatch, no_home):
    for name in ("CAPSULE_CACHE", "CAPSULE_CONFIG", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    done = doctor("--fix")
    assert done.exit_code == 4
    assert "Set HOME or CAPSULE_CACHE" in " ".join(done.output.split())


def test_with_neither_an_engine_nor_a_new_c_library_nothing_can_run(machine, monkeypatch):
    assert by_name()["C library"].status == "ok"
    monkeypatch.setattr(checkup, "DEBIAN_12", replace(DEBIAN_12, glibc=(3, 0)))
    assert by_name()["C library"].status == "problem"
    assert doctor().exit_code == 4
    monkeypatch.setattr(checkup, "connect", lambda _name: FakeClient())
    assert by_name()["C library"].status == "warning"
    assert doctor().exit_code == 0


def test_a_processor_without_the_instructions(machine, monkeypatch):
    monkeypatch.setattr(checkup, "read_cpu", lambda: Cpu(name="Old", flags=("sse4_2", "fma")))
    check = by_name()["processor"]
    assert (check.status, check.found) == ("problem", "Old lacks avx2")


GPUS = (
    Gpu(index=0, unavailable={"handle": "NVML_ERROR_GPU_IS_LOST"}),
    Gpu(
        index=1,
        name="NVIDIA H200",
        compute_capability="9.0",
        remapped_rows=RemappedRows(correctable=1, uncorrectable=2, pending=True, failed=True),
    ),
)
DEVICE = Device(1, "1", "GPU-1111", "NVIDIA H200", "9.0", 2)


@pytest.fixture
def with_gpus(machine, monkeypatch):
    """Two GPUs, of which the first does not answer."""
    driver = Driver(nvml="loaded", version="580.65")
    monkeypatch.setattr(checkup, "read_gpus", lambda _nvml: (driver, GPUS))
    monkeypatch.setattr(checkup, "read_devices", lambda _nvml: (DEVICE,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine


def gpu_checks():
    return {check.name: check for check in checkup.check_gpus()}


@pytest.mark.parametrize("has_apptainer", [True, False])
def test_engines_without_a_daemon_give_a_gpu_to_runs(with_gpus, monkeypatch, has_apptainer):
    def opened():
        if not has_apptainer:
            raise CapsuleError("CAP-E001", "apptainer is not on the PATH", fix="-")
        return SimpleNamespace(name="apptainer")

    monkeypatch.setattr("capsule.engine.apptainer.ApptainerEngine", opened)
    monkeypatch.setattr(checkup, "require_driver", lambda: None)
    check = gpu_checks()["GPU"]
    given = "--engine process gives"
    if has_apptainer:
        given = "--engine process and --engine apptainer give"
    expected = f"NVIDIA H200 (9.0); driver 580.65; {given} it to runs"
    assert (check.status, check.found) == ("ok", expected)


@pytest.mark.parametrize(
    ("nvml", "status"),
    [
        ("not found", "ok"),
        ("loaded", "ok"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "warning"),
    ],
)
def test_a_driver_that_does_not_work_is_a_warning(with_gpus, monkeypatch, nvml, status):
    monkeypatch.setattr(checkup, "read_gpus", lambda _nvml: (Driver(nvml=nvml), ()))
    check = gpu_checks()["GPU"]
    assert (check.status, check.found.partition(";")[0]) == (status, f"none (NVML: {nvml})")


def test_a_gpu_that_no_engine_gives_to_runs(with_gpus, monkeypatch):
    monkeypatch.setattr(checkup, "require_driver", refuse)
    check = gpu_checks()["GPU"]
    assert (check.status, check.fix) == ("warning", "Check the network.")
    assert check.found == "NVIDIA H200 (9.0); driver 580.65; it cannot be reached"
    monkeypatch.setattr("capsule.engine.connection.connect", lambda _name: FakeClient())
    monkeypatch.setattr(checkup, "gpu_request", refuse)
    assert "it cannot be reached" in gpu_checks()["GPU"].found


def test_engines_are_asked_for_the_first_visible_gpu(with_gpus, monkeypatch):
    asked = []
    monkeypatch.setattr("capsule.engine.connection.connect", lambda _name: FakeClient())
    monkeypatch.setattr(checkup, "gpu_request", lambda *given: asked.append(given[2]))
    assert gpu_checks()["GPU"].status == "ok"
    assert asked == [(DEVICE,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = gpu_checks()["GPU"]
    assert (check.status, check.found[:9]) == ("warning", "none of 2")
    assert "CUDA_VISIBLE_DEVICES" in check.fix
    assert asked == [(DEVICE,)]


def test_gpus_that_do_not_answer_or_have_faults_are_named(with_gpus):
    found = gpu_checks()
    assert found["GPU 0"].status == found["GPU 1"].status == "warning"
    assert "NVML_ERROR_GPU_IS_LOST" in found["GPU 0"].found
    assert "next reset" in found["GPU 1"].found
    assert "could not be remapped" in found["GPU 1"].found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "status"), [(20 * GIB, "ok"), (5 * GIB, "warning"), (GIB, "problem")]
)
def test_disk_space(machine, monkeypatch, free, status):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(free))
    check = by_name()["disk"]
    assert check.status == status
    assert f"{free / GIB:.1f} GiB" in check.found
    assert doctor().exit_code == (4 if status == "problem" else 0)


def test_a_cache_in_which_no_program_can_be_executed(machine, monkeypatch):
    (machine / "cache").mkdir()
    noexec = CapsuleError("CAP-E020", "mounted with noexec", fix="Set CAPSULE_CACHE.")
    monkeypatch.setattr(Cache, "require_programs", Mock(side_effect=noexec))
    check = checkup.check_cache()
    assert check == Check("cache", "warning", "mounted with noexec", "Set CAPSULE_CACHE.")


@pytest.mark.slow
def test_a_cache_that_others_can_write_to(machine):
    assert "will be made" in by_name()["cache"].found
    (machine / "cache").mkdir()
    assert by_name()["cache"].status == "ok"
    (machine / "cache").chmod(0o777)
    check = by_name()["cache"]
    assert check.status == "problem"
    assert f"{machine / 'cache'} is writable by others (mode 0777)" in check.found
    assert "Delete it" in check.fix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"), [("compile_wheels", "package index"), ("fetch_debian", "Debian mirror")]
)
def test_sources_that_do_not_answer(machine, monkeypatch, what, name):
    monkeypatch.setattr(checkup, what, refuse)
    assert by_name()[name] == Check(
        name, "warning", "CAP-L105: it cannot be reached", "Check the network."
    )
    assert doctor().exit_code == 0  # what is in the cache can still be built and run


def test_programs_that_are_missing(machine, monkeypatch):
    monkeypatch.setenv("PATH", str(machine))
    check = by_name()["git"]
    assert check.status == "warning"
    assert "source tree" in check.found


def test_keys_in_the_folder_and_named_ones(machine):
    generate(Path("alice"))
    (machine / "elsewhere").mkdir()
    generate(Path("elsewhere/bob"))
    Path("alice").chmod(0o644)
    Path("note.pub").write_text("not a key")
    checks = by_name([Path("elsewhere/bob"), Path("missing")])
    assert checks["key alice"].status == "problem"
    assert "0644" in checks["key alice"].found
    assert checks["key elsewhere/bob"].found.startswith("SHA256:")
    assert checks["key missing"].status == "problem"
    assert "key note" not in checks


@pytest.mark.slow
def test_nothing_is_written_unless_it_is_to_be_mended(machine, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(machine / "temporary"))
    generate(Path("alice"))
    Path("alice").chmod(0o644)
    (machine / "link").symlink_to("alice")
    (machine / "link.pub").touch()
    before = {path.name: path.lstat().st_mode for path in machine.iterdir()}
    assert doctor().exit_code == 4
    assert {path.name: path.lstat().st_mode for path in machine.iterdir()} == before
    assert by_name()["temporary files"].status == "warning"
    done = doctor("--fix", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["fixed"]) == 3
    assert (machine / "alice").stat().st_mode & 0o777 == 0o600
    assert (machine / "cache").is_dir()
    assert (machine / "temporary").stat().st_mode & 0o777 == 0o700
    assert list(repair([])) == []
    names = [check["name"] for check in found["checks"]]
    assert names[0] == "Python"
    assert "key alice" in names


def test_the_key_of_another_user_is_not_read(machine, monkeypatch):
    generate(Path("theirs"))
    opened = Path.open

    def open_own(path, *arguments, **settings):
        if path.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", open_own)
    assert "key theirs" not in by_name()
    (machine / "cache").mkdir()
    assert list(repair([Path("theirs")])) == []


def test_folders_that_cannot_be_made_are_left_to_the_checks(machine, monkeypatch):
    monkeypatch.setenv("CAPSULE_CACHE", "/dev/null/cache")
    monkeypatch.setenv("TMPDIR", "/dev/null/temporary")
    assert list(repair([])) == []
    assert by_name()["temporary files"].status == "warning"


def test_a_key_of_another_format_is_not_touched(machine):
    Path("own").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    Path("own").chmod(0o644)
    Path("own.pub").touch()
    list(repair([Path("own")]))
    assert Path("own").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("status", "expected"), [("as expected", "ok"), ("differs", "problem"), ("unchecked",) * 2]
)
def test_numerics(status, expected):
    test = SelfTest(profile="portable-v3", status=status, answers=3, different=("a",))
    assert numerics_check(test).status == expected


def test_one_wrong_answer_is_written_in_the_singular():
    test = SelfTest(profile="portable-v3", status="differs", answers=3, different=("a",))
    assert numerics_check(test).found.startswith("1 of 3 answers differs: a; ")


def test_the_output_fits_a_terminal(machine):
    assert max(map(len, doctor().stdout.splitlines())) <= 80


@pytest.mark.network
def test_the_sources_of_this_machine_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPSULE_CACHE", str(tmp_path / "cache"))
    assert checkup.check_index().status == "ok"
    assert checkup.check_mirror().status == "ok"
    assert not (tmp_path / "cache").exists()
