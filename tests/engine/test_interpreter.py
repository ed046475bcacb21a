"""The interpreter of a lock runs from any folder, with its own libraries and nobody's Python."""

import json
import shutil
import subprocess

import pytest

from capsule.engine.interpreter import interpreter_packages, unpack_interpreter
from capsule.experiment.errors import CapsuleError
from capsule.image.distribution import DEBIAN_12
from capsule.image.resolution.debian import shipped_base

pytestmark = pytest.mark.network  # for the packages, unless they are cached

# Each loads a library of Debian; the last line tells from where.
CODE = """
import bz2, ctypes, curses, json, lzma, pyexpat, readline, sqlite3, ssl, sys, sysconfig, uuid, zlib
import _crypt
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
facts = {"version": sys.version_info[:2], "prefix": sys.prefix, "executable": sys.executable}
print(json.dumps(facts | {"site": sysconfig.get_path("purelib"), "loaded": sorted(loaded)}))
"""
MACHINES = ("ld-linux-x86-64.so", "libc.so", "libm.so")


@pytest.fixture
def folder(make_lock, interpreter, cache, tmp_path):
    unpack_interpreter(make_lock(debian=interpreter), cache, tmp_path / "python")
    return tmp_path / "python"


def facts_of(folder):
    command = [folder / "bin" / "python3.11", "-B", "-c", CODE]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_it_loads_its_own_libraries_from_wherever_it_is(folder, tmp_path):
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    facts = facts_of(moved)
    assert facts["version"] == [3, 11]
    assert facts["prefix"] == str(moved)
    assert facts["executable"] == str(moved / "bin" / "python3.11")
    assert facts["site"] == str(moved / "local/lib/python3.11/dist-packages")
    others = [path for path in facts["loaded"] if not path.startswith(f"{moved}/")]
    assert any("/libstdc++.so.6" in path for path in facts["loaded"])
    assert all(path.rpartition("/")[2].startswith(MACHINES) for path in others), others


@pytest.mark.parametrize("name", ["python", "python3"])
def test_it_has_the_names_that_it_has_in_images(folder, name):
    command = [folder / "bin" / name, "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}\n"


def test_programs_that_it_starts_get_libraries_of_the_machine(folder):
    code = "import subprocess; subprocess.run(['/bin/cat', '/proc/self/maps'])"
    command = [folder / "bin" / "python3.11", "-B", "-c", code]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert "libc.so" in done.stdout
    assert str(folder) not in done.stdout


def test_it_has_nothing_of_another_machine(folder):
    links = [path for path in folder.rglob("*") if path.is_symlink()]
    assert links
    assert not [path for path in links if path.readlink().is_absolute()]
    assert not (folder / "lib/python3.11/EXTERNALLY-MANAGED").exists()


def test_its_packages_are_a_part_of_the_base(make_lock):
    lock = make_lock(debian=shipped_base(DEBIAN_12).packages)
    assert {package.name for package in interpreter_packages(lock)} == DEBIAN_12.python_packages


def test_a_lock_without_an_interpreter_is_refused(make_lock, cache, tmp_path):
    with pytest.raises(CapsuleError) as refusal:
        unpack_interpreter(make_lock(), cache, tmp_path / "python")
    assert refusal.value.code == "CAP-E015"


def test_a_damaged_package_is_refused(make_lock, interpreter, cache, tmp_path):
    shutil.copy(__file__, cache.path(interpreter[0].sha256))
    with pytest.raises(CapsuleError) as refusal:
        unpack_interpreter(make_lock(debian=interpreter), cache, tmp_path / "python")
    assert refusal.value.code == "CAP-I103"
