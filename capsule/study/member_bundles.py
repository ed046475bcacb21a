"""The members' own bundles, where a verifier has them: how they are found, and verified."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from capsule.bundle.bundle import open_bundle
from capsule.bundle.run_bundle import RecordedRun
from capsule.bundle.trust import TrustPolicy
from capsule.engine.select import EngineChoice
from capsule.experiment.canonical import sha256_file
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Reporter
from capsule.host.wording import counted
from capsule.image.cache import Cache
from capsule.study.results import MemberIdentity, StudyResults
from capsule.study.sampling import VerifiedMember
from capsule.verification.request import Expectation, Mode, VerifyRequest, segments_of
from capsule.verification.verify import verify

# The folder of a study has the bundles of its members in members/NAME. Folders below are not
# searched: a folder such as /tmp may contain millions of files.
_PLACES = [f"{folders}*.capsule.tar" for folders in ("", "*/", "*/*/")]


class MemberVerifier(NamedTuple):
    """How the bundles of members are verified.

    Attributes:
        trust: Whose signatures count.
        allow_untrusted: Accept that no key was given to check the signer with.
        engine: Where runs are executed again.
        cache: Of images.
        reporter: Told about the progress.
    """

    trust: TrustPolicy
    allow_untrusted: bool
    engine: EngineChoice
    cache: Cache
    reporter: Reporter

    def verify(self, member: MemberIdentity, path: Path, mode: Mode) -> VerifiedMember:
        """Verify the bundle of a member as 'capsule verify' does; it has to have its claim id.

        Raises:
            CapsuleError: It cannot be verified in this mode.
        """
        request = VerifyRequest(
            path,
            self.trust,
            mode,
            self.engine,
            self.allow_untrusted,
            expected=Expectation(claim=member.claim_id),
        )
        report = verify(request, self.cache, self.reporter)
        fix = None if report.error is None else report.error["fix"]
        return VerifiedMember(member.name, report.verdict, report.summary, fix)


def find_bundles(results: StudyResults, folder: Path) -> dict[str, Path]:
    """Find the bundles of members in a folder and up to two levels below it.

    A bundle is a member's if it has the digest that the study names, or if it claims the same: a
    member that was lost is run again to another file with the same claim id.

    Args:
        results: The study.
        folder: It may have the bundles of some members only, and no others.

    Returns:
        The bundle of each member that was found, by its name, in the order of the study.

    Raises:
        CapsuleError: CAP-Y030, there is no bundle; CAP-Y031, one is of no member or of another
            study, or claims something else than its member; CAP-B…, one cannot be read.
    """
    matching = (path for place in _PLACES for path in folder.glob(place))
    paths = sorted(path for path in matching if path.is_file())
    if not paths:
        raise CapsuleError(
            "CAP-Y030",
            f"--members {folder}: there is no bundle (*.capsule.tar) in this folder or up to "
            "two levels below it",
            fix="Name the folder of the study that 'capsule study run' made, or any folder with "
            "the bundles of its members.",
        )
    members = {member.identity.name: member.identity for member in results.members}
    named = {identity.bundle: name for name, identity in members.items()}
    found: dict[str, Path] = {}
    others = []
    # The very files that the study names come first. Any other bundle then goes to a member that
    # has none yet, if one of them has its claims.
    for path in paths:
        name = named.get(sha256_file(path))
        if name is None:
            others.append(path)
        else:
            found[name] = path
    for path in others:
        try:
            name = _member_with_claims_of(path, results, found)
        except CapsuleError as error:
            raise error.within(str(path)) from error
        found.setdefault(name, path)
    return {name: found[name] for name in members if name in found}


def _member_with_claims_of(path: Path, results: StudyResults, found: Mapping[str, Path]) -> str:
    """Return the member that claims what a bundle does, if possible one without a bundle."""
    with open_bundle(path, []) as bundle:
        run = RecordedRun.read(bundle)
    lock, claim_id = run.lock.digest(), run.claims.claim_id()
    of_lock = [member.identity for member in results.members if member.claims.lock == lock]
    # Members with the same seeds have the same claim id.
    same = [member.name for member in of_lock if member.claim_id == claim_id]
    if same:
        return next((name for name in same if name not in found), same[0])
    if of_lock:
        reason = f"it claims {claim_id}, but member {of_lock[0].name} claims {of_lock[0].claim_id}"
    else:
        reason = f"no member has its lock, {lock}"
    raise CapsuleError(
        "CAP-Y031",
        f"this is not the bundle of a member of study {results.lock.study.name}: {reason}",
        fix="Do not trust this file as a part of the study. If it does not belong to it, move it "
        "out of the folder.",
    )


def count_segments(results: StudyResults, names: Mapping[str, Path]) -> dict[str, int]:
    """Return how many segments can be challenged in each of some members, by their names.

    Raises:
        CapsuleError: CAP-V062, there is none in any of them.
    """
    members = {member.name: member for member in results.lock.members}
    segments = {}
    refusal: CapsuleError | None = None
    for name in names:
        lock = results.lock.lock_of(members[name])
        try:
            Mode("segments").check(lock)
            segments[name] = segments_of(lock)
        except CapsuleError as error:
            refusal = CapsuleError(
                error.code,
                f"member {name}: {error.message}",
                fix="Use --sample, which runs whole members again.",
            )
    if refusal is not None and not segments:
        raise refusal
    return segments


def choose_segments(segments: Mapping[str, int], number: int) -> dict[str, int]:
    """Choose segments of all members together, and return how many are chosen in each.

    A verification then chooses so many in the member: every set of ``number`` segments of the study
    is as likely as any other.

    Args:
        segments: As of :func:`count_segments`.
        number: How many.

    Raises:
        CapsuleError: CAP-Y032, there are fewer, or the number is not positive.
    """
    # Each segment is one entry, so a member with more of them is drawn more often. Which of its
    # segments are executed is drawn by the verification of the member.
    every = [name for name, count in segments.items() for _ in range(count)]
    if not 1 <= number <= len(every):
        raise CapsuleError(
            "CAP-Y032",
            f"--challenge {number}: the members in the folder have "
            f"{counted(len(every), 'segment')}",
            fix=f"Give a number from 1 to {len(every)}.",
        )
    return dict(Counter(secrets.SystemRandom().sample(every, number)))
