"""``capsule study lock``: expand a study into its members, each by the digest of its lock."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule.cli.common import guarded, print_json
from capsule.cli.options import JsonOption, QuietOption, option
from capsule.cli.study.arguments import StudyArgument, locked_study
from capsule.host.wording import counted


@guarded
def command(
    study: StudyArgument,
    *,
    refresh: Annotated[
        bool, option("--refresh", "Resolve all packages again, for newer versions.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Expand a study into its members, and pin all inputs.

    The lock, STUDY.study.lock.json, is a pure function of the study and its base spec. Adding a
    group or a run does not change the other members. The lock file of the base spec is not
    changed.

    Examples:
        # Write study.study.lock.json.
        capsule study lock study.yaml
    """
    from capsule.image.cache import Cache
    from capsule.report.progress import open_reporter

    with open_reporter(quiet=quiet) as reporter:
        _, lock = locked_study(study, Cache(), refresh=refresh, progress=reporter.note)
    if as_json:
        members = {member.name: member.lock for member in lock.members}
        document = {"schema": "capsule/study-locked/v1", "lock": lock.digest(), "members": members}
        print_json(document)
        return
    typer.echo(f"lock      sha256:{lock.digest()}")
    typer.echo(f"members   {len(lock.members)} in {counted(len(lock.study.groups), 'group')}")
    typer.echo(f"locks     {len({member.lock for member in lock.members})} different")
    typer.echo(f"images    {len(lock.pins)}")
