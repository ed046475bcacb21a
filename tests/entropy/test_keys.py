"""Derived bytes and paths, against independent implementations of BLAKE2s and ChaCha20."""

import ctypes
import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given
from hypothesis import strategies as st

SOURCES = Path(__file__).parents[2] / "capsule" / "native" / "source"
KEY = bytes(range(32))
PATHS = st.text("0123456789.-:x", min_size=1, max_size=191)


def stream(process, thread, size, key=KEY, label="libc"):
    """The specification, by other people's code."""
    data = f"{process}\0{thread}\0{label}".encode()
    derived = hashlib.blake2s(data, key=key).digest()
    return Cipher(algorithms.ChaCha20(derived, bytes(16)), None).encryptor().update(bytes(size))


@pytest.fixture(scope="session")
def library(compiled):
    return ctypes.CDLL(str(compiled(SOURCES / "shared" / "entropy.c", "-shared", "-fPIC")))


@pytest.mark.slow
@given(key=st.none() | st.binary(min_size=32, max_size=32), parts=st.lists(st.binary(max_size=200)))
def test_blake2s_is_hashlibs(library, key, parts):
    state, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    library.capsule_blake2s_begin(state, key)
    for part in parts:
        library.capsule_blake2s_add(state, part, ctypes.c_size_t(len(part)))
    library.capsule_blake2s_end(state, digest)
    assert digest.raw == hashlib.blake2s(b"".join(parts), key=key or b"").digest()


@given(
    key=st.binary(min_size=32, max_size=32),
    process=PATHS,
    thread=PATHS,
    label=st.sampled_from(["libc", "kernel"]),
    sizes=st.lists(st.integers(0, 300), max_size=8),
)
def test_streams_are_chacha20_however_they_are_read(library, key, process, thread, label, sizes):
    state = ctypes.create_string_buffer(256)
    names = (process.encode(), thread.encode(), label.encode())
    library.capsule_stream_open(state, key, *names)
    read = b""
    for size in sizes:
        buffer = ctypes.create_string_buffer(size + 1)
        library.capsule_stream_read(state, buffer, ctypes.c_size_t(size))
        read += buffer.raw[:size]
    assert read == stream(process, thread, sum(sizes), key, label)


def path(library, function, *arguments):
    out = ctypes.create_string_buffer(192)
    getattr(library, f"capsule_path_{function}")(out, *arguments)
    return out.value.decode()


def test_paths_say_who_created_whom(library):
    assert path(library, "child", b"0", b"0", 3) == "0.3"
    assert path(library, "child", b"0.3x", b"0-2", 4294967295) == "0.3x.0-2:4294967295"
    assert path(library, "exec", b"0.3") == "0.3x"
    assert path(library, "thread", b"0-2", 1) == "0-2-1"


@given(parent=PATHS, n=st.integers(1, 2**32 - 1))
def test_a_path_that_does_not_fit_is_folded(library, parent, n):
    full = f"{parent}.{n}"
    folded = "#" + hashlib.blake2s(full.encode()).hexdigest()
    assert path(library, "child", parent.encode(), b"0", n) == (full if len(full) < 192 else folded)


@given(text=st.text("0123456789abcdefABCg", min_size=62, max_size=66))
def test_a_key_is_64_lower_case_hexadecimal_digits(library, text):
    key = ctypes.create_string_buffer(32)
    library.capsule_key_parse.restype = ctypes.c_bool
    valid = len(text) == 64 and set(text) <= set("0123456789abcdef")
    assert library.capsule_key_parse(key, text.encode()) == valid
    if valid:
        assert key.raw.hex() == text


def test_a_program_is_given_its_thread_s_stream(interposed):
    """A fork starts a fresh stream, so that what Python drew before does not matter."""
    finished = interposed.python(
        "import os, threading\n"
        "def show(): print(os.urandom(5).hex() + os.urandom(100).hex(), flush=True)\n"
        "if os.fork() == 0:\n"
        "    show()\n"
        "    for _ in range(2):\n"
        "        thread = threading.Thread(target=show); thread.start(); thread.join()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    expected = [stream("0.1", thread, 105).hex() for thread in ("0", "0-1", "0-2")]
    assert finished.lines == expected
