"""Other bases' C libraries below this interpreter: their answers, and what trainers learn.

The loader of the locked package ``libc6`` starts the interpreter, so that these tests need no wheel
of torch for the Python of the base.
"""

import sys
import tempfile
from functools import cache

import pytest

from capsule.experiment.spec import SourcesSpec
from capsule.image.archives.deb import deb_entries
from capsule.image.assembly.unpack import write_entry
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_13, UBUNTU_24_04
from capsule.image.resolution.debian import shipped_base
from capsule.image.resolution.fetch import fetch_debian
from tests.training.conftest import BREAKOUT, claimed, finish_run, make_spec, new_run
from tests.training.determinism.test_cpu import PORTABLE, python
from tests.training.determinism.test_self_test import START
from tests.training.impala.conftest import TASK as IMPALA
from tests.training.r2d2.test_learner import TASK as R2D2

pytestmark = [pytest.mark.network, pytest.mark.slow]

TASKS = {task["name"]: task for task in (BREAKOUT, R2D2, IMPALA)}
VERSION = "import os; print(json.dumps(os.confstr('CS_GNU_LIBC_VERSION')))"


@pytest.fixture(scope="module", params=[DEBIAN_13, UBUNTU_24_04], ids=lambda base: base.name)
def base(request):
    return request.param


@pytest.fixture(scope="module")
def interpreter(base, tmp_path_factory):
    """The command that starts this interpreter with the C library of a base."""
    root, cache = tmp_path_factory.mktemp(base.name), Cache()
    package = next(each for each in shipped_base(base).packages if each.name == "libc6")
    fetch_debian(base.vendor, [package], cache, SourcesSpec(), print)
    folders = {"."}
    with tempfile.TemporaryFile() as scratch:
        for entry in deb_entries(cache.package(package), package, scratch):
            write_entry(entry, root, folders)
    libraries = root / "usr" / "lib" / "x86_64-linux-gnu"
    options = ("--library-path", libraries, "--argv0", sys.executable, sys.executable)
    return (libraries / "ld-linux-x86-64.so.2", *options)


def test_the_interpreter_has_the_c_library_of_the_base(base, interpreter):
    major, minor = base.glibc
    assert python(VERSION, "portable-v3", interpreter=interpreter) == f"glibc {major}.{minor}"


@pytest.mark.parametrize("profile", PORTABLE)
def test_its_answers_are_known(interpreter, profile):
    assert python(START, profile, interpreter=interpreter).endswith(" answers as expected")


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """What a task's run claims with the C library of this machine."""

    @cache
    def run(name):
        directory = new_run(tmp_path_factory.mktemp("usual") / name, make_spec(TASKS[name]))
        assert finish_run(directory) == (0, "")
        return claimed(directory)

    return run


@pytest.mark.parametrize("name", TASKS)
def test_trainers_learn_the_same_with_it(interpreter, one_core, tmp_path, usual, name):
    other = new_run(tmp_path / "other", make_spec(TASKS[name]))
    assert finish_run(other, warm=False, interpreter=interpreter) == (0, "")
    assert claimed(other) == usual(name)
