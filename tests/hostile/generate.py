"""Write every case of the corpus: ``python tests/hostile/generate.py FOLDER``.

Each becomes a folder ``NN-name`` with ``flawed.capsule.tar``, which must be refused,
``passing.capsule.tar``, which must not, the files that their options name, and a README that says
how to present them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hostile.case import Case
from tests.hostile.corpus import CASES


def write(case: Case, folder: Path) -> None:
    """Write one case."""
    target = folder / f"{case.number:02d}-{case.name}"
    target.mkdir(parents=True)
    commands = []
    for name in ("flawed", "passing"):
        with TemporaryDirectory(dir=folder) as scratch:
            shown = case.present(Path(scratch), name == "flawed")
            options = " ".join(
                option.replace(scratch + "/", f"{name}-") for option in shown.options
            )
            shown.bundle.rename(target / f"{name}.capsule.tar")
            for path in Path(scratch).iterdir():  # what its options name
                shutil.move(path, target / f"{name}-{path.name}")
        commands.append(f"`capsule verify {name}.capsule.tar {options} --mode integrity`")
    flawed, passing = commands
    (target / "README.md").write_text(
        f"Case {case.number}: {case.name.replace('-', ' ')}.\n"
        f"{flawed} must say {case.code};\n"
        f"{passing} differs in the flaw alone, and says intact.\n"
    )


if __name__ == "__main__":
    for each in CASES:
        write(each, Path(sys.argv[1]))
    sys.stdout.write(f"{len(CASES)} cases in {sys.argv[1]}\n")
