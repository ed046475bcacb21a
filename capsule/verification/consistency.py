"""Does a bundle agree with itself? Every claim that can be checked without running anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import CheckpointClaim, Claims
from capsule.bundle.sbom import sbom_matches_lock, validate_sbom
from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.trace import trace_head

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
    for check in (_lock, _trace, _streams, _evaluation, _checkpoints, _final_tensors, _sbom):
        check(parts)


def _lock(parts: Contents) -> None:
    _equal("spec/lock.json", "its digest", parts.claims.lock, parts.lock.digest())
    job = parts.bundle.read(run_bundle.JOB, contract.Job)
    _equal(run_bundle.JOB, "the spec", contract.Job(spec=parts.lock.spec), job)
    _equal("manifest.json", "its claim id", parts.claims.claim_id(), parts.bundle.manifest.claim_id)


def _trace(parts: Contents) -> None:
    name = run_bundle.RUN + contract.TRACE
    records, head = trace_head(parts.bundle.member(name))
    _equal(name, "the number of records", parts.claims.trace.records, records)
    _equal(name, "the head of its hash chain", parts.claims.trace.head, head)


def _streams(parts: Contents) -> None:
    profiles = parts.bundle.read(run_bundle.STREAMS, contract.StreamProfiles)
    _equal(run_bundle.STREAMS, "the stream profiles", parts.claims.streams, profiles.streams)


def _evaluation(parts: Contents) -> None:
    name = run_bundle.RUN + contract.EVALUATION
    found = parts.bundle.read(name, contract.Evaluation)
    _equal(name, "the returns", parts.claims.evaluation, found)


def _checkpoints(parts: Contents) -> None:
    name = run_bundle.RUN + contract.CHECKPOINT_INDEX
    found = tuple(
        CheckpointClaim(step=item.step, digest=item.digest()) for item in _index(parts).checkpoints
    )
    _equal(name, "the checkpoint digests", parts.claims.checkpoints, found)


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
