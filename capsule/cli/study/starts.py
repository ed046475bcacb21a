"""``capsule study starts``: have one run rank the start sequences of all members."""

from __future__ import annotations

from pathlib import Path

import typer

from capsule.cli import options
from capsule.cli.common import guarded
from capsule.cli.study.arguments import StudyArgument


@guarded
def command(
    study: StudyArgument,
    *,
    key: options.SigningKeyOption = None,
    passphrase_file: options.PassphraseFileOption = None,
    engine: options.EngineOption = "auto",
    output: options.RunsOption = Path("runs"),
    quiet: options.QuietOption = False,
) -> None:
    """Make the start sequences that the members share.

    An experiment is run, and its final network ranks the sequences. The experiment is the base spec
    with the settings of 'starts' in the study. The sequences are written to STUDY.starts.json,
    which 'capsule study lock' pins for every member.

    Examples:
        # Write study.starts.json.
        capsule study starts study.yaml --key alice
    """
    from capsule.bundle.start_sets import start_set_of
    from capsule.cli.defaults import checked_key
    from capsule.experiment.evaluation import digest_of_starts
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import require_file, require_folder, write_file
    from capsule.host.run_directory import LOCK
    from capsule.image.cache import Cache
    from capsule.image.lockfile import write_lock
    from capsule.report.progress import open_reporter
    from capsule.study.lock import STARTS, earlier_lock, lock_starts
    from capsule.study.running import RunOptions, Runs
    from capsule.study.study_file import StudyFile

    signing_key = checked_key(key, passphrase_file, ask=False)
    file = StudyFile.load(study)
    target = file.beside(STARTS)
    # An output that cannot be written is found before the training.
    require_file(target)
    require_folder(output)
    with open_reporter(quiet=quiet) as reporter:
        lock = lock_starts(file, earlier_lock(file), Cache(), reporter.note)
        key_file, signer = signing_key()
        # The name follows from the lock, so the same command resumes a run that was interrupted.
        folder = output / f"{file.study.name}.starts-{lock.digest()[:8]}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The modification time of the lock is when the run started, which its bundle states.
        if not (folder / LOCK).exists():
            write_lock(folder / LOCK, lock)
        reporter.note(f"running {folder}")
        with Runs() as runs:
            outcome = runs.run_folder(folder, RunOptions(key_file, passphrase_file, engine))
    if outcome is None:
        raise KeyboardInterrupt
    if outcome.bundle is None:
        raise CapsuleError(str(outcome.code), str(outcome.message), fix=str(outcome.fix))
    found = start_set_of(folder / outcome.bundle, [signer.public])
    write_file(target, found.model_dump_json(by_alias=True).encode() + b"\n")
    typer.echo(f"starts  {len(found.starts)}\ndigest  sha256:{digest_of_starts(found.starts)}")
    typer.echo(f"bundle  {folder / outcome.bundle}\nfile    {target}")
