"""The one path that turns a locked spec into a finished run directory.

``capsule run`` and ``capsule verify`` both call :func:`prepare` and :func:`execute`; there is no
second way to execute anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from capsule.bundle.claims import read_arrivals
from capsule.engine.interface import NATIVE, RUN_DIRECTORY, Engine, Exit, Task
from capsule.engine.interpreter import interpreter_packages
from capsule.engine.select import host_flaws
from capsule.engine.supervise import exclusive, last_lines, unattended_seconds
from capsule.entropy.attempt import Attempt, clear, is_complete
from capsule.entropy.evidence import Evidence
from capsule.entropy.ledger import compute_ledger
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.fields import Model, PositiveInt
from capsule.experiment.files import write_atomic
from capsule.experiment.lock import Lock, LockedData, LockedDebianPackage
from capsule.experiment.mechanisms import Mechanisms
from capsule.experiment.spec import LimitsSpec, SourcesSpec, Spec
from capsule.experiment.trainers import CommandTrainer, ImpalaTrainer
from capsule.experiment.variables import environment_variables
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.reporter import Reporter
from capsule.image.assembly.assemble import Image, assemble
from capsule.image.assembly.unpack import unpacked_root
from capsule.image.cache import Cache
from capsule.image.closure import check_packages
from capsule.image.data.places import FoundData
from capsule.image.distribution import distribution_of
from capsule.image.resolution.fetch import fetch
from capsule.image.resolution.project import check_project
from capsule.machine.devices import devices_for
from capsule.outcome import (
    FIXES,
    OTHER_GPU,
    EventTail,
    GpuCheck,
    check_earlier_attempt,
    check_run_directory,
    how_ended,
    outcome,
    read_checked,
    reported_failure,
    result_of,
)

# With -P (Python 3.11), no module in the working folder hides one of the image.
TRAINING = ("-P", "-m", "capsule.training", RUN_DIRECTORY)
FILM = ("-P", "-m", "capsule.training.film", RUN_DIRECTORY)

# Prints what a program sees of its surroundings, as one JSON object, the fields of
# :class:`SeenSurroundings`. What the kernel allows is not asked for by a system call, which
# Capsule's own library would answer by the spec's ``determinism.cores``.
_LOOK = """\
import json, locale, os, re, socket, time
wanted = os.environ.get("LC_ALL", "")
try:
    took = locale.setlocale(locale.LC_ALL, "")
except locale.Error:
    took = f"C (no {wanted})"
print(json.dumps({
    "locale": took,
    "timezone": time.strftime("%Z (UTC%z)", time.localtime(0)),
    "hostname": socket.gethostname(),
    "processors": re.search(r"Cpus_allowed_list:\\s*(\\S+)", open("/proc/self/status").read())[1],
    "told": os.cpu_count(),
}))
"""
# The list of processors is long where every second one of hundreds may be used.
_LONGEST_REPORT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class VariedSurroundings:
    """The surroundings of an execution that are not to be as usual.

    Attributes:
        hostname: The host name; only for engines with containers.
        processors: The only processors it may run on, as the kernel lists them (``0-2,5``).
        variables: Environment variables with other values than those that the spec stands for.
        shell: Words of a shell before the command of a program, which sets its variables.
    """

    hostname: str | None = None
    processors: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ()


USUAL = VariedSurroundings()


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How an execution differs from that of a whole new run.

    Attributes:
        stop_after: Only this many steps (a prefix re-execution).
        replay: The recorded randomness to replay, for a run that recorded it.
        schedule: The schedule log to follow, for a run that recorded it.
        arrivals: The arrival log to follow, for a program that recorded it.
        learners: Processes that share the gradient of a batch, of trainers that can.
        replicas: Processes that answer the actors, where the spec has others answer them.
        limits: What it may use, if not what the lock says.
        surroundings: What is not to be as usual around it.
        dense: Parameter updates to write a dense record of.
        segment: Resume from the state in the run directory to ``stop_after``, and evaluate nothing.
        data: The data sets of the lock, if it has any; they are hashed before it runs and again
            afterwards.
        described: The facts of the engine that executes the run, for its ledger, if that is another
            one: the run has ended elsewhere, and only the rest is done here.
    """

    stop_after: int | None = None
    replay: Path | None = None
    schedule: Path | None = None
    arrivals: Path | None = None
    learners: int = 1
    replicas: int = 1
    limits: LimitsSpec | None = None
    surroundings: VariedSurroundings = USUAL
    dense: contract.DenseWindow | None = None
    segment: bool = False
    data: Mapping[str, FoundData] = field(default_factory=dict)
    described: Mapping[str, str] | None = None

    def check(self, spec: Spec) -> None:
        """Check that the trainer of a spec can use as many learners and replicas.

        Raises:
            CapsuleError: CAP-S009.
        """
        trainer = spec.trainer
        is_impala = isinstance(trainer, ImpalaTrainer)
        is_served = isinstance(trainer, ImpalaTrainer) and trainer.inference.mode == "server"
        for option, count, possible, needed in (
            ("--learners", self.learners, is_impala, "trainer.algorithm 'impala'"),
            ("--replicas", self.replicas, is_served, "trainer.inference.mode 'server' of 'impala'"),
        ):
            if count > 1 and not possible:
                raise CapsuleError(
                    "CAP-S009",
                    f"{option} {count} requires {needed} in the spec",
                    fix=f"Remove {option}, or change the spec.",
                )

    def job(self, lock: Lock) -> contract.Job:
        """Return what the training side is to do."""
        return contract.Job.of(
            lock,
            stop_after=self.stop_after,
            learners=self.learners,
            replicas=self.replicas,
            dense=self.dense,
            segment=self.segment,
        )

    def logs(self) -> dict[str, Path]:
        """Return the logs that the training side follows, by their names in the run directory."""
        logs = {
            contract.SCHEDULE_REPLAY: self.schedule,
            contract.ARRIVALS_REPLAY: self.arrivals,
        }
        return {name: log for name, log in logs.items() if log is not None}


WHOLE_RUN = ExecutionOptions()


class SeenSurroundings(Model):
    """The surroundings of a program as it saw them."""

    locale: str = Field(description="Locale, as the C library takes it from the environment.")
    timezone: str = Field(description="Name of the time zone, and its offset from UTC.")
    hostname: str
    processors: str = Field(
        description="Processors that the run may use, as the kernel lists them, e.g. '0-2,5'."
    )
    told: PositiveInt = Field(description="Number of processors that the C library reports.")


def prepare(
    lock: Lock,
    engine: Engine,
    cache: Cache,
    *,
    sources: SourcesSpec,
    supplied: Mapping[Literal["base", "code"], Path] | None = None,
    project: Path | None = None,
    to_run: bool = True,
    reporter: Reporter,
) -> Image | None:
    """Fetch what the lock names, assemble the image, and make the engine ready to run it.

    Args:
        lock: The locked experiment.
        engine: Where it will run.
        cache: Content-addressed store of packages and layers.
        sources: Where missing packages may come from, beside the machine's own configuration.
        supplied: Uncompressed layers that need not be built, as a bundle carries them.
        project: The layer of a program's source tree, as a bundle carries it.
        to_run: Whether it is to run here, so that a GPU that it needs has to be at hand.
        reporter: Told about each stage.

    Returns:
        The image; None with the plain-process engine, which uses none.

    Raises:
        CapsuleError: A package is not available, differs, or nothing asks for it (CAP-I…), or the
            engine refuses (CAP-E…).
    """
    # An engine that cannot run this is found before anything is fetched.
    if to_run:
        engine.check(lock)
        for flaw in host_flaws(lock, engine):
            reporter.note(f"warning: {flaw}")
    image = None
    if engine.name == "process":
        _obtain(lock, cache, sources, project, reporter, interpreter_packages(lock))
    else:
        image = build_image(
            lock, cache, sources=sources, supplied=supplied, project=project, reporter=reporter
        )
    engine.prepare(lock, image, cache, progress=reporter.note)
    return image


def build_image(
    lock: Lock,
    cache: Cache,
    *,
    sources: SourcesSpec,
    supplied: Mapping[Literal["base", "code"], Path] | None = None,
    project: Path | None = None,
    reporter: Reporter,
) -> Image:
    """Fetch what the lock names, and assemble the image. No engine is needed.

    The arguments are those of :func:`prepare`.

    Raises:
        CapsuleError: CAP-I…, a package is not available, differs, or nothing asks for it.
    """
    supplied = supplied or {}
    # Debian packages are only needed for a base layer that is made here.
    debian = () if "base" in supplied else lock.image.debian
    _obtain(lock, cache, sources, project, reporter, debian)
    return assemble(lock, cache, supplied=supplied, progress=reporter.note)


def unpack_image(lock: Lock, cache: Cache, *, sources: SourcesSpec, reporter: Reporter) -> Image:
    """Prepare an image for bubblewrap or Apptainer on a machine that has neither.

    A machine with the engine that shares the cache finds the unpacked image there. Bytecode, which
    the image's own interpreter makes, is left to that machine.

    Raises:
        CapsuleError: As :func:`build_image` and
            :func:`capsule.image.assembly.unpack.unpacked_root`.
    """
    image = build_image(lock, cache, sources=sources, reporter=reporter)
    unpacked_root(image, cache, reporter.note)
    return image


def _obtain(
    lock: Lock,
    cache: Cache,
    sources: SourcesSpec,
    project: Path | None,
    reporter: Reporter,
    debian: tuple[LockedDebianPackage, ...],
) -> None:
    """Bring the wheels, some Debian packages and the source tree of a lock into the cache."""
    if lock.project is not None and project is not None:
        check_project(lock.project, project)
        cache.trees.add(project, lock.project.sha256)
    wanted = lock.image.model_copy(update={"debian": debian})
    fetch(distribution_of(lock.spec.image), wanted, cache, sources, progress=reporter.note)
    check_packages(lock, cache, debian=debian == lock.image.debian)


def execute(
    lock: Lock,
    engine: Engine,
    run_directory: Path,
    options: ExecutionOptions = WHOLE_RUN,
    *,
    reporter: Reporter,
) -> contract.Result | contract.ProgramResult:
    """Run the training side until it ends.

    A directory that holds state is resumed; one that holds a result is finished at once. A user
    program that cannot resume starts over.

    Args:
        lock: The locked experiment; ``engine`` must have been prepared for it.
        engine: Where it runs.
        run_directory: Becomes the run directory of ``capsule.experiment.contract``.
        options: What is not as for a whole new run.
        reporter: Told about each event.

    Raises:
        CapsuleError: CAP-T… as the training side reported it, CAP-E010 when it ended in a way
            that it could not report, CAP-E012 when it was interrupted, or CAP-E011, CAP-E040 and
            CAP-E041 when it did not keep to the run directory's form; CAP-E008, another process
            executes it there; CAP-E044, a data set is not what the lock pins; CAP-E048, the run
            used another GPU than it was given.
        ValueError: Data sets are missing, or the lock has no such ones.
    """
    if options.data.keys() != (lock.data or {}).keys():
        raise ValueError(f"the data sets {sorted(options.data)} are not those of the lock")
    run_directory.mkdir(parents=True, exist_ok=True)
    # Nothing may be written while another process executes a task in the directory.
    with exclusive(run_directory):
        if (run_directory / contract.LEDGER).exists():  # written last
            clear(run_directory)
            return result_of(lock.spec, run_directory)
        return _execute(lock, engine, run_directory, options, reporter)


def _execute(
    lock: Lock,
    engine: Engine,
    run_directory: Path,
    options: ExecutionOptions,
    reporter: Reporter,
) -> contract.Result | contract.ProgramResult:
    """Run the training side until it ends; the caller holds the run directory."""
    data = options.data
    check_earlier_attempt(run_directory)
    # That of an earlier attempt would be taken for this one's.
    (run_directory / contract.FAILURE).unlink(missing_ok=True)
    write_atomic(run_directory / contract.JOB, options.job(lock).document())
    for name, log in options.logs().items():
        write_atomic(run_directory / name, log.read_bytes())
    events = EventTail(run_directory / contract.EVENTS, reporter)
    _read_data(data, reporter)
    ended = has_ended(run_directory)
    if not ended:
        _discard_end(run_directory)
    attempt = Attempt(run_directory, lock.spec, replay=options.replay, ended=ended)
    words = (_python(lock.spec), *TRAINING)
    task = _task(lock, attempt, run_directory, words, options, ended=ended)
    gpu = GpuCheck(task.gpus, run_directory)

    def poll() -> None:
        events.poll()
        gpu.poll()

    with _reported(run_directory), _only_on_its_gpu(run_directory):
        exit_ = engine.run(task, on_poll=poll)
        # No process of the task is left. From here on, the host reads what the task wrote, and
        # checks all of it.
        check_run_directory(run_directory)
        poll()
        # What the launcher or a replay found wrong outweighs whatever the program reports.
        attempt.check()
        result = outcome(lock.spec, run_directory, exit_)
        # A run with a result has named its GPU; one that failed early may not have.
        gpu.check()
    if data:
        # A data set that another process changed meanwhile was not the pinned one to the end.
        again = _read_data(data, reporter)
        write_atomic(run_directory / contract.DATA, contract.DataRead(sets=again).document())
    report = attempt.finish(prefix=options.stop_after is not None)
    # This document comes last: a directory that has it counts as finished above. Until then, the
    # folders of the starts are needed to finish the run again.
    described = options.described or engine.describe()
    _write_ledger(lock.spec, run_directory, report, described, exit_.image)
    clear(run_directory)
    return result


@contextmanager
def _reported(run_directory: Path) -> Iterator[None]:
    """Leave the error of a task that could not report it itself, for 'capsule list'."""
    try:
        yield
    except CapsuleError as error:
        path = run_directory / contract.FAILURE
        if error.exit_code != ExitCode.INTERRUPTED and not path.exists():
            failure = contract.Failure(code=error.code, message=error.message, fix=error.fix)
            with suppress(OSError):  # the disk may be full; the error itself is printed in any case
                write_atomic(path, failure.document())
        raise


@contextmanager
def _only_on_its_gpu(run_directory: Path) -> Iterator[None]:
    """Discard the end of a task that used another GPU than it was given.

    A resumed run that has ended is given no GPU, so nothing would be compared there.
    """
    try:
        yield
    except CapsuleError as error:
        if error.code == OTHER_GPU:
            check_earlier_attempt(run_directory)
            _discard_end(run_directory)
        raise


def has_ended(run_directory: Path) -> bool:
    """Tell whether the task has ended, so that at most a program's outputs are still to be listed.

    The machine that does the rest then executes nothing of the run.
    """
    return is_complete(run_directory) and any(end.exists() for end in _ends(run_directory))


def _discard_end(run_directory: Path) -> None:
    """Remove the end of a task, which then continues from its last state.

    If its launcher failed or was killed then, nothing is known about the randomness of its end.
    """
    for end in _ends(run_directory):
        end.unlink(missing_ok=True)


def _ends(run_directory: Path) -> tuple[Path, ...]:
    return run_directory / contract.ENDED, run_directory / contract.RESULT


def look(
    lock: Lock,
    engine: Engine,
    directory: Path,
    limits: LimitsSpec,
    surroundings: VariedSurroundings,
) -> SeenSurroundings:
    """Start a program as a run is started, and return what it sees of its surroundings.

    Args:
        lock: The locked experiment; ``engine`` must have been prepared for it.
        engine: Where it runs.
        directory: Becomes its run directory; there is none yet.
        limits: What it may use.
        surroundings: What is not to be as usual around it.

    Raises:
        CapsuleError: CAP-E043, the program did not report; CAP-E… as in :func:`execute`.
    """
    directory.mkdir(parents=True)
    attempt = Attempt(directory, lock.spec, replay=None)
    words = (*surroundings.shell, _python(lock.spec), "-P", "-c", _LOOK)
    options = ExecutionOptions(limits=limits, surroundings=surroundings)
    task = _task(lock, attempt, directory, words, options)
    ended = _run_aside(engine, task, "the check of the surroundings")
    said = "".join(last_lines(directory / contract.LOG, 1, _LONGEST_REPORT))
    try:
        return SeenSurroundings.model_validate_json(said)
    except ValidationError as error:
        raise CapsuleError(
            "CAP-E043",
            f"the surroundings of the run cannot be read back: the program that reports them ended "
            f"with status {ended.status}; last output: {said[:300]!r}",
            fix="Verify without --vary.",
        ) from error


def film(
    lock: Lock,
    engine: Engine,
    directory: Path,
    order: contract.EpisodeOrder,
    tensors: Path,
    *,
    limits: LimitsSpec,
    data: Mapping[str, FoundData],
    reporter: Reporter,
) -> contract.Film:
    """Play the last evaluation of a run again, and film one of its episodes.

    Args:
        lock: The locked experiment; ``engine`` must have been prepared for it.
        engine: Where it runs.
        directory: Becomes its run directory, which then has the screens; there is none yet.
        order: What to play and to film.
        tensors: Those of the run's last checkpoint.
        limits: What it may use.
        data: The data sets of the lock; they are hashed before it runs and again afterwards.
        reporter: Told about the progress.

    Raises:
        CapsuleError: CAP-T… as the training side reported it; CAP-E047, it ended in a way that it
            could not report; CAP-E… as in :func:`execute`.
    """
    checkpoints = directory / contract.CHECKPOINTS
    checkpoints.mkdir(parents=True)
    name = contract.checkpoint_name(order.step)
    shutil.copyfile(tensors, checkpoints / f"{name}.safetensors")
    write_atomic(directory / contract.JOB, contract.Job.of(lock).document())
    write_atomic(directory / contract.EPISODE_ORDER, order.document())
    _read_data(data, reporter)
    attempt = Attempt(directory, lock.spec, replay=None)
    words = (_python(lock.spec), *FILM)
    task = _task(lock, attempt, directory, words, ExecutionOptions(limits=limits, data=data))
    reporter.note(f"playing the evaluation of step {order.step:,} again")
    ended = _run_aside(engine, task, "the replay")
    if (failure := reported_failure(directory)) is not None:
        raise failure
    if ended.reason != "exited" or ended.status != 0:
        raise CapsuleError(
            "CAP-E047",
            f"the program that plays the evaluation {how_ended(ended)}; "
            f"last output: {''.join(last_lines(directory / contract.LOG, 1))!r}",
            fix=FIXES.get(
                ended.reason,
                "If there is no such module, the training code in the "
                "bundle is older than 'capsule replay'; make the bundle again with this Capsule.",
            ),
        )
    _read_data(data, reporter)
    return read_checked(contract.Film, directory / contract.FILM)


def _run_aside(engine: Engine, task: Task, what: str) -> Exit:
    """Execute a task that is no run and cannot be resumed, and check the form of what it left."""
    ended = engine.run(task)
    check_run_directory(task.run_directory)
    if ended.reason == "interrupted":
        raise CapsuleError("CAP-E012", f"{what} was interrupted", fix="Start it again.")
    return ended


def _task(
    lock: Lock,
    attempt: Attempt,
    run_directory: Path,
    words: tuple[str, ...],
    options: ExecutionOptions,
    *,
    ended: bool = False,
) -> Task:
    """Return the task that starts ``words`` under the launcher, as the spec and options say."""
    spec, surroundings, limits = lock.spec, options.surroundings, options.limits or lock.spec.limits
    launcher = attempt.arguments(
        native=NATIVE, run_directory=RUN_DIRECTORY, seconds=unattended_seconds(limits)
    )
    return Task(
        arguments=(*launcher, *words),
        native=distribution_of(spec.image).native,
        run_directory=run_directory,
        # Variables that are varied replace those of the spec.
        environment={**environment_variables(spec), **surroundings.variables},
        data={
            f"{name}/{found.below}".rstrip("/"): found.path for name, found in options.data.items()
        },
        limits=limits,
        # A run that has ended only lists its outputs, also on a machine without a GPU or with
        # another.
        gpus=() if ended else devices_for(spec.accelerator, options.learners),
        hostname=surroundings.hostname,
        processors=surroundings.processors,
    )


def _python(spec: Spec) -> str:
    """Return the name of the interpreter: with its version, since a program can claim the name."""
    return f"python{spec.image.python}"


def _read_data(data: Mapping[str, FoundData], reporter: Reporter) -> dict[str, LockedData]:
    """Hash data sets, and return what they are, which is what their lock pins."""
    return {name: found.check(name, reporter.note) for name, found in data.items()}


def _write_ledger(
    spec: Spec,
    run_directory: Path,
    report: EntropyReport,
    engine: Mapping[str, str],
    image: str | None,
) -> None:
    streams = None
    if not isinstance(spec.trainer, CommandTrainer):
        streams = read_checked(contract.StreamProfiles, run_directory / contract.STREAMS)
    arrivals, data = run_directory / contract.ARRIVALS, run_directory / contract.DATA
    evidence = Evidence(
        runtime=read_checked(contract.Runtime, run_directory / contract.RUNTIME),
        mechanisms=read_checked(Mechanisms, run_directory / contract.MECHANISMS),
        report=report,
        streams=streams,
        arrivals=read_arrivals(arrivals) if arrivals.exists() else None,
        data=read_checked(contract.DataRead, data) if data.exists() else None,
        engine=engine,
        image=image,
    )
    write_atomic(run_directory / contract.LEDGER, compute_ledger(evidence).document())
