"""``capsule study member``: run one member of a study."""

from __future__ import annotations

from typing import Annotated

import typer

from capsule.cli import options
from capsule.cli.common import guarded
from capsule.cli.study.arguments import FolderArgument


@guarded
def command(
    folder: FolderArgument,
    name: Annotated[str, typer.Argument(metavar="MEMBER", help="The member, e.g. exploration.2.")],
    *,
    key: options.SigningKeyOption = None,
    passphrase_file: options.PassphraseFileOption = None,
    engine: options.EngineOption = "auto",
) -> None:
    """Run one member of a study, or resume it. The jobs of schedulers call this command.

    A member that is done is not run again. A scheduler may start a member again while its last
    attempt still saves its state. In this case, the command waits up to a minute.

    Examples:
        # Run a member again whose bundle was lost.
        capsule study member studies/rates exploration.2 --key alice
    """
    from capsule.cli.defaults import signing_key
    from capsule.host.errors import CapsuleError
    from capsule.study.directory import StudyDirectory
    from capsule.study.running import STOP_SECONDS, RunOptions, Runs

    key_file, _ = signing_key(key, passphrase_file, ask=False)
    study = StudyDirectory.open(folder)
    outcome = study.outcome(name)
    if outcome is None or outcome.bundle is None:  # a scheduler may start a job twice
        with Runs() as runs:
            outcome = runs.run(
                study, name, RunOptions(key_file, passphrase_file, engine), STOP_SECONDS
            )
    if outcome is None:
        raise KeyboardInterrupt
    if outcome.bundle is None:
        raise CapsuleError(str(outcome.code), str(outcome.message), fix=str(outcome.fix))
    typer.echo(f"claim id  {outcome.claim_id}\nbundle    {study.folder(name) / outcome.bundle}")
