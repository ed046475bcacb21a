"""The engine interface: the one seam between a locked run and what executes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec
from capsule.host.reporter import Progress
from capsule.image.assembly.assemble import Image
from capsule.image.cache import Cache
from capsule.machine.devices import Device

# What stands in arguments for wherever the task sees it.
RUN_DIRECTORY = "{run_directory}"
NATIVE = "{native}"  # the folder of the native parts

EngineName = Literal["docker", "podman", "bwrap", "apptainer", "process"]
# The remedy where neither Docker nor Podman is available.
ENGINES_WITHOUT_DAEMON = (
    "Without a daemon, use --engine bwrap (apt-get install bubblewrap; it gives no GPU to a run) "
    "or --engine apptainer (https://apptainer.org; not as root)."
)
WITHOUT_CONTAINERS = f"{ENGINES_WITHOUT_DAEMON} --engine process does not isolate the run."


@dataclass(frozen=True)
class Workers:
    """A cluster of containers beside a task, made for it and removed with it.

    Attributes:
        count: How many there are, of the task's image, to play its actors.
    """

    count: int


@dataclass(frozen=True)
class RemoteCluster:
    """A cluster that is there already.

    Attributes:
        address: Address of its head, ``HOST:PORT`` or ``ray://HOST:PORT``.
        token: File with its token; None for a cluster without.
    """

    address: str
    token: Path | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One execution of the training side.

    Attributes:
        run_directory: Existing folder on this machine; the only thing the task can write for good.
        environment: Variables of the task, on top of the image's own. Nothing else is inherited.
        limits: What it may use.
        gpus: The NVIDIA devices that it needs, the only ones it sees, by the order of the PCI bus.
        arguments: Program and arguments, with :data:`RUN_DIRECTORY` and :data:`NATIVE` in them.
        native: Where the native parts are below the interpreter's prefix, if arguments name them.
        data: Files and folders of this machine that it sees read-only, by their paths below
            :data:`capsule.experiment.contract.DATA_FOLDER`.
        cluster: The Ray cluster that it uses; None without. The network of :class:`Workers` leads
            nowhere else. To reach a :class:`RemoteCluster`, a task has the engine's usual network,
            or the machine's as a plain process, and whatever these lead to.
        hostname: Another host name than the usual one; only for engines with containers.
        processors: The only processors it may run on, as the kernel lists them (``0-2,5``); None
            for all that the machine gives it.
    """

    run_directory: Path
    environment: Mapping[str, str]
    limits: LimitsSpec
    gpus: tuple[Device, ...] = ()
    arguments: tuple[str, ...]
    native: str = ""
    cluster: Workers | RemoteCluster | None = None
    hostname: str | None = None
    processors: str | None = None
    data: Mapping[str, Path] = field(default_factory=dict)

    def command(self, *, run_directory: str, prefix: str) -> list[str]:
        """Return the arguments for a task that sees its folders at the given paths.

        Args:
            run_directory: Path of the run directory.
            prefix: Path of its interpreter's prefix.
        """
        return [
            word.replace(RUN_DIRECTORY, run_directory).replace(NATIVE, f"{prefix}/{self.native}")
            for word in self.arguments
        ]


@dataclass(frozen=True)
class Exit:
    """How a task ended.

    Attributes:
        status: Exit status; 128 + n after signal n.
        reason: ``exited`` unless the engine stopped the task or the kernel did for its memory.
        image: Identity of the image that its container had, as the engine reported it after the
            start; None without a container.
        evidence: For ``out-of-memory`` and ``disk-full``, what was observed.
    """

    status: int
    reason: Literal["exited", "out-of-memory", "timed-out", "disk-full", "interrupted"]
    image: str | None = None
    evidence: str = ""


class Engine(Protocol):
    """An engine, which executes runs."""

    @property
    def name(self) -> EngineName:
        """The engine's name, as bundles say it."""

    def describe(self) -> dict[str, str]:
        """Return facts for the fingerprint: ``name``, ``version`` and what else is known."""

    def check(self, lock: Lock) -> None:
        """Reject a lock that needs what the engine cannot give to runs.

        Raises:
            CapsuleError: CAP-E003, it needs a GPU.
        """

    def prepare(self, lock: Lock, image: Image | None, cache: Cache, *, progress: Progress) -> None:
        """Make everything ready that :meth:`run` needs; instant when it already is.

        Args:
            lock: The locked experiment. Its packages are in the cache.
            image: The lock's image; None for the plain-process engine, which uses none.
            cache: Holds the packages and what is derived from them.
            progress: Told about each thing that takes time.

        Raises:
            CapsuleError: CAP-E…, and nothing was started.
        """

    def run(self, task: Task, on_poll: Callable[[], None] = lambda: None) -> Exit:
        """Execute a task to its end. Whatever happens, nothing of it is left running.

        SIGINT, SIGTERM and SIGHUP stop the task with SIGTERM and some time to save its state; a
        second one kills it. Its output is in ``output.log`` of the run directory afterwards.

        Args:
            task: What to execute. :meth:`prepare` must have been called, and no other process may
                use the run directory: the caller has just made it, or holds it
                (:func:`capsule.engine.supervise.exclusive`).
            on_poll: Called several times a second while it runs, and once after.

        Raises:
            CapsuleError: CAP-E…, the task could not be started or the engine went away.
        """


@dataclass(frozen=True)
class ChangedEngine:
    """An engine that changes the tasks of another one.

    Attributes:
        engine: Where they are executed.
    """

    engine: Engine

    @property
    def name(self) -> EngineName:
        """See :class:`Engine`."""
        return self.engine.name

    def describe(self) -> dict[str, str]:
        """See :class:`Engine`."""
        return self.engine.describe()

    def check(self, lock: Lock) -> None:
        """See :class:`Engine`."""
        self.engine.check(lock)

    def prepare(self, lock: Lock, image: Image | None, cache: Cache, *, progress: Progress) -> None:
        """See :class:`Engine`."""
        self.engine.prepare(lock, image, cache, progress=progress)
