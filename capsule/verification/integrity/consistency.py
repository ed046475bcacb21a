"""Does a bundle agree with itself? Every claim that can be checked without running anything."""

from __future__ import annotations

from collections import Counter

from capsule.bundle import run_bundle
from capsule.bundle.bundle import OpenedBundle
from capsule.bundle.claims import (
    CheckpointClaim,
    Observations,
    ProgramClaims,
    TraceClaim,
    TrainingClaims,
    has_population,
    image_relaxations,
    read_schedule,
    records_schedule,
)
from capsule.bundle.sbom_checks import MAX_BYTES, sbom_matches_lock, validate_sbom
from capsule.entropy.profile import MAX_PROFILE_BYTES, parse
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.arrival_log import MAX_LOG_BYTES, parse_arrivals
from capsule.experiment.trace import read_trace, trace_head
from capsule.experiment.trainers import CommandTrainer, ImpalaTrainer
from capsule.host.errors import CapsuleError
from capsule.image.assembly.base import is_genuine
from capsule.image.closure import check_pins
from capsule.image.resolution.project import read_project
from capsule.verification.integrity.contents import Contents, equal, inconsistent
from capsule.verification.integrity.image_documents import PROJECT, layer_identities
from capsule.verification.integrity.layers import bad_layer, check_layer, unpacked_layer
from capsule.verification.integrity.members import (
    check_derived,
    check_events,
    check_layout,
    check_observations,
)
from capsule.verification.integrity.tensors import digests_of


def check_consistency(parts: Contents) -> tuple[str, ...]:
    """Check that documents, digests and tensors inside the bundle say the same.

    Returns:
        Members that could not be checked: those that another Capsule derived.

    Raises:
        CapsuleError: CAP-V010 naming the first contradiction (exit status 3): the signer signed
            files that contradict each other; CAP-V045, CAP-V046, CAP-V047 of
            :mod:`capsule.verification.integrity.members`; CAP-I305, CAP-I306, CAP-I113 the lock
            contradicts itself.
    """
    observed = parts.bundle.read(run_bundle.OBSERVATIONS, Observations)
    _output_names(parts)
    check_layout(parts, observed)
    _lock(parts)
    _requirements(parts)
    check_pins(parts.lock)
    _relaxations(parts, observed)
    for check in (_runtime, _image, _sbom, _entropy, check_events):
        check(parts)
    if isinstance(parts.claims, ProgramClaims):
        _outputs(parts.bundle, parts.claims)
        _arrivals(parts.bundle, parts.claims)
    elif isinstance(parts.claims, TrainingClaims):
        _training(parts, parts.claims)
    check_observations(parts, observed)
    return check_derived(parts, observed)


def _training(parts: Contents, claims: TrainingClaims) -> None:
    """Check what a trainer of Capsule's own claims."""
    for check in (*(_result, _schedule, _trace, _population, _streams, _evaluation, _checkpoints),):
        check(parts, claims)
    _final_tensors(parts)


def _lock(parts: Contents) -> None:
    equal("spec/lock.json", "its digest", parts.claims.lock, parts.lock.digest())
    equal("manifest.json", "its claim id", parts.claims.claim_id(), parts.bundle.manifest.claim_id)


def _requirements(parts: Contents) -> None:
    """Check that the packages that the spec asks for are requirements by the grammar of PEP 508."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in parts.lock.spec.image.packages:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise inconsistent(
                "CAP-V010",
                f"image.packages of {run_bundle.LOCK} holds {text[:100]!a}, no requirement",
            ) from error


def _relaxations(parts: Contents, observed: Observations) -> None:
    """Check that no guarantee was given up silently."""
    report = parts.bundle.read(run_bundle.ENTROPY_REPORT, EntropyReport)
    found = image_relaxations(parts.lock, observed.engine.get("name", ""), report)
    equal(run_bundle.LOCK, "the relaxations", parts.claims.relaxations, found)
    equal(
        run_bundle.OBSERVATIONS,
        "whether there was an image",
        parts.claims.image is not None,
        observed.engine.get("name") != "process",
    )


def _runtime(parts: Contents) -> None:
    name = run_bundle.RUN + contract.RUNTIME
    runtime = parts.bundle.read(name, contract.Runtime)
    equal(name, "the flags that were read back", parts.claims.flags, runtime.flags)
    equal(name, "the libraries", parts.claims.libraries, runtime.libraries)


def _entropy(parts: Contents) -> None:
    """Check that the recorded randomness is there where it must be, and is the claimed one."""
    claimed = parts.claims.entropy_profile
    recorded = parts.lock.spec.entropy.mode == "recorded"
    equal(run_bundle.LOCK, "whether randomness was recorded", recorded, claimed is not None)
    if claimed is not None:
        found = parts.bundle.sha256(run_bundle.ENTROPY_PROFILE)
        equal(run_bundle.ENTROPY_PROFILE, "its digest", claimed, found)
        parse(parts.bundle.content(run_bundle.ENTROPY_PROFILE, MAX_PROFILE_BYTES))


def _image(parts: Contents) -> None:
    """Check the image's documents, and that the bundle carries the locked source tree.

    A false digest of a base layer whose true one Capsule ships is a contradiction, too (CAP-I113).
    """
    is_genuine(parts.lock.image)
    identities = layer_identities(parts.bundle, parts.lock, parts.claims)
    if parts.claims.image is not None:
        for name in run_bundle.EMBEDDED_LAYERS:
            check_layer(parts.bundle, name, identities[name])
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
        equal(member, path, project.files.get(path), facts.get(path))
    equal(member, "its digest", project.sha256, digest)
    if project.git is not None and project.git.diff is not None:
        diff = parts.bundle.sha256(run_bundle.PROJECT_DIFF)
        equal(run_bundle.PROJECT_DIFF, "its digest", project.git.diff, diff)


def _outputs(bundle: OpenedBundle, claims: ProgramClaims) -> None:
    name = run_bundle.RUN + contract.OUTPUTS
    listed = bundle.read(name, contract.Outputs)
    equal(name, "the outputs", claims.outputs, listed.files)
    equal(name, "the deleted files", claims.deleted, listed.deleted)
    equal(name, "the empty folders", claims.empty_folders, listed.empty_folders)
    equal(name, "the standard output", claims.standard_output, listed.standard_output)
    for path, member in run_bundle.claimed_outputs(claims).items():
        equal(path, "its digest", claims.outputs[path].sha256, bundle.sha256(member))
    if claims.standard_output is not None:
        printed = bundle.sha256(run_bundle.STANDARD_OUTPUT)
        equal(run_bundle.STANDARD_OUTPUT, "its digest", claims.standard_output.sha256, printed)


def _arrivals(bundle: OpenedBundle, claims: ProgramClaims) -> None:
    """Check that the arrival log is the claimed one."""
    if claims.arrivals is not None:
        found = parse_arrivals(bundle.content(run_bundle.ARRIVALS, MAX_LOG_BYTES)).digest()
        equal(run_bundle.ARRIVALS, "its digest", claims.arrivals, found)


def _output_names(parts: Contents) -> None:
    """Refuse the name of an output that would lead out of a working folder, or is claimed twice.

    Raises:
        CapsuleError: CAP-V044.
    """
    claims = parts.claims
    if not isinstance(claims, ProgramClaims):
        return
    paths = (*claims.outputs, *claims.deleted, *claims.empty_folders)
    for path, count in Counter(paths).items():
        if count > 1:
            raise inconsistent(
                "CAP-V044", f"the bundle claims two things of {path!a}, of which one must be false"
            )
        if "\0" in path or {"", ".", ".."} & set(path.split("/")):
            raise inconsistent(
                "CAP-V044",
                f"the bundle claims an output called {path!a}, which no program can have written",
            )


def _schedule(parts: Contents, claims: TrainingClaims) -> None:
    """Check that a recorded schedule is there where it must be, and is one of this run."""
    recorded = records_schedule(parts.lock)
    equal(run_bundle.LOCK, "whether the schedule was recorded", recorded, bool(claims.schedule))
    trainer = parts.lock.spec.trainer
    if not isinstance(trainer, ImpalaTrainer) or not recorded:
        return
    log = read_schedule(parts.bundle.member(run_bundle.SCHEDULE))
    of_run = parts.lock.spec.digest(), trainer.actors, trainer.fresh, claims.steps
    found = log.spec, log.actors, log.batch, log.updates * trainer.interval_steps
    equal(run_bundle.SCHEDULE, "its digest", claims.schedule, log.digest())
    equal(run_bundle.SCHEDULE, "the run that it is of", of_run, found)


def _result(parts: Contents, claims: TrainingClaims) -> None:
    """Check that the run had come to its end, and to the claimed one."""
    name = run_bundle.RUN + contract.RESULT
    result = parts.bundle.read(name, contract.Result)
    claimed = (True, claims.steps, claims.episodes, claims.parameters)
    found = (result.complete, result.steps, result.episodes, result.parameters)
    equal(name, "the end of the run", claimed, found)
    traced = TraceClaim(records=result.trace_records, head=result.trace_head)
    equal(name, "the trace", claims.trace, traced)
    trainer = parts.lock.spec.trainer
    if not isinstance(trainer, CommandTrainer):
        equal(run_bundle.LOCK, "the number of steps", claims.steps, trainer.total_steps)


def _trace(parts: Contents, claims: TrainingClaims) -> None:
    name = run_bundle.RUN + contract.TRACE
    records, head = trace_head(parts.bundle.member(name))
    equal(name, "the number of records", claims.trace.records, records)
    equal(name, "the head of its hash chain", claims.trace.head, head)


def _population(parts: Contents, _claims: TrainingClaims) -> None:
    """Check that the ancestry of a population is what the trace, which is claimed, has of it."""
    if not has_population(parts.lock):
        return
    ancestry = parts.bundle.read(run_bundle.POPULATION, contract.Ancestry)
    listed = [(each.name, each.facts()) for each in ancestry.generations]
    records = read_trace(parts.bundle.member(run_bundle.RUN + contract.TRACE))
    begun = [record.values.get("generations", {}) for record in records]
    traced = [item for each in begun if isinstance(each, dict) for item in each.items()]
    equal(run_bundle.POPULATION, "the ancestry in the trace", listed, traced)


def _streams(parts: Contents, claims: TrainingClaims) -> None:
    profiles = parts.bundle.read(run_bundle.STREAMS, contract.StreamProfiles)
    equal(run_bundle.STREAMS, "the stream profiles", claims.streams, profiles.streams)


def _evaluation(parts: Contents, claims: TrainingClaims) -> None:
    name = run_bundle.RUN + contract.EVALUATION
    found = parts.bundle.read(name, contract.Evaluation)
    equal(name, "the returns", claims.evaluation, found)
    pinned = parts.lock.spec.evaluation.start_set
    if pinned is not None:
        equal(name, "the starts against the lock", pinned.starts, found.starts)


def _checkpoints(parts: Contents, claims: TrainingClaims) -> None:
    name = run_bundle.RUN + contract.CHECKPOINT_INDEX
    found = tuple(
        CheckpointClaim(step=item.step, digest=item.digest()) for item in _index(parts).checkpoints
    )
    equal(name, "the checkpoint digests", claims.checkpoints, found)


def _index(parts: Contents) -> contract.CheckpointIndex:
    name = run_bundle.RUN + contract.CHECKPOINT_INDEX
    return parts.bundle.read(name, contract.CheckpointIndex)


def _final_tensors(parts: Contents) -> None:
    index = _index(parts)
    final = index.checkpoints[-1]
    name = run_bundle.checkpoint_member(final.step)
    with parts.bundle.open(name) as stream:
        found = digests_of(stream, parts.bundle.files.signed(name).size, name)
    for tensor in sorted({*final.tensors, *found}):
        equal(name, f"tensor {tensor!a}", final.tensors.get(tensor), found.get(tensor))


def _sbom(parts: Contents) -> None:
    data = parts.bundle.content(run_bundle.IMAGE_SBOM, MAX_BYTES)
    validate_sbom(data)
    validate_sbom(parts.bundle.content(run_bundle.MACHINE_SBOM, MAX_BYTES))
    image = parts.claims.image
    config = image.config if image else f"sha256:{parts.lock.digest()}"
    differences = sbom_matches_lock(data, parts.lock, config)
    equal(run_bundle.IMAGE_SBOM, "its components against the lock", [], differences)
