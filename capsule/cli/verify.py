"""``capsule verify``: check, re-execute, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsule.cli import options
from capsule.cli.common import guarded, no_effect, print_json, use_gpu
from capsule.cli.defaults import trusted_files
from capsule.cli.passphrase import unlock
from capsule.cli.reports import require_writable, tell, write_report

if TYPE_CHECKING:
    from capsule.verification.request import Mode
    from capsule.verification.vary import VaryReport
    from capsule.verification.verdict import Report

BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="Bundle to verify. It is never changed.")
]


@guarded
def command(
    bundle: BundleArgument,
    *,
    mode: options.ModeOption = "full",
    challenge: options.ChallengeOption = None,
    fresh_seed: options.FreshSeedOption = False,
    vary: options.VaryOption = None,
    grade: options.GradeOption = "bitwise",
    keys: options.KeysOption = None,
    allowed_signers: options.AllowedSignersOption = None,
    identities: options.IdentityOption = None,
    revoked: options.RevokedOption = None,
    threshold: options.ThresholdOption = 1,
    signatures: options.SignatureOption = None,
    keyless: options.KeylessOption = None,
    issuer: options.IssuerOption = None,
    allow_untrusted: options.UntrustedOption = False,
    expect_spec: options.ExpectSpecOption = None,
    expect_lock: options.ExpectLockOption = None,
    expect_claim: options.ExpectClaimOption = None,
    engine: options.EngineOption = "auto",
    gpu: options.GpuOption = None,
    image: options.ImageOption = "rebuilt",
    pull: options.PullOption = None,
    base: options.BaseOption = "packages",
    code: options.CodeOption = "own",
    data: options.DataOption = None,
    limits: options.LimitOption = None,
    sign: options.SignReceiptOption = None,
    receipt: options.ReceiptOption = None,
    passphrase_file: options.PassphraseOption = None,
    report: options.ReportOption = Path("verify-report.json"),
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check a bundle, execute its run again, and compare.

    The bundle's signature and contents are checked first. Then its image is rebuilt and its run
    is executed again on this machine. The report states which results are equal.

    Examples:
        # Check, rebuild, execute the whole run again and compare bit for bit.
        capsule verify run.capsule.tar

        # Execute three random segments again, then sign a receipt of the result.
        capsule verify run.capsule.tar --key alice.pub --challenge 3 --sign bob

        # Find out whether the result depends on the threads or the time zone.
        capsule verify run.capsule.tar --key alice.pub --vary threads,timezone
    """
    from capsule.bundle.receipts import check_writable
    from capsule.bundle.trust import load_policy
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import require_other
    from capsule.image.cache import Cache
    from capsule.image.data.places import parse_places
    from capsule.report.progress import open_reporter
    from capsule.verification.receipt import check_receipt, require_execution, sign_report
    from capsule.verification.request import (
        Expectation,
        Mode,
        VerifyRequest,
        parse_image,
        parse_limits,
    )
    from capsule.verification.variation import parse_names
    from capsule.verification.vary import vary as vary_run
    from capsule.verification.verdict import Report
    from capsule.verification.verify import verify

    policy = load_policy(
        *trusted_files(keys, allowed_signers, others=bool(keyless or allow_untrusted)),
        revoked=revoked or (),
        identities=identities or (),
        threshold=threshold,
        signatures=signatures or (),
        keyless_signatures=keyless or (),
        issuer=issuer,
    )
    check_receipt(sign, receipt, vary, signatures or ())
    if passphrase_file is not None and sign is None:
        raise no_effect("--passphrase-file", "a verification without --sign", "It is for its key.")
    chosen = Mode.of_options(mode, challenge, fresh_seed=fresh_seed)
    _require_effect(
        chosen,
        machine={"--engine": engine != "auto", "--gpu": gpu is not None},
        execution={
            "--image": image != "rebuilt",
            "--pull": pull is not None,
            "--base": base != "packages",
            "--code": code != "own",
            "--data": bool(data),
            "--limit": bool(limits),
        },
        whole={"--grade": grade != "bitwise"},
    )
    if base == "supplied" and (pull or image == "embedded"):
        whole = "--pull" if pull else "--image embedded"
        raise no_effect("--base", whole, "It is for an image that is made from the lock.")
    use_gpu(gpu)
    wanted = None if vary is None else parse_names(vary)
    executed_image, registry = parse_image(image, pull)
    request = VerifyRequest(
        bundle=bundle,
        trust=policy,
        mode=chosen,
        engine=engine,
        allow_untrusted=allow_untrusted,
        expected=Expectation.parse(expect_spec, expect_lock, expect_claim),
        image=executed_image,
        registry=registry,
        base=base,
        code=code,
        limits=parse_limits(limits or []),
        data=parse_places(data or []),
        required=grade,
        signs=sign is not None,
    )
    # An unusable key or place must be found now, not after hours of re-execution.
    signing_key = None
    if sign is not None:
        require_execution(request.mode)
        signing_key = unlock(sign, passphrase_file)
        check_writable(bundle, receipt)
    trust_files = (keys, allowed_signers, revoked, signatures, keyless)
    inputs = [bundle, *(path for paths in trust_files for path in paths or ())]
    inputs += [path for path in (sign, expect_spec) if path is not None]
    require_writable(report, inputs)
    if receipt is not None:
        require_other(receipt, inputs)
        _require_apart(receipt, report)
    result: Report | VaryReport
    # From here on, the bundle is read and its run executed.
    with open_reporter(quiet=quiet) as reporter:
        if wanted is None:
            result = verify(request, Cache(), reporter)
        else:
            result = vary_run(request, wanted, Cache(), reporter)
    document = result.model_dump(mode="json", by_alias=True)
    # The report comes first: it costs a re-execution, and a receipt can fail.
    write_report(report, document)
    if signing_key is not None and isinstance(result, Report):
        # The verdict outweighs its receipt, too.
        try:
            typer.echo(sign_report(result, signing_key, bundle, receipt), err=True)
        except CapsuleError as error:
            tell(error)
    _show(result, document, as_json=as_json)
    raise typer.Exit(result.exit_code)


def _require_effect(
    mode: Mode, *, machine: dict[str, bool], execution: dict[str, bool], whole: dict[str, bool]
) -> None:
    """Reject options that the mode would ignore.

    Args:
        mode: How far the verification goes.
        machine: Options about the machine, and whether each was given; 'integrity' ignores them.
        execution: Options about the execution; 'environment' ignores them, too.
        whole: Options about its result, which only 'full' has.

    Raises:
        CapsuleError: CAP-X005.
    """
    ignored = {
        "full": {},
        "environment": execution | whole,
        "integrity": machine | execution | whole,
    }.get(mode.name, whole)
    for name in (name for name, given in ignored.items() if given):
        fix = f"It is for {'--mode full' if name in whole else 'a mode that executes the run'}."
        raise no_effect(name, f"--mode {mode}", fix)


def _require_apart(receipt: Path, report: Path) -> None:
    """Check that the receipt does not replace the report, which is written first.

    Raises:
        CapsuleError: CAP-X004.
    """
    from capsule.host.errors import CapsuleError
    from capsule.host.outputs import is_device

    if receipt.resolve() == report.resolve() and not is_device(receipt):
        raise CapsuleError(
            "CAP-X004",
            f"--receipt and --report name the same file: {str(receipt)!r}",
            fix="Name another place for one of them.",
        )


def _show(result: Report | VaryReport, document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    from rich.console import Console

    from capsule.report.terminal import show_report
    from capsule.report.variations import show_variations
    from capsule.verification.verdict import Report

    if isinstance(result, Report):
        show_report(result, Console())
    else:
        show_variations(result, Console())
