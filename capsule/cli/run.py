"""``capsule run``: execute a spec and write a signed bundle."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capsule.cli import options
from capsule.cli.beginning import NewRun, ResumedRun
from capsule.cli.common import engine_option, guarded, no_effect, print_json, shell_word, use_gpu
from capsule.cli.defaults import checked_key, public_half
from capsule.host.run_directory import WORK, started

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from capsule.bundle.claims import Claims
    from capsule.experiment.spec import Spec
    from capsule.host.reporter import Reporter


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
    from capsule.engine.supervise import exclusive
    from capsule.entropy.ledger import Ledger
    from capsule.experiment.contract import LEDGER
    from capsule.host.platform import require_execution
    from capsule.image.cache import Cache
    from capsule.image.data.places import find_data
    from capsule.machine.fingerprint import take_fingerprint
    from capsule.machine.requirements import check_requirements, gpu_warning
    from capsule.report.diagnosis import show_ledger
    from capsule.report.progress import open_reporter
    from capsule.resumption import keep_fingerprint

    # Whatever is wrong with the command line is found before anything is made or executed.
    require_execution()
    use_gpu(gpu)
    beginning = _beginning(resume, spec, overrides or [], output)
    asked = beginning.spec()
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
    beginning.check_folder()
    cache = Cache()
    with open_reporter(quiet=quiet) as reporter:
        chosen = beginning.open_engine(engine, reporter.note)
        _check_embedding(chosen.name, embed_image=embed_image)
        lock, sources = beginning.lock(cache, reporter.note)
        if workers is not None:
            chosen = OnCluster(chosen, workers)
        here = take_fingerprint(chosen.describe(), beginning.folder)
        ended = beginning.ended
        # A run that has ended executes nothing here, so that it needs no GPU.
        if not ended and (unmet := check_requirements(lock, here)):
            raise unmet[0]
        found = find_data(lock, cache, reporter.note, places)
        # The run directory is made only now, when this machine has all that the run requires.
        directory = beginning.directory(lock)
        fingerprint = keep_fingerprint(directory, here)
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
        # Commands that look at the run would take it for an interrupted one, and resume it.
        with exclusive(directory / WORK):
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
    trust = f" --key {shell_word(public_half(key_file))}" if key else ""
    _show(bundle, claims, trust + engine_option([chosen.name]))


def _show(bundle: Path, claims: Claims, options: str) -> None:
    from capsule.bundle.claims import ProgramClaims

    typer.echo(f"claim id  {claims.claim_id()}")
    if isinstance(claims, ProgramClaims):
        typer.echo(f"claimed   {claims.described}")
    typer.echo(f"bundle    {bundle}")
    typer.echo(f"next: capsule verify {shell_word(bundle)}{options}", err=True)


def _beginning(
    resume: Path | None, spec: Path, overrides: list[str], output: Path
) -> NewRun | ResumedRun:
    return NewRun(spec, overrides, output) if resume is None else ResumedRun(resume, overrides)


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
