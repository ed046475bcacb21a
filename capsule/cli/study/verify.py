"""``capsule study verify``: check the bundle of a study, and run a sample of its members again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsule.cli import options
from capsule.cli.common import guarded, no_effect, print_json
from capsule.cli.defaults import trusted_files
from capsule.cli.options import CHECKS, option
from capsule.host.wording import agreeing, counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from capsule.bundle.trust import Signer


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
    signatures: options.SignatureOption = None,
    allow_untrusted: options.UntrustedOption = False,
    members: Annotated[
        Path | None,
        option(
            "--members FOLDER",
            "Also check those bundles of members that are in this folder.",
            CHECKS,
        ),
    ] = None,
    sample: Annotated[
        int | None,
        option("--sample N", "Run N randomly chosen members again, and compare.", CHECKS),
    ] = None,
    challenge: Annotated[
        int | None,
        option(
            "--challenge N",
            "Execute N randomly chosen segments of the members in --members again, and compare.",
            CHECKS,
        ),
    ] = None,
    engine: options.EngineOption = "auto",
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check the signature and the tables of a study.

    Every table is compared with the claims of the members. With --sample, members that are drawn
    at random on this machine are run again and must give the same claims. With --challenge,
    segments of members that saved their states are executed again. The command then prints the
    probability with which it would have found forged members.

    Exit status: 0 all requested checks agree, 1 a member differs, 3 tampered or untrusted,
    4 a member is inconclusive.

    Examples:
        # Check everything that needs no execution.
        capsule study verify rates.capsule-study.tar --key alice.pub

        # Also run three members again.
        capsule study verify rates.capsule-study.tar --key alice.pub --sample 3

        # Check the members' bundles, too, and execute nine segments again.
        capsule study verify r.capsule-study.tar --key a.pub --members r --challenge 9
    """
    from capsule.bundle.trust import load_policy
    from capsule.host.errors import CapsuleError
    from capsule.image.cache import Cache
    from capsule.report.progress import open_reporter
    from capsule.study.member_bundles import MemberVerifier
    from capsule.study.study_bundle import open_study
    from capsule.study.verification import check_study, reservations

    policy = load_policy(
        *trusted_files(keys, allowed_signers, others=allow_untrusted),
        revoked=revoked or (),
        identities=identity or (),
        threshold=threshold,
        signatures=signatures or (),
    )
    if engine != "auto" and sample is None and challenge is None:
        fix = "It is for --sample and --challenge."
        raise no_effect("--engine", "a check that executes nothing", fix)
    # Exactly one must be given: a trusted key, or the consent to do without.
    if policy.trusts_nobody != allow_untrusted:
        raise CapsuleError(
            "CAP-V002" if policy.trusts_nobody else "CAP-V006",
            "no key was given to check the signature with"
            if policy.trusts_nobody
            else "--allow-untrusted contradicts --key and --allowed-signers",
            fix="Name the signer's public key with --key or --allowed-signers, or else pass "
            "--allow-untrusted.",
        )
    with (
        open_reporter(quiet=quiet) as reporter,
        open_study(bundle, policy) as (opened, study),
    ):
        # Co-signatures are of the study, and so is the number of them that is required.
        of_members = replace(policy, threshold=1, detached=())
        verifier = MemberVerifier(of_members, allow_untrusted, engine, Cache(), reporter)
        checked = check_study(study.results, members, sample, challenge, verifier)
        facts = {
            "schema": "capsule/study-verified/v1",
            "claim_id": study.claim_id,
            "authentic": opened.authentic,
            "signers": [signer.model_dump(mode="json") for signer in opened.signers],
            **reservations(study.results),
        }
    document = facts | checked.document()
    if as_json:
        print_json(document)
    else:
        _show(document, opened.signers)
    if checked.exit_code:
        raise typer.Exit(checked.exit_code)


def _show(document: dict[str, Any], signers: Sequence[Signer]) -> None:
    from capsule.report.text import listed, listed_relaxations, printable

    typer.echo(f"claim id  {document['claim_id']}")
    for signer in signers:
        reason = signer.rejection_reason
        counts = "" if reason is None else f" {reason}; the signature does not count"
        typer.echo(f"signer    {printable(f'{signer}{counts}')}")
    members = counted(document["members"], "member")
    typer.echo(f"intact    every table follows from the claims of {members}")
    if document["relaxations"]:
        typer.echo(f"relaxed   {printable(listed_relaxations(document['relaxations']))}")
    if document["records"]:
        typer.echo(f"records   followed as the SIGNER wrote them: {listed(document['records'])}")
    if trees := document["source_trees"]:
        code = counted(len(trees), "source tree", "source trees")
        typer.echo(f"code      the SIGNER'S, of {code}: {listed(trees)}")
    if (bundles := document["bundles"]) is not None:
        typer.echo(f"bundles   the bundles of {len(bundles)} of {members} are in the folder")
        _show_members(each for each in bundles if each["agreement"] != "intact")
    _show_members(document["sample"])
    for chance in document["chance_to_notice"]:
        typer.echo(
            f"If {counted(chance['forged'], 'member was', 'members were')} forged, a sample of "
            f"this size would have drawn one with probability {chance['probability']:.2f}."
        )
    if document["sample"] and (undecidable := document["undecidable"]):
        bundles = agreeing(undecidable, "its own bundle", "their own bundles")
        typer.echo(f"{counted(undecidable, 'member')} cannot be decided without {bundles}.")
    if (challenge := document["challenge"]) is not None:
        _show_members(challenge["members"])
        for chance in challenge["chance_to_notice"]:
            typer.echo(
                f"If {chance['forged']} of {counted(challenge['of'], 'segment')} "
                f"{agreeing(chance['forged'], 'was', 'were')} forged, this challenge would have "
                f"found one with probability {chance['probability']:.2f}."
            )


def _show_members(members: Iterable[dict[str, Any]]) -> None:
    from capsule.report.text import MAX_SENTENCE, printable

    for member in members:
        reason = printable(member["reason"], MAX_SENTENCE)
        typer.echo(f"{member['name']}: {member['agreement']}: {reason}")
        if member["fix"] is not None:
            typer.echo(f"fix: {printable(member['fix'], MAX_SENTENCE)}")
