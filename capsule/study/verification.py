"""Verifying a study beyond its signature: its members' bundles, a sample of them, a challenge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capsule.bundle.claims import recorded_inputs
from capsule.experiment.spec import relaxations
from capsule.host.errors import CapsuleError, ExitCode
from capsule.study.member_bundles import (
    MemberVerifier,
    choose_segments,
    count_segments,
    find_bundles,
)
from capsule.study.results import MemberResult, StudyResults, files_needed
from capsule.study.sampling import (
    VerifiedMember,
    chance_to_notice,
    chosen_members,
    rerun,
)
from capsule.verification.request import Mode
from capsule.verification.verdict import exit_code_of
from capsule.verification.verify import deciding_error, verdict_of

SHARES = (0.05, 0.1, 0.2, 0.5)  # of what was forged, for which the chance to notice is stated


@dataclass(frozen=True)
class StudyChallenge:
    """Segments that were executed again.

    Attributes:
        members: What this has shown of each member that has some of them.
        chosen: Number of segments in each of these members.
        of: Segments that could have been chosen.
    """

    members: tuple[VerifiedMember, ...]
    chosen: dict[str, int]
    of: int


@dataclass(frozen=True)
class CheckedStudy:
    """The result of a study's verification beyond its own file.

    Attributes:
        size: Number of members of the study.
        bundles: The members whose own bundles were checked; None if none were to be.
        sample: The members that were run again.
        challenge: The segments that were executed again, if any were to be.
        undecidable: Number of members that no sample can decide, because their re-execution needs
            their own bundles, which were not given.
    """

    size: int
    bundles: tuple[VerifiedMember, ...] | None
    sample: tuple[VerifiedMember, ...]
    challenge: StudyChallenge | None
    undecidable: int = 0

    @property
    def exit_code(self) -> ExitCode:
        """The status of the command: the worst that was found, tampering before differences."""
        challenged = self.challenge.members if self.challenge else ()
        everything = [*(self.bundles or ()), *self.sample, *challenged]
        # As 'capsule verify' does by default: only equal bits agree.
        found = {exit_code_of(each.agreement, "bitwise") for each in everything}
        worst = (ExitCode.TAMPERED, ExitCode.DIFFERS, ExitCode.INCONCLUSIVE)
        return next((code for code in worst if code in found), ExitCode.OK)

    def document(self) -> dict[str, Any]:
        """Return the result as JSON values, with the chances to notice what was forged."""
        challenge = None
        if self.challenge is not None:
            chosen = self.challenge.chosen
            decided = sum(chosen[name] for name in _decided(self.challenge.members))
            challenge = {
                "of": self.challenge.of,
                "members": [
                    {**asdict(each), "segments": chosen[each.name]}
                    for each in self.challenge.members
                ],
                "chance_to_notice": _chances(self.challenge.of, decided),
            }
        return {
            "members": self.size,
            "bundles": None if self.bundles is None else [asdict(each) for each in self.bundles],
            "sample": [asdict(each) for each in self.sample],
            "chance_to_notice": _chances(self.size, len(_decided(self.sample))),
            "undecidable": self.undecidable,
            "challenge": challenge,
        }


def _decided(members: Iterable[VerifiedMember]) -> list[str]:
    return [member.name for member in members if member.agreement != "inconclusive"]


def _chances(total: int, drawn: int) -> list[dict[str, Any]]:
    """Return the chance that a drawing found what was forged, for several shares of the total."""
    if not drawn:
        return []
    forged = dict.fromkeys(max(1, round(share * total)) for share in SHARES)
    return [
        {"forged": number, "probability": chance_to_notice(total, number, drawn)}
        for number in forged
    ]


def reservations(results: StudyResults) -> dict[str, list[str]]:
    """Return what the verdict on any member relies on, as ``capsule verify`` says it of one run.

    Returns:
        The guarantees that members gave up, the inputs that a re-execution takes from their
        bundles, and the digests of their source trees, which are the signer's code.
    """
    lock, claims = results.lock, [member.claims for member in results.members]
    # What a member claims is not compared with its lock before its own bundle is checked.
    given_up = {name for spec in lock.specs for name in relaxations(spec)}
    return {
        "relaxations": sorted(given_up.union(*(each.relaxations for each in claims))),
        "records": list(dict.fromkeys(name for each in claims for name in recorded_inputs(each))),
        "source_trees": sorted({pins.project.sha256 for pins in lock.pins if pins.project}),
    }


def check_study(
    results: StudyResults,
    folder: Path | None,
    sample: int | None,
    challenge: int | None,
    verifier: MemberVerifier,
) -> CheckedStudy:
    """Check what of a study can be checked with its members' bundles or by running members again.

    Args:
        results: The study, whose own file is intact.
        folder: Where bundles of its members are.
        sample: How many members are run again, if any are.
        challenge: How many segments are executed again, if any are.
        verifier: Verifies the bundles.

    Raises:
        CapsuleError: CAP-Y019, CAP-Y032 so many cannot be drawn; CAP-Y030, CAP-Y031 the folder has
            no bundles of the study, or others; CAP-Y033 a challenge without a folder; CAP-V062 no
            member can be challenged; CAP-V007 it was interrupted.
    """
    if challenge is not None and folder is None:
        raise CapsuleError(
            "CAP-Y033",
            "--challenge needs the bundles of the members, which keep the states of segments",
            fix="Add --members with their folder, or use --sample.",
        )
    # What can be rejected is found here, before the first member is executed for hours.
    drawn = [] if sample is None else chosen_members(results, sample)
    found = {} if folder is None else find_bundles(results, folder)
    segments = {} if challenge is None else count_segments(results, found)
    chosen = {} if challenge is None else choose_segments(segments, challenge)
    members = {member.identity.name: member.identity for member in results.members}
    locks = {member.name: results.lock.lock_of(member) for member in results.lock.members}

    def verified(name: str, mode: Mode) -> VerifiedMember:
        return verifier.verify(members[name], found[name], mode)

    def again(member: MemberResult) -> VerifiedMember:
        name = member.identity.name
        if name in found:  # with what the run recorded
            return verified(name, Mode("full"))
        try:
            return rerun(member, locks[name], verifier.engine, verifier.cache, verifier.reporter)
        except (CapsuleError, OSError, MemoryError) as raised:
            # As in 'capsule verify': what this machine lacks decides nothing about the member, and
            # nothing about the members after it.
            error = deciding_error(raised)
            return VerifiedMember(name, verdict_of(error), error.message, error.fix)

    def noted(member: VerifiedMember) -> VerifiedMember:
        # The results of many hours are printed at the end, which an interruption prevents.
        verifier.reporter.note(f"{member.name}: {member.agreement}")
        return member

    bundles = tuple(verified(name, Mode("integrity")) for name in found)
    sampled = tuple(noted(again(member)) for member in drawn)
    challenged = tuple(
        noted(verified(name, Mode("segments", segments=count))) for name, count in chosen.items()
    )
    return CheckedStudy(
        len(members),
        None if folder is None else bundles,
        sampled,
        None if challenge is None else StudyChallenge(challenged, chosen, sum(segments.values())),
        sum(
            each.identity.name not in found
            and files_needed(each.claims, locks[each.identity.name], verifier.cache) != ""
            for each in results.members
        ),
    )
