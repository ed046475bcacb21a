"""The members of a run's bundle: their names, and which of them a run has.

Members follow from the lock and the claims, so that a reader can reject whatever else is in a
bundle. :mod:`capsule.bundle.packing` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from capsule.bundle.archive import MAX_NAME, NAME_PATTERN
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    Claims,
    ImageClaim,
    Observations,
    ProgramClaims,
    TrainingClaims,
    claims_model,
    has_population,
    records_schedule,
)
from capsule.bundle.crate import CRATE
from capsule.bundle.manifest import MediaType, Role
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.experiment.mechanisms import Mechanisms
from capsule.image.assembly.assemble import Image

CLAIMS = "claims.json"
OBSERVATIONS = "observations.json"
GUIDE = "REPRODUCING.md"
LOCK = "spec/lock.json"
JOB = "spec/job.json"
IMAGE_CONFIG = "image/config.json"
IMAGE_MANIFEST = "image/manifest.json"
IMAGE_SBOM = "image/sbom.cdx.json"
IMAGE_ARCHIVE = "image/image.tar.zst"
LAYER = "image/layer-{name}.tar.zst"
MACHINE_SBOM = "machine/sbom.cdx.json"
STREAMS = "profiles/streams.json"
ENTROPY_REPORT = "profiles/entropy.json"
ENTROPY_PROFILE = "profiles/entropy.profile"
LEDGER = "profiles/ledger.json"
SCHEDULE = "profiles/schedule.log"
ARRIVALS = "profiles/arrivals.json"
POPULATION = "run/population.json"
SECCOMP = "image/seccomp.json"
PROJECT_DIFF = "spec/project.diff"
DATA_LISTING = "data/{name}.json"
DATA_ARCHIVE = "data/{name}.tar.zst"
WORKSPACE = "workspace/"  # outputs of a program, under their own names
BY_DIGEST = "outputs/"  # those whose names an archive cannot hold
STANDARD_OUTPUT = "run/stdout.txt"
RUN = "run/"
CHECKPOINT = "checkpoints/"
STATES = "states/"

# Debian's mirrors drop old packages, and another Capsule has other training code. Wheels are
# fetched again by their digests.
EMBEDDED_LAYERS = ("base", "code")

# By what factor a layer may have shrunk, and up to what size that does not matter. Trees of small
# files reach 20; a bomb of zeros has 30,000.
MAX_RATIO = 100
ALWAYS_UNPACKED_BYTES = 64 << 20

Kind = tuple[Role, MediaType]
_BINARY = "application/octet-stream"
_JSON = "application/json"
_LINES = "application/jsonl"
_TEXT = "text/plain"
_ZSTD = "application/zstd"
_CYCLONEDX = "application/vnd.cyclonedx+json"


@dataclass(frozen=True)
class RecordedRun:
    """The run of an open bundle."""

    bundle: OpenedBundle
    lock: Lock
    claims: TrainingClaims | ProgramClaims

    @classmethod
    def read(cls, bundle: OpenedBundle) -> Self:
        """Read the lock and the claims of a bundle.

        Raises:
            CapsuleError: CAP-B144, CAP-B145, CAP-B160 of :meth:`OpenedBundle.read`.
        """
        lock = bundle.read(LOCK, Lock)
        return cls(bundle, lock, bundle.read(CLAIMS, claims_model(lock)))

    def observations(self) -> Observations:
        """Return what the run observed."""
        return self.bundle.read(OBSERVATIONS, Observations)

    def checkpoints(self) -> tuple[contract.Checkpoint, ...]:
        """Return the checkpoints of a training, with the digests of their tensors."""
        return self.bundle.read(
            RUN + contract.CHECKPOINT_INDEX, contract.CheckpointIndex
        ).checkpoints

    def compilers(self) -> str | None:
        """Return the imported packages whose functions depend on the processor, or None."""
        return self.bundle.read(RUN + contract.MECHANISMS, Mechanisms).compilers

    @property
    def trace(self) -> Path:
        """The trace of a training."""
        return self.bundle.member(RUN + contract.TRACE)

    @property
    def schedule(self) -> Path | None:
        """The schedule log of a training; None unless one was recorded."""
        return self.bundle.member(SCHEDULE) if records_schedule(self.lock) else None


def members_of(lock: Lock, claims: Claims, *, embedded: bool, with_data: bool) -> dict[str, Kind]:
    """Return every member that the bundle of a run has, with its role and media type.

    Args:
        lock: What was run.
        claims: What the run claims.
        embedded: Whether the whole image is carried along.
        with_data: Whether the data sets are.
    """
    members: dict[str, Kind] = {
        CRATE: ("guide", "application/ld+json"),
        GUIDE: ("guide", "text/markdown"),
        CLAIMS: ("claims", _JSON),
        OBSERVATIONS: ("observations", _JSON),
        LOCK: ("lock", _JSON),
        JOB: ("job", _JSON),
        IMAGE_SBOM: ("sbom", _CYCLONEDX),
        MACHINE_SBOM: ("sbom", _CYCLONEDX),
        RUN + contract.RUNTIME: ("run", _JSON),
        RUN + contract.MECHANISMS: ("run", _JSON),
        RUN + contract.RESULT: ("run", _JSON),
        RUN + contract.EVENTS: ("run", _LINES),
        RUN + contract.LOG: ("log", _TEXT),
        ENTROPY_REPORT: ("profile", _JSON),
        LEDGER: ("profile", _JSON),
        **dict(_image_members(lock, claims, embedded=embedded)),
        **dict(_data_members(lock, embedded=with_data)),
    }
    if claims.entropy_profile is not None:
        members[ENTROPY_PROFILE] = ("profile", _BINARY)
    if isinstance(claims, ProgramClaims):
        members |= dict(_program_members(claims))
    elif isinstance(claims, TrainingClaims):
        members |= dict(_training_members(lock, claims))
    return members


def _image_members(lock: Lock, claims: Claims, *, embedded: bool) -> Iterator[tuple[str, Kind]]:
    if claims.image is not None:
        yield SECCOMP, ("image", _JSON)
        yield IMAGE_CONFIG, ("image", "application/vnd.oci.image.config.v1+json")
        yield IMAGE_MANIFEST, ("image", "application/vnd.oci.image.manifest.v1+json")
        for name in EMBEDDED_LAYERS:
            yield LAYER.format(name=name), ("image", _ZSTD)
        if embedded:
            yield IMAGE_ARCHIVE, ("image", _ZSTD)
    if lock.project is not None:
        yield LAYER.format(name="project"), ("image", _ZSTD)
        if lock.project.git is not None and lock.project.git.diff is not None:
            yield PROJECT_DIFF, ("lock", "text/x-diff")


def _data_members(lock: Lock, *, embedded: bool) -> Iterator[tuple[str, Kind]]:
    if lock.data is not None:
        yield RUN + contract.DATA, ("run", _JSON)
    for name in lock.data or {}:
        yield DATA_LISTING.format(name=name), ("data", _JSON)
        if embedded:
            yield DATA_ARCHIVE.format(name=name), ("data", _ZSTD)


def carries_data(lock: Lock, files: Container[str]) -> bool:
    """Tell whether a bundle with these files carries the data sets of its run."""
    return any(DATA_ARCHIVE.format(name=name) in files for name in lock.data or {})


def _program_members(claims: ProgramClaims) -> Iterator[tuple[str, Kind]]:
    yield RUN + contract.OUTPUTS, ("run", _JSON)
    if claims.arrivals is not None:
        yield ARRIVALS, ("profile", _JSON)
    if claims.standard_output is not None:
        yield STANDARD_OUTPUT, ("run", _TEXT)
    for name in claimed_outputs(claims.outputs).values():
        yield name, ("output", _BINARY)


def _training_members(lock: Lock, claims: TrainingClaims) -> Iterator[tuple[str, Kind]]:
    yield STREAMS, ("profile", _JSON)
    yield RUN + contract.CHECKPOINT_INDEX, ("run", _JSON)
    yield RUN + contract.EVALUATION, ("run", _JSON)
    yield RUN + contract.TRACE, ("run", _LINES)
    if claims.schedule is not None:
        yield SCHEDULE, ("profile", _BINARY)
    if has_population(lock):
        yield POPULATION, ("run", _JSON)
    # A slice, because the claims of an untrusted bundle may have no checkpoint at all.
    for checkpoint in claims.checkpoints[-1:]:
        yield checkpoint_member(checkpoint.step), ("checkpoint", _BINARY)
    if lock.spec.recording.segment_states:
        # Segments begin at every checkpoint but the last one.
        for checkpoint in claims.checkpoints[:-1]:
            index, pack = state_members(checkpoint.step)
            yield index, ("state", _JSON)
            yield pack, ("state", _ZSTD)


def checkpoint_member(step: int) -> str:
    """Return the member with the tensors of the checkpoint at ``step``."""
    return f"{CHECKPOINT}{contract.checkpoint_name(step)}.safetensors"


def claimed_outputs(outputs: Mapping[str, contract.Output]) -> dict[str, str]:
    """Return the member of each output but links, by path in the working folder."""
    return output_members(
        (path, output.sha256) for path, output in outputs.items() if not output.target
    )


def state_members(step: int) -> tuple[str, str]:
    """Return the members with index and pack of the state at ``step``."""
    name = STATES + contract.checkpoint_name(step)
    return f"{name}.json", f"{name}.zst"


def output_members(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Choose where each output goes in a bundle.

    Args:
        paths: Path in the working folder, and SHA-256, of each.

    Returns:
        Path to member name: ``workspace/PATH`` if an archive can hold that beside all others, even
        where case does not count, else ``outputs/SHA256``.
    """
    files: set[str] = set()
    folders: set[str] = set()
    members = {}
    # In order, so that packer and verifier give a name for which several compete to the same one.
    for path, sha256 in sorted(paths):
        name = WORKSPACE + path
        above = {str(parent).lower() for parent in PurePosixPath(name).parents}
        plain = re.fullmatch(NAME_PATTERN, name) and len(name) <= MAX_NAME
        # The union of both sets would be built again for every output.
        free = name.lower() not in files and name.lower() not in folders
        if plain and free and not above & files:
            members[path] = name
            files.add(name.lower())
            folders |= above
        else:
            # Outputs of equal content share this member.
            members[path] = BY_DIGEST + sha256
    return members


def image_claim(image: Image | None) -> ImageClaim | None:
    """Return the claimed identity of an image."""
    if image is None:
        return None
    return ImageClaim(
        config=image.config_digest, layers=tuple(layer.diff_id for layer in image.layers)
    )


def largest_unpacked(packed: int) -> int:
    """Return how many bytes a verifier lets a layer of ``packed`` bytes become."""
    return max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * packed)
