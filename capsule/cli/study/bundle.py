"""``capsule study bundle``: sign the results of a study in one small file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli import options
from capsule.cli.common import engine_option, guarded, print_json, shell_word
from capsule.cli.options import OUTPUT, option
from capsule.cli.study.arguments import FolderArgument

if TYPE_CHECKING:
    from capsule.study.results import StudyResults


@guarded
def command(
    folder: FolderArgument,
    *,
    key: options.SigningKeyOption = None,
    ssh_key: options.SshKeyOption = None,
    passphrase_file: options.PassphraseOption = None,
    output: Annotated[
        Path | None,
        option(
            "--output -o PATH",
            "File (NAME.tar) or folder in which the bundle is written; default: FOLDER.",
            OUTPUT,
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Sign the results of a study.

    The bundle contains the lock of the study, the claims of every member, and the tables. It names
    the bundles of the members by their digests, and does not contain them.

    Examples:
        # Write studies/rates/rates-CLAIM.capsule-study.tar.
        capsule study bundle studies/rates --key alice
    """
    from capsule.bundle.sshsig import sign_by_ssh_keygen
    from capsule.cli.defaults import checked_key, public_half
    from capsule.study.directory import StudyDirectory
    from capsule.study.results import StudyResults
    from capsule.study.study_bundle import pack_study, sample_of

    signing_key = checked_key(key, passphrase_file)
    results = StudyResults.of(StudyDirectory.open(folder))
    key_file, private_key = signing_key()
    sign = partial(sign_by_ssh_keygen, key=ssh_key) if ssh_key else None
    path, bundle = pack_study(results, private_key, output or folder, sign)
    if as_json:
        print_json(
            {"schema": "capsule/study-bundled/v1", "bundle": str(path), "claim_id": bundle.claim_id}
        )
        return
    typer.echo(f"claim id  {bundle.claim_id}\nmembers   {len(results.members)}\nbundle    {path}")
    trust = f" --key {shell_word(public_half(key_file))}" if key else ""
    sample = sample_of(len(results.members))
    options = f"{trust} --sample {sample}{_to_run_again(results, folder)}"
    typer.echo(f"next: capsule study verify {shell_word(path)}{options}", err=True)


def _to_run_again(results: StudyResults, folder: Path) -> str:
    """Return the options without which members of a study cannot be run again."""
    from capsule.image.cache import Cache

    bundles = f" --members {shell_word(folder)}" if results.needs_bundles(Cache()) else ""
    return bundles + engine_option(member.engine for member in results.members)
