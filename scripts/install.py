# ruff: noqa: INP001
"""Install this checkout in editable mode, with the packages that requirements/*.txt lock.

uv installs them from the sources for which pip is configured, and rejects a file whose SHA-256 is
not locked. The training side has the versions that a spec pins by default, so that tests run with
the packages of images. scripts/lock.py writes the lock.

usage: python scripts/install.py [train] [dev]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

from capsule.experiment.spec import SourcesSpec
from capsule.image.resolution.sources import MachineSources, machine_sources

ROOT = Path(__file__).resolve().parents[1]


def main(parts: list[str]) -> int:
    """Install the host side and ``parts`` into the current environment; return a status."""
    needed = ["setup", "host", *(["train"] if parts else []), *(["dev"] if "dev" in parts else [])]
    locked = [word for name in needed for word in ("--requirements", str(part_file(name)))]
    # Building the native parts needs hatchling and ziglang, which are locked with dev. If they are
    # installed, they build: tests also use the C library that the compiler builds for itself.
    builder = (
        ["--no-build-isolation"]
        if "dev" in parts
        else ["--build-constraints", str(part_file("dev"))]
    )
    checkout = ["--no-deps", *builder, "--editable", str(ROOT)]
    sources = machine_sources(SourcesSpec())
    for arguments in (["--require-hashes", "--no-build", *locked], checkout):
        command = [find_uv_bin(), "pip", "install", "--quiet", "--python", sys.executable]
        command += [*source_options(sources), *arguments]
        done = subprocess.run(command, env=sources.uv_environment(), check=False)
        if done.returncode:
            return done.returncode
    return 0


def part_file(name: str) -> Path:
    """Return the path of the file that locks one part of the environment."""
    return ROOT / "requirements" / f"{name}.txt"


def source_options(sources: MachineSources) -> list[str]:
    """Return pip's package sources as options of uv, which does not read them itself."""
    # The default index has builds of torch for GPUs only.
    backend = [] if sources.configured else ["--torch-backend", "cpu"]
    return [*sources.uv_arguments(), *backend]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
