"""The start set of a finished run, for other runs to be scored on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import TrainingClaims
from capsule.bundle.keys import PublicKey
from capsule.bundle.run_bundle import RecordedRun
from capsule.experiment.evaluation import StartSet
from capsule.experiment.spec import AtariEnvironment, task_name
from capsule.host.errors import CapsuleError


def start_set_of(path: Path, keys: Iterable[PublicKey]) -> StartSet:
    """Return the starts that the run of a bundle ranked, or those that were pinned for it.

    Raises:
        CapsuleError: CAP-S011, its starts are not ranked by a network; CAP-B… as
            :func:`open_bundle` and :meth:`RecordedRun.read` raise them.
    """
    with open_bundle(path, keys) as bundle:
        run = RecordedRun.read(bundle)
    spec, claims = run.lock.spec, run.claims
    if not isinstance(claims, TrainingClaims) or spec.environment is None:
        raise _rejected("it ran a program instead of one of Capsule's trainers")
    if spec.evaluation.start_set is not None:
        return spec.evaluation.start_set
    if spec.evaluation.noop_max:
        raise _rejected(
            f"with evaluation.noop_max {spec.evaluation.noop_max}, its starts are no-ops"
        )
    environment, evaluation = spec.environment, spec.evaluation
    return StartSet(
        schema="capsule/starts/v1",
        run=claims.claim_id(),
        task=task_name(environment),
        full_action_set=isinstance(environment, AtariEnvironment) and environment.full_action_set,
        candidates=evaluation.candidates,
        shortlist=evaluation.shortlist,
        min_actions=evaluation.min_actions,
        max_actions=evaluation.max_actions,
        starts=claims.evaluation.starts,
    )


def _rejected(reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-S011",
        f"the run has no start set: {reason}",
        fix="Give the bundle of a run whose evaluation ranks random starts.",
    )
