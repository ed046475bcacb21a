"""What building and running a spec would take, found out without leaving a file behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from capsule.bundle.claims import read_document, result_model
from capsule.bundle.reproducing import what_ran
from capsule.engine.connection import answering_engines, engine_errors
from capsule.experiment import contract
from capsule.experiment.lock import Lock, LockedWheel, without_sources
from capsule.experiment.spec import AtariEnvironment, SourcesSpec, Spec, relaxations
from capsule.experiment.trainers import AlgorithmTrainer, CommandTrainer, ImpalaTrainer
from capsule.host.errors import CapsuleError
from capsule.host.folders import free_bytes
from capsule.host.owner import temporary_folder
from capsule.host.reporter import Progress
from capsule.host.run_directory import WORK
from capsule.host.spec_file import load_spec
from capsule.host.wording import counted
from capsule.image.assembly.assemble import known_identity, reference_of
from capsule.image.assembly.base import shipped_layer
from capsule.image.cache import Cache
from capsule.image.distribution import distribution_of
from capsule.image.lockfile import earlier_lock, lock_path, names_lock, pinned_already, read_lock
from capsule.image.pinning import Pins, capture, find_pins, locked_image, pins_fit
from capsule.image.recipe import recipe_for
from capsule.image.resolution.fetch import locate
from capsule.image.resolution.sources import machine_sources
from capsule.image.resolution.wheels import ResolvedWheel, WheelSearch
from capsule.report.runs import find_runs
from capsule.report.text import bytes_text

if TYPE_CHECKING:
    from docker import DockerClient

_ATARI_FRAME = 84 * 84  # bytes; those of other suites are known only when the run starts
_WHERE = {"cache": "in the cache", "folder": "in local folders", "download": "to download"}

_UNMEASURED = "not estimated: no finished run of this lock was found"

Origin = Literal["the lock file", "the lock file beside the spec", "the package indexes"]


class PlannedPackage(NamedTuple):
    """A package of the image.

    Attributes:
        name: Its name.
        version: Its version.
        place: Where it is: in the cache, in a local folder, or elsewhere.
        bytes: Its size; None if no index states it.
    """

    name: str
    version: str
    place: Literal["cache", "folder", "download"]
    bytes: int | None


class MeasuredRun(NamedTuple):
    """A finished run of a lock.

    Attributes:
        seconds: The time that it took.
        bundle_bytes: The size of its bundle.
    """

    seconds: float
    bundle_bytes: int


class KeptStates(NamedTuple):
    """The states that a run keeps for challenges.

    Attributes:
        number: Their number.
        least_bytes: What the replay memory adds to all of them at least, before compression; 0 if
            this is not known. The tensors of each state come on top.
    """

    number: int
    least_bytes: int


class RunPlan(NamedTuple):
    """The costs of building and running a spec.

    Attributes:
        spec: The spec.
        origin: Where its pins come from.
        lock: The lock; None if its base layer or its data sets are still to be pinned.
        wheels: Python packages.
        debian: Debian packages. Only a base layer that is made here needs them.
        image: Identity of the image; None if it is known only once the image is built.
        engines: The engines that answer, and whether each has the image already.
        free: Free bytes where the cache is, and where runs are written.
        measured: Finished runs of this very lock.
    """

    spec: Spec
    origin: Origin
    lock: Lock | None
    wheels: tuple[PlannedPackage, ...]
    debian: tuple[PlannedPackage, ...]
    image: str | None
    engines: dict[str, bool]
    free: tuple[int, int]
    measured: dict[str, MeasuredRun]

    @property
    def packages(self) -> tuple[PlannedPackage, ...]:
        """All packages."""
        return (*self.wheels, *self.debian)

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        """The plan as rows of label and text."""
        yield "name", self.spec.name
        yield "run", what_ran(self.spec)
        yield "steps", steps_text(self.spec)
        yield "relaxed", ", ".join(relaxations(self.spec)) or "none"
        yield "pins", f"from {self.origin}"
        yield "lock", self.digest or "known once the spec is locked"
        yield "wheels", _places(self.wheels)
        yield "Debian", _places(self.debian)
        for name in self.spec.data or {}:
            yield "data", f"{name}, {self._data(name)}"
        if unknown := [package.name for package in self.packages if package.bytes is None]:
            yield "unknown", f"no index states the size of {', '.join(unknown)}"
        yield "image", self.image or "its identity is known once it is built"
        for name, has in self.engines.items():
            yield name, "has the image" if has else "would load the image"
        if not self.engines:
            yield (
                "engine",
                "no container engine answers; without --engine, runs would be plain processes",
            )
        yield "disk", self._disk()
        if (states := kept_states(self.spec)) is not None:
            yield "states", self._states(states)
        yield "bundle", self._bundle()
        yield "time", self._time()

    @property
    def digest(self) -> str:
        """The digest of the lock, or the empty string."""
        return "" if self.lock is None else self.lock.digest()

    @property
    def downloaded(self) -> int:
        """Bytes to download, as far as they are known."""
        return sum(each.bytes or 0 for each in self.packages if each.place == "download")

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        states = kept_states(self.spec)
        return {
            "schema": "capsule/plan/v1",
            "name": self.spec.name,
            "origin": self.origin,
            "lock": self.digest or None,
            "image": self.image,
            "engines": self.engines,
            "download_bytes": self.downloaded,
            "packages": [package._asdict() for package in self.packages],
            "relaxations": list(relaxations(self.spec)),
            "limits": self.spec.limits.model_dump(),
            "free_bytes": {"cache": self.free[0], "runs": self.free[1]},
            "states": None if states is None else states._asdict(),
            "measured_seconds": {name: run.seconds for name, run in self.measured.items()},
            "measured_bundle_bytes": {
                name: run.bundle_bytes for name, run in self.measured.items()
            },
            "spec": self.spec.model_dump(mode="json", by_alias=True),
        }

    def _data(self, name: str) -> str:
        if self.lock is None or self.lock.data is None:
            return "which is pinned when the spec is locked"
        pin = self.lock.data[name]
        return f"{counted(pin.files, 'file')}, {bytes_text(pin.size)}"

    def _disk(self) -> str:
        download, limit = bytes_text(self.downloaded), bytes_text(self.spec.limits.disk_mb << 20)
        cache, runs = (bytes_text(free) for free in self.free)
        return (
            f"{download} of downloads, the layers made of them, and at most {limit} for the run "
            f"directory (limits.disk_mb); free: {cache} at the cache, {runs} at the runs"
        )

    def _states(self, states: KeptStates) -> str:
        kept = f"{counted(states.number, 'state')} for 'verify --challenge'"
        if not states.least_bytes:
            return f"{kept}; their size is known only from a finished run"
        size = bytes_text(states.least_bytes)
        text = f"{kept}: before compression, at least {size}, and the tensors of each"
        if states.least_bytes > self.spec.limits.disk_mb << 20:
            text += (
                ", which is more than limits.disk_mb allows: raise it or "
                "recording.checkpoint_interval, or set recording.segment_states to false"
            )
        return text

    def _bundle(self) -> str:
        if not self.measured:
            return _UNMEASURED
        name, run = max(self.measured.items(), key=lambda each: each[1].bundle_bytes)
        return f"{bytes_text(run.bundle_bytes)} as measured in {name}"

    def _time(self) -> str:
        if not self.measured:
            return _UNMEASURED
        name, run = min(self.measured.items(), key=lambda each: each[1].seconds)
        return f"{run.seconds:,.0f} s as measured in {name}, possibly on another machine"


def make_plan(
    path: Path, overrides: Sequence[str], cache: Cache, runs: Path, progress: Progress
) -> RunPlan:
    """Plan a spec or a lock. Indexes are asked, and nothing that stays is written.

    Args:
        path: Spec or lock file.
        overrides: Settings of ``--set``.
        cache: The cache, which is only looked into.
        runs: Folder in which runs of the same lock are looked for.
        progress: Told about each stage.

    Raises:
        CapsuleError: The spec is wrong (CAP-S…), its packages cannot be resolved (CAP-L…), or
            there are settings for a lock (CAP-L003).
    """
    if names_lock(path) and overrides:
        raise pinned_already(path)
    with temporary_folder("capsule-plan-") as folder:
        # What resolving writes goes to a temporary cache, which is removed with its folder.
        scratch = Cache(folder / "cache")
        pinned = _from_lock(path) if names_lock(path) else _pin(path, overrides, scratch, progress)
        wheels = _locate(pinned, cache, scratch, progress)
    lock = pinned.lock
    image = None if lock is None else known_identity(lock, cache)
    return RunPlan(
        spec=pinned.spec,
        origin=pinned.origin,
        lock=lock,
        wheels=wheels,
        debian=tuple(
            PlannedPackage(
                each.name,
                each.version,
                "cache" if cache.has(each.sha256) else "download",
                each.size,
            )
            for each in pinned.pins.debian
        ),
        image=image,
        engines=dict(_engines(image)),
        free=(free_bytes(cache.root), free_bytes(runs)),
        measured=dict(_measured(runs, lock)),
    )


class _Pinned(NamedTuple):
    """A spec with its packages."""

    spec: Spec
    sources: SourcesSpec
    origin: Origin
    pins: Pins
    lock: Lock | None


def _from_lock(path: Path) -> _Pinned:
    lock = read_lock(path)
    pins = Pins(lock.image.wheels, lock.image.debian, lock.image.base)
    return _Pinned(lock.spec, SourcesSpec(), "the lock file", pins, lock)


def _pin(path: Path, overrides: Sequence[str], scratch: Cache, progress: Progress) -> _Pinned:
    """Find the pins of a spec as ``capsule lock`` does; the base layer is not made for them."""
    spec, beside = load_spec(path, overrides), lock_path(path)
    recipe = recipe_for(spec)
    previous = earlier_lock(beside)
    kept = previous is not None and pins_fit(previous, spec, recipe)
    project = capture(spec, beside, scratch, progress, [path])
    pins = find_pins(spec, recipe, scratch, previous=previous, progress=progress)
    base, lock = pins.base or shipped_layer(pins.debian, recipe), None
    # Data sets are neither hashed nor downloaded for a plan.
    data = None if previous is None else previous.data
    if base is not None and (data or {}).keys() == (spec.data or {}).keys():
        lock = Lock(
            spec=without_sources(spec),
            image=locked_image(recipe, pins, base),
            project=project,
            data=data,
        )
    origin: Origin = "the lock file beside the spec" if kept else "the package indexes"
    return _Pinned(spec, spec.image.sources, origin, pins, lock)


def _locate(
    pinned: _Pinned, cache: Cache, scratch: Cache, progress: Progress
) -> tuple[PlannedPackage, ...]:
    """Find where each wheel is, and its size."""
    missing = [wheel for wheel in pinned.pins.wheels if not cache.has(wheel.sha256)]
    found: dict[str, ResolvedWheel] = {}
    if missing:
        progress(f"asking the package indexes about {counted(len(missing), 'wheel')}")
        distribution, sources = distribution_of(pinned.spec.image), machine_sources(pinned.sources)
        found = locate(WheelSearch(distribution, sources, scratch, progress), missing)
    planned = []
    for wheel in pinned.pins.wheels:
        if wheel in missing:
            planned.append(_elsewhere(wheel, found.get(wheel.sha256)))
        else:
            planned.append(PlannedPackage(wheel.name, wheel.version, "cache", cache.size(wheel)))
    return tuple(planned)


def _elsewhere(wheel: LockedWheel, found: ResolvedWheel | None) -> PlannedPackage:
    parts = urlsplit("" if found is None else found.url)
    # Wheels in local folders (find_links) have addresses with this scheme.
    if parts.scheme == "file":
        size = Path(unquote(parts.path)).stat().st_size
        return PlannedPackage(wheel.name, wheel.version, "folder", size)
    size_stated = None if found is None else found.size
    return PlannedPackage(wheel.name, wheel.version, "download", size_stated)


def _engines(image: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the container engines that answer, and whether each has the image."""
    for name, client in answering_engines():
        with closing(client), engine_errors(name):
            yield name, image is not None and _has(client, image)


def _has(client: DockerClient, image: str) -> bool:
    """Tell whether an engine has an image by its configuration or its name."""
    from docker.errors import NotFound

    # Engines with a containerd store identify the image by its manifest, so the name is tried, too.
    for name in (image, *(reference_of(recipe, image) for recipe in ("cpu", "cuda"))):
        with suppress(NotFound):
            client.images.get(name)
            return True
    return False


def _measured(runs: Path, lock: Lock | None) -> Iterator[tuple[str, MeasuredRun]]:
    """Yield finished runs of a lock, by their folders."""
    if lock is None or not runs.is_dir():
        return
    for run in find_runs(runs):
        if run.bundle is not None and run.lock is not None and run.lock.digest() == lock.digest():
            path = run.path / WORK / contract.RESULT
            # A finished run is kept as its bundle, and its working folder may have been deleted.
            with suppress(CapsuleError, FileNotFoundError):
                seconds = read_document(path, result_model(lock)).seconds
                yield str(run.path), MeasuredRun(seconds, run.bundle.stat().st_size)


def steps_text(spec: Spec) -> str:
    """Describe how much is to be done, as far as a spec says that."""
    if isinstance(spec.trainer, CommandTrainer):
        return "determined by the program"
    trainer, evaluation = spec.training().trainer, spec.evaluation
    # The final network is evaluated, too, after a shorter interval where necessary.
    evaluations = -(-trainer.total_steps // evaluation.interval) + evaluation.initial
    population = trainer.population if isinstance(trainer, ImpalaTrainer) else None
    each = "" if population is None else f" of each of {counted(population.members, 'member')}"
    return (
        f"{counted(trainer.total_steps, 'agent step')}{each}, "
        f"{counted(evaluations, 'evaluation')} of "
        f"{counted(evaluation.starts, 'start')}, a checkpoint every "
        f"{counted(spec.recording.checkpoint_interval, 'step')}"
    )


def kept_states(spec: Spec) -> KeptStates | None:
    """Return the states that a run keeps; None if it keeps none."""
    if isinstance(spec.trainer, CommandTrainer) or not spec.recording.segment_states:
        return None
    training, interval = spec.training(), spec.recording.checkpoint_interval
    trainer = training.trainer
    population = trainer.population if isinstance(trainer, ImpalaTrainer) else None
    # No segment begins at the last checkpoint, which is that of the last step.
    number = (trainer.total_steps - 1) // interval
    # A state adds the steps since the one before, as far as the replay memory still has them.
    steps = number * min(interval, _remembered_steps(trainer))
    frame = _ATARI_FRAME if isinstance(training.environment, AtariEnvironment) else 0
    members = 1 if population is None else population.members
    return KeptStates(number, members * steps * frame)


def _remembered_steps(trainer: AlgorithmTrainer) -> int:
    """Return how many agent steps the replay memory has at most."""
    if not isinstance(trainer, ImpalaTrainer):
        return trainer.replay_capacity
    return 0 if trainer.replay is None else trainer.replay.capacity * trainer.unroll_length


def _places(packages: Sequence[PlannedPackage]) -> str:
    """Describe how many packages are where, and their sizes."""
    parts = []
    for place, where in _WHERE.items():
        sizes = [each.bytes for each in packages if each.place == place]
        if sizes:
            known = sum(size for size in sizes if size is not None)
            least = "at least " * (None in sizes)
            parts.append(f"{len(sizes)} {where} ({least}{bytes_text(known)})")
    return ", ".join(parts) or "none"
