"""The members of a bundle that say nothing of their own: they follow from its other documents.

``capsule run`` writes them for people and for other tools, and ``capsule verify`` makes them again
and compares bytes, so that no statement or command can be hidden in one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from capsule.bundle import run_bundle
from capsule.bundle.claims import Claims, Observations
from capsule.bundle.crate import CRATE, run_crate
from capsule.bundle.reproducing import reproducing_guide
from capsule.bundle.run_bundle import Kind
from capsule.bundle.sbom import machine_sbom
from capsule.experiment import contract
from capsule.experiment.lock import Lock
from capsule.image.seccomp import PROFILE


def derived_members(
    lock: Lock, claims: Claims, observations: Observations, kinds: Mapping[str, Kind]
) -> dict[str, bytes]:
    """Make the members that are functions of the lock, the claims and the observations.

    Args:
        lock: What was run.
        claims: What it claims.
        observations: When and where it was run.
        kinds: Every member of the bundle, of :func:`capsule.bundle.run_bundle.members_of`.
    """
    embedded = run_bundle.IMAGE_ARCHIVE in kinds
    # That of a whole run with the usual options: the author's numbers of learners and replicas
    # change no bits and are left out.
    job = contract.Job.of(lock)
    others = {path: kind for path, kind in kinds.items() if path != CRATE}
    members = {
        run_bundle.JOB: job.document(),
        run_bundle.MACHINE_SBOM: machine_sbom(observations.fingerprint),
        run_bundle.GUIDE: reproducing_guide(
            lock, claims, embedded=embedded, with_data=run_bundle.carries_data(lock, kinds)
        ).encode(),
        CRATE: run_crate(lock, claims, observations, others),
    }
    if claims.image is not None:
        members[run_bundle.SECCOMP] = PROFILE.read_bytes()
    return members
