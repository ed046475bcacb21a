"""For all tests."""

import functools
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

# A shell starts what it has in the background with SIGINT ignored, nohup ignores SIGHUP, and
# programs pass that on. Tests interrupt programs and themselves, wherever they run; a handler is
# not passed on.
for ignored, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, lambda _number, _frame: None),
):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)

# The keys of whoever runs the tests sign nothing here, and are trusted by nothing.
os.environ["CAPSULE_CONFIG"] = "/dev/null/none"

# A timing is never a test: a slow machine must not fail a property. Each run tests the same
# examples, and "pytest --hypothesis-profile random" tests others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("capsule", settings.get_profile("random"), derandomize=True)
settings.load_profile("capsule")


# For each call, a runner of commands makes all of them anew, which takes longer than most calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without Python's garbage collector, and keep it from what they imported.

    It would take a quarter of the time of the collection, and visit all of these modules and tests
    again and again while tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """Group the tests: one process runs a group, and takes the groups in this order.

    Containers and Ray clusters come first, since they take longest. The tests of an engine are two
    groups: "programs" has those that execute only images of their own, none of which another test
    uses or removes. A file is a group otherwise, and those with slow tests precede the others. What
    imports JAX is last: a process should not fork after that.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    ranks = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        if mark:
            group = mark.args[0]
        else:
            group = "engine" if item.get_closest_marker("engine") else item.nodeid.split("::")[0]
        if mark is None:
            item.add_marker(pytest.mark.xdist_group(group))
        position = {"engine": 0, "programs": 1, "ray": 2, "jax": 5}.get(group)
        ranks[item] = position if position is not None else 3 if item.path in slow else 4
    items.sort(key=ranks.__getitem__)
    return (yield)


def pytest_runtest_setup(item):
    """Skip what needs a GPU where torch finds none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} finds no NVIDIA GPU")


@pytest.fixture
def one_thread():
    """Have one maths thread, as a run has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def strictly():
    """Have torch use one thread, and refuse what is not deterministic."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


@contextmanager
def one_processor():
    """Have children use one processor only, unless in containers.

    Trainers with actors then have no processes for them, which changes no result. The start of each
    takes as long as a small run. Other processes of the tests do the same at the time, so it may be
    any processor.
    """
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {secrets.choice([*usable])})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def free_port():
    """Return a port of the loopback interface that no other process uses.

    It is below the ports that the kernel chooses itself, for servers and for connections: these
    could be in use before the caller's server begins.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition, seconds=600.0):
    """Wait until a condition is true, and fail after many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what is waited for did not happen"
        time.sleep(0.02)


def printed(command, variables, seconds=600.0):
    """Run a command with these environment variables alone, and return what it prints."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def caught(attempt, folder):
    """Call a function with a new folder until it returns something, and return that.

    On a busy machine, a run may end before the test has stopped it. The function returns None then.
    """
    for number in range(10):
        if (found := attempt(folder / f"attempt-{number}")) is not None:
            return found
    pytest.fail("each run ended before the test had stopped it")


@pytest.fixture
def deterministic():
    """Have torch use one thread, and refuse what is not deterministic."""
    with strictly():
        yield


@pytest.fixture
def busy():
    """Have two processes that always want to run, beside the test."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.fixture
def no_home(monkeypatch):
    """Let this user have no home directory, as a number that no password database lists."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture
def importable(monkeypatch):
    """Let other processes, who take it over, find the tests' modules."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compile a C program.

    In the folder in which the native parts were compiled: only there does the compiler find the C
    library that it made for them, which takes a minute of processor time.
    """
    root = Path(__file__).parents[1]
    folder, native = tmp_path_factory.mktemp("programs"), root / "capsule" / "native" / "source"
    caches = dict.fromkeys(
        ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(root / ".cache" / "zig")
    )

    def compile_program(source, *flags):
        target = folder / source.stem
        command = [sys.executable, "-m", "ziglang", "cc", "-O1", "-target", "x86_64-linux-gnu.2.36"]
        command += ["-fno-sanitize=all", *flags, str(source.resolve()), "-o", str(target)]
        subprocess.run(
            command, cwd=native, env={**os.environ, **caches}, check=True, capture_output=True
        )
        return target

    return compile_program
