"""Docker, and Podman through the same API: a run in a container without network or privileges."""

from __future__ import annotations

import grp
import os
import pwd
import re
import resource
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from capsule.engine.bytecode import prepare_bytecode
from capsule.engine.cluster import in_cluster
from capsule.engine.connection import (
    ContainerEngineName,
    component,
    engine_errors,
    engine_name,
    is_rootless,
    remove_container,
)
from capsule.engine.data import Mounts, data_mounts, data_variables
from capsule.engine.gpu import IN_CONTAINERS, about_gpu, gpu_components, gpu_request, no_gpu
from capsule.engine.images import inspected
from capsule.engine.interface import Exit, Task
from capsule.engine.supervise import LOG_BYTES, interrupts, supervise, with_output, write_log
from capsule.experiment import contract
from capsule.experiment.beneath import give_folder
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec
from capsule.host.errors import CapsuleError
from capsule.host.owner import is_gone, is_of_earlier_boot, this_process
from capsule.host.reporter import Progress
from capsule.image.assembly.assemble import TASK_USER, Image, archive_chunks
from capsule.image.cache import Cache
from capsule.image.distribution import PREFIX
from capsule.image.seccomp import seccomp_option
from capsule.machine.devices import devices_for

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image as EngineImage

MOUNT = contract.RUN_FOLDER  # where a task sees its run directory

PODMAN_PROCESSES = 32_768

_LABEL = "capsule.run"
_OWNER = "capsule.owner"
_NOT_RUNNING = ("created", "exited", "dead")
# How engines name the init that is missing. Debian's Podman only recommends its catatonit.
_NO_INIT = ("docker-init", "catatonit", "container-init", "init binary")
_ENDING_SECONDS = 5  # for how long an engine may look up a process that has just ended

Answer = TypeVar("Answer")


class ContainerEngine:
    """An engine behind the Docker API."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._version: dict[str, Any] = client.version()
        self._info: dict[str, Any] = client.info()
        self._image: str | None = None
        self._bytecode: Mounts = []
        weakref.finalize(self, client.close)  # else its sockets are reported as leaked

    @property
    def name(self) -> ContainerEngineName:
        """The engine that answers at the API."""
        return engine_name(self._version)

    def describe(self) -> dict[str, str]:
        """Return the engine's versions and the parts of the host that it runs containers with."""
        return {
            "name": self.name,
            "version": component(self._version)["Version"],
            "api": self._version["ApiVersion"],
            "runtime": str(self._info.get("DefaultRuntime") or "unknown"),
            "storage-driver": str(self._info.get("Driver") or "unknown"),
            "cgroup": str(self._info.get("CgroupVersion") or "unknown"),
            "rootless": str(is_rootless(self._info)).lower(),
        }

    @property
    def unlimited(self) -> str | None:
        """What users are told where the engine cannot enforce limits; None where it can."""
        if not (is_rootless(self._info) and str(self._info.get("CgroupVersion")) == "1"):
            return None
        return (
            f"engine {self.name}: memory and processes are not limited, because without root it "
            "cannot use control groups of version 1"
        )

    def components(self) -> dict[str, str]:
        """Return the versions of runc and of NVIDIA's toolkit, where there is such a thing."""
        return gpu_components(self._version)

    def check(self, lock: Lock) -> None:
        """See :class:`capsule.engine.interface.Engine`."""
        if lock.spec.accelerator.kind == "cuda":
            gpu_request(self._version, self._info, devices_for(lock.spec.accelerator))

    def prepare(
        self,
        lock: Lock,
        image: Image | None,
        cache: Cache,
        *,
        progress: Progress,
    ) -> None:
        """Load the image if the engine lacks it, and check that the engine sees what was locked.

        Raises:
            CapsuleError: CAP-E004 the engine shows another image than was loaded, CAP-E006 it
                rejects the image or went away, CAP-E… as :func:`prepare_bytecode` raises it.
        """
        if image is None:
            raise ValueError(f"{self.name} needs an image")
        if self.unlimited is not None:
            progress(self.unlimited)
        with engine_errors(self.name):
            found = self._find(image)
            if found is None:
                self._load(image, progress)
                found = self._find(image)
        self._image = _checked_id(found, image, self.name)
        self._bytecode = prepare_bytecode(self, lock, image, cache, progress)

    def run(self, task: Task, on_poll: Callable[[], None] = lambda: None) -> Exit:
        """Execute a task in a container of the prepared image, by the image's id.

        The container has no network, a read-only root, no capabilities, no new privileges, limited
        memory and processes, and a private ``/tmp``. A task with a cluster has a network
        (:class:`Task`). The container's user is the caller; when the caller is root it is
        :func:`task_user`, to whom the run directory is given.

        Raises:
            CapsuleError: CAP-E003 the engine has no GPU to give, CAP-E005 the container does not
                start, CAP-E006 the engine went away, CAP-E007 and CAP-E009 (``supervise``),
                CAP-E041 the task left its folder so that no log can be written there, CAP-E042
                others can enter the folder around the run directory, CAP-X003 the disk is full or
                fails.
        """
        if self._image is None:
            raise RuntimeError("prepare() was not called")
        # From here on a signal is only counted, so that no container is ever left behind.
        with (
            interrupts() as interruptions,
            engine_errors(self.name),
            data_mounts(task.data) as mounts,
        ):
            self._remove_leftovers(task.run_directory)
            plain = self._settings(task, [*self._bytecode, *mounts])
            worker = partial(self._start, gpu=False)
            with in_cluster(task.cluster, plain, self._client, worker) as settings:
                container = self._start(settings, gpu=bool(task.gpus))
                with _collected(container, task.run_directory) as running:
                    _about(container.reload)
                    # The image is what the engine says that it started; the ledger of the run
                    # relies on it.
                    image = str(container.attrs["Image"])
                    ended = supervise(running, task, interruptions, on_poll)
        return with_output(replace(ended, image=image), running.unkept)

    def _find(self, image: Image) -> EngineImage | None:
        from docker.errors import ImageNotFound

        # Never by name, since any archive that is loaded can take a name over.
        for digest in (image.config_digest, image.manifest_digest):
            with suppress(ImageNotFound):
                return self._client.images.get(digest)
        return None

    def _load(self, image: Image, progress: Progress) -> None:
        """Send the image without the layers that the engine has; whole if it wants them after all.

        Engines keep layers by chain: one counts as present only on top of the same layers.
        """
        from docker.errors import APIError, ImageLoadError

        present = self._present_layers(image)
        size = sum(layer.size for layer in image.layers[len(present) :])
        progress(f"loading the image into {self.name} ({size >> 20} MiB)")
        try:
            self._client.images.load(archive_chunks(image, skip=present))
        except (APIError, ImageLoadError):
            # With nothing left out, the same request would fail again. Otherwise, the image that
            # had the missing layers may have been removed meanwhile.
            if not present:
                raise
            self._client.images.load(archive_chunks(image))

    def _present_layers(self, image: Image) -> list[str]:
        """Return the longest run of the image's layers, from the bottom, that the engine has."""
        wanted = [layer.diff_id for layer in image.layers]
        longest = 0
        for facts in inspected(self._client):
            found = facts["RootFS"].get("Layers") or []
            common = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, found, strict=False))
            longest = max(longest, sum(1 for _ in common))
        return wanted[:longest]

    def _remove_leftovers(self, run_directory: Path) -> None:
        """Remove containers of a Capsule that was killed; the caller holds the directory."""
        label = f"{_LABEL}={run_label(run_directory)}"
        for container in self._containers(label):
            remove_container(container)
        # After the containers, because an engine does not remove a network that is in use.
        for network in self._client.networks.list(filters={"label": label}):
            network.remove()

    def remove_abandoned(self, *, progress: Progress) -> None:
        """Remove what a Capsule of this user left that was killed: containers, then networks.

        Args:
            progress: Told about each, and whether it cannot be removed.

        Raises:
            CapsuleError: CAP-E006, the engine went away.
        """
        from docker.errors import APIError

        with engine_errors(self.name):
            for left in self._abandoned():
                try:
                    left()
                    progress("removed the remains of a killed Capsule process")
                except APIError as error:  # another Capsule may be removing it
                    progress(f"cannot remove the remains of a killed Capsule: {error.explanation}")

    def count_abandoned(self) -> int:
        """Return how many containers and networks :meth:`remove_abandoned` would remove.

        Raises:
            CapsuleError: CAP-E006, the engine went away.
        """
        with engine_errors(self.name):
            return len(self._abandoned())

    def _abandoned(self) -> list[Callable[[], None]]:
        """Return the removal of each container and network that a killed Capsule left."""
        containers = [each for each in self._containers(_OWNER) if _is_abandoned(each)]
        # The engine does not remove a network with a running container.
        networks = [
            network
            for network in self._client.networks.list(filters={"label": _OWNER})
            if is_gone(owner := (network.attrs.get("Labels") or {}).get(_OWNER, ""))
            or is_of_earlier_boot(owner)
        ]
        removals = [partial(container.remove, force=True, v=True) for container in containers]
        return [*removals, *(network.remove for network in networks)]

    def _containers(self, label: str) -> list[Container]:
        """Return the containers that have a label."""
        # The SDK inspects each container after listing them all. By then, one may be gone or end.
        filters, found = {"label": label}, self._client.containers
        return _about(partial(found.list, all=True, filters=filters, ignore_removed=True))

    def _settings(self, task: Task, mounts: Mounts) -> dict[str, Any]:
        from docker.types import LogConfig, Mount, Ulimit

        limits = task.limits
        temporary = f"{limits.temporary_mb}m"
        run_directory = task.run_directory.resolve()
        settings: dict[str, Any] = {
            "image": self._image,
            "entrypoint": task.command(run_directory=MOUNT, prefix=PREFIX),
            "command": [],
            "environment": {**task.environment, **data_variables(task.data)},
            "labels": {_LABEL: run_label(run_directory), _OWNER: this_process()},
            # Otherwise engines choose a random name, which a program could print or hash.
            "hostname": task.hostname or "capsule",
            "working_dir": "/tmp",  # noqa: S108 - the container's own
            "network_mode": "none",
            "init": task.cluster is not None,
            "ipc_mode": "private",
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges", seccomp_option(self.name)],
            "mem_limit": f"{limits.memory_mb}m",
            # The sum of memory and swap. As much as mem_limit means no swap.
            "memswap_limit": f"{limits.memory_mb}m",
            "pids_limit": limits.processes,
            "shm_size": temporary,
            # With its mode, because some runtimes give a tmpfs that of the folder which it covers.
            "tmpfs": {"/tmp": f"rw,nosuid,nodev,noexec,size={temporary},mode=1777"},  # noqa: S108
            # Unlike a volume FROM:TO, a mount fails where the engine does not see the folder,
            # instead of making an empty one, and allows a colon in the path.
            "mounts": [
                Mount(MOUNT, _source(run_directory), type="bind"),
                *(Mount(to, _source(path), type="bind", read_only=True) for path, to in mounts),
            ],
            "ulimits": [
                Ulimit(name=name, soft=limit, hard=limit)
                for name, limit in resource_limits(limits).items()
            ],
            # The engine keeps the log on its own disk, where no limit of the run directory would
            # notice it.
            "log_config": LogConfig(
                type=LogConfig.types.JSON,
                config={"max-size": str(LOG_BYTES), "max-file": "1"},
            ),
            **self._user(run_directory),
        }
        if task.processors is not None:
            settings["cpuset_cpus"] = task.processors
        if task.gpus:
            settings["device_requests"] = [gpu_request(self._version, self._info, task.gpus)]
            settings["environment"] |= IN_CONTAINERS
        return settings

    def _user(self, run_directory: Path) -> dict[str, str]:
        """Choose a user that is not root on this machine and may write the run directory."""
        if is_rootless(self._info):
            # Inside a rootless engine's user namespace the caller is root, without any power over
            # this machine; every other id has no access to the run directory.
            return {"user": "0:0"}
        if os.getuid() != 0:
            return {"user": f"{os.getuid()}:{os.getgid()}"}
        user = task_user()
        require_closed_parent(run_directory)
        give_folder(run_directory, user)
        return {"user": f"{user}:{user}"}

    def _start(self, settings: dict[str, Any], *, gpu: bool) -> Container:
        """Start a container. Its first process, the launcher, adopts orphans and passes signals on.

        Those of a cluster start under an init instead, if the engine has one: Ray does neither.
        """
        from docker.errors import APIError

        try:
            try:
                return self._start_once(settings)
            except APIError as error:
                if not any(name in str(error) for name in _NO_INIT):
                    raise
                return self._start_once({**settings, "init": False})
        except APIError as error:
            if gpu and about_gpu(str(error)):
                raise no_gpu(f"{self.name} reports: {error.explanation}") from error
            raise CapsuleError(
                "CAP-E005",
                f"{self.name} cannot start the container: {error.explanation}",
                fix="See the engine's own log. If it is on another machine, it cannot see the run "
                "directory.",
            ) from error

    def _start_once(self, settings: dict[str, Any]) -> Container:
        # Not with auto_remove, which would take the output away before it is collected.
        container = self._client.containers.create(**settings)
        try:
            container.start()
        except BaseException:
            container.remove(force=True, v=True)
            raise
        return container


def _source(path: Path) -> str:
    """Return a path of this machine as the engine's API takes it, which is UTF-8.

    Raises:
        CapsuleError: CAP-E005, the path has other bytes, which the engine would replace.
    """
    source = str(path)
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise CapsuleError(
            "CAP-E005",
            f"the path {source!r} contains bytes that are not UTF-8, and cannot be mounted in a "
            "container",
            fix="Rename the folder, name another one with --output or --data, or use --engine "
            "bwrap.",
        ) from error
    return source


class _RunningContainer:
    """A started container (:class:`capsule.engine.supervise.Running`).

    Attributes:
        unkept: Why its output could not be kept, if so. Set after its end.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self.unkept: CapsuleError | None = None
        self._ended: SimpleQueue[int | Exception] = SimpleQueue()
        # Waiting for the engine's answer costs nothing, unlike asking it several times a second.
        # The request has no time limit, so the thread must not keep this process alive.
        threading.Thread(target=self._await_end, daemon=True).start()

    def wait(self, seconds: float) -> int | None:
        try:
            ended = self._ended.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(ended, Exception):
            raise ended
        return ended

    def terminate(self) -> None:
        self._signal("SIGTERM")

    def kill(self) -> None:
        self._signal("SIGKILL")

    def exceeds_memory(self) -> bool:
        return False  # the kernel sees to it

    def was_out_of_memory(self) -> str | None:
        _about(self._container.reload)
        killed = self._container.attrs["State"].get("OOMKilled")
        return "the engine reports OOMKilled" if killed else None

    def keep_output(self, path: Path) -> None:
        """Write the output of the container, which has ended, to a file."""
        # To follow the log might hang even now (docker/docker-py#3084).
        chunks = _about(partial(self._container.logs, stream=True, follow=False))
        try:
            write_log(chunks, path)
        except CapsuleError as error:
            self.unkept = error

    def _await_end(self) -> None:
        try:
            ended = _about(partial(self._container.wait, timeout=None))
            self._ended.put(int(ended["StatusCode"]))
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread
            self._ended.put(error)

    def _signal(self, name: str) -> None:
        from docker.errors import APIError

        try:
            # If the container has just ended by itself, the engine rejects the signal.
            self._container.kill(signal=name)
        except APIError:
            _about(self._container.reload)
            if self._container.status == "running":
                raise


def resource_limits(limits: LimitsSpec) -> dict[str, int]:
    """Return the resource limits of a task's processes."""
    # Holes cost a file nothing but make it as long as it says, for later readers.
    longest = max(limits.disk_mb, limits.memory_mb, limits.temporary_mb) << 20
    # The number of processes is the cgroup's business, but unless it is told a number Podman sets
    # more than a caller without privileges may have; its service has no more than this itself.
    _, allowed = resource.getrlimit(resource.RLIMIT_NPROC)
    processes = PODMAN_PROCESSES if allowed == resource.RLIM_INFINITY else allowed
    return {
        "core": 0,
        "fsize": longest,
        "nofile": 4096,
        "nproc": min(processes, PODMAN_PROCESSES),
    }


def _is_abandoned(container: Container) -> bool:
    """Tell whether the Capsule process that made a container has ended."""
    owner = container.labels.get(_OWNER, "")
    # No container of an earlier boot runs, unless the owner is of another machine, a copy of this
    # one, that uses the same engine.
    return is_gone(owner) or (is_of_earlier_boot(owner) and container.status in _NOT_RUNNING)


def run_label(run_directory: Path) -> str:
    """Return the label value by which a run directory's container is found again."""
    path = run_directory.resolve()
    return f"{path.parent.name}/{path.name}-{sha256_hex(os.fsencode(path))[:16]}"


def _about(ask: Callable[[], Answer]) -> Answer:
    """Ask the engine about a container, and ask again if the container's process ended meanwhile.

    Podman before 4.4 looks such a process up and answers with the error of that
    (https://github.com/containers/podman/issues/16383).
    """
    from docker.errors import APIError

    for _ in range(_ENDING_SECONDS * 10):
        try:
            return ask()
        except APIError as error:
            if not re.search(r"/proc/\d+/cgroup", str(error)):
                raise
            time.sleep(0.1)
    return ask()


def _checked_id(found: EngineImage | None, image: Image, engine: str) -> str:
    """Return the engine's id of the image, if it is exactly the one that was assembled.

    Engines name an image by its configuration or, with a containerd store, by its manifest. The
    layers that they unpacked must be the assembled ones in either case.
    """
    layers = [layer.diff_id for layer in image.layers]
    if found is not None and found.attrs["RootFS"].get("Layers") == layers:
        identity = str(found.id)
        if identity in (image.config_digest, image.manifest_digest):
            return identity
    raise CapsuleError(
        "CAP-E004",
        f"{engine} does not contain the image {image.config_digest} as it was loaded"
        + ("" if found is None else f": it has {found.id} with {found.attrs['RootFS']}"),
        fix=f"Remove the image {image.reference} from {engine} and build again. If the error "
        f"persists, the image store of {engine} is damaged.",
    )


def task_user() -> int:
    """Return the uid and gid of tasks that root starts: the image's, or the next lower free number.

    A person or a service of this machine with the same number could write into the run directory.
    """
    for number in range(TASK_USER, 0, -1):
        with suppress(KeyError):
            pwd.getpwuid(number)
            continue
        with suppress(KeyError):
            grp.getgrgid(number)
            continue
        return number
    raise RuntimeError("every uid has an account")


def require_closed_parent(run_directory: Path) -> None:
    """Check that only root can enter the folder around a run directory.

    The run directory itself will belong to a user without privileges, who must not reach it from
    outside the container.

    Raises:
        CapsuleError: CAP-E042, others can enter it.
    """
    parent = run_directory.resolve().parent
    facts = parent.stat()
    if facts.st_uid == 0 and not facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    raise CapsuleError(
        "CAP-E042",
        f"{parent} has mode {stat.S_IMODE(facts.st_mode):04o} and owner {facts.st_uid}, so others "
        "could enter it while the run writes there",
        fix=f"Give it to root alone: chown root {parent} && chmod 700 {parent}.",
    )


@contextmanager
def _collected(container: Container, run_directory: Path) -> Iterator[_RunningContainer]:
    """Watch a container for a block; afterwards its output is kept, and it is removed."""
    running = _RunningContainer(container)
    with (
        _afterwards(partial(container.remove, force=True, v=True)),
        _afterwards(partial(running.keep_output, run_directory / contract.LOG)),
    ):
        yield running


@contextmanager
def _afterwards(action: Callable[[], object]) -> Iterator[None]:
    """Take an action after a block. Its error does not replace one of the block, the true cause."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            action()
        raise
    action()
