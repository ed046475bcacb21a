"""Builds the native parts, with the C compiler that the ``ziglang`` wheel brings.

Same compiler, same sources, same flags: same bytes, whoever builds. Hatch calls
:class:`NativeParts` for a wheel or an editable install; ``python hatch_build.py`` builds in place.
On Linux with an x86-64 processor, the wheel has the native parts. Elsewhere, and there with
``CAPSULE_WHEEL=pure``, it has none and fits every platform. An installer prefers the former where
it fits.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "capsule" / "native" / "source"
OUTPUT = ROOT / "capsule" / "native" / "lib"

WHEEL_TAG = "py3-none-manylinux_2_28_x86_64"
# Zig turns checks for undefined behaviour on by itself. In a release they would cost time, and a
# finding would end other people's programs; scripts/sanitize.sh builds and tests with sanitizers.
COMMON = ("-O2", "-std=c17", "-Wall", "-Wextra", "-Werror", "-s", "-fno-sanitize=all")
# Loaded into other people's processes: an old C library must do.
SHARED = ("-target", "x86_64-linux-gnu.2.28", "-shared", "-fPIC", "-fvisibility=hidden")
# Started before anything else: needs no C library at all.
STATIC = ("-target", "x86_64-linux-musl", "-static")


def _files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.c" for name in names.split())


# File name to sources and flags. Results must not depend on how a compiler fuses operations.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "libcapsule-kernels.so": (
        _files("numerics", "kernels layers products processor"),
        (*SHARED, "-O3", "-ffp-contract=off", "-fno-math-errno"),
    ),
    "libcapsule-math.so": (_files("numerics", "math"), (*SHARED, "-O3", "-fno-math-errno", "-lm")),
    "capsule-launch": (
        (
            *_files("launcher", "launch supervisor filter tasks program proc account channel"),
            *_files("launcher", "numbers options events ending"),
            *_files("shared", "recording journal entropy"),
        ),
        STATIC,
    ),
    "capsule-enclose": (_files("enclose", "enclose"), STATIC),
    "libcapsule-entropy.so": (
        (
            *_files("interposer", "interposer sources devices lineage environment scopes clock"),
            *_files("interposer", "waits names listings cores calls"),
            *_files("shared", "journal recording entropy"),
        ),
        (*SHARED, "-D_GNU_SOURCE", "-ftls-model=initial-exec", "-ldl", "-lpthread"),
    ),
}


def build(name: str) -> None:
    """Compile one part into :data:`OUTPUT`.

    Raises:
        subprocess.CalledProcessError: The compiler refused; it said why on standard error.
    """
    sources, flags = PARTS[name]
    OUTPUT.mkdir(exist_ok=True)
    unfinished = OUTPUT / f".{name}"
    command = [sys.executable, "-m", "ziglang", "cc", *COMMON, *flags]
    # Relative paths, so that no file name of this machine gets into the result.
    command += [*sources, "-o", str(unfinished)]
    cache = ROOT / ".cache" / "zig"
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        # The compiler is a package of this process, in a folder of pip's if pip builds the wheel.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "ZIG_GLOBAL_CACHE_DIR": str(cache),
        "ZIG_LOCAL_CACHE_DIR": str(cache),
    }
    subprocess.run(command, cwd=SOURCES, env=environment, check=True)
    unfinished.replace(OUTPUT / name)


def build_all(names: Iterable[str]) -> None:
    """Compile parts side by side; each is a process of the compiler.

    Raises:
        subprocess.CalledProcessError: As :func:`build`.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, names))


class NativeParts(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build every part before the files of the wheel are collected. An sdist has sources."""
        # pip installs no wheel of another platform, and builds this one when it installs a clone.
        elsewhere = (sys.platform, platform.machine()) != ("linux", "x86_64")
        if self.target_name == "sdist" or elsewhere or os.environ.get("CAPSULE_WHEEL") == "pure":
            return
        build_all(PARTS)
        build_data["pure_python"] = False
        build_data["tag"] = WHEEL_TAG
        build_data["artifacts"] += [f"/capsule/native/lib/{name}" for name in PARTS]


if __name__ == "__main__":
    build_all(sys.argv[1:] or PARTS)
