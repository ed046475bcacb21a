"""Arguments and options that the commands of ``capsule study`` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli.options import option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from capsule.image.cache import Cache
    from capsule.study.lock import StudyLock
    from capsule.study.spec import StudySpec
    from capsule.study.study_file import StudyFile

StudyArgument = Annotated[
    Path, typer.Argument(metavar="STUDY", help="Study file (YAML): a base spec and groups.")
]
FolderArgument = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder of a study, as 'capsule study run' made it."),
]
ResultsArgument = Annotated[
    Path,
    typer.Argument(metavar="RESULTS", help="Folder of a study, or its bundle."),
]
OnOption = Annotated[
    str,
    option(
        "--on WHERE",
        "Where the members run: local[:N], N at a time on this machine; slurm, as jobs; "
        "kubernetes:TEMPLATE.yaml, as pods; or ray://HOST:PORT, as tasks of a Ray cluster.",
    ),
]


def locked_study(
    path: Path, cache: Cache, *, refresh: bool = False, progress: Callable[[str], None]
) -> tuple[StudyFile, StudyLock]:
    """Lock a study, and keep its lock file up to date.

    Raises:
        CapsuleError: CAP-S…, CAP-Y…, CAP-L…: the study, its base or its pins are wrong.
    """
    from capsule.host.outputs import write_file
    from capsule.study.lock import STUDY_LOCK, earlier_lock, find_starts, lock_study
    from capsule.study.study_file import StudyFile

    file = StudyFile.load(path)
    target = file.beside(STUDY_LOCK)
    previous = None if refresh else earlier_lock(file)
    found = lock_study(file, find_starts(file), previous, cache, progress, refresh=refresh)
    if found != previous:
        write_file(target, found.document() + b"\n")
        progress(f"wrote {target}")
        for note in _repetitions(file.study):
            progress(note)
    return file, found


def _repetitions(study: StudySpec) -> Iterator[str]:
    """Yield a note on each group that repeats an experiment: its runs may be meant as seeds."""
    for name, group in study.groups.items():
        runs = group.runs or study.runs
        if runs > 1 and not group.vary:
            yield (
                f"group {name} varies no seed, so its {runs} runs of each setting repeat one "
                "experiment; with 'vary: [root]', each run has its own seeds"
            )
