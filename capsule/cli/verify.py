"""``capsule verify``: check, re-execute, compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from capsule.cli.common import (
    EngineOption,
    JsonOption,
    KeysOption,
    QuietOption,
    guarded,
    print_json,
)
from capsule.cli.passphrase import PassphraseOption, unlock

if TYPE_CHECKING:
    from capsule.experiment.errors import CapsuleError


@guarded
def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to verify; it is never changed.")],
    *,
    keys: KeysOption = None,
    allowed_signers: Annotated[
        list[Path] | None,
        typer.Option("--allowed-signers", help="Trust file in OpenSSH's form; may be repeated."),
    ] = None,
    identities: Annotated[
        list[str] | None,
        typer.Option("--identity", help="Who must have signed, of those in the trust file."),
    ] = None,
    revoked: Annotated[
        list[Path] | None,
        typer.Option("--revoked", help="Keys or fingerprints, one a line, that count no more."),
    ] = None,
    threshold: Annotated[
        int, typer.Option("--threshold", min=1, help="How many different keys must have signed.")
    ] = 1,
    signatures: Annotated[
        list[Path] | None,
        typer.Option("--signature", help="Further signature (capsule sign); may be repeated."),
    ] = None,
    keyless: Annotated[
        list[Path] | None,
        typer.Option("--keyless", help="Sigstore bundle over manifest.json, by --identity."),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option("--issuer", help="Who vouches for the identity, with --keyless.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="integrity, environment, prefix:N (N agent steps), segments:N, fresh-seed, full.",
        ),
    ] = "full",
    challenge: Annotated[
        str | None,
        typer.Option(
            "--challenge",
            help="Segments between checkpoints to choose at random and execute again, or 'all'; "
            "with a fresh seed's prefix. The same as --mode segments:N.",
        ),
    ] = None,
    fresh_seed: Annotated[
        bool,
        typer.Option(
            "--fresh-seed",
            help="Have a seed that was drawn now computed: does the image compute, or recite? "
            "The same as --mode fresh-seed.",
        ),
    ] = False,
    allow_untrusted: Annotated[
        bool, typer.Option("--allow-untrusted", help="Continue although the signer is not trusted.")
    ] = False,
    expect_spec: Annotated[
        Path | None,
        typer.Option("--expect-spec", help="Refuse the bundle of any other experiment."),
    ] = None,
    expect_lock: Annotated[
        str | None,
        typer.Option(
            "--expect-lock",
            metavar="FILE|DIGEST",
            help="Refuse the bundle of any other lock, which names every package by digest.",
        ),
    ] = None,
    expect_claim: Annotated[
        str | None, typer.Option("--expect-claim", help="Refuse any other claim id.")
    ] = None,
    grade: Annotated[
        Literal["bitwise", "content", "statistical"],
        typer.Option("--grade", help="Weakest grade that ends with exit status 0."),
    ] = "bitwise",
    engine: EngineOption = "auto",
    image: Annotated[
        Literal["rebuilt", "embedded"],
        typer.Option(
            "--image",
            help="Rebuild the image from the lock, or load the signer's own from the bundle.",
        ),
    ] = "rebuilt",
    base: Annotated[
        Literal["packages", "supplied"],
        typer.Option(
            "--base",
            help="Build the image's base layer from Debian's packages, or take the signer's own.",
        ),
    ] = "packages",
    code: Annotated[
        Literal["own", "supplied"],
        typer.Option(
            "--code",
            help="Execute only this Capsule's own training code, or the signer's other version.",
        ),
    ] = "own",
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="FIELD=NUMBER",
            help="Lower one of the bundle's limits, e.g. minutes=10.",
        ),
    ] = None,
    report: Annotated[Path, typer.Option("--report", help="Where to write the report.")] = Path(
        "verify-report.json"
    ),
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="KEY", help="Private key that signs a receipt."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            "--receipt", help="File that --sign writes; default: in the folder of the bundle."
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a bundle, run it again on this machine, and say what is the same and what is not."""
    from capsule.bundle.trust import load_policy
    from capsule.experiment.errors import CapsuleError, ExitCode
    from capsule.host.spec_file import load_spec
    from capsule.image.cache import Cache
    from capsule.report.progress import open_reporter
    from capsule.report.terminal import show_report
    from capsule.verification.execution.bounds import parse_limits
    from capsule.verification.expectation import Expectation, parse_claim, parse_lock
    from capsule.verification.mode import Mode
    from capsule.verification.receipt import require_execution, sign_report
    from capsule.verification.verify import Request, verify

    policy = load_policy(
        keys=keys or (),
        allowed_signers=allowed_signers or (),
        revoked=revoked or (),
        identities=identities or (),
        threshold=threshold,
        signatures=signatures or (),
        keyless_signatures=keyless or (),
        issuer=issuer,
    )
    if allow_untrusted and not policy.trusts_nobody:
        raise CapsuleError(
            "CAP-V006",
            "--allow-untrusted contradicts --key, --allowed-signers and --keyless",
            fix="Leave it out, or those.",
            exit_code=ExitCode.USAGE,
        )
    if receipt is not None and sign is None:
        raise CapsuleError(
            "CAP-V081",
            f"--receipt {receipt} without --sign",
            fix="Name the private key that signs the receipt: --sign KEY.",
            exit_code=ExitCode.USAGE,
        )
    # Hours later would be too late to learn that a key cannot be used.
    signing_key = None if sign is None else unlock(sign, passphrase_file)
    request = Request(
        bundle=bundle,
        trust=policy,
        mode=Mode.parse(_mode(mode, challenge, fresh_seed=fresh_seed)),
        engine=engine,
        allow_untrusted=allow_untrusted,
        expected=Expectation(
            spec=load_spec(expect_spec) if expect_spec else None,
            lock=parse_lock(expect_lock) if expect_lock is not None else None,
            claim=parse_claim(expect_claim) if expect_claim is not None else None,
        ),
        image=image,
        base=base,
        code=code,
        limits=parse_limits(limits or []),
        required=grade,
    )
    if signing_key is not None:
        require_execution(request.mode)
    _require_writable(report)
    with open_reporter(quiet=quiet) as reporter:
        result = verify(request, Cache(), reporter)
    document = result.model_dump(mode="json", by_alias=True)
    _write_report(report, document)
    if signing_key is not None:
        typer.echo(sign_report(result, signing_key, bundle, receipt), err=True)
    if as_json:
        print_json(document)
    else:
        from rich.console import Console

        show_report(result, Console())
    raise typer.Exit(result.exit_code)


def _require_writable(report: Path) -> None:
    """Refuse before anything runs a report that could not be written afterwards.

    Raises:
        CapsuleError: CAP-V082.
    """
    from capsule.experiment.canonical import check_output

    try:
        check_output(report)
    except OSError as error:
        raise _unwritable(report, error) from error


def _write_report(report: Path, document: dict[str, Any]) -> None:
    """Write the report; if the disk is full by now, say so, and leave the verdict to be printed."""
    from capsule.experiment.canonical import write_output

    try:
        write_output(report, json.dumps(document, indent=2).encode() + b"\n")
    except OSError as error:
        lost = _unwritable(report, error)
        typer.echo(f"{lost}\nfix: {lost.fix}", err=True)


def _unwritable(report: Path, error: OSError) -> CapsuleError:
    from capsule.experiment.errors import CapsuleError, ExitCode

    return CapsuleError(
        "CAP-V082",
        f"the report {str(report)!a} cannot be written: {error.strerror}",
        fix="Name a file in a folder you may write to with --report, or /dev/null.",
        exit_code=ExitCode.USAGE,
    )


def _mode(mode: str, challenge: str | None, *, fresh_seed: bool) -> str:
    """Return the mode that the options ask for; a challenge has a fresh seed in it anyway."""
    from capsule.experiment.errors import CapsuleError, ExitCode

    if challenge is None and not fresh_seed:
        return mode
    if mode != "full":
        raise CapsuleError(
            "CAP-V064",
            f"--mode {mode} contradicts {'--challenge' if challenge else '--fresh-seed'}",
            fix="Give one of the two.",
            exit_code=ExitCode.USAGE,
        )
    return "fresh-seed" if challenge is None else f"segments:{challenge}"
