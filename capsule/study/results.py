"""The results of a study: what each member claims, and the scores of its networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.claims import ProgramClaims, TrainingClaims
from capsule.bundle.run_bundle import RecordedRun, claimed_outputs
from capsule.experiment.canonical import sha256_file
from capsule.experiment.contract import Evaluation
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock, Sha256
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.wording import counted
from capsule.image.cache import Cache
from capsule.report.scores import Network, Score, ScoredTask, by_task, network_scores
from capsule.report.subject import evaluation_points
from capsule.study.directory import StudyDirectory
from capsule.study.lock import StudyLock
from capsule.study.members import PlannedMember
from capsule.study.program_scores import ReadOutput, ScoreReader, Tasks, scored_outputs


class MemberIdentity(Model):
    """One member of a study, by what identifies its results."""

    name: str
    claim_id: Sha256
    bundle: Sha256


@dataclass(frozen=True)
class MemberResult:
    """The results that a member claims.

    Attributes:
        plan: Its place in the study.
        identity: Its claim id, and the digest of its bundle.
        claims: Its claims.
        tasks: The evaluations in each of its tasks.
        outputs: The outputs of a program in which its scores are, by their paths.
        engine: The engine that ran it, as its bundle states; None if only its claims are known.
    """

    plan: PlannedMember
    identity: MemberIdentity
    claims: TrainingClaims | ProgramClaims
    tasks: Tasks
    outputs: Mapping[str, bytes] = field(default_factory=dict)
    engine: str | None = None

    @cached_property
    def scores(self) -> dict[ScoredTask, dict[Network, Score]]:
        """The scores of the final and the best network in each task."""
        return {task: network_scores(points) for task, points in self.tasks}


@dataclass(frozen=True)
class StudyResults:
    """The results of the members that are done.

    Attributes:
        lock: The study.
        members: In the order of the study.
        missing: Names of the members that have no results yet.
    """

    lock: StudyLock
    members: tuple[MemberResult, ...]
    missing: tuple[str, ...] = ()

    @property
    def without_image(self) -> bool:
        """Whether all members ran as plain processes, so that verifiers have to choose it, too."""
        return bool(self.members) and all(member.claims.image is None for member in self.members)

    def needs_bundles(self, cache: Cache | None) -> bool:
        """Return whether a member cannot be run again without its own bundle.

        Args:
            cache: As of :func:`files_needed`.
        """
        locks = {member.name: self.lock.lock_of(member) for member in self.lock.members}
        return any(
            files_needed(member.claims, locks[member.identity.name], cache)
            for member in self.members
        )

    @classmethod
    def of(cls, study: StudyDirectory) -> StudyResults:
        """Read the results of a study from its folder.

        Raises:
            CapsuleError: CAP-Y015 a bundle is not that of its member, CAP-Y016 a member has no
                scores; CAP-B…, a bundle is damaged.
        """
        members, missing, scores = [], [], ScoreReader(study.lock.study)
        for member in study.lock.members:
            path = study.bundle(member.name)
            if path is None:
                missing.append(member.name)
            else:
                members.append(_from_bundle(study.lock, member.name, path, scores))
        return cls(study.lock, tuple(members), tuple(missing))


def _open(path: Path) -> OpenedBundle:
    """Open the bundle of a member, which the user of the study's folder can make again."""
    try:
        # No key is trusted: whether a bundle is authentic matters to verifiers of the study only.
        return open_bundle(path, [])
    except CapsuleError as error:
        fix = error.fix
        if error.exit_code == ExitCode.TAMPERED:
            fix = (
                "Restore the file from a copy. Or delete it and run 'capsule study run --resume', "
                "which runs the member again."
            )
        raise CapsuleError(error.code, f"{path}: {error.message}", fix=fix) from error


def _from_bundle(lock: StudyLock, name: str, path: Path, scores: ScoreReader) -> MemberResult:
    with _open(path) as bundle:
        run = RecordedRun.read(bundle)
        claims, engine = run.claims, run.observations().engine.get("name")
        identity = MemberIdentity(name=name, claim_id=claims.claim_id(), bundle=sha256_file(path))

        def read(claims: ProgramClaims, path: str) -> bytes:
            return bundle.content(claimed_outputs(claims.outputs)[path])

        return replace(member_result(lock, identity, claims, read, scores), engine=engine)


def member_result(
    lock: StudyLock,
    identity: MemberIdentity,
    claims: TrainingClaims | ProgramClaims,
    read: ReadOutput,
    scores: ScoreReader,
) -> MemberResult:
    """Return the result of a member.

    Args:
        lock: The study.
        identity: The member.
        claims: What it claims.
        read: Returns what an output of a program holds, by its path in the working folder.
        scores: Reads the scores of the study's programs.

    Raises:
        CapsuleError: CAP-Y015, the claims are those of another lock; CAP-Y016, they have no scores,
            or one that is not a finite number.
    """
    name = identity.name
    member = next(each for each in lock.members if each.name == name)
    if claims.lock != member.lock:
        raise CapsuleError(
            "CAP-Y015",
            f"the results of member {name} are those of the lock {claims.lock}, not of its own, "
            f"{member.lock}",
            fix="Do not trust these files: a bundle was exchanged for another one.",
        )
    try:
        outputs: dict[str, bytes] = {}
        if isinstance(claims, ProgramClaims):
            outputs = scored_outputs(lock.study, claims, read)
            tasks = scores.read(claims, outputs)
        else:
            _check_returns(claims.evaluation)
            points = by_task(lock.lock_of(member), evaluation_points(claims.evaluation))
            tasks = tuple((task, tuple(each)) for task, each in points)
        result = MemberResult(lock.planned[name], identity, claims, tasks, outputs)
        result.scores  # noqa: B018 - rejects what cannot be scored
    except ValueError as error:
        raise CapsuleError(
            "CAP-Y016",
            f"member {name} cannot be scored: {error}",
            fix="Give its spec an evaluation, or the study the 'scores' of a program.",
        ) from error
    return result


def _check_returns(evaluation: Evaluation) -> None:
    """Check that every evaluation has a return of each start, on which curves rely.

    Raises:
        ValueError: One has not.
    """
    for point in evaluation.points:
        if len(point.returns) != len(evaluation.starts):
            raise ValueError(
                f"its evaluation of step {point.step} has {counted(len(point.returns), 'return')} "
                f"for {counted(len(evaluation.starts), 'start')}"
            )


def files_needed(claims: ProgramClaims | TrainingClaims, lock: Lock, cache: Cache | None) -> str:
    """Return the files of a member that its re-execution lacks; empty if it lacks none of them.

    Args:
        claims: What the member claims.
        lock: Its lock.
        cache: Of the machine that executes it; None: of a machine that has nothing of the study.
    """
    if isinstance(claims, ProgramClaims):
        return "its source tree"
    if claims.schedule is not None:
        return "its recorded schedule"
    if claims.entropy_profile is not None:
        return "its recorded randomness"
    if lock.data is not None:
        return "its data sets"
    # Locking the file of the study puts the tree of an environment into the cache.
    tree = lock.project
    cached = tree is None or (cache is not None and cache.trees.has(tree.sha256))
    return "" if cached else "its source tree"


def grouped(
    members: Sequence[MemberResult],
) -> dict[tuple[str, ScoredTask], list[MemberResult]]:
    """Return the members by group and task, in the order of the study."""
    groups: dict[tuple[str, ScoredTask], list[MemberResult]] = {}
    for member in members:
        for task, _ in member.tasks:
            groups.setdefault((member.plan.group, task), []).append(member)
    return groups


def means(
    members: Iterable[MemberResult], task: ScoredTask, network: Network = "final"
) -> list[float]:
    """Return the score of a network of each member in a task."""
    return [member.scores[task][network].summary.mean for member in members]
