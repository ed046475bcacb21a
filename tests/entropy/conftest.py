"""Programs under the interposer, started as the launcher starts them but without it."""

import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from capsule.entropy.launch import REPLAYED
from capsule.entropy.profile import merge
from capsule.native import native_part

HERE = Path(__file__).parent
KEY = bytes(range(32))


def key_stream(key, size):
    """Return the first bytes of ChaCha20 under a key, made with cryptography."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)
    return cipher.encryptor().update(bytes(size))


def given(call):
    """Return what a recorded call was given, made with Python's BLAKE2s and that ChaCha20."""
    if call.size <= 32:
        return call.kept
    key = hashlib.blake2s(b"capsule/entropy/expansion/v1", key=call.kept).digest()
    return key_stream(key, call.size)


@dataclass
class Finished:
    status: int
    output: str
    errors: str
    directory: Path  # what the interposer wrote

    def __post_init__(self):
        self.lines = self.output.splitlines()


class Interposed:
    """Runs programs in processes of their own; a failed replay ends the whole process group.

    Runs that draw the same bytes choose the same names for temporary files, so each has a folder of
    its own for them. Their paths are short, because sockets are made there.
    """

    def __init__(self, folder, temporary):
        self.folder = folder
        self.temporary = temporary

    def __call__(self, *command, mode="virtual", check=True, timeout=600, cwd=None, **settings):
        """Run a command; without a mode it is not interposed."""
        directory = Path(tempfile.mkdtemp(dir=self.folder))
        process = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            env=self.environment(directory, mode, **settings) if mode else None,
            start_new_session=True,
            timeout=timeout,
            cwd=cwd,
        )
        if check:
            assert process.returncode == 0, process.stderr
        return Finished(process.returncode, process.stdout, process.stderr, directory)

    def environment(self, directory, mode="virtual", key=KEY, profile=None, **settings):
        values = {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": str(native_part("libcapsule-entropy.so")),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": tempfile.mkdtemp(dir=self.temporary),
            "CAPSULE_ENTROPY": mode,
            "CAPSULE_ENTROPY_PATH": "0",
            "CAPSULE_ENTROPY_KEY": key.hex(),
            "CAPSULE_ENTROPY_DIRECTORY": str(directory),
        }
        if profile is not None:
            (directory / REPLAYED).write_bytes(profile)
        return values | {f"CAPSULE_{name.upper()}": value for name, value in settings.items()}

    def python(self, code, *arguments, **options):
        return self(sys.executable, "-c", code, *arguments, **options)

    def twice(self, *command, **options):
        """Run in two processes at a time."""
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(self, *command, **options) for _ in range(2)]
            return [run.result() for run in runs]

    def record(self, *command, **options):
        """Run once under recording; return what happened and the profile."""
        finished = self(*command, mode="record", **options)
        return finished, merge(finished.directory)


@pytest.fixture
def interposed(tmp_path):
    with tempfile.TemporaryDirectory() as temporary:
        yield Interposed(tmp_path, temporary)


@pytest.fixture(scope="session")
def probe(compiled):
    return compiled(HERE / "probe.c")
