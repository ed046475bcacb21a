"""Writing the bundle of a finished run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from capsule import __version__
from capsule.bundle import run_bundle
from capsule.bundle.bundle import Content, changed, pack
from capsule.bundle.claims import (
    Claims,
    Observations,
    ProgramClaims,
    TraceClaim,
    TrainingClaims,
    collect_claims,
    open_run_file,
    read_document,
    result_model,
    steps_per_second,
)
from capsule.bundle.derived import derived_members
from capsule.bundle.events import sound_events
from capsule.bundle.licences import collect_licences
from capsule.bundle.run_bundle import RUN, image_claim, members_of
from capsule.bundle.sbom import image_sbom
from capsule.bundle.sbom_checks import validate_sbom
from capsule.experiment import contract
from capsule.experiment.beneath import open_beneath
from capsule.experiment.lock import Lock
from capsule.experiment.trace import trace_heads
from capsule.host.code import package_digest
from capsule.host.errors import CapsuleError, coded
from capsule.host.owner import temporary_folder
from capsule.image.assembly.assemble import Image, write_archive
from capsule.image.assembly.making import Layer
from capsule.image.cache import Cache
from capsule.image.data.archive import archive_size, write_data
from capsule.image.data.listing import listing_document, pin_of
from capsule.image.data.places import FoundData
from capsule.image.resolution.project import project_archive
from capsule.machine.fingerprint import Fingerprint

if TYPE_CHECKING:
    from capsule.bundle.keys import PrivateKey

# An image of 872 MB takes 2.7 s and 200 MB at level 3, and 23 s and 175 MB at level 9. Level 9 is
# for layers, whose compressed form is kept in the cache, for source trees, and for states: one of
# 866 MB with a replay memory takes 0.9 s and 31.7 MB at level 3, and 3.2 s and 23.1 MB at level 9.
ZSTD_LEVEL = 9
ARCHIVE_ZSTD_LEVEL = 3

Sources = dict[str, Path | bytes]  # by member

# The file of the run directory that each member is. members_of() knows which of them a run has.
_RUN_FILES = {
    **{
        RUN + name: name
        for name in (
            *(contract.RUNTIME, contract.MECHANISMS, contract.RESULT, contract.LOG, contract.DATA),
            *(contract.CHECKPOINT_INDEX, contract.EVALUATION, contract.TRACE, contract.OUTPUTS),
        )
    },
    run_bundle.ARRIVALS: contract.ARRIVALS,
    run_bundle.ENTROPY_PROFILE: contract.ENTROPY_PROFILE,
    run_bundle.ENTROPY_REPORT: contract.ENTROPY_REPORT,
    run_bundle.LEDGER: contract.LEDGER,
    run_bundle.POPULATION: contract.POPULATION,
    run_bundle.SCHEDULE: contract.SCHEDULE,
    run_bundle.STANDARD_OUTPUT: contract.STANDARD_OUTPUT,
    run_bundle.STREAMS: contract.STREAMS,
}


@dataclass(frozen=True)
class FinishedRun:
    """Everything that is known when a run has ended."""

    lock: Lock
    image: Image | None
    engine: dict[str, str]
    fingerprint: Fingerprint
    started: datetime
    directory: Path
    data: Mapping[str, FoundData] = field(default_factory=dict)


def pack_run(
    run: FinishedRun,
    key: PrivateKey,
    destination: Path,
    cache: Cache,
    *,
    embed_image: bool,
    embed_data: bool = False,
    ssh_key: Path | None = None,
) -> tuple[Path, Claims]:
    """Write the signed bundle of a finished run into the folder ``destination``.

    The file is called ``NAME-CLAIM.capsule.tar`` after the spec's name and the first eight digits
    of the claim id.

    Raises:
        CapsuleError: The run directory breaks the contract (CAP-B090), what came out was changed
            since the run ended (CAP-B142), or the file cannot be written; nothing is left behind
            then.
    """
    from capsule.bundle.sshsig import sign_by_ssh_keygen

    # The claims come first: they decide which members there are, and a run directory that breaks
    # the contract is found before anything is compressed.
    claims = collect_claims(run.lock, image_claim(run.image), run.engine["name"], run.directory)
    observations = _observations(run, claims)
    with temporary_folder("capsule-pack-") as scratch:
        sources: Sources = {
            run_bundle.CLAIMS: claims.document(),
            run_bundle.OBSERVATIONS: observations.document(),
            run_bundle.LOCK: run.lock.document(),
            **_run_files(run, claims, scratch),
            RUN + contract.EVENTS: _events(run.directory, scratch),
            **_image_files(run, cache, scratch, embed_image=embed_image),
            **_project_files(run.lock, cache, scratch),
            **_data_files(run, scratch, embed_data=embed_data),
        }
        kinds = members_of(run.lock, claims, embedded=embed_image, with_data=embed_data)
        derived = derived_members(run.lock, claims, observations, kinds)
        # The other bill of materials is validated where it is made, once for all runs of an image.
        validate_sbom(derived[run_bundle.MACHINE_SBOM])
        sources |= derived
        # Verifiers compute the same names from lock and claims. A source that is missing is an
        # error here, and not a bundle that everybody rejects.
        claimed = _claimed_digests(claims)
        members = {
            path: Content(sources[path], *kind, claimed.get(path)) for path, kind in kinds.items()
        }
        claim_id = claims.claim_id()
        path = destination / f"{run.lock.spec.name}-{claim_id[:8]}.capsule.tar"
        ssh_sign = partial(sign_by_ssh_keygen, key=ssh_key) if ssh_key else None
        return pack(members, claim_id, key, path, ssh_sign), claims


def _observations(run: FinishedRun, claims: TrainingClaims | ProgramClaims) -> Observations:
    seconds = read_document(run.directory / contract.RESULT, result_model(run.lock)).seconds
    runtime = read_document(run.directory / contract.RUNTIME, contract.Runtime)
    return Observations(
        capsule=__version__,
        capsule_sha256=package_digest(),
        started=run.started.isoformat(timespec="seconds"),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        training_seconds=seconds,
        steps_per_second=steps_per_second(claims, seconds),
        engine=run.engine,
        device=runtime.device,
        fingerprint=run.fingerprint,
        data={name: found.url for name, found in run.data.items()} or None,
    )


def _run_files(run: FinishedRun, claims: TrainingClaims | ProgramClaims, scratch: Path) -> Sources:
    """Take the run directory's documents, and what came out."""
    files: Sources = {member: run.directory / name for member, name in _RUN_FILES.items()}
    if isinstance(claims, ProgramClaims):
        # A symbolic link is in the listing only.
        for path, name in run_bundle.claimed_outputs(claims.outputs).items():
            files[name] = _written(run.directory / contract.WORKSPACE, path)
        return files
    _require_trace(run.directory, claims)
    member = run_bundle.checkpoint_member(claims.checkpoints[-1].step)
    files[member] = run.directory / contract.CHECKPOINTS / PurePosixPath(member).name
    return files | _state_files(run, claims, scratch)


def _events(directory: Path, scratch: Path) -> Path:
    """Take the events out of a file that a program may have written to."""
    path = scratch / contract.EVENTS
    with open_run_file(directory, contract.EVENTS) as stream, path.open("wb") as target:
        target.writelines(sound_events(stream))
    return path


def _state_files(run: FinishedRun, claims: TrainingClaims, scratch: Path) -> Sources:
    """Take the states that segments begin with, where the run kept them."""
    if not run.lock.spec.recording.segment_states:
        return {}
    folder = run.directory / contract.SEGMENT_STATES
    files: Sources = {}
    # No segment begins at the last checkpoint, so no state is kept there.
    for checkpoint in claims.checkpoints[:-1]:
        name = contract.checkpoint_name(checkpoint.step)
        index_member, pack_member = run_bundle.state_members(checkpoint.step)
        packed = scratch / f"{name}.zst"
        with open_run_file(run.directory, f"{contract.SEGMENT_STATES}/{name}.blocks") as blocks:
            _compress(packed, ZSTD_LEVEL, partial(_copy_stream, blocks))
        files |= {index_member: folder / f"{name}.json", pack_member: packed}
    return files


def _written(workspace: Path, path: str) -> Path:
    """Return where an output is, if no link leads from there to a file of this machine."""
    what = f"the program says that it wrote {path!a}, which cannot be read"
    with coded("CAP-B142", what, fix="Do not trust this program; look at its output.log."):
        # A probe is enough, because nothing of the program runs any more that could exchange the
        # path.
        open_beneath(workspace, path).close()
    return workspace / path


def _claimed_digests(claims: Claims) -> dict[str, str]:
    """Return the SHA-256 that the claims state of what a program wrote, by member."""
    if not isinstance(claims, ProgramClaims):
        return {}
    outputs = run_bundle.claimed_outputs(claims.outputs).items()
    found = {name: claims.outputs[path] for path, name in outputs}
    if claims.standard_output is not None:
        found[run_bundle.STANDARD_OUTPUT] = claims.standard_output
    return {name: output.sha256 for name, output in found.items()}


def _require_trace(directory: Path, claims: TrainingClaims) -> None:
    """Check that the trace is the claimed one, of which the run's result names the head."""
    try:
        heads = trace_heads(directory / contract.TRACE)
    except CapsuleError as error:  # it is no trace any more
        raise changed(RUN + contract.TRACE) from error
    if claims.trace != TraceClaim(records=heads.records, head=heads.last):
        raise changed(RUN + contract.TRACE)


def _image_files(run: FinishedRun, cache: Cache, scratch: Path, *, embed_image: bool) -> Sources:
    """Describe the image, and carry the layers that a verifier could not rebuild for ever."""
    files: Sources = {run_bundle.IMAGE_SBOM: _image_sbom(run, cache)}
    if run.image is None:
        return files
    image = run.image
    files[run_bundle.IMAGE_CONFIG] = image.config
    files[run_bundle.IMAGE_MANIFEST] = image.manifest
    for layer in image.layers:
        if layer.name in run_bundle.EMBEDDED_LAYERS:
            files[run_bundle.LAYER.format(name=layer.name)] = _packed_layer(layer, cache)
    if embed_image:
        packed = scratch / "image.zst"
        _compress(packed, ARCHIVE_ZSTD_LEVEL, lambda out: write_archive(image, out))
        files[run_bundle.IMAGE_ARCHIVE] = packed
    return files


def _image_sbom(run: FinishedRun, cache: Cache) -> bytes:
    """Return the image's bill of materials, which is made once for all runs of an image."""
    # Where no image was made, the digest of the lock takes its place; verifiers do the same.
    config_digest = run.image.config_digest if run.image else f"sha256:{run.lock.digest()}"
    layers = {layer.name: layer.path for layer in run.image.layers} if run.image else {}

    def make() -> bytes:
        licences = collect_licences(
            run.lock, lambda wheel: cache.path(wheel.sha256), layers.get("base")
        )
        sbom = image_sbom(run.lock, config_digest, licences)
        validate_sbom(sbom)
        return sbom

    # Not the whole lock: its spec has the hyper-parameters as well.
    project = run.lock.project.document() if run.lock.project else b""
    base = run.lock.spec.image.base
    parts = (run.lock.image.document(), project, f"{base} {config_digest}".encode())
    return cache.document("sbom", parts, make)


def _packed_layer(layer: Layer, cache: Cache) -> Path:
    """Return a compressed layer, which is made once for all bundles that have it."""
    # Neither level nor version of zstd is in the key: what is claimed of a layer is its unpacked
    # digest.
    packed = cache.folder("derived") / f"{layer.diff_id.removeprefix('sha256:')}.layer.zst"
    if not packed.exists():
        with cache.scratch() as scratch:
            new = scratch / packed.name
            _compress(new, ZSTD_LEVEL, partial(_copy, layer.path))
            # Before the rename: after a crash the name must not lead to an unfinished file.
            with new.open("rb") as stream:
                os.fsync(stream.fileno())
            new.replace(packed)
    return packed


def _project_files(lock: Lock, cache: Cache, scratch: Path) -> Sources:
    """Carry a program's source tree, with any engine, and its difference from its commit."""
    if lock.project is None:
        return {}
    packed = scratch / "project.zst"
    archive = project_archive(lock.project, cache)
    _compress(packed, ZSTD_LEVEL, partial(_copy, archive))
    # The verifier's own bound, applied where the author can still do something about it.
    if lock.project.size > run_bundle.largest_unpacked(packed.stat().st_size):
        raise CapsuleError(
            "CAP-B161",
            f"the source tree has {lock.project.size} bytes and compresses to "
            f"{packed.stat().st_size}: no verifier would unpack it",
            fix="Exclude files that are mostly empty with code.files, and run again.",
        )
    files: Sources = {run_bundle.LAYER.format(name="project"): packed}
    if lock.project.git is not None and lock.project.git.diff is not None:
        files[run_bundle.PROJECT_DIFF] = cache.trees.path(lock.project.git.diff)
    return files


def _data_files(run: FinishedRun, scratch: Path, *, embed_data: bool) -> Sources:
    """Take the listings of data sets, and the data sets if they are to be carried along.

    Raises:
        CapsuleError: CAP-B162, no verifier would unpack one; CAP-I104, one has changed.
    """
    files: Sources = {RUN + contract.DATA: run.directory / contract.DATA} if run.data else {}
    for name, found in run.data.items():
        files[run_bundle.DATA_LISTING.format(name=name)] = listing_document(found.listing)
        if not embed_data:
            continue
        packed = scratch / f"{name}.data.zst"
        _compress(packed, ARCHIVE_ZSTD_LEVEL, partial(_pack_data, found))
        files[run_bundle.DATA_ARCHIVE.format(name=name)] = packed
        if archive_size(found.listing) > run_bundle.largest_unpacked(packed.stat().st_size):
            raise CapsuleError(
                "CAP-B162",
                f"the data set {name!r} has {pin_of(found.listing).size} bytes and compresses to "
                f"{packed.stat().st_size}: no verifier would unpack it",
                fix="Run without --embed-data, and publish the data set beside the bundle; or "
                "leave out files that are mostly empty.",
            )
    return files


def _pack_data(found: FoundData, target: BinaryIO) -> None:
    write_data(found.listing, found.path, target.write)


def _compress(path: Path, level: int, write: Callable[[BinaryIO], None]) -> None:
    import zstandard

    with path.open("wb") as raw, zstandard.ZstdCompressor(level=level).stream_writer(raw) as out:
        write(out)


def _copy(source: Path, target: BinaryIO) -> None:
    with source.open("rb") as stream:
        _copy_stream(stream, target)


def _copy_stream(source: BinaryIO, target: BinaryIO) -> None:
    shutil.copyfileobj(source, target, 1 << 20)
