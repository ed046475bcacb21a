"""The study lock: it lists every member with the digest of the member's own lock.

The digest of the study lock identifies the study. Members share the pins of one image, unless a
group changes the image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from capsule.experiment.evaluation import StartSet
from capsule.experiment.fields import DigestedModel, Model, Name, NonNegativeInt, added
from capsule.experiment.lock import (
    Lock,
    LockedData,
    LockedImage,
    LockedProject,
    Sha256,
    without_sources,
)
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError
from capsule.host.spec_file import read_start_set
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason
from capsule.image.cache import Cache
from capsule.image.data.capture import capture_data
from capsule.image.lockfile import read_lock
from capsule.image.pinning import capture, resolve
from capsule.study.members import PlannedMember, plan_members
from capsule.study.spec import StudySpec
from capsule.study.study_file import START_SET, StudyFile
from capsule.study.unset_fields import check_unset_fields

PLACES = frozenset(
    {"code", "data", "image.sources"}
)  # where things came from, which locks do not have
STUDY_LOCK = ".study.lock.json"
STARTS = ".starts.json"
# A study's bundle has its lock, so this is the limit of a bundle's documents (capsule.bundle).
MAX_LOCK_BYTES = 64 << 20
# The file of a study has at most 1 MiB. Its settings are compared with the spec of each member.
MAX_STUDY_BYTES = 2 << 20


class SharedPins(Model):
    """The pins that are common to all members with one image."""

    image: LockedImage
    project: LockedProject | None = Field(description="The source tree of a program.")
    data: dict[Name, LockedData] | None = added(absent=None, description="The data sets.")

    def lock(self, spec: Spec) -> Lock:
        """Return the lock that a spec without sources has with these pins."""
        return Lock(spec=spec, image=self.image, project=self.project, data=self.data)


class LockedMember(Model):
    """One run of the study."""

    name: str = Field(description="Name of the member: GROUP.RUN or GROUP.SETTING.RUN.")
    spec: NonNegativeInt = Field(description="Index of its spec in 'specs'.")
    pins: NonNegativeInt = Field(description="Index of its pins in 'pins'.")
    lock: Sha256 = Field(description="Digest of the lock that the spec and the pins make.")


class StudyLock(DigestedModel):
    """A locked study."""

    schema_id: Literal["capsule/study-lock/v1"] = Field("capsule/study-lock/v1", alias="schema")
    study: StudySpec = Field(description="The study; its base is reduced to a file name.")
    pins: Annotated[tuple[SharedPins, ...], Field(min_length=1)]
    specs: Annotated[tuple[Spec, ...], Field(min_length=1)] = Field(
        description="The specs of all members, each of them once."
    )
    members: Annotated[tuple[LockedMember, ...], Field(min_length=1)] = Field(
        description="The members in the order of the study: by group, setting and run."
    )

    @model_validator(mode="after")
    def _consistent(self) -> StudyLock:
        if len(self.study.document()) > MAX_STUDY_BYTES:
            raise ValueError(f"study: more than {MAX_STUDY_BYTES >> 20} MiB")
        planned, names = self.planned, [member.name for member in self.members]
        # Canonical JSON sorts the keys of 'study', so the list of members determines the order of
        # the groups. A group without a member in that list sorts first, and the comparison fails.
        groups = {name: self.groups.index(name) for name in self.groups}
        ordered = sorted(planned.values(), key=lambda member: groups.get(member.group, -1))
        if [member.name for member in ordered] != names:
            raise ValueError("members are not those of the study")
        for member in self.members:
            if member.spec >= len(self.specs) or member.pins >= len(self.pins):
                raise ValueError(f"members: {member.name} names a spec or pins that do not exist")
            _check_settings(planned[member.name], self.specs[member.spec])
        # Members with equal specs and pins have the same lock, which is digested only once.
        distinct = {(member.spec, member.pins): member for member in self.members}
        digests = {key: self.lock_of(member).digest() for key, member in distinct.items()}
        for member in self.members:
            if digests[member.spec, member.pins] != member.lock:
                raise ValueError(f"members: the lock of {member.name} has another digest")
        chosen = ((planned[member.name], member.spec, member.pins) for member in self.members)
        check_unset_fields(chosen, self.specs, ranked=self.study.starts is not None)
        return self

    def lock_of(self, member: LockedMember) -> Lock:
        """Return the lock of a member: an ordinary run's."""
        return self.pins[member.pins].lock(self.specs[member.spec])

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups, in the order of their members; 'study' has them in no order."""
        return tuple(dict.fromkeys(member.name.partition(".")[0] for member in self.members))

    @cached_property
    def planned(self) -> dict[str, PlannedMember]:
        """The group, setting and run of each member, by its name."""
        return {member.name: member for member in plan_members(self.study)}


def _check_settings(member: PlannedMember, spec: Spec) -> None:
    """Check that a spec has the settings that the study gives its member."""
    wanted: dict[str, Any] = {}
    for field, value in member.settings:  # the last one counts
        *sections, last = field.split(".")
        section = wanted
        for key in sections:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        # A copy is set, because a later setting may be a field of it, and the study stays as it is.
        section[last] = copy.deepcopy(value)
    _check_values(member.name, spec.model_dump(mode="json", by_alias=True), wanted, "")


def _check_values(name: str, found: Any, wanted: dict[str, Any], prefix: str) -> None:
    """Check the values that were set; a section has further fields, by their defaults."""
    for key, value in wanted.items():
        field = prefix + key
        each = found.get(key) if isinstance(found, dict) else None
        # Where the study names a file of start sequences, the spec has the content of that file.
        if field in PLACES or (field == START_SET and isinstance(value, str)):
            continue
        if isinstance(value, dict) and isinstance(each, dict):
            _check_values(name, each, value, f"{field}.")
        elif each != value:
            raise ValueError(f"members: {name} has {field} {each!r}, not {value!r}")


def lock_study(
    file: StudyFile,
    starts: StartSet | None,
    previous: StudyLock | None,
    cache: Cache,
    progress: Callable[[str], None],
    *,
    refresh: bool = False,
) -> StudyLock:
    """Resolve a study to its members.

    Pins are kept while they fit: those of ``previous``, or else those of the lock file beside the
    base spec, which is read and never written.

    Args:
        file: The study and its base.
        starts: The start sequences of all members, if the study has one run rank them.
        previous: An earlier lock of the study.
        cache: As of :func:`capsule.image.pinning.resolve`.
        progress: Told about each stage.
        refresh: Keep no pins, but resolve all packages again.

    Raises:
        CapsuleError: A setting gives no valid spec (CAP-S…, CAP-Y…), or a pin cannot be resolved
            (CAP-L…).
    """
    earlier = [] if refresh else list(_locks(previous, file.base_lock))
    resolver = _Resolver(file, earlier, cache, progress)
    specs: dict[str, Spec] = {}
    numbers: dict[str, int] = {}
    digests: dict[tuple[int, int], str] = {}
    members = []
    for member, spec in file.member_specs(starts):
        place, pinned = resolver.place(spec), without_sources(spec)
        spec_digest = pinned.digest()
        specs.setdefault(spec_digest, pinned)
        number = numbers.setdefault(spec_digest, len(numbers))
        if (number, place) not in digests:
            digests[number, place] = resolver.pins[place].lock(pinned).digest()
        digest = digests[number, place]
        members.append(LockedMember(name=member.name, spec=number, pins=place, lock=digest))
    return StudyLock(
        # A lock holds no local path, so copies of a study in different folders have one digest.
        study=file.study.model_copy(update={"base": Path(file.study.base).name}),
        pins=tuple(resolver.pins),
        specs=tuple(specs.values()),
        members=tuple(members),
    )


def lock_starts(
    file: StudyFile, previous: StudyLock | None, cache: Cache, progress: Callable[[str], None]
) -> Lock:
    """Return the lock of the run that ranks the start sequences of a study.

    Raises:
        CapsuleError: CAP-Y002, the study has none; or as :func:`lock_study`.
    """
    spec = file.starts_spec()
    earlier = list(_locks(previous, file.base_lock))
    pins = _Resolver(file, earlier, cache, progress).pins_of(spec)
    return pins.lock(without_sources(spec))


class _Resolver:
    """Resolves each image and source tree of a study once."""

    def __init__(
        self,
        file: StudyFile,
        earlier: Sequence[Lock],
        cache: Cache,
        progress: Callable[[str], None],
    ) -> None:
        self._file, self._earlier = file, earlier
        self._cache, self._progress = cache, progress
        self._places: dict[str, int] = {}
        self.pins: list[SharedPins] = []

    def place(self, spec: Spec) -> int:
        """Return the place of a spec's pins, resolving them if they are new."""
        # Sources and paths are part of the key, although locks do not have them: groups with
        # different source trees, for example, have pins of their own.
        key = spec.model_dump_json(include={"image", "accelerator", "code", "data"})
        if key not in self._places:
            self._places[key] = len(self.pins)
            self.pins.append(self.pins_of(spec))
        return self._places[key]

    def pins_of(self, spec: Spec) -> SharedPins:
        """Resolve the pins of a spec, keeping earlier ones that fit."""
        # These files are not part of the source tree: each further group of the study would
        # otherwise give every member another lock.
        base = self._file.base_lock.parent / Path(self._file.study.base).name
        own = (self._file.path, self._file.beside(STARTS), base)
        project = capture(spec, self._file.base_lock, self._cache, self._progress, own)
        folder, earlier = base.parent, self._earlier
        # Groups may have other data under one name, so that a new group is no change of an old one.
        data = capture_data(
            spec.data, folder, self._cache, earlier, self._progress, may_change=True
        )
        pinned = without_sources(spec)
        wanted = (pinned.image, pinned.accelerator)
        previous = next(
            (lock for lock in earlier if (lock.spec.image, lock.spec.accelerator) == wanted),
            None,
        )
        lock = resolve(
            spec,
            self._cache,
            project=project,
            data=data,
            previous=previous,
            progress=self._progress,
        )
        return SharedPins(image=lock.image, project=lock.project, data=lock.data)


def _locks(previous: StudyLock | None, base_lock: Path) -> Iterable[Lock]:
    """Yield the locks whose pins may be kept, the study's own first."""
    if previous is not None:
        yield from (previous.lock_of(member) for member in previous.members)
    if base_lock.exists():
        yield read_lock(base_lock)


def earlier_lock(file: StudyFile) -> StudyLock | None:
    """Return the lock beside a study file; None if there is none.

    Raises:
        CapsuleError: CAP-Y003 of :func:`read_study_lock`.
    """
    path = file.beside(STUDY_LOCK)
    return read_study_lock(path) if path.exists() else None


def read_study_lock(path: Path) -> StudyLock:
    """Read the lock of a study.

    Raises:
        CapsuleError: CAP-Y003, it cannot be read, is not a study's lock, or was edited.
    """
    fix = "Delete it and run 'capsule study lock' again, or restore it from version control."
    try:
        with path.open("rb") as stream:
            return StudyLock.parse(read_whole(stream, MAX_LOCK_BYTES).removesuffix(b"\n"))
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            fix = "Name an existing lock of a study, or make one with 'capsule study lock'."
        raise CapsuleError("CAP-Y003", f"study lock {path}: {error.strerror}", fix=fix) from error
    except (CapsuleError, ValueError) as error:  # CAP-Y001 of its study
        message = f"study lock {path}: {first_reason(error)}"
        raise CapsuleError("CAP-Y003", message, fix=fix) from error


def find_starts(file: StudyFile) -> StartSet | None:
    """Return the start set that was made for a study; None if the study does not ask for one.

    Raises:
        CapsuleError: CAP-Y004, it was not made yet; CAP-S010, it is not a start set.
    """
    if file.study.starts is None:
        return None
    path = file.beside(STARTS)
    if not path.exists():
        raise CapsuleError(
            "CAP-Y004",
            f"the start sequences of all members of study {file.study.name} are ranked by one run, "
            f"and {path}, which contains them, does not exist",
            fix=f"Run 'capsule study starts {file.path} --key KEY' once, and commit that file.",
        )
    return read_start_set(path)
