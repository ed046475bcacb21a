"""Does a bundle agree with itself? Every claim that can be checked without running anything.

What is neither checked nor made again here is listed as unchecked, and the verdict names it.
``docs/bundle-format.md`` says of each member how it is checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from capsule.bundle import run_bundle
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
    steps_per_second,
)
from capsule.bundle.derived import derived_members
from capsule.bundle.events import MAX_EVENTS, event_lines, parse_event
from capsule.bundle.run_bundle import RUN, Kind, RecordedRun, members_of
from capsule.bundle.sbom_checks import MAX_BYTES, sbom_matches_lock, validate_sbom
from capsule.entropy.evidence import Evidence
from capsule.entropy.ledger import compute_ledger
from capsule.entropy.profile import MAX_PROFILE_BYTES, parse
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.arrival_log import MAX_LOG_BYTES, parse_arrivals
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.mechanisms import Mechanisms
from capsule.experiment.trace import read_trace, trace_heads
from capsule.experiment.trainers import CommandTrainer, ImpalaTrainer
from capsule.host.code import package_digest
from capsule.host.errors import CapsuleError
from capsule.host.wording import shown_value
from capsule.image.assembly.base import is_genuine
from capsule.image.closure import check_pins
from capsule.image.requirements import MAX_PARENTHESES, read_requirement
from capsule.image.resolution.project import read_project
from capsule.verification.integrity.data import check_data
from capsule.verification.integrity.layers import (
    PROJECT,
    bad_layer,
    check_layer,
    layer_identities,
    unpacked_layer,
)
from capsule.verification.integrity.tensors import digests_of

_SHOWN_CHARACTERS = 100


def check_consistency(run: RecordedRun) -> tuple[str, ...]:
    """Check that the documents, digests and tensors inside a bundle say the same.

    Returns:
        Members that this Capsule cannot judge: those that another one derived, or that a bundle
        of this one would not have.

    Raises:
        CapsuleError: CAP-V010 naming the first contradiction (exit status 3): the signer signed
            files that contradict each other; CAP-V044 to CAP-V047 of the functions below; CAP-V004
            and CAP-V040 of :mod:`capsule.verification.integrity.layers`; CAP-V011, a tensor file
            is malformed; CAP-I305, CAP-I306, CAP-I113, the lock contradicts itself.
    """
    observed = run.observations()
    # Another version may write other members, and word them otherwise, so not all checks apply. If
    # a signer states another version to escape them, the report names what was left out.
    same_capsule = observed.capsule_sha256 == package_digest()
    # Whether these two are carried along is the only choice that lock and claims leave to a bundle,
    # so it is read from the bundle itself.
    embedded = run_bundle.IMAGE_ARCHIVE in run.bundle.files
    with_data = run_bundle.carries_data(run.lock, run.bundle.files)
    kinds = members_of(run.lock, run.claims, embedded=embedded, with_data=with_data)
    _check_output_names(run)
    if same_capsule:
        _check_members(run, kinds)
    _check_lock(run)
    _check_run(run, observed)
    _check_image(run)
    _check_data(run)
    _check_sboms(run)
    _check_entropy(run)
    _check_events(run)
    if isinstance(run.claims, TrainingClaims):
        seconds = _check_training(run, run.claims)
    else:
        seconds = _check_program(run, run.claims)
    _check_observations(run, observed, seconds)
    derived = derived_members(run.lock, run.claims, observed, kinds)
    if not same_capsule:
        own = kinds.keys() - {*derived, run_bundle.LEDGER}
        return tuple(sorted(path for path in run.bundle.files if path not in own))
    _check_derived(run, observed, derived)
    return ()


def _check_output_names(run: RecordedRun) -> None:
    """Reject the name of an output that would lead out of a working folder, or is claimed twice.

    Raises:
        CapsuleError: CAP-V044.
    """
    claims = run.claims
    if not isinstance(claims, ProgramClaims):
        return
    # A path may be claimed as a file, as deleted and as an empty folder. Compared by path, only one
    # of these claims would count (analysis/outputs.py).
    for path, count in Counter((*claims.outputs, *claims.deleted, *claims.empty_folders)).items():
        if count > 1:
            raise _inconsistent(
                "CAP-V044", f"the bundle claims two things of {path!a}, of which one must be false"
            )
        if "\0" in path or {"", ".", ".."} & set(path.split("/")):
            raise _inconsistent(
                "CAP-V044",
                f"the bundle claims an output called {path!a}, which no program can have written",
            )


def _check_members(run: RecordedRun, kinds: Mapping[str, Kind]) -> None:
    """Check that a bundle has the members of its run, and no others.

    Raises:
        CapsuleError: CAP-V045, a member is missing, of another kind, or unknown.
    """
    listed = {file.path: (file.role, file.media_type) for file in run.bundle.manifest.files}
    for path in sorted({*kinds, *listed}):
        wanted, found = kinds.get(path), listed.get(path)
        if wanted == found:
            continue
        if wanted is None:
            problem = f"{path} is not a member that a bundle of this run has"
        elif found is None:
            problem = f"the bundle has no file {path}"
        else:
            kind = " of type ".join(found)
            problem = f"{path} is listed as {kind}, not as {' of type '.join(wanted)}"
        raise _inconsistent("CAP-V045", problem)


def _check_lock(run: RecordedRun) -> None:
    """Check that the lock is the claimed one, and pins what its spec asks for."""
    claimed = run.claims.claim_id()
    _equal(run_bundle.LOCK, "its digest", run.claims.lock, run.lock.digest())
    _equal("manifest.json", "its claim id", claimed, run.bundle.manifest.claim_id)
    # read_inventory() of report/subject.py parses these again, and relies on this check.
    for text in run.lock.spec.image.packages:
        try:
            read_requirement(text)
        except ValueError as error:
            raise _inconsistent(
                "CAP-V010",
                f"image.packages of {run_bundle.LOCK} contains {text[:100]!a}, which is not a "
                f"requirement of PEP 508 with at most {MAX_PARENTHESES} parentheses",
            ) from error
    check_pins(run.lock)


def _check_run(run: RecordedRun, observed: Observations) -> None:
    """Check that no guarantee was given up silently, and what was read back while it ran."""
    claims, engine = run.claims, observed.engine.get("name", "")
    report = run.bundle.read(run_bundle.ENTROPY_REPORT, EntropyReport)
    mechanisms = run.bundle.read(RUN + contract.MECHANISMS, Mechanisms)
    relaxations = image_relaxations(run.lock, engine, report, mechanisms)
    _equal(run_bundle.LOCK, "the relaxations", claims.relaxations, relaxations)
    with_image = claims.image is not None
    _equal(run_bundle.OBSERVATIONS, "whether there was an image", with_image, engine != "process")
    name = RUN + contract.RUNTIME
    runtime = run.bundle.read(name, contract.Runtime)
    _equal(name, "the flags that were read back", claims.flags, runtime.flags)
    _equal(name, "the libraries", claims.libraries, runtime.libraries)


def _check_image(run: RecordedRun) -> None:
    """Check the image's documents, and that the bundle carries the locked source tree.

    A false digest of a base layer whose true one Capsule ships is a contradiction, too (CAP-I113).
    """
    is_genuine(run.lock)
    identities = layer_identities(run)
    if run.claims.image is not None:
        for name in run_bundle.EMBEDDED_LAYERS:
            check_layer(run.bundle, name, identities[name])
    project = run.lock.project
    if project is None:
        return
    member = run_bundle.LAYER.format(name=PROJECT)
    with unpacked_layer(run.bundle, PROJECT, identities[PROJECT], compared=True) as archive:
        try:
            facts, digest = read_project(archive)
        except CapsuleError as error:
            raise bad_layer(member, error.message) from error
    # The files come before the digest of the whole tree, so that the message names the first one
    # that differs.
    for path in sorted({*project.files, *facts}):
        _equal(member, path, project.files.get(path), facts.get(path))
    _equal(member, "its digest", project.sha256, digest)
    if project.git is not None and project.git.diff is not None:
        diff = run.bundle.sha256(run_bundle.PROJECT_DIFF)
        _equal(run_bundle.PROJECT_DIFF, "its digest", project.git.diff, diff)


def _check_data(run: RecordedRun) -> None:
    """Check that the run read the locked data sets, and that the bundle has their listings."""
    pins = run.lock.data
    if pins is not None:
        name = RUN + contract.DATA
        read = run.bundle.read(name, contract.DataRead)
        _equal(name, "the data sets against the lock", pins, read.sets)
    claimed = None if pins is None else {name: pin.sha256 for name, pin in pins.items()}
    _equal(run_bundle.LOCK, "the data sets", run.claims.data, claimed)
    named = (run.observations().data or {}).keys()
    _equal(run_bundle.OBSERVATIONS, "the data sets", (claimed or {}).keys(), named)
    check_data(run)


def _check_sboms(run: RecordedRun) -> None:
    data = run.bundle.content(run_bundle.IMAGE_SBOM, MAX_BYTES)
    validate_sbom(run.bundle.content(run_bundle.MACHINE_SBOM, MAX_BYTES))
    image = run.claims.image
    config = image.config if image else f"sha256:{run.lock.digest()}"
    differences = sbom_matches_lock(data, run.lock, config)
    _equal(run_bundle.IMAGE_SBOM, "its components against the lock", [], differences)


def _check_entropy(run: RecordedRun) -> None:
    """Check that the recorded randomness is in the bundle if it must be, and is the claimed one."""
    claimed = run.claims.entropy_profile
    recorded = run.lock.spec.entropy.mode == "recorded"
    _equal(run_bundle.LOCK, "whether randomness was recorded", recorded, claimed is not None)
    if claimed is not None:
        found = run.bundle.sha256(run_bundle.ENTROPY_PROFILE)
        _equal(run_bundle.ENTROPY_PROFILE, "its digest", claimed, found)
        parse(run.bundle.content(run_bundle.ENTROPY_PROFILE, MAX_PROFILE_BYTES))


def _check_events(run: RecordedRun) -> None:
    """Check that the events are events: one document a line, within bounds.

    What they say is the run's own statement, and is shown as such.

    Raises:
        CapsuleError: CAP-V047.
    """
    name = RUN + contract.EVENTS
    with run.bundle.open(name) as stream:
        # The events are read line by line from the bundle, as are layers and tensors in pieces: an
        # integrity check takes the same memory whatever the size of the bundle.
        for number, line in enumerate(event_lines(stream), 1):
            if number > MAX_EVENTS:
                raise _inconsistent("CAP-V047", f"{name} has more than {MAX_EVENTS} lines")
            try:
                parse_event(line)
            except ValueError as error:
                raise _inconsistent(
                    "CAP-V047", f"line {number} of {name} is not an event: {str(error)!a}"
                ) from error


# --- a user program ------------------------------------------------------------------------------


def _check_program(run: RecordedRun, claims: ProgramClaims) -> float:
    """Check the outputs and the arrival log of a program; return the seconds that it took."""
    bundle, name = run.bundle, RUN + contract.OUTPUTS
    listed = bundle.read(name, contract.Outputs)
    _equal(name, "the outputs", claims.outputs, listed.files)
    _equal(name, "the deleted files", claims.deleted, listed.deleted)
    _equal(name, "the empty folders", claims.empty_folders, listed.empty_folders)
    _equal(name, "the standard output", claims.standard_output, listed.standard_output)
    for path, output in claims.outputs.items():
        if output.target is not None:
            text = output.target.encode()
            link = contract.Output(size=len(text), sha256=sha256_hex(text), target=output.target)
            _equal(path, "the size and digest of a link", output, link)
    for path, member in run_bundle.claimed_outputs(claims.outputs).items():
        _check_output(run, path, claims.outputs[path], member)
    printed = claims.standard_output
    if printed is not None:
        member = run_bundle.STANDARD_OUTPUT
        _check_output(run, member, printed, member)
        _equal(member, "its kind", (printed.target, printed.executable), (None, False))
    if claims.arrivals is not None:
        found = parse_arrivals(bundle.content(run_bundle.ARRIVALS, MAX_LOG_BYTES)).digest()
        _equal(run_bundle.ARRIVALS, "its digest", claims.arrivals, found)
    result = bundle.read(RUN + contract.RESULT, contract.ProgramResult)
    outputs = bundle.sha256(name)
    _equal(RUN + contract.RESULT, "the digest of the listed outputs", outputs, result.outputs)
    return result.seconds


def _check_output(run: RecordedRun, name: str, output: contract.Output, member: str) -> None:
    _equal(name, "its digest", output.sha256, run.bundle.sha256(member))
    _equal(name, "its size", output.size, run.bundle.files.signed(member).size)


# --- a training ---------------------------------------------------------------------------------


def _check_training(run: RecordedRun, claims: TrainingClaims) -> float:
    """Check what one of Capsule's own trainers claims; return the seconds of training."""
    seconds = _check_result(run, claims)
    _check_schedule(run, claims)
    name = RUN + contract.TRACE
    checkpoints = run.checkpoints()
    heads = trace_heads(run.bundle.member(name), [each.step for each in checkpoints])
    _equal(name, "the number of records", claims.trace.records, heads.records)
    _equal(name, "the head of its hash chain", claims.trace.head, heads.last)
    _equal(name, "whether it ends with the run", True, heads.step <= claims.steps)
    _check_population(run)
    profiles = run.bundle.read(run_bundle.STREAMS, contract.StreamProfiles)
    _equal(run_bundle.STREAMS, "the stream profiles", claims.streams, profiles.streams)
    name = RUN + contract.EVALUATION
    evaluation = run.bundle.read(name, contract.Evaluation)
    _equal(name, "the returns", claims.evaluation, evaluation)
    starts = len(evaluation.starts)
    for point in evaluation.points:
        numbers = len(point.returns), len(point.lengths)
        what = f"the numbers of returns and lengths at step {point.step}, one for each start,"
        _equal(name, what, numbers, (starts, starts))
    pinned = run.lock.spec.evaluation.start_set
    if pinned is not None:
        _equal(name, "the starts against the lock", pinned.starts, evaluation.starts)
    _check_checkpoints(run, claims)
    stated = [each.trace_head for each in checkpoints]
    _equal(RUN + contract.CHECKPOINT_INDEX, "the trace heads", heads.checkpoints, stated)
    return seconds


def _check_result(run: RecordedRun, claims: TrainingClaims) -> float:
    """Check that the run had come to its end, and to the claimed one."""
    name = RUN + contract.RESULT
    result = run.bundle.read(name, contract.Result)
    # The prefix of a run ends with a result, too, but with one that is not complete.
    claimed = (True, claims.steps, claims.episodes, claims.parameters)
    found = (result.complete, result.steps, result.episodes, result.parameters)
    _equal(name, "the end of the run", claimed, found)
    traced = TraceClaim(records=result.trace_records, head=result.trace_head)
    _equal(name, "the trace", claims.trace, traced)
    trainer = run.lock.spec.trainer
    if not isinstance(trainer, CommandTrainer):
        _equal(run_bundle.LOCK, "the number of steps", claims.steps, trainer.total_steps)
    return result.seconds


def _check_schedule(run: RecordedRun, claims: TrainingClaims) -> None:
    """Check that a recorded schedule is in the bundle if it must be, and is one of this run."""
    recorded = records_schedule(run.lock)
    _equal(run_bundle.LOCK, "whether the schedule was recorded", recorded, bool(claims.schedule))
    trainer = run.lock.spec.trainer
    if not isinstance(trainer, ImpalaTrainer) or not recorded:
        return
    log = read_schedule(run.bundle.member(run_bundle.SCHEDULE))
    # A re-execution follows the log, so it must be of this spec, of as many actors, and long
    # enough.
    of_run = run.lock.spec.digest(), trainer.actors, trainer.fresh, claims.steps
    found = log.spec, log.actors, log.batch, log.updates * trainer.interval_steps
    _equal(run_bundle.SCHEDULE, "its digest", claims.schedule, log.digest())
    _equal(run_bundle.SCHEDULE, "the run that it is of", of_run, found)


def _check_population(run: RecordedRun) -> None:
    """Check that the ancestry of a population is what the claimed trace says of it."""
    if not has_population(run.lock):
        return
    ancestry = run.bundle.read(run_bundle.POPULATION, contract.Ancestry)
    listed = [(each.name, each.facts()) for each in ancestry.generations]
    records = read_trace(run.bundle.member(RUN + contract.TRACE))
    begun = [record.values.get("generations", {}) for record in records]
    traced = [item for each in begun if isinstance(each, dict) for item in each.items()]
    _equal(run_bundle.POPULATION, "the ancestry in the trace", listed, traced)


def _check_checkpoints(run: RecordedRun, claims: TrainingClaims) -> None:
    """Check all checkpoints' steps and digests, and the last one's tensors and parameters."""
    checkpoints = run.checkpoints()
    training = run.lock.spec.training()
    interval, total = training.recording.checkpoint_interval, training.trainer.total_steps
    # Their number comes first: a list of a lock's steps could be of any length.
    _equal(run_bundle.LOCK, "the number of checkpoints", len(checkpoints), -(-total // interval))
    steps = [each.step for each in checkpoints]
    due = [min(number * interval, total) for number in range(1, len(checkpoints) + 1)]
    _equal(run_bundle.LOCK, "the steps of the checkpoints", steps, due)
    found = tuple(CheckpointClaim(step=each.step, digest=each.digest()) for each in checkpoints)
    name = RUN + contract.CHECKPOINT_INDEX
    _equal(name, "the checkpoint digests", claims.checkpoints, found)
    final = checkpoints[-1]
    name = run_bundle.checkpoint_member(final.step)
    with run.bundle.open(name) as stream:
        # What is read in place may have changed since the bundle was checked. It is compared with
        # digests of the claims, which would show that.
        tensors = digests_of(stream, run.bundle.files.signed(name).size, name)
    for tensor in sorted({*final.tensors, *tensors}):
        _equal(name, f"tensor {tensor!a}", final.tensors.get(tensor), tensors.get(tensor))
    if claims.parameters not in _parameters(final):
        raise _inconsistent(
            "CAP-V010",
            f"the bundle contradicts itself: the parameters in {name} are not those of claims.json",
        )


def _parameters(final: contract.Checkpoint) -> set[str]:
    """Return the digest of the parameters in a checkpoint, for each member of a population."""
    members: dict[str, dict[str, str]] = defaultdict(dict)
    for name, digest in final.tensors.items():
        member, group, tensor = name.rpartition("parameters/")
        if group:
            members[member][tensor] = digest
    return {sha256_hex(canonical_json(tensors)) for tensors in members.values()}


# --- what follows from the rest -----------------------------------------------------------------


def _check_observations(run: RecordedRun, observed: Observations, seconds: float) -> None:
    """Check that the observations repeat what the run itself recorded."""
    runtime = run.bundle.read(RUN + contract.RUNTIME, contract.Runtime)
    speed = steps_per_second(run.claims, seconds)
    name = run_bundle.OBSERVATIONS
    _equal(name, "the device", runtime.device, observed.device)
    _equal(name, "the seconds of training", seconds, observed.training_seconds)
    _equal(name, "the steps per second", speed, observed.steps_per_second)
    # Whether the C library was that of an image decides about the expected grade.
    engine = (observed.fingerprint.engine or {}).get("name", "process")
    _equal(name, "the engine of the machine", observed.engine.get("name"), engine)


def _check_derived(run: RecordedRun, observed: Observations, derived: Mapping[str, bytes]) -> None:
    """Compare the bytes of members that follow from others: the ledger's, too.

    Raises:
        CapsuleError: CAP-V046, one is not what the bundle's other documents give.
    """
    bundle = run.bundle
    is_training = isinstance(run.claims, TrainingClaims)
    arrivals = None
    if run_bundle.ARRIVALS in bundle.files:
        arrivals = parse_arrivals(bundle.content(run_bundle.ARRIVALS, MAX_LOG_BYTES))
    name = RUN + contract.DATA
    data = bundle.read(name, contract.DataRead) if name in bundle.files else None
    evidence = Evidence(
        runtime=bundle.read(RUN + contract.RUNTIME, contract.Runtime),
        mechanisms=bundle.read(RUN + contract.MECHANISMS, Mechanisms),
        report=bundle.read(run_bundle.ENTROPY_REPORT, EntropyReport),
        streams=bundle.read(run_bundle.STREAMS, contract.StreamProfiles) if is_training else None,
        arrivals=arrivals,
        data=data,
        engine=observed.engine,
        image=None,
    )
    images: tuple[str | None, ...] = (None,)
    if run.claims.image is not None:  # an engine names it by its configuration or its manifest
        images = run.claims.image.config, f"sha256:{bundle.sha256(run_bundle.IMAGE_MANIFEST)}"
    ledgers = [compute_ledger(replace(evidence, image=name)).document() for name in images]
    accepted = {path: [data] for path, data in derived.items()} | {run_bundle.LEDGER: ledgers}
    for path, documents in accepted.items():
        if bundle.content(path) not in documents:
            raise _inconsistent("CAP-V046", f"{path} is not what the bundle's other documents give")


def _equal(name: str, what: str, claimed: Any, found: Any) -> None:
    """Reject a bundle in which two statements differ that must be equal.

    Raises:
        CapsuleError: CAP-V010.
    """
    if claimed != found:
        # The beginning of untrusted text in ASCII, without control characters.
        texts = (shown_value(value)[:_SHOWN_CHARACTERS] for value in (claimed, found))
        left, right = (ascii(text)[1:-1] for text in texts)
        raise _inconsistent(
            "CAP-V010",
            f"the bundle contradicts itself: {what} in {name} is not what claims.json says "
            f"(claimed {left}, found {right})",
        )


def _inconsistent(code: str, message: str) -> CapsuleError:
    return CapsuleError(
        code, message, fix="Do not trust this bundle; ask its signer for a consistent one."
    )
