# ruff: noqa: INP001
"""Install this checkout, editable, with uv and the package sources that pip is configured for.

The training side gets the versions that a spec pins by default, so that tests run what images hold.

usage: python scripts/install.py [train] [dev]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from uv import find_uv_bin

from capsule.experiment.spec import ImageSpec, SourcesSpec
from capsule.image.resolution.sources import MachineSources, machine_sources

GROUPS = {"dev"}


def main(parts: list[str]) -> int:
    """Install the host side and ``parts`` into the environment that runs this; return a status."""
    extras = ",".join(part for part in parts if part not in GROUPS)
    sources = machine_sources(SourcesSpec())
    command = [find_uv_bin(), "pip", "install", "--quiet", "--python", sys.executable]
    command += source_options(sources)
    for group in GROUPS.intersection(parts):
        command += ["--group", group]
    command += ["--editable", f".[{extras}]" if extras else "."]
    root = Path(__file__).resolve().parents[1]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(ImageSpec().packages))
        constraints.flush()
        command += ["--constraints", constraints.name]
        done = subprocess.run(command, cwd=root, env=sources.uv_environment(), check=False)
    return done.returncode


def source_options(sources: MachineSources) -> list[str]:
    """Return pip's package sources as options of uv, which does not read them itself."""
    # pip ranks all indexes alike.
    options = ["--no-config", "--index-strategy", "unsafe-best-match"]
    for option, values in (
        ("--default-index", (sources.index,) if sources.index else ()),
        ("--index", sources.extra_indexes),
        ("--find-links", sources.find_links),
        ("--allow-insecure-host", sources.trusted_hosts),
    ):
        for value in values:
            options += [option, value]
    if sources.no_index:
        options.append("--no-index")
    if not sources.configured:
        options += ["--torch-backend", "cpu"]  # the default index has torch for GPUs only
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
