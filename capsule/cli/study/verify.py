"""``capsule study verify``: check the bundle of a study, and run a sample of its members again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsule.cli import options
from capsule.cli.common import guarded, print_json
from capsule.cli.options import CHECKS, option

if TYPE_CHECKING:
    from capsule.study.sampling import SampledMember


@guarded
def command(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Bundle of a study (.capsule-study.tar).")
    ],
    *,
    keys: options.KeysOption = None,
    allowed_signers: options.AllowedSignersOption = None,
    identity: options.IdentityOption = None,
    revoked: options.RevokedOption = None,
    threshold: options.ThresholdOption = 1,
    allow_untrusted: options.UntrustedOption = False,
    sample: Annotated[
        int | None,
        option("--sample N", "Run N randomly chosen members again, and compare.", CHECKS),
    ] = None,
    engine: options.EngineOption = "auto",
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check the signature of a study, and every table against what the members claim.

    With --sample, members that this machine draws at random are run again and have to give the
    same claims. The command then states how likely forged members would have been found.

    Exit status: 0 all that was asked for agrees, 1 a member differs, 3 tampered or untrusted,
    4 a member could not be decided.

    Examples:
        # Check everything that needs no execution.
        capsule study verify rates.capsule-study.tar --key alice.pub

        # And run three members again.
        capsule study verify rates.capsule-study.tar --key alice.pub --sample 3
    """
    from capsule.bundle.trust import load_policy
    from capsule.host.errors import CapsuleError, ExitCode
    from capsule.image.cache import Cache
    from capsule.report.progress import open_reporter
    from capsule.study.sampling import chosen_members, rerun
    from capsule.study.study_bundle import open_study

    policy = load_policy(
        keys=keys or (),
        allowed_signers=allowed_signers or (),
        revoked=revoked or (),
        identities=identity or (),
        threshold=threshold,
    )
    if policy.trusts_nobody != allow_untrusted:
        raise CapsuleError(
            "CAP-V002" if policy.trusts_nobody else "CAP-V006",
            "no key was given to check the signature with"
            if policy.trusts_nobody
            else "--allow-untrusted contradicts --key and --allowed-signers",
            fix="Pass --key with the signer's public key, or else --allow-untrusted.",
        )
    with (
        open_reporter(quiet=quiet) as reporter,
        open_study(bundle, policy) as (opened, study),
    ):
        members = study.results.members
        locks = {member.name: member for member in study.results.lock.members}
        sampled = [
            rerun(
                member,
                study.results.lock.lock_of(locks[member.identity.name]),
                engine,
                Cache(),
                reporter,
            )
            for member in (chosen_members(study.results, sample) if sample is not None else ())
        ]
        signers = [str(signer) for signer in opened.signers]
    document = _document(study.claim_id, len(members), signers, sampled)
    if as_json:
        print_json(document)
    else:
        _show(document)
    agreements = {member.agreement for member in sampled}
    if "not-reproduced" in agreements:
        raise typer.Exit(ExitCode.DIFFERS)
    if "inconclusive" in agreements:
        raise typer.Exit(ExitCode.INCONCLUSIVE)


def _document(
    claim_id: str, members: int, signers: list[str], sampled: list[SampledMember]
) -> dict[str, Any]:
    from capsule.study.sampling import SHARES, chance_to_notice

    decided = sum(member.agreement != "inconclusive" for member in sampled)
    chances = {}
    for share in SHARES:
        forged = max(1, round(share * members))
        chances[forged] = chance_to_notice(members, forged, decided)
    return {
        "schema": "capsule/study-verified/v1",
        "claim_id": claim_id,
        "members": members,
        "signers": signers,
        "sample": [asdict(member) for member in sampled],
        "chance_to_notice": [
            {"forged": forged, "probability": chance} for forged, chance in chances.items()
        ]
        if decided
        else [],
    }


def _show(document: dict[str, Any]) -> None:
    from capsule.report.text import printable

    typer.echo(f"claim id  {document['claim_id']}")
    for signer in document["signers"]:
        typer.echo(f"signer    {printable(signer)}")
    typer.echo(
        f"intact    every table follows from the claims of the {document['members']} members"
    )
    for member in document["sample"]:
        typer.echo(f"{member['name']}: {member['agreement']}: {member['reason']}")
    for chance in document["chance_to_notice"]:
        forged = chance["forged"]
        were = "member was" if forged == 1 else "members were"
        typer.echo(
            f"If {forged} {were} forged, a sample of this size would have found one with "
            f"probability {chance['probability']:.2f}."
        )
