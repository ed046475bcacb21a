"""``capsule run``: execute a spec and sign what came out."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capsule.cli.common import (
    DEFAULT_SPEC,
    EngineOption,
    JsonOption,
    QuietOption,
    SetOption,
    SpecArgument,
    guarded,
    locked,
    print_json,
)
from capsule.cli.passphrase import PassphraseOption, unlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from capsule.experiment.lock import Lock
    from capsule.experiment.spec import SourcesSpec
    from capsule.image.cache import Cache

LOCK = "lock.json"
WORK = "work"


@guarded
def command(
    spec: SpecArgument = DEFAULT_SPEC,
    *,
    key: Annotated[
        Path, typer.Option("--key", help="Private key that signs the bundle (capsule keygen).")
    ],
    ssh_key: Annotated[
        Path | None,
        typer.Option("--ssh-key", help="Key with which ssh-keygen signs the bundle as well."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    output: Annotated[Path, typer.Option("--output", help="Folder for run directories.")] = Path(
        "runs"
    ),
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Run directory to continue; SPEC is ignored.")
    ] = None,
    overrides: SetOption = None,
    engine: EngineOption = "auto",
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="docker:N|[ray://]HOST:PORT",
            help="Run the actors of IMPALA on a Ray cluster: one started in N containers, or an "
            "existing one by its address.",
        ),
    ] = None,
    learners: Annotated[
        int,
        typer.Option(
            "--learners", min=1, help="Processes that share the gradient of a batch (IMPALA)."
        ),
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Processes that answer the actors (IMPALA with trainer.inference.mode server).",
        ),
    ] = 1,
    embed_image: Annotated[
        bool, typer.Option("--embed-image", help="Carry the whole image in the bundle.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a spec in its locked image and write the signed bundle."""
    from rich.console import Console

    from capsule import execution
    from capsule.bundle.claims import ProgramClaims, read_document
    from capsule.bundle.packing import FinishedRun, pack_run
    from capsule.bundle.sshsig import PROBE, sign_by_ssh_keygen
    from capsule.engine.cluster import OnCluster, parse_cluster
    from capsule.engine.select import open_engine
    from capsule.entropy.ledger import Ledger
    from capsule.experiment.contract import LEDGER
    from capsule.image.cache import Cache
    from capsule.machine.compare import check_requirements
    from capsule.machine.fingerprint import take_fingerprint
    from capsule.report.diagnosis import show_ledger
    from capsule.report.progress import open_reporter

    private_key = unlock(key, passphrase_file)  # a run of hours must not end with an unusable key
    if ssh_key is not None:
        sign_by_ssh_keygen(b"", ssh_key, PROBE)
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter:
        directory, lock, sources = _directory(resume, spec, overrides, output, cache, reporter.note)
        chosen = open_engine(engine, progress=reporter.note)
        _check_processes(learners, replicas, lock)
        if cluster is not None:
            chosen = OnCluster(chosen, parse_cluster(cluster, lock.spec, os.environ))
        fingerprint = take_fingerprint(chosen.describe(), directory)
        for finding in check_requirements(lock.spec, fingerprint):
            raise finding
        image = execution.prepare(lock, chosen, cache, sources=sources, reporter=reporter)
        reporter.note(f"run directory {directory}")
        execution.execute(
            lock,
            chosen,
            directory / WORK,
            learners=learners,
            replicas=replicas,
            reporter=reporter,
        )
        finished = FinishedRun(
            lock=lock,
            image=image,
            engine=chosen.describe(),
            fingerprint=fingerprint,
            started=_started(directory),
            directory=directory / WORK,
        )
        bundle, claims = pack_run(
            finished, private_key, directory, cache, embed_image=embed_image, ssh_key=ssh_key
        )
    claimed = claims.described if isinstance(claims, ProgramClaims) else None
    if isinstance(claims, ProgramClaims) and claims.nothing:
        typer.echo(f"WARNING: this run claims {claimed}; no re-execution can confirm it", err=True)
    if as_json:
        print_json(
            {
                "schema": "capsule/ran/v1",
                "bundle": str(bundle),
                "claim_id": claims.claim_id(),
                "run_directory": str(directory),
                "relaxations": list(claims.relaxations),
                "claimed": claimed,
            }
        )
        return
    if not quiet:
        show_ledger(read_document(directory / WORK / LEDGER, Ledger), Console(stderr=True))
    typer.echo(f"claim id  {claims.claim_id()}")
    if claimed is not None:
        typer.echo(f"claimed   {claimed}")
    typer.echo(f"bundle    {bundle}")
    typer.echo(f"next: capsule verify {bundle} --key {key}.pub", err=True)


def _check_processes(learners: int, replicas: int, lock: Lock) -> None:
    """Refuse several processes for what a trainer has one of, or none."""
    from capsule.experiment.errors import CapsuleError, ExitCode
    from capsule.experiment.trainers import ImpalaTrainer

    trainer = lock.spec.trainer
    is_impala = isinstance(trainer, ImpalaTrainer)
    is_served = isinstance(trainer, ImpalaTrainer) and trainer.inference.mode == "server"
    for option, count, possible, needed in (
        ("--learners", learners, is_impala, "trainer.algorithm 'impala'"),
        ("--replicas", replicas, is_served, "trainer.inference.mode 'server' of 'impala'"),
    ):
        if count > 1 and not possible:
            raise CapsuleError(
                "CAP-S009",
                f"{option} {count} needs {needed}, which {lock.spec.name} does not have",
                fix=f"Leave {option} out, or change the spec.",
                exit_code=ExitCode.USAGE,
            )


def _directory(
    resume: Path | None,
    spec: Path,
    overrides: list[str] | None,
    output: Path,
    cache: Cache,
    progress: Callable[[str], None],
) -> tuple[Path, Lock, SourcesSpec]:
    """Make a new run directory for a spec, or take up an old one as it was locked."""
    from capsule.experiment.spec import SourcesSpec
    from capsule.image.lockfile import read_lock, write_lock

    if resume is None:
        lock, sources = locked(spec, overrides, cache, progress=progress)
        directory = _new_directory(output, lock.spec.name)
        write_lock(directory / LOCK, lock)
        return directory, lock, sources
    lock = read_lock(resume / LOCK)
    if overrides:
        lock = _with_other_outputs(lock, overrides)
        started = _started(resume).timestamp()
        write_lock(resume / LOCK, lock)
        os.utime(resume / LOCK, (started, started))
    return resume, lock, SourcesSpec()


def _with_other_outputs(lock: Lock, overrides: list[str]) -> Lock:
    """Return the lock of a run that is resumed with another choice of the files to be claimed.

    The choice has no effect on the program, which may have ended already.
    """
    from capsule.experiment.errors import CapsuleError, ExitCode
    from capsule.experiment.trainers import CommandTrainer
    from capsule.host.spec_file import parse_spec

    document = lock.spec.model_dump_json(by_alias=True).encode()
    spec = parse_spec(document, LOCK, overrides)
    trainer = lock.spec.trainer
    if isinstance(trainer, CommandTrainer) and isinstance(spec.trainer, CommandTrainer):
        trainer = trainer.model_copy(update={"outputs": spec.trainer.outputs})
    if spec != lock.spec.model_copy(update={"trainer": trainer}):
        raise CapsuleError(
            "CAP-S006",
            f"--set {' '.join(overrides)} cannot change a run that is resumed; only "
            "trainer.outputs of a program can be",
            fix="Start a new run without --resume.",
            exit_code=ExitCode.USAGE,
        )
    return lock.model_copy(update={"spec": spec})


def _new_directory(output: Path, name: str) -> Path:
    """Make ``OUTPUT/NAME-UTC`` (with a counter when two start in one second)."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        suffix = "" if attempt == 1 else f"-{attempt}"
        directory = output / f"{name}-{stamp}{suffix}"
        try:
            output.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700)  # what runs inside may be another user's (CAP-E042)
        except FileExistsError:
            continue
        return directory
    raise FileExistsError(output / f"{name}-{stamp}")


def _started(directory: Path) -> datetime:
    """Return when the run directory was made, which its lock file remembers."""
    return datetime.fromtimestamp((directory / LOCK).stat().st_mtime, tz=UTC)
