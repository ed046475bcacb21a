"""``capsule show``: what is in a bundle, a run directory or a lock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import JsonOption

if TYPE_CHECKING:
    from capsule.report.inspection import Inspected


@guarded
def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE",
            help="Bundle of a run or a study, run directory, folder of a study, or lock file.",
        ),
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show what a bundle contains and claims, and who signed it.

    The files of a bundle are checked against its manifest. No key is trusted, nothing is executed,
    and the claims are shown as the bundle states them: 'capsule verify' checks them.

    Examples:
        # Show a bundle on one screen.
        capsule show dqn-cartpole-0a1b2c3d.capsule.tar

        # Show the state of an interrupted run.
        capsule show runs/dqn-cartpole-20270101T120000Z
    """
    found = _inspect(path)
    if as_json:
        print_json(found.document)
        return
    from rich.console import Console

    from capsule.report.inspection import show_rows

    show_rows(found.rows, Console())


def _inspect(path: Path) -> Inspected:
    """Read whatever is at a path.

    Raises:
        CapsuleError: CAP-P106, a spec or another folder is there; CAP-B…, CAP-L… and CAP-Y…, a
            bundle or a lock cannot be read.
    """
    from capsule.bundle.bundle import open_bundle
    from capsule.host.errors import CapsuleError
    from capsule.host.run_directory import STUDY_LOCK, is_run_directory
    from capsule.image.lockfile import names_lock, read_lock
    from capsule.report.inspection import inspect_directory, inspect_lock, inspect_run
    from capsule.report.runs import read_run
    from capsule.study.inspection import inspect_study, inspect_study_lock
    from capsule.study.lock import read_study_lock

    if is_run_directory(path):
        return inspect_directory(read_run(path))
    if (path / STUDY_LOCK).is_file():
        return inspect_study_lock(read_study_lock(path / STUDY_LOCK))
    if path.is_dir() or path.suffix in (".yaml", ".yml"):
        what = "a folder without a lock" if path.is_dir() else "a spec"
        raise CapsuleError(
            "CAP-P106",
            f"{path} is {what}",
            fix="Name a bundle, a run directory, the folder of a study or a lock file. "
            "'capsule list FOLDER' lists the runs in a folder, and 'capsule plan SPEC' shows what "
            "a run of a spec would need.",
        )
    # This precedes names_lock(), which takes the lock of a study for that of a run.
    if path.name.endswith(STUDY_LOCK):
        return inspect_study_lock(read_study_lock(path))
    if names_lock(path):
        return inspect_lock(read_lock(path))
    with open_bundle(path, (), kind=None) as opened:
        return inspect_study(opened) if opened.manifest.kind == "study" else inspect_run(opened)
