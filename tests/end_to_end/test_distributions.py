"""Images of Debian 13 and Ubuntu 24.04, with their own Python: made, run, and run again."""

import json

import pytest

from capsule.image.distribution import DEBIAN_13, UBUNTU_24_04
from tests.end_to_end.conftest import run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.xdist_group("programs"),
]

SPEC = """\
schema: capsule/spec/v1
name: newer
code: {path: newer}
image: {base: BASE, packages: [numpy]}
trainer: {command: [python, program.py]}
limits: {memory_mb: 1024, minutes: 5}
"""
# The modules load every library of the base that is not Python's own.
PROGRAM = """\
import bz2, ctypes, curses, hashlib, json, lzma, pyexpat, readline, sqlite3, ssl, uuid, zlib
import os, platform, random, secrets, sys
import numpy

drawn = [random.random(), secrets.token_hex(), str(uuid.uuid4()), os.urandom(9).hex()]
drawn.append(numpy.random.default_rng().random())
names = {path.rpartition("/")[2] for path in sys.path}
print(json.dumps([sys.version_info[:2], platform.libc_ver(), sorted(names), drawn]))
"""


@pytest.fixture(scope="module", params=[DEBIAN_13, UBUNTU_24_04], ids=lambda each: each.name)
def distribution(request):
    return request.param


@pytest.fixture(scope="module")
def made(workplace, distribution):
    (workplace / "newer").mkdir(exist_ok=True)
    (workplace / "newer" / "program.py").write_text(PROGRAM)
    spec = f"{distribution.name}.yaml"
    (workplace / spec).write_text(SPEC.replace("BASE", distribution.name))
    return run(workplace, spec=spec)


def test_the_program_sees_the_python_and_the_c_library_of_the_base(made, distribution):
    version, library, _, drawn = json.loads((made.directory / "work" / "output.log").read_text())
    assert ".".join(map(str, version)) == distribution.python
    assert library == ["glibc", ".".join(map(str, distribution.glibc))]
    assert len(set(map(str, drawn))) == 5


@pytest.mark.parametrize("engine", ["docker", "bwrap"])
def test_it_is_reproduced(made, workplace, engine):
    done = made.verify(made.bundle, "--engine", engine, cwd=workplace)
    assert done.status == 0, done.errors
    assert done.document["verdict"] == "reproduced-bitwise"


def test_the_processes_of_an_older_machine_cannot_run_it(made, workplace, distribution):
    done = made.verify(made.bundle, "--engine", "process", cwd=workplace)
    if done.status == 0:  # this machine has such a C library
        assert done.document["verdict"] == "reproduced-bitwise"
    else:
        assert (
            f"glibc {'.'.join(map(str, distribution.glibc))}" in done.document["error"]["message"]
        )
