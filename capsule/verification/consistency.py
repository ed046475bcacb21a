"""Does a bundle agree with itself? Every claim that can be checked without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    CheckpointClaim,
    Claims,
    Observations,
    ProgramClaims,
    TrainingClaims,
    has_population,
    image_relaxations,
    read_schedule,
    records_schedule,
)
from capsule.bundle.crate import CRATE, described, parts_of
from capsule.bundle.sbom_checks import MAX_BYTES, sbom_matches_lock, validate_sbom
from capsule.entropy.profile import MAX_PROFILE_BYTES, parse
from capsule.experiment import contract
from capsule.experiment.arrival_log import MAX_LOG_BYTES, parse_arrivals
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.trace import read_trace, trace_head
from capsule.experiment.trainers import CommandTrainer, ImpalaTrainer
from capsule.image.project import read_project
from capsule.verification.image_documents import PROJECT, layer_identities
from capsule.verification.layers import bad_layer, unpacked_layer
from capsule.verification.tensors import digests_of

_SHOWN_CHARACTERS = 100


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
    for check in (_lock, _relaxations, _runtime, _image, _sbom, _entropy):
        check(parts)
    if isinstance(parts.claims, ProgramClaims):
        _outputs(parts.bundle, parts.claims)
        _arrivals(parts.bundle, parts.claims)
    elif isinstance(parts.claims, TrainingClaims):
        _training(parts, parts.claims)
    _crate(parts)


def _training(parts: Contents, claims: TrainingClaims) -> None:
    """Check what a trainer of Capsule's own claims."""
    for check in (
        *(_result, _schedule, _trace, _population, _streams, _evaluation, _checkpoints, _states),
    ):
        check(parts, claims)
    _final_tensors(parts)


def _lock(parts: Contents) -> None:
    _equal("spec/lock.json", "its digest", parts.claims.lock, parts.lock.digest())
    job = parts.bundle.read(run_bundle.JOB, contract.Job)
    _equal(run_bundle.JOB, "the spec or its source tree", contract.Job.of(parts.lock), job)
    _equal("manifest.json", "its claim id", parts.claims.claim_id(), parts.bundle.manifest.claim_id)


def _relaxations(parts: Contents) -> None:
    """Check that no guarantee was given up silently."""
    observed = parts.bundle.read(run_bundle.OBSERVATIONS, Observations)
    found = image_relaxations(parts.lock, observed.engine.get("name", ""))
    _equal(run_bundle.LOCK, "the relaxations", parts.claims.relaxations, found)
    _equal(
        run_bundle.OBSERVATIONS,
        "whether there was an image",
        parts.claims.image is not None,
        observed.engine.get("name") != "process",
    )


def _runtime(parts: Contents) -> None:
    name = run_bundle.RUN + contract.RUNTIME
    runtime = parts.bundle.read(name, contract.Runtime)
    _equal(name, "the flags that were read back", parts.claims.flags, runtime.flags)
    _equal(name, "the libraries", parts.claims.libraries, runtime.libraries)


def _crate(parts: Contents) -> None:
    """Check that what catalogues read is about this run and these files."""
    if CRATE not in parts.bundle.files:  # bundles were made before there was one
        return
    expected = parts.claims.claim_id(), parts_of(parts.bundle.files)
    found = described(parts.bundle.content(CRATE))
    _equal(CRATE, "the claim id and the list of files", expected, found)


def _entropy(parts: Contents) -> None:
    """Check that the recorded randomness is there where it must be, and is the claimed one."""
    claimed = parts.claims.entropy_profile
    recorded = parts.lock.spec.entropy.mode == "recorded"
    _equal(run_bundle.LOCK, "whether randomness was recorded", recorded, claimed is not None)
    if claimed is not None:
        found = parts.bundle.sha256(run_bundle.ENTROPY_PROFILE)
        _equal(run_bundle.ENTROPY_PROFILE, "its digest", claimed, found)
        parse(parts.bundle.content(run_bundle.ENTROPY_PROFILE, MAX_PROFILE_BYTES))


def _image(parts: Contents) -> None:
    """Check the image's documents, and that the bundle carries the locked source tree."""
    identities = layer_identities(parts.bundle, parts.lock, parts.claims)
    project = parts.lock.project
    if project is None:
        return
    member = run_bundle.LAYER.format(name=PROJECT)
    with unpacked_layer(parts.bundle, PROJECT, identities[PROJECT], compared=True) as archive:
        try:
            facts, digest = read_project(archive)
        except CapsuleError as error:
            raise bad_layer(member, error.message) from error
    for path in sorted({*project.files, *facts}):
        _equal(member, path, project.files.get(path), facts.get(path))
    _equal(member, "its digest", project.sha256, digest)
    if project.git is not None and project.git.diff is not None:
        diff = parts.bundle.sha256(run_bundle.PROJECT_DIFF)
        _equal(run_bundle.PROJECT_DIFF, "its digest", project.git.diff, diff)


def _outputs(bundle: OpenedBundle, claims: ProgramClaims) -> None:
    name = run_bundle.RUN + contract.OUTPUTS
    listed = bundle.read(name, contract.Outputs)
    _equal(name, "the outputs", claims.outputs, listed.files)
    _equal(name, "the deleted files", claims.deleted, listed.deleted)
    _equal(name, "the empty folders", claims.empty_folders, listed.empty_folders)
    _equal(name, "the standard output", claims.standard_output, listed.standard_output)
    for path in (*claims.outputs, *claims.deleted, *claims.empty_folders):
        _check_output_name(path)
    for path, member in output_members(claims).items():
        _equal(path, "its digest", claims.outputs[path].sha256, bundle.sha256(member))
    if claims.standard_output is not None:
        printed = bundle.sha256(run_bundle.STANDARD_OUTPUT)
        _equal(run_bundle.STANDARD_OUTPUT, "its digest", claims.standard_output.sha256, printed)


def _arrivals(bundle: OpenedBundle, claims: ProgramClaims) -> None:
    """Check that the arrival log is there if it is claimed, and is the claimed one."""
    carried = run_bundle.ARRIVALS in bundle.files
    _equal("manifest.json", "whether arrivals were recorded", claims.arrivals is not None, carried)
    if carried:
        found = parse_arrivals(bundle.content(run_bundle.ARRIVALS, MAX_LOG_BYTES)).digest()
        _equal(run_bundle.ARRIVALS, "its digest", claims.arrivals, found)


def _check_output_name(path: str) -> None:
    """Refuse the name of an output that would lead out of a program's working folder.

    Raises:
        CapsuleError: CAP-V044.
    """
    if "\0" not in path and not {"", ".", ".."} & set(path.split("/")):
        return
    raise CapsuleError(
        "CAP-V044",
        f"the bundle claims an output called {path!a}, which no program can have written",
        fix="Do not trust this bundle; ask its signer for a consistent one.",
        exit_code=ExitCode.TAMPERED,
    )


def recorded_outputs(bundle: OpenedBundle, claims: ProgramClaims) -> dict[str, Path]:
    """Return the bundle's copy of each claimed output but links, by path in the working folder.

    Raises:
        CapsuleError: CAP-B144, the bundle lacks one.
    """
    return {path: bundle.member(member) for path, member in output_members(claims).items()}


def output_members(claims: ProgramClaims) -> dict[str, str]:
    """Return the member of each claimed output but links, by path in the working folder."""
    files = {path: output.sha256 for path, output in claims.outputs.items() if not output.target}
    return run_bundle.output_members(files.items())


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


def _result(parts: Contents, claims: TrainingClaims) -> None:
    """Check that the run had come to its end, and to the claimed one."""
    name = run_bundle.RUN + contract.RESULT
    result = parts.bundle.read(name, contract.Result)
    claimed = (True, claims.steps, claims.episodes, claims.parameters)
    found = (result.complete, result.steps, result.episodes, result.parameters)
    _equal(name, "the end of the run", claimed, found)
    trainer = parts.lock.spec.trainer
    if not isinstance(trainer, CommandTrainer):
        _equal(run_bundle.LOCK, "the number of steps", claims.steps, trainer.total_steps)


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


def _states(parts: Contents, _claims: TrainingClaims) -> None:
    """Check that there are the states that the spec promises, and no others."""
    promised = parts.lock.spec.recording.segment_states
    steps = [item.step for item in _index(parts).checkpoints[:-1]] if promised else []
    expected = sorted(member for step in steps for member in run_bundle.state_members(step))
    found = sorted(name for name in parts.bundle.files if name.startswith(run_bundle.STATES))
    _equal("manifest.json", "the states of checkpoints", expected, found)


def _final_tensors(parts: Contents) -> None:
    index = _index(parts)
    final = index.checkpoints[-1]
    name = f"{run_bundle.CHECKPOINT}{contract.checkpoint_name(final.step)}.safetensors"
    with parts.bundle.open(name) as stream:
        found = digests_of(stream, parts.bundle.files.signed(name).size, name)
    for tensor in sorted({*final.tensors, *found}):
        _equal(name, f"tensor {tensor!a}", final.tensors.get(tensor), found.get(tensor))


def _sbom(parts: Contents) -> None:
    data = parts.bundle.content(run_bundle.IMAGE_SBOM, MAX_BYTES)
    validate_sbom(data)
    validate_sbom(parts.bundle.content(run_bundle.MACHINE_SBOM, MAX_BYTES))
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
        f"(claimed {_shown(claimed)}, found {_shown(found)})",
        fix="Do not trust this bundle; ask its signer for a consistent one.",
        exit_code=ExitCode.TAMPERED,
    )


def _shown(value: Any) -> str:
    """Return the beginning of a stranger's text in ASCII, without control characters."""
    return ascii(str(value)[:_SHOWN_CHARACTERS])[1:-1]
