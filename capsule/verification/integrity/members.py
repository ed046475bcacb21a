"""Is every member of a bundle one that a run has, and is it what it must be?

What is neither checked nor made again here is listed as unchecked, and the verdict says so.
``docs/bundle-format.md`` says of each member how it is checked.
"""

from __future__ import annotations

from dataclasses import replace

from capsule.bundle import run_bundle
from capsule.bundle.claims import Claims, Observations, ProgramClaims, TrainingClaims
from capsule.bundle.derived import derived_members
from capsule.bundle.events import MAX_EVENTS, event_lines, parse_event
from capsule.bundle.run_bundle import RUN, Kind, members_of
from capsule.entropy.evidence import Evidence
from capsule.entropy.ledger import compute_ledger
from capsule.entropy.report import EntropyReport
from capsule.experiment import contract
from capsule.experiment.arrival_log import MAX_LOG_BYTES, ArrivalLog, parse_arrivals
from capsule.experiment.mechanisms import Mechanisms
from capsule.host.code import package_digest
from capsule.host.errors import CapsuleError
from capsule.verification.integrity.contents import Contents, equal, inconsistent


def check_layout(parts: Contents, observed: Observations) -> None:
    """Check that a bundle has the members of its run, and no others.

    Raises:
        CapsuleError: CAP-V045, a member is missing, of another kind, or none that a run has.
    """
    if observed.capsule_sha256 != package_digest():
        return
    kinds, found = _kinds(parts), _found(parts)
    for path in sorted({*kinds, *found}):
        _check_kind(path, kinds.get(path), found.get(path))


def check_derived(parts: Contents, observed: Observations) -> tuple[str, ...]:
    """Make the members again that follow from others, and compare bytes.

    Returns:
        Members that this Capsule cannot judge: those that another one derived, or that a bundle
        of this one would not have.

    Raises:
        CapsuleError: CAP-V046, one is not what the bundle's other documents give.
    """
    kinds, found = _kinds(parts), _found(parts)
    derived = derived_members(parts.lock, parts.claims, observed, kinds)
    if observed.capsule_sha256 != package_digest():
        made = {*derived, run_bundle.LEDGER}
        return tuple(sorted(path for path in found if path in made or path not in kinds))
    for path, data in derived.items():
        if parts.bundle.content(path) != data:
            raise _underived(path)
    _check_ledger(parts, observed)
    return ()


def _check_ledger(parts: Contents, observed: Observations) -> None:
    """Compute the ledger again from the documents that it rests on, and compare bytes.

    Raises:
        CapsuleError: CAP-V046.
    """
    bundle = parts.bundle
    streams = None
    if isinstance(parts.claims, TrainingClaims):
        streams = bundle.read(run_bundle.STREAMS, contract.StreamProfiles)
    evidence = Evidence(
        runtime=bundle.read(RUN + contract.RUNTIME, contract.Runtime),
        mechanisms=bundle.read(RUN + contract.MECHANISMS, Mechanisms),
        report=bundle.read(run_bundle.ENTROPY_REPORT, EntropyReport),
        streams=streams,
        arrivals=_arrivals(parts),
        engine=observed.engine,
        image=None,
    )
    ledgers = (compute_ledger(replace(evidence, image=name)) for name in _image_names(parts))
    if bundle.content(run_bundle.LEDGER) not in [ledger.document() for ledger in ledgers]:
        raise _underived(run_bundle.LEDGER)


def _arrivals(parts: Contents) -> ArrivalLog | None:
    if run_bundle.ARRIVALS not in parts.bundle.files:
        return None
    return parse_arrivals(parts.bundle.content(run_bundle.ARRIVALS, MAX_LOG_BYTES))


def _image_names(parts: Contents) -> tuple[str | None, ...]:
    """Return what an engine may call the image: by its configuration or its manifest."""
    if parts.claims.image is None:
        return (None,)
    manifest = parts.bundle.sha256(run_bundle.IMAGE_MANIFEST)
    return parts.claims.image.config, f"sha256:{manifest}"


def _underived(path: str) -> CapsuleError:
    return inconsistent("CAP-V046", f"{path} is not what the bundle's other documents give")


def _kinds(parts: Contents) -> dict[str, Kind]:
    embedded = run_bundle.IMAGE_ARCHIVE in parts.bundle.files
    return members_of(parts.lock, parts.claims, embedded=embedded)


def _found(parts: Contents) -> dict[str, Kind]:
    return {file.path: (file.role, file.media_type) for file in parts.bundle.manifest.files}


def _check_kind(path: str, wanted: Kind | None, found: Kind | None) -> None:
    if wanted == found:
        return
    if wanted is None:
        raise inconsistent("CAP-V045", f"{path} is not a member that a bundle of this run has")
    if found is None:
        raise inconsistent("CAP-V045", f"the bundle has no file {path}")
    kind = " of type ".join(found)
    raise inconsistent("CAP-V045", f"{path} is listed as {kind}, not as {' of type '.join(wanted)}")


def check_observations(parts: Contents, observed: Observations) -> None:
    """Check that the observations repeat what the run wrote down of itself.

    Raises:
        CapsuleError: CAP-V010.
    """
    runtime = parts.bundle.read(RUN + contract.RUNTIME, contract.Runtime)
    equal(run_bundle.OBSERVATIONS, "the device", runtime.device, observed.device)
    seconds, steps = _seconds(parts, parts.claims)
    equal(run_bundle.OBSERVATIONS, "the seconds of training", seconds, observed.training_seconds)
    speed = None if steps is None or not seconds else steps / seconds
    equal(run_bundle.OBSERVATIONS, "the steps per second", speed, observed.steps_per_second)


def _seconds(parts: Contents, claims: Claims) -> tuple[float, int | None]:
    name = RUN + contract.RESULT
    if isinstance(claims, TrainingClaims):
        return parts.bundle.read(name, contract.Result).seconds, claims.steps
    result = parts.bundle.read(name, contract.ProgramResult)
    if isinstance(claims, ProgramClaims):
        found = parts.bundle.sha256(RUN + contract.OUTPUTS)
        equal(name, "the digest of the listed outputs", found, result.outputs)
    return result.seconds, None


def check_events(parts: Contents) -> None:
    """Check that the events are events: one document a line, within bounds.

    What they say is the run's own word, and is shown as such.

    Raises:
        CapsuleError: CAP-V047.
    """
    name = RUN + contract.EVENTS
    with parts.bundle.open(name) as stream:
        for number, line in enumerate(event_lines(stream), 1):
            if number > MAX_EVENTS:
                raise inconsistent("CAP-V047", f"{name} has more than {MAX_EVENTS} lines")
            try:
                parse_event(line)
            except ValueError as error:
                raise inconsistent(
                    "CAP-V047", f"line {number} of {name} is not an event: {str(error)!a}"
                ) from error
