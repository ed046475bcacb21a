"""For all tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A timing is never a test: a slow machine must not fail a property.
settings.register_profile("capsule", deadline=None)
settings.load_profile("capsule")


@pytest.fixture
def one_thread():
    """Have one maths thread, as a run has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic(one_thread):
    """Have torch refuse what is not deterministic, too."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def busy():
    """Have two processes that always want to run, beside the test."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.fixture
def importable(monkeypatch):
    """Let other processes, who take it over, find the tests' modules."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compile a C program."""
    folder = tmp_path_factory.mktemp("programs")
    cache = Path(__file__).parents[1] / ".cache" / "zig"
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(cache))

    def compile_program(source, *flags):
        target = folder / source.stem
        command = [sys.executable, "-m", "ziglang", "cc", "-O1", "-target", "x86_64-linux-gnu.2.36"]
        command += [*flags, str(source), "-o", str(target)]
        subprocess.run(command, env={**os.environ, **caches}, check=True, capture_output=True)
        return target

    return compile_program
