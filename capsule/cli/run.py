"""``capsule run``: execute a spec and write a signed bundle."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from capsule.cli import options
from capsule.cli.common import guarded, locked, no_effect, print_json, shell_word, use_gpu
from capsule.cli.defaults import checked_key, public_half
from capsule.host.run_directory import FINGERPRINT, LOCK, STARTED, WORK, started

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from capsule.bundle.claims import Claims
    from capsule.engine.interface import Engine, Progress
    from capsule.engine.select import EngineChoice
    from capsule.experiment.lock import Lock
    from capsule.experiment.spec import SourcesSpec, Spec
    from capsule.host.errors import CapsuleError
    from capsule.host.reporter import Reporter
    from capsule.image.cache import Cache
    from capsule.machine.fingerprint import Fingerprint


@guarded
def command(
    spec: options.SpecArgument = options.DEFAULT_SPEC,
    *,
    overrides: options.SetOption = None,
    key: options.SigningKeyOption = None,
    ssh_key: options.SshKeyOption = None,
    passphrase_file: options.PassphraseOption = None,
    resume: options.ResumeOption = None,
    engine: options.EngineOption = "auto",
    gpu: options.GpuOption = None,
    cluster: options.ClusterOption = None,
    learners: options.LearnersOption = 1,
    replicas: options.ReplicasOption = 1,
    output: options.RunsOption = Path("runs"),
    data: options.DataOption = None,
    embed_image: options.EmbedImageOption = False,
    embed_data: options.EmbedDataOption = False,
    metrics: options.MetricsOption = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Execute a spec in its image and write a signed bundle.

    The spec is locked first if it has no current lock, and its image is built if needed.

    Examples:
        # Run ./capsule.yaml and sign the bundle with your own key.
        capsule run

        # Run another spec with another seed, and sign with another key.
        capsule run specs/dqn-cartpole.yaml --set seeds.root=2 --key alice

        # Resume an interrupted run.
        capsule run --resume runs/dqn-cartpole-20270101T120000Z
    """
    from rich.console import Console

    from capsule import execution
    from capsule.bundle.claims import ProgramClaims, read_document
    from capsule.bundle.packing import FinishedRun, pack_run
    from capsule.bundle.sshsig import PROBE, sign_by_ssh_keygen
    from capsule.engine.cluster import OnCluster, parse_cluster
    from capsule.engine.select import open_engine
    from capsule.entropy.ledger import Ledger
    from capsule.experiment.contract import LEDGER
    from capsule.host.outputs import require_folder
    from capsule.host.platform import require_execution
    from capsule.image.cache import Cache
    from capsule.image.data.places import find_data
    from capsule.machine.fingerprint import take_fingerprint
    from capsule.machine.requirements import check_requirements, gpu_warning
    from capsule.report.diagnosis import show_ledger
    from capsule.report.progress import open_reporter

    # Whatever is wrong with the command line is found before anything is made or executed.
    require_execution()
    use_gpu(gpu)
    asked = _spec_of(resume, spec, overrides)
    shared = execution.ExecutionOptions(learners=learners, replicas=replicas)
    shared.check(asked)
    places = _places(data, asked, embed_data=embed_data)
    workers = None if cluster is None else parse_cluster(cluster, asked, os.environ)
    signing_key = checked_key(key, passphrase_file)
    if ssh_key is not None:
        # The probe is signed in a namespace that counts nowhere: a missing agent or token is found
        # now, and not when the run has ended.
        sign_by_ssh_keygen(b"", ssh_key, PROBE)
    following = _following(metrics)
    if resume is None:
        require_folder(output)
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter:
        chosen = open_engine(_engine(engine, resume), progress=reporter.note)
        _remove_containers(resume, chosen, reporter.note)
        _check_embedding(chosen.name, embed_image=embed_image)
        lock, sources = _lock(resume, spec, overrides, cache, reporter.note)
        if workers is not None:
            chosen = OnCluster(chosen, workers)
        here = take_fingerprint(chosen.describe(), resume or output)
        ended = resume is not None and _has_ended(resume)
        # A run that has ended executes nothing here, so that it needs no GPU.
        for finding in () if ended else check_requirements(lock, here):
            raise finding
        found = find_data(lock, cache, reporter.note, places)
        # The run directory is made only now, when this machine has all that the run requires.
        directory = resume or _new_directory(output, lock)
        fingerprint = _kept(directory, here)
        if warning := gpu_warning(lock.spec, fingerprint):
            reporter.note(warning)
        # The default key is made only now, when nothing else is missing.
        key_file, private_key = signing_key()
        image = execution.prepare(
            lock, chosen, cache, sources=sources, to_run=not ended, reporter=reporter
        )
        reporter.note(f"run directory {directory}")
        with following(directory, reporter) as followed:
            execution.execute(
                lock,
                chosen,
                directory / WORK,
                replace(shared, data=found, described=fingerprint.engine),
                reporter=followed,
            )
        finished = FinishedRun(
            lock=lock,
            image=image,
            engine=dict(fingerprint.engine or {}),
            fingerprint=fingerprint,
            started=started(directory),
            directory=directory / WORK,
            data=found,
        )
        bundle, claims = pack_run(
            finished,
            private_key,
            directory,
            cache,
            embed_image=embed_image,
            embed_data=embed_data,
            ssh_key=ssh_key,
        )
    if isinstance(claims, ProgramClaims) and claims.nothing:
        typer.echo(
            f"WARNING: this run claims {claims.described}, so no re-execution can confirm it",
            err=True,
        )
    if as_json:
        print_json(_document(bundle, claims, directory))
        return
    if not quiet:
        show_ledger(read_document(directory / WORK / LEDGER, Ledger), Console(stderr=True))
    typer.echo(f"claim id  {claims.claim_id()}")
    if isinstance(claims, ProgramClaims):
        typer.echo(f"claimed   {claims.described}")
    typer.echo(f"bundle    {bundle}")
    trust = f" --key {shell_word(public_half(key_file))}" if key else ""
    typer.echo(f"next: capsule verify {shell_word(bundle)}{trust}{_where(claims)}", err=True)


def _check_embedding(engine: str, *, embed_image: bool) -> None:
    if embed_image and engine == "process":
        raise no_effect("--embed-image", "--engine process", "A plain process has no image.")


def _places(data: list[str] | None, asked: Spec, *, embed_data: bool) -> dict[str, Path]:
    """Return where the command line says that data sets of the spec lie.

    Raises:
        CapsuleError: CAP-E045, it names no data set of the spec, or a path that does not exist;
            CAP-X005, the spec has no data sets to be embedded.
    """
    from capsule.image.data.places import check_places, parse_places

    places = parse_places(data or [])
    check_places(places, asked.data or ())
    if embed_data and asked.data is None:
        raise no_effect("--embed-data", "a spec without data sets", "It stores those of 'data'.")
    return places


def _where(claims: Claims) -> str:
    """Return the option that a bundle without an image needs to be verified."""
    return " --engine process" if claims.image is None else ""


def _document(bundle: Path, claims: Claims, directory: Path) -> dict[str, Any]:
    from capsule.bundle.claims import ProgramClaims

    return {
        "schema": "capsule/ran/v1",
        "bundle": str(bundle),
        "claim_id": claims.claim_id(),
        "run_directory": str(directory),
        "relaxations": list(claims.relaxations),
        "claimed": claims.described if isinstance(claims, ProgramClaims) else None,
    }


def _spec_of(resume: Path | None, path: Path, overrides: list[str] | None) -> Spec:
    """Return the spec that the command line asks to run.

    Raises:
        CapsuleError: CAP-S012, what is to be resumed is not a run directory; or what reading the
            spec or the lock raises.
    """
    from capsule.host.errors import CapsuleError
    from capsule.host.spec_file import load_spec
    from capsule.image.lockfile import names_lock, read_lock

    if resume is None:
        return read_lock(path).spec if names_lock(path) else load_spec(path, overrides or [])
    if not (resume / LOCK).is_file():
        raise CapsuleError(
            "CAP-S012",
            f"--resume {resume} is not a run directory: {resume / LOCK} does not exist",
            fix="Name the folder that 'capsule run' made; 'capsule list' shows them.",
        )
    return read_lock(resume / LOCK).spec


def _following(
    metrics: str | None,
) -> Callable[[Path, Reporter], AbstractContextManager[Reporter]]:
    """Return what makes a run's reporter write metrics, too, if the command line says where."""
    if metrics is None:
        return lambda _, reporter: nullcontext(reporter)
    # Not before: a run without metrics starts 0.3 s sooner.
    from capsule.export.live import follow, require_target

    require_target(metrics)
    return lambda directory, reporter: follow(metrics, directory, reporter)


def _lock(
    resume: Path | None,
    spec: Path,
    overrides: list[str] | None,
    cache: Cache,
    progress: Callable[[str], None],
) -> tuple[Lock, SourcesSpec]:
    """Return the lock of a spec, or of the run to resume, and the sources of its packages.

    Raises:
        CapsuleError: CAP-E008, another process runs in the one to resume; CAP-S006, the overrides
            would make it another experiment, or its outputs were listed without them.
    """
    from capsule.engine.supervise import exclusive
    from capsule.experiment.contract import RESULT
    from capsule.experiment.spec import SourcesSpec
    from capsule.image.lockfile import read_lock, write_lock

    if resume is None:
        return locked(spec, overrides, cache, progress=progress)
    if (resume / WORK).is_dir():
        # execute() holds the folder itself. Before that, the lock and metrics are written.
        with exclusive(resume / WORK):
            pass
    lock = read_lock(resume / LOCK)
    if overrides and (changed := _with_other_outputs(lock, overrides)) != lock:
        # Outputs are not listed again, so the bundle would claim those of the other choice.
        if (resume / WORK / RESULT).exists():
            raise _not_overridden(overrides, f"the run in {resume}, which has finished")
        lock = changed
        write_lock(resume / LOCK, lock)
    return lock, SourcesSpec()


def _engine(wanted: EngineChoice, resume: Path | None) -> EngineChoice:
    """Return the engine to open: that of the run to resume, unless another one is wanted."""
    return (_earlier_engine(resume) or wanted) if wanted == "auto" else wanted


def _earlier_engine(resume: Path | None) -> EngineChoice | None:
    """Return the engine with which the run to resume began; None for a run that has not begun."""
    from capsule.engine.select import EngineChoice

    if resume is None or (began := _began(resume)) is None:
        return None
    names: dict[str, EngineChoice] = {name: name for name in get_args(EngineChoice)}
    return names.get(_name(began))


def _remove_containers(resume: Path | None, chosen: Engine, progress: Progress) -> None:
    """Remove what a killed Capsule left in another engine than the chosen one.

    A container of the run to resume could still write to it there. In the chosen engine, nothing is
    left: opening an engine removes the containers of killed Capsules.

    Raises:
        CapsuleError: CAP-E006, the other engine stopped answering.
    """
    from capsule.engine.connection import CONTAINER_ENGINES
    from capsule.engine.select import open_engine
    from capsule.host.errors import CapsuleError

    earlier = _earlier_engine(resume)
    if earlier is None or earlier == chosen.name or earlier not in CONTAINER_ENGINES:
        return
    try:
        open_engine(earlier, progress=progress)
    except CapsuleError as error:
        if error.code != "CAP-E001":
            raise
        # On another machine than that of its beginning, the engine may not be installed.
        progress(
            f"the run began with {earlier}, which does not answer; if a container of the run is "
            "still running there, stop it"
        )


def _kept(directory: Path, here: Fingerprint) -> Fingerprint:
    """Keep the fingerprint of the machine that executes a run in its directory, and return it.

    The first execution also keeps when the directory was made. A run that has ended, and only has
    to be listed or packed, has the fingerprint of the machine on which it ended.

    Raises:
        CapsuleError: CAP-E050, the run began in a container and would continue without one, or the
            reverse. The bundle would say that all of it ran where its end did. CAP-E008, another
            process, which may be of another machine, executes it.
    """
    from capsule.engine.supervise import exclusive
    from capsule.experiment.canonical import write_atomic
    from capsule.host.errors import CapsuleError

    began = _began(directory)
    if began is not None and (_name(began) == "process") != (_name(here) == "process"):
        raise CapsuleError(
            "CAP-E050",
            f"the run in {directory} began with the engine {_name(began)}, and cannot be resumed "
            f"with the engine {_name(here)}: one is a plain process, and the other a container",
            fix=f"Add --engine {_name(began)}.",
        )
    if began is not None and _has_ended(directory):
        return began
    with exclusive(directory / WORK):
        write_atomic(directory / FINGERPRINT, here.document())
        if not (directory / STARTED).exists():
            write_atomic(directory / STARTED, started(directory).isoformat().encode())
    return here


def _has_ended(directory: Path) -> bool:
    """Tell whether a run has ended, so that it only has to be listed or packed."""
    from capsule.execution import has_ended
    from capsule.experiment.contract import LEDGER

    work = directory / WORK
    # The launcher's report, by which has_ended() knows, goes when the ledger has been written.
    return (work / LEDGER).exists() or has_ended(work)


def _began(directory: Path) -> Fingerprint | None:
    """Return the fingerprint that is kept in a run directory; None if it has not been executed."""
    from capsule.bundle.claims import read_document
    from capsule.machine.fingerprint import Fingerprint

    path = directory / FINGERPRINT
    return read_document(path, Fingerprint) if path.exists() else None


def _name(fingerprint: Fingerprint) -> str:
    return (fingerprint.engine or {}).get("name", "")


def _with_other_outputs(lock: Lock, overrides: list[str]) -> Lock:
    """Return the lock of a resumed run with another choice of the files to claim.

    The choice does not affect the program, which may have ended already.
    """
    from capsule.experiment.trainers import CommandTrainer
    from capsule.host.spec_file import parse_spec

    document = lock.spec.model_dump_json(by_alias=True).encode()
    spec = parse_spec(document, LOCK, overrides)
    trainer = lock.spec.trainer
    if isinstance(trainer, CommandTrainer) and isinstance(spec.trainer, CommandTrainer):
        trainer = trainer.model_copy(update={"outputs": spec.trainer.outputs})
    # Under any other setting, the states in the folder would be those of another experiment.
    if spec != lock.spec.model_copy(update={"trainer": trainer}):
        raise _not_overridden(
            overrides,
            "a run that is resumed, where only trainer.outputs of a program may change",
        )
    return lock.model_copy(update={"spec": spec})


def _not_overridden(overrides: list[str], what: str) -> CapsuleError:
    from capsule.host.errors import CapsuleError

    return CapsuleError(
        "CAP-S006",
        f"--set {' '.join(overrides)} is not supported for {what}",
        fix="Start a new run, without --resume.",
    )


def _new_directory(output: Path, lock: Lock) -> Path:
    """Make ``OUTPUT/NAME-UTC``, with a counter if two runs start in one second, with the lock."""
    from capsule.image.lockfile import write_lock

    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        suffix = "" if attempt == 1 else f"-{attempt}"
        directory = output / f"{lock.spec.name}-{stamp}{suffix}"
        try:
            output.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700)  # a run may have another user id (CAP-E042)
        except FileExistsError:
            continue
        write_lock(directory / LOCK, lock)
        return directory
    raise FileExistsError(output / f"{lock.spec.name}-{stamp}")
