"""Does a bundle agree with itself? Every claim that can be checked without running anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    CheckpointClaim,
    Claims,
    ProgramClaims,
    TrainingClaims,
    has_population,
    read_schedule,
    records_schedule,
)
from capsule.bundle.sbom_checks import sbom_matches_lock, validate_sbom
from capsule.entropy.profile import parse
from capsule.experiment import contract
from capsule.experiment.canonical import sha256_file
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.trace import read_trace, trace_head
from capsule.experiment.trainers import ImpalaTrainer
from capsule.image.project import read_project
from capsule.verification.layers import PROJECT, bad_layer, unpacked_layer

MAX_SAFETENSORS_HEADER = 1 << 24


@dataclass(frozen=True)
class Contents:
    """A bundle that was opened, with its two central documents."""

    bundle: OpenedBundle
    lock: Lock
    claims: Claims


def check_consistency(parts: Contents) -> None:
    """Check that documents, digests and tensors inside the bundle say the same.

    Raises:
        CapsuleError: CAP-V010 naming the first contradiction (exit status 3): the signer signed
            files that contradict each other.
    """
    for check in (_lock, _sbom, _project, _entropy):
        check(parts)
    if isinstance(parts.claims, ProgramClaims):
        _outputs(parts.bundle, parts.claims)
    elif isinstance(parts.claims, TrainingClaims):
        _training(parts, parts.claims)


def _training(parts: Contents, claims: TrainingClaims) -> None:
    """Check what a trainer of Capsule's own claims."""
    for check in (_schedule, _trace, _population, _streams, _evaluation, _checkpoints):
        check(parts, claims)
    _final_tensors(parts)


def _lock(parts: Contents) -> None:
    _equal("spec/lock.json", "its digest", parts.claims.lock, parts.lock.digest())
    job = parts.bundle.read(run_bundle.JOB, contract.Job)
    _equal(run_bundle.JOB, "the spec", contract.Job(spec=parts.lock.spec), job)
    _equal("manifest.json", "its claim id", parts.claims.claim_id(), parts.bundle.manifest.claim_id)


def _entropy(parts: Contents) -> None:
    """Check that the recorded randomness is there where it must be, and is the claimed one."""
    claimed = parts.claims.entropy_profile
    recorded = parts.lock.spec.entropy.mode == "recorded"
    _equal(run_bundle.LOCK, "whether randomness was recorded", recorded, claimed is not None)
    if claimed is not None:
        member = parts.bundle.member(run_bundle.ENTROPY_PROFILE)
        _equal(run_bundle.ENTROPY_PROFILE, "its digest", claimed, sha256_file(member))
        parse(member.read_bytes())


def _project(parts: Contents) -> None:
    """Check that the bundle carries the locked source tree, and git's diff."""
    project = parts.lock.project
    if project is None:
        return
    member = run_bundle.LAYER.format(name=PROJECT)
    with unpacked_layer(parts.bundle, PROJECT) as archive:
        try:
            facts, digest = read_project(archive)
        except CapsuleError as error:
            raise bad_layer(member, error.message) from error
    for path in sorted({*project.files, *facts}):
        _equal(member, path, project.files.get(path), facts.get(path))
    _equal(member, "its digest", project.sha256, digest)
    if project.git is not None and project.git.diff is not None:
        diff = sha256_file(parts.bundle.member(run_bundle.PROJECT_DIFF))
        _equal(run_bundle.PROJECT_DIFF, "its digest", project.git.diff, diff)


def _outputs(bundle: OpenedBundle, claims: ProgramClaims) -> None:
    name = run_bundle.RUN + contract.OUTPUTS
    listed = bundle.read(name, contract.Outputs)
    _equal(name, "the outputs", claims.outputs, listed.files)
    _equal(name, "the standard output", claims.standard_output, listed.standard_output)
    for path, member in recorded_outputs(bundle, claims).items():
        _equal(path, "its digest", claims.outputs[path].sha256, sha256_file(member))
    if claims.standard_output is not None:
        printed = sha256_file(bundle.member(run_bundle.STANDARD_OUTPUT))
        _equal(run_bundle.STANDARD_OUTPUT, "its digest", claims.standard_output.sha256, printed)


def recorded_outputs(bundle: OpenedBundle, claims: ProgramClaims) -> dict[str, Path]:
    """Return the bundle's copy of each claimed output but links, by path in the working folder.

    Raises:
        CapsuleError: CAP-B144, the bundle lacks one.
    """
    files = {path: output.sha256 for path, output in claims.outputs.items() if not output.target}
    members = run_bundle.output_members(files.items())
    return {path: bundle.member(member) for path, member in members.items()}


def _schedule(parts: Contents, claims: TrainingClaims) -> None:
    """Check that a recorded schedule is there where it must be, and is one of this run."""
    recorded = records_schedule(parts.lock)
    _equal(run_bundle.LOCK, "whether the schedule was recorded", recorded, bool(claims.schedule))
    trainer = parts.lock.spec.trainer
    if not isinstance(trainer, ImpalaTrainer) or not recorded:
        return
    log = read_schedule(parts.bundle.member(run_bundle.SCHEDULE))
    of_run = parts.lock.spec.digest(), trainer.actors, trainer.fresh, claims.steps
    found = log.spec, log.actors, log.batch, log.updates * trainer.interval_steps
    _equal(run_bundle.SCHEDULE, "its digest", claims.schedule, log.digest())
    _equal(run_bundle.SCHEDULE, "the run that it is of", of_run, found)


def _trace(parts: Contents, claims: TrainingClaims) -> None:
    name = run_bundle.RUN + contract.TRACE
    records, head = trace_head(parts.bundle.member(name))
    _equal(name, "the number of records", claims.trace.records, records)
    _equal(name, "the head of its hash chain", claims.trace.head, head)


def _population(parts: Contents, _claims: TrainingClaims) -> None:
    """Check that the ancestry of a population is what the trace, which is claimed, has of it."""
    if not has_population(parts.lock):
        return
    ancestry = parts.bundle.read(run_bundle.POPULATION, contract.Ancestry)
    listed = [(each.name, each.document()) for each in ancestry.generations]
    records = read_trace(parts.bundle.member(run_bundle.RUN + contract.TRACE))
    begun = [record.values.get("generations", {}) for record in records]
    traced = [item for each in begun if isinstance(each, dict) for item in each.items()]
    _equal(run_bundle.POPULATION, "the ancestry in the trace", listed, traced)


def _streams(parts: Contents, claims: TrainingClaims) -> None:
    profiles = parts.bundle.read(run_bundle.STREAMS, contract.StreamProfiles)
    _equal(run_bundle.STREAMS, "the stream profiles", claims.streams, profiles.streams)


def _evaluation(parts: Contents, claims: TrainingClaims) -> None:
    name = run_bundle.RUN + contract.EVALUATION
    found = parts.bundle.read(name, contract.Evaluation)
    _equal(name, "the returns", claims.evaluation, found)


def _checkpoints(parts: Contents, claims: TrainingClaims) -> None:
    name = run_bundle.RUN + contract.CHECKPOINT_INDEX
    found = tuple(
        CheckpointClaim(step=item.step, digest=item.digest()) for item in _index(parts).checkpoints
    )
    _equal(name, "the checkpoint digests", claims.checkpoints, found)


def _index(parts: Contents) -> contract.CheckpointIndex:
    name = run_bundle.RUN + contract.CHECKPOINT_INDEX
    return parts.bundle.read(name, contract.CheckpointIndex)


def _final_tensors(parts: Contents) -> None:
    index = _index(parts)
    final = index.checkpoints[-1]
    name = f"{run_bundle.CHECKPOINT}{contract.checkpoint_name(final.step)}.safetensors"
    found = tensor_digests(parts.bundle.member(name))
    for tensor in sorted({*final.tensors, *found}):
        claimed = final.tensors.get(tensor)
        _equal(name, f"tensor {tensor}", claimed, found.get(tensor))


def _sbom(parts: Contents) -> None:
    data = parts.bundle.member(run_bundle.IMAGE_SBOM).read_bytes()
    validate_sbom(data)
    validate_sbom(parts.bundle.member(run_bundle.MACHINE_SBOM).read_bytes())
    image = parts.claims.image
    config = image.config if image else f"sha256:{parts.lock.digest()}"
    differences = sbom_matches_lock(data, parts.lock, config)
    _equal(run_bundle.IMAGE_SBOM, "its components against the lock", [], differences)


def _equal(name: str, what: str, claimed: Any, found: Any) -> None:
    if claimed == found:
        return
    raise CapsuleError(
        "CAP-V010",
        f"the bundle contradicts itself: {what} in {name} is not what claims.json says "
        f"(claimed {str(claimed)[:100]}, found {str(found)[:100]})",
        fix="Do not trust this bundle; ask its signer for a consistent one.",
        exit_code=ExitCode.TAMPERED,
    )


def tensor_digests(path: Path) -> dict[str, str]:
    """Digest every tensor of a safetensors file without a tensor library.

    Returns:
        Tensor name to SHA-256 over dtype, shape and little-endian bytes, as
        :class:`capsule.experiment.contract.Checkpoint` defines it.

    Raises:
        CapsuleError: CAP-V011, not a well-formed safetensors file.
    """
    data = path.read_bytes()
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > MAX_SAFETENSORS_HEADER:
            raise ValueError(f"header of {length} bytes")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        return {name: _digest(entry, data[8 + length :]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CapsuleError(
            "CAP-V011",
            f"{path.name} is not a well-formed safetensors file: {error}",
            fix="Do not trust this bundle; ask its signer for a consistent one.",
            exit_code=ExitCode.TAMPERED,
        ) from error


def _digest(entry: dict[str, Any], body: bytes) -> str:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"offsets {start}:{end} outside {len(body)} bytes")
    return contract.tensor_digest(entry["dtype"], entry["shape"], body[start:end])
