"""``scripts/setup.sh`` may be interrupted, and is then repeated as a whole."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup.sh"
# Stands for both interpreters: notes how environments are made, and installs nothing.
INTERPRETER = """#!/bin/sh
case "$*" in
  -c*version_info*) exit "${TOO_OLD:-0}" ;;
  "-m venv "*) echo "$*" >>made; mkdir -p .venv/bin; cp "$0" .venv/bin/python
               echo "$PWD/.venv/bin/python" >.venv/bin/pip ;;
  --version) echo Python 3.11.2 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with the script and what its stamps are made of."""
    for folder in ("scripts", "requirements", "capsule/native/source", "capsule/native/lib", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("pyproject.toml", "hatch_build.py", "requirements/host.txt"):
        (tmp_path / file).write_text("")
    (tmp_path / "capsule/native/source/launch.c").write_text("")
    (tmp_path / "capsule/native/lib/capsule-launch").write_text("")
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "bin/python3").write_text(INTERPRETER)
    (tmp_path / "bin/python3").chmod(0o755)
    return tmp_path


def set_up(checkout, **variables):
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "scripts/setup.sh", "--no-engine"],
        cwd=checkout,
        env={**os.environ, "PATH": path, "SSL_CERT_FILE": str(SCRIPT), **variables},
        capture_output=True,
        text=True,
    )


def made(checkout):
    return (checkout / "made").read_text().splitlines()


def test_nothing_is_installed_twice(checkout):
    assert set_up(checkout).returncode == 0
    assert set_up(checkout).returncode == 0
    assert made(checkout) == ["-m venv --clear .venv"]


def test_an_interrupted_installation_begins_anew(checkout):
    set_up(checkout)
    (checkout / ".venv/stamp-host").unlink()
    assert set_up(checkout).returncode == 0
    assert made(checkout) == ["-m venv --clear .venv"] * 2


def test_deleted_native_parts_are_installed_again_into_the_same_environment(checkout):
    set_up(checkout)
    (checkout / "capsule/native/lib/capsule-launch").unlink()
    done = set_up(checkout)
    assert "installing Capsule" in done.stderr
    assert made(checkout) == ["-m venv --clear .venv"]


def test_an_old_python_is_named(checkout):
    done = set_up(checkout, TOO_OLD="1")
    assert done.returncode == 1
    assert "Python 3.11.2 is too old; Python 3.11 or newer is required" in done.stderr


PACKAGES = """
source "$1"
mkdir -p .cache
apt-get() { echo "apt-get $*" >>called; [ "$(grep -c update called)" -gt "$FAILURES" ]; }
sleep() { echo "sleep $*" >>called; }
patiently update_and_install one two
"""


def install(folder, failures):
    command = ["bash", "-euo", "pipefail", "-c", PACKAGES, "bash", SCRIPT.with_name("packages.sh")]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "FAILURES": str(failures)})
    return done.returncode, (folder / "called").read_text().splitlines()


def test_packages_are_installed_as_soon_as_apt_can(tmp_path):
    status, called = install(tmp_path, failures=2)
    assert status == 0
    assert [line for line in called if "sleep" in line] == ["sleep 10", "sleep 30"]
    assert called[-1].endswith(" install -y --no-install-recommends one two")
    assert "DPkg::Lock::Timeout" in called[-1]


def test_an_apt_that_never_can_is_an_error(tmp_path):
    status, called = install(tmp_path, failures=9)
    assert status == 1
    assert sum("update" in line for line in called) == 4
