"""``capsule study status``: how far a study is."""

from __future__ import annotations

from capsule.cli.common import guarded, print_json
from capsule.cli.options import JsonOption
from capsule.cli.study.arguments import FolderArgument


@guarded
def command(folder: FolderArgument, *, as_json: JsonOption = False) -> None:
    """Show how many members are done, running, failed or waiting.

    Examples:
        # Look at a study that runs elsewhere, for instance on a cluster.
        capsule study status studies/rates
    """
    from capsule.report.text import terminal_console
    from capsule.study.directory import StudyDirectory
    from capsule.study.progress import progress_of, show

    progress = progress_of(StudyDirectory.open(folder))
    if as_json:
        print_json(progress.document())
    else:
        show(progress, terminal_console())
