# ruff: noqa: INP001
"""Write requirements/*.txt: the packages that scripts/setup.sh installs, by version and SHA-256.

One resolution covers Python 3.11 to 3.14. It is divided into files that build on one another:
setup.txt (the packages that scripts/install.py itself needs), host.txt, train.txt and dev.txt. The
training packages have the versions that a spec pins by default (ImageSpec in
experiment/spec/image.py).

Locked versions do not change if pyproject.toml permits them. Options are passed on to ``uv pip
compile``: --upgrade, --upgrade-package NAME, --exclude-newer DATE.

usage: .venv/bin/python scripts/lock.py [OPTION ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from install import ROOT, part_file, source_options
from packaging.requirements import Requirement
from uv import find_uv_bin

from capsule.experiment.spec import ImageSpec, SourcesSpec
from capsule.image.resolution.sources import machine_sources

OLDEST_PYTHON = "3.11"
PROJECT = str(ROOT / "pyproject.toml")
EXTRAS = ["train", "cluster", "sigstore", "memory-tasks", "wandb"]
# Each file adds to the earlier files the packages that these inputs of `uv pip compile` need.
PARTS = {
    "setup": [str(ROOT / "scripts" / "install.in")],
    "host": [PROJECT],
    "train": [PROJECT, "--extra", "train"],
    "dev": [PROJECT, *(word for extra in EXTRAS for word in ("--extra", extra)), "--group", "dev"],
}
HEADER = """\
# What scripts/setup.sh installs: versions and digests, from whichever source pip is configured for.
# Made by scripts/lock.py. Do not edit.
"""


def main(options: list[str]) -> int:
    """Resolve everything once, divide it, and write the files; return a status."""
    locked = {name: read_entries(part_file(name)) for name in PARTS}
    before = {head: digests for entries in locked.values() for head, digests in entries.items()}
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("\n".join(map(training_pin, ImageSpec().packages)))
        everything = Path(folder, "everything.txt")
        everything.write_text(
            "\n".join(before)
        )  # without digests; otherwise uv would not request new ones
        done = compile_lock(
            [*PARTS["dev"], *PARTS["setup"], "--generate-hashes", *options], pins, everything
        )
        if done:
            return done
        left = read_entries(everything)
        for name, inputs in PARTS.items():
            part = Path(folder, f"{name}.txt")
            if done := compile_lock(inputs, everything, part):
                return done
            names = set(map(project_name, read_entries(part)))
            chosen = {head: left.pop(head) for head in list(left) if project_name(head) in names}
            # A mirror may have wheels of one Python only, so known digests of a version are kept.
            joined = {head: chosen[head] | before.get(head, set()) for head in chosen}
            part_file(name).write_text(HEADER + as_text(joined))
            sys.stdout.write(f"{part_file(name).relative_to(ROOT)}: {len(joined)} entries\n")
    return 0


def compile_lock(inputs: list[str], constraints: Path, output: Path) -> int:
    """Run ``uv pip compile`` for every supported Python; return its status."""
    # An extra index is often a partial mirror: it lists one wheel where the main index lists all.
    sources = replace(machine_sources(SourcesSpec()), extra_indexes=())
    command = [find_uv_bin(), "pip", "compile", "--quiet", "--universal", "--no-header"]
    command += ["--no-annotate", "--python-version", OLDEST_PYTHON, *source_options(sources)]
    command += [*inputs, "--constraints", str(constraints), "--output-file", str(output)]
    return subprocess.run(command, env=sources.uv_environment(), check=False).returncode


def training_pin(requirement: str) -> str:
    """Return a package of the default spec as this environment installs it: torch's CPU build."""
    return f"{requirement}+cpu" if Requirement(requirement).name == "torch" else requirement


def read_entries(path: Path) -> dict[str, set[str]]:
    """Read a lock: the digests of each ``name==version ; marker``."""
    entries: dict[str, set[str]] = {}
    if not path.exists():
        return entries
    for line in path.read_text().splitlines():
        text = line.rstrip("\\").strip()
        if text.startswith("--hash="):
            entries[list(entries)[-1]].add(text.removeprefix("--hash="))
        elif text and not text.startswith("#"):
            entries[text] = set()
    return entries


def as_text(entries: dict[str, set[str]]) -> str:
    """Write entries as :func:`read_entries` reads them."""
    lines = (
        " \\\n    ".join([head, *(f"--hash={digest}" for digest in sorted(digests))])
        for head, digests in sorted(entries.items())
    )
    return "".join(f"{line}\n" for line in lines)


def project_name(head: str) -> str:
    """Return the project of a lock's entry."""
    return head.partition("==")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
