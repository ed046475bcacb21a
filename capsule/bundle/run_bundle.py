"""What goes into the bundle of a run, and under which name."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from capsule import __version__
from capsule.bundle.archive import MAX_NAME, NAME_PATTERN
from capsule.bundle.bundle import Content, pack
from capsule.bundle.claims import (
    Claims,
    ImageClaim,
    Observations,
    ProgramClaims,
    TrainingClaims,
    collect_claims,
    has_population,
    open_run_file,
    read_document,
)
from capsule.bundle.crate import CRATE, run_crate
from capsule.bundle.licences import collect_licences
from capsule.bundle.manifest import Role
from capsule.bundle.reproducing import reproducing_guide
from capsule.bundle.sbom import image_sbom, machine_sbom
from capsule.bundle.sbom_checks import validate_sbom
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.image.assemble import Image, write_archive
from capsule.image.cache import Cache
from capsule.image.project import project_archive
from capsule.image.seccomp import PROFILE
from capsule.machine.fingerprint import Fingerprint

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
WORKSPACE = "workspace/"  # outputs of a program, under their own names
BY_DIGEST = "outputs/"  # those whose names an archive cannot hold
STANDARD_OUTPUT = "run/stdout.txt"
RUN = "run/"
CHECKPOINT = "checkpoints/"
STATES = "states/"

EMBEDDED_LAYERS = ("base", "code")
ZSTD_LEVEL = 9
ARCHIVE_ZSTD_LEVEL = 3

# By what factor a layer may have shrunk, and up to what size that does not matter. Trees of small
# files reach 20; a bomb of zeros has 30,000.
MAX_RATIO = 100
ALWAYS_UNPACKED_BYTES = 64 << 20


@dataclass(frozen=True)
class FinishedRun:
    """Everything that is known when a run has ended."""

    lock: Lock
    image: Image | None
    engine: dict[str, str]
    fingerprint: Fingerprint
    started: datetime
    directory: Path


def image_claim(image: Image | None) -> ImageClaim | None:
    """Return the claimed identity of an image."""
    if image is None:
        return None
    return ImageClaim(
        config=image.config_digest, layers=tuple(layer.diff_id for layer in image.layers)
    )


def pack_run(
    run: FinishedRun,
    key: Path,
    destination: Path,
    cache: Cache,
    *,
    embed_image: bool,
    ssh_key: Path | None = None,
) -> tuple[Path, Claims]:
    """Write the signed bundle of a finished run into the folder ``destination``.

    The file is called ``NAME-CLAIM.capsule.tar`` after the spec's name and the first eight digits
    of the claim id.

    Raises:
        CapsuleError: The run directory breaks the contract (CAP-B090), the key cannot be used, or
            the file cannot be written; nothing is left behind then.
    """
    from capsule.bundle.keys import load_private
    from capsule.bundle.sshsig import sign_by_ssh_keygen

    claims = collect_claims(run.lock, image_claim(run.image), run.engine["name"], run.directory)
    private_key = load_private(key)
    observations = _observations(run, claims)
    with tempfile.TemporaryDirectory(prefix="capsule-pack-") as scratch:
        members = {
            **_documents(run, claims, observations, embed_image=embed_image),
            **_run_files(run.directory, claims),
            **_population_files(run),
            **_state_files(run, Path(scratch)),
            **_image_files(run, cache, Path(scratch), embed_image=embed_image),
            **_project_files(run.lock, cache, Path(scratch)),
        }
        kinds = {path: (each.role, each.media_type) for path, each in members.items()}
        crate = run_crate(run.lock, claims, observations, kinds)
        members[CRATE] = Content(crate, "guide", "application/ld+json")
        claim_id = claims.claim_id()
        path = destination / f"{run.lock.spec.name}-{claim_id[:8]}.capsule.tar"
        ssh_sign = partial(sign_by_ssh_keygen, key=ssh_key) if ssh_key else None
        return pack(members, claim_id, private_key, path, ssh_sign), claims


def _documents(
    run: FinishedRun, claims: Claims, observations: Observations, *, embed_image: bool
) -> dict[str, Content]:
    guide = reproducing_guide(run.lock, claims, image=run.image, embedded=embed_image)
    job = contract.Job.of(run.lock)
    sbom = machine_sbom(run.fingerprint)
    validate_sbom(sbom)
    return {
        GUIDE: Content(guide.encode(), "guide", "text/markdown"),
        CLAIMS: _json(claims.document(), "claims"),
        OBSERVATIONS: _json(
            canonical_json(observations.model_dump(mode="json", by_alias=True)), "observations"
        ),
        LOCK: _json(run.lock.document(), "lock"),
        JOB: _json(canonical_json(job.model_dump(mode="json", by_alias=True)), "job"),
        MACHINE_SBOM: Content(sbom, "sbom", "application/vnd.cyclonedx+json"),
    }


def _observations(run: FinishedRun, claims: Claims) -> Observations:
    seconds, speed = _speed(run, claims)
    runtime = read_document(run.directory / contract.RUNTIME, contract.Runtime)
    return Observations(
        capsule=__version__,
        started=run.started.isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        training_seconds=seconds,
        steps_per_second=speed,
        engine=run.engine,
        device=runtime.device,
        fingerprint=run.fingerprint,
    )


def _speed(run: FinishedRun, claims: Claims) -> tuple[float, float | None]:
    """Return the seconds that a run took, and its steps per second if it counted any."""
    if isinstance(claims, TrainingClaims):
        result = read_document(run.directory / contract.RESULT, contract.Result)
        return result.seconds, claims.steps / result.seconds
    return read_document(run.directory / contract.RESULT, contract.ProgramResult).seconds, None


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
    for path, sha256 in sorted(paths):
        name = WORKSPACE + path
        above = {str(parent).lower() for parent in PurePosixPath(name).parents}
        plain = re.fullmatch(NAME_PATTERN, name) and len(name) <= MAX_NAME
        if plain and name.lower() not in files | folders and not above & files:
            members[path] = name
            files.add(name.lower())
            folders |= above
        else:
            members[path] = BY_DIGEST + sha256
    return members


def _run_files(directory: Path, claims: Claims) -> dict[str, Content]:
    """Take the run directory's documents, and what came out."""
    names = (contract.RUNTIME, contract.MECHANISMS, contract.RESULT)
    members = {RUN + name: _json(directory / name, "run") for name in names}
    members[RUN + contract.EVENTS] = Content(
        directory / contract.EVENTS, "run", "application/jsonl"
    )
    members[RUN + contract.LOG] = Content(directory / contract.LOG, "log", "text/plain")
    members[ENTROPY_REPORT] = _json(directory / contract.ENTROPY_REPORT, "profile")
    members[LEDGER] = _json(directory / contract.LEDGER, "profile")
    if claims.entropy_profile is not None:
        members[ENTROPY_PROFILE] = Content(
            directory / contract.ENTROPY_PROFILE, "profile", "application/octet-stream"
        )
    if isinstance(claims, ProgramClaims):
        return members | _program_files(directory, claims)
    if isinstance(claims, TrainingClaims) and claims.schedule is not None:
        members[SCHEDULE] = Content(
            directory / contract.SCHEDULE, "profile", "application/octet-stream"
        )
    return members | _training_files(directory)


def _population_files(run: FinishedRun) -> dict[str, Content]:
    """Take the ancestry of a population, which the trace claims."""
    if not has_population(run.lock):
        return {}
    return {POPULATION: _json(run.directory / contract.POPULATION, "run")}


def state_members(step: int) -> tuple[str, str]:
    """Return the members that hold index and pack of the state at ``step``."""
    name = STATES + contract.checkpoint_name(step)
    return f"{name}.json", f"{name}.zst"


def _state_files(run: FinishedRun, scratch: Path) -> dict[str, Content]:
    """Take the states that segments begin with, where the run kept them."""
    if not run.lock.spec.recording.segment_states:
        return {}
    index = read_document(run.directory / contract.CHECKPOINT_INDEX, contract.CheckpointIndex)
    folder = run.directory / contract.SEGMENT_STATES
    members = {}
    for checkpoint in index.checkpoints[:-1]:
        name = contract.checkpoint_name(checkpoint.step)
        index_member, pack_member = state_members(checkpoint.step)
        packed = scratch / f"{name}.zst"
        with open_run_file(run.directory, f"{contract.SEGMENT_STATES}/{name}.blocks") as blocks:
            _compress(packed, ARCHIVE_ZSTD_LEVEL, partial(_copy_stream, blocks))
        members[index_member] = _json(folder / f"{name}.json", "state")
        members[pack_member] = Content(packed, "state", "application/zstd")
    return members


def _program_files(directory: Path, claims: ProgramClaims) -> dict[str, Content]:
    """Take every claimed output; a symbolic link is in the listing only."""
    members = {RUN + contract.OUTPUTS: _json(directory / contract.OUTPUTS, "run")}
    if claims.arrivals is not None:
        members[ARRIVALS] = _json(directory / contract.ARRIVALS, "profile")
    if claims.standard_output is not None:
        printed = directory / contract.STANDARD_OUTPUT
        members[STANDARD_OUTPUT] = Content(printed, "run", "text/plain")
    files = {path: output.sha256 for path, output in claims.outputs.items() if not output.target}
    for path, name in output_members(files.items()).items():
        source = _written(directory / contract.WORKSPACE, path)
        members[name] = Content(source, "output", "application/octet-stream")
    return members


def _written(workspace: Path, path: str) -> Path:
    """Return where an output is, if no link leads from there to a file of this machine."""
    try:
        open_beneath(workspace, path).close()
    except OSError as error:
        raise CapsuleError(
            "CAP-B142",
            f"the program says that it wrote {path!a}, which cannot be read: {error.strerror}",
            fix="Do not trust this program; look at its output.log.",
            exit_code=ExitCode.USAGE,
        ) from error
    return workspace / path


def _training_files(directory: Path) -> dict[str, Content]:
    """Take the documents of a trainer of Capsule's own, and the final checkpoint."""
    members = {STREAMS: _json(directory / contract.STREAMS, "profile")}
    for name in (contract.CHECKPOINT_INDEX, contract.EVALUATION):
        members[RUN + name] = _json(directory / name, "run")
    members[RUN + contract.TRACE] = Content(directory / contract.TRACE, "run", "application/jsonl")
    index = read_document(directory / contract.CHECKPOINT_INDEX, contract.CheckpointIndex)
    final = f"{contract.checkpoint_name(index.checkpoints[-1].step)}.safetensors"
    members[CHECKPOINT + final] = Content(
        directory / contract.CHECKPOINTS / final, "checkpoint", "application/octet-stream"
    )
    return members


def _image_files(
    run: FinishedRun, cache: Cache, scratch: Path, *, embed_image: bool
) -> dict[str, Content]:
    """Describe the image, and carry the layers that a verifier could not rebuild for ever."""
    config_digest = run.image.config_digest if run.image else f"sha256:{run.lock.digest()}"
    layers = {layer.name: layer.path for layer in run.image.layers} if run.image else {}
    licences = collect_licences(
        run.lock, lambda wheel: cache.path(wheel.sha256), layers.get("base")
    )
    sbom = image_sbom(run.lock, config_digest, licences)
    validate_sbom(sbom)
    members = {IMAGE_SBOM: Content(sbom, "sbom", "application/vnd.cyclonedx+json")}
    if run.image is None:
        return members
    image = run.image
    members[SECCOMP] = _json(PROFILE, "image")
    members[IMAGE_CONFIG] = Content(
        image.config, "image", "application/vnd.oci.image.config.v1+json"
    )
    members[IMAGE_MANIFEST] = Content(
        image.manifest, "image", "application/vnd.oci.image.manifest.v1+json"
    )
    for layer in image.layers:
        if layer.name in EMBEDDED_LAYERS:
            packed = scratch / f"{layer.name}.zst"
            _compress(packed, ZSTD_LEVEL, partial(_copy, layer.path))
            members[LAYER.format(name=layer.name)] = Content(packed, "image", "application/zstd")
    if embed_image:
        packed = scratch / "image.zst"
        _compress(packed, ARCHIVE_ZSTD_LEVEL, lambda out: write_archive(image, out))
        members[IMAGE_ARCHIVE] = Content(packed, "image", "application/zstd")
    return members


def _project_files(lock: Lock, cache: Cache, scratch: Path) -> dict[str, Content]:
    """Carry a program's source tree, with any engine, and its difference from its commit."""
    if lock.project is None:
        return {}
    packed = scratch / "project.zst"
    archive = project_archive(lock.project, cache)
    _compress(packed, ZSTD_LEVEL, partial(_copy, archive))
    if lock.project.size > largest_unpacked(packed.stat().st_size):
        raise CapsuleError(
            "CAP-B161",
            f"the source tree has {lock.project.size} bytes and compresses to "
            f"{packed.stat().st_size}: no verifier would unpack that",
            fix="Leave files that are mostly empty out of it, by code.files, and run again.",
            exit_code=ExitCode.USAGE,
        )
    members = {LAYER.format(name="project"): Content(packed, "image", "application/zstd")}
    if lock.project.git is not None and lock.project.git.diff is not None:
        diff = cache.path(lock.project.git.diff)
        members[PROJECT_DIFF] = Content(diff, "lock", "text/x-diff")
    return members


def largest_unpacked(packed: int) -> int:
    """Return how many bytes a verifier lets a layer of ``packed`` bytes become."""
    return max(ALWAYS_UNPACKED_BYTES, MAX_RATIO * packed)


def _compress(path: Path, level: int, write: Callable[[BinaryIO], None]) -> None:
    import zstandard

    with path.open("wb") as raw, zstandard.ZstdCompressor(level=level).stream_writer(raw) as out:
        write(out)


def _copy(source: Path, target: BinaryIO) -> None:
    with source.open("rb") as stream:
        _copy_stream(stream, target)


def _copy_stream(source: BinaryIO, target: BinaryIO) -> None:
    import shutil

    shutil.copyfileobj(source, target, 1 << 20)


def _json(source: Path | bytes, role: Role) -> Content:
    return Content(source, role, "application/json")
