"""The Python environment of the plain-process engine: the locked interpreter, wheels and code.

It is made once per set of packages and code, with uv, which installs the wheels, and kept in the
cache. Programs run in it with all that the caller may do, so it is compared with what was installed
each time before it is used.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from capsule.engine.interpreter import interpreter_packages, unpack_interpreter
from capsule.experiment.canonical import canonical_json, sha256_file, sha256_hex
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.image.cache import Cache
from capsule.image.code import is_program, training_code, training_code_digest
from capsule.image.distribution import Distribution, distribution_of

_LAYOUT = 7  # number of the way in which environments are made and recorded, a part of their keys


def prepare_environment(lock: Lock, cache: Cache, progress: Progress) -> Path:
    """Return the environment of a lock, made anew if it is not as it was installed.

    Raises:
        CapsuleError: CAP-E013 a wheel is missing or damaged, CAP-E014 the training code is not the
            locked one, CAP-E015 uv cannot make the environment; CAP-I103 to CAP-I108 a package of
            the interpreter is missing, damaged or malformed.
    """
    _check_c_library(distribution_of(lock.spec.image))

    def make(environment: Path) -> None:
        progress("installing the locked packages for the plain-process engine")
        _make_environment(lock, cache, environment)

    return cache.recorded_folder("environments", environment_key(lock), make)


def environment_key(lock: Lock) -> str:
    """Return the digest of all that an environment is made of; hyper-parameters are not."""
    wheels = [(wheel.filename, wheel.sha256) for wheel in lock.image.wheels]
    interpreter = [package.sha256 for package in interpreter_packages(lock)]
    code = lock.image.code.sha256
    return sha256_hex(canonical_json([_LAYOUT, interpreter, wheels, code]))


def _check_c_library(distribution: Distribution) -> None:
    """Reject an interpreter that this machine's C library is too old for."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < distribution.glibc:
        needed = ".".join(map(str, distribution.glibc))
        raise CapsuleError(
            "CAP-E015",
            f"the locked interpreter is the one of {distribution.title}, which needs glibc "
            f"{needed}; this machine has {name or 'another C library'} {version}".rstrip(),
            fix="Use a container engine, --engine bwrap, or another base in image.base.",
        )


def _make_environment(lock: Lock, cache: Cache, environment: Path) -> None:
    code = training_code()
    if (digest := training_code_digest(code)) != lock.image.code.sha256:
        raise CapsuleError(
            "CAP-E014",
            f"the training code has digest {digest}, the lock needs {lock.image.code.sha256}",
            fix=f"Use Capsule {lock.image.code.version} unchanged, or lock the spec again.",
        )
    scratch = environment.parent  # otherwise empty (Cache.recorded_folder)
    python = unpack_interpreter(lock, cache, environment)
    packages = environment / distribution_of(lock.spec.image).packages
    wheels = _named_wheels(lock, cache, scratch / "wheels")
    options = ("--python", str(python), "--no-deps", "--no-index", "--offline")
    _uv(scratch, "pip", "install", *options, *wheels)
    for name, content in code.items():
        file = packages / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o755 if is_program(name) else 0o644)
    _compile(python, packages)


def _compile(python: Path, folder: Path) -> None:
    """Compile the packages, since no run may write bytecode: torch starts in a third of the time.

    The bytecode is taken without a look at the source, whose times no two environments share. What
    is no Python of this version, such as a template, stays as it is; compileall's status says only
    that there is such a file.
    """
    options = ("-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")
    command = [str(python), "-I", "-m", "compileall", *options, str(folder)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def _named_wheels(lock: Lock, cache: Cache, folder: Path) -> list[str]:
    """Link the locked wheels under their names, which installers read; check each again."""
    folder.mkdir()
    for wheel in lock.image.wheels:
        path = cache.path(wheel.sha256)
        if not path.is_file() or sha256_file(path) != wheel.sha256:
            raise CapsuleError(
                "CAP-E013",
                f"{wheel.filename} is missing from the cache or damaged",
                fix=f"Delete {path} and run 'capsule build' again.",
            )
        (folder / wheel.filename).symlink_to(path)
    return [str(folder / wheel.filename) for wheel in lock.image.wheels]


def _uv(scratch: Path, *arguments: str) -> None:
    """Run uv without any configuration; what it unpacks is linked, not copied."""
    from uv import find_uv_bin

    process = subprocess.run(
        [find_uv_bin(), "--no-config", "--quiet", *arguments],
        env={
            "HOME": str(scratch),
            "PATH": os.environ.get("PATH", os.defpath),
            "UV_CACHE_DIR": str(scratch / "uv"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise CapsuleError(
            "CAP-E015",
            f"uv cannot make the environment: {' '.join(process.stderr.split())}",
            fix="Use a container engine, or --engine bwrap.",
        )
