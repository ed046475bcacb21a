"""From a verification report to the statement of a receipt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from capsule.bundle.keys import PrivateKey
from capsule.bundle.receipts import (
    FIRST_YEAR,
    MAX_DIFFERENCE,
    MAX_SIGNERS,
    TIME_FORMAT,
    Detail,
    ReceiptStatement,
    Verdict,
    VerificationPolicy,
    make_statement,
    write_receipt,
)
from capsule.bundle.tally import CLOCKS_APART
from capsule.host.errors import CapsuleError
from capsule.verification.request import Mode
from capsule.verification.verdict import Report

MAX_SIGNATURES = MAX_SIGNERS - 2  # the bundle itself has up to two signatures


def check_receipt(
    sign: Path | None, receipt: Path | None, vary: str | None, signatures: Sequence[Path] = ()
) -> None:
    """Reject options that no receipt can come of.

    Raises:
        CapsuleError: CAP-V081, ``--receipt`` without ``--sign``; CAP-V065, ``--sign`` beside
            ``--vary``; CAP-B151, ``--sign`` beside more files of ``--signature`` than a receipt can
            name keys.
    """
    if receipt is not None and sign is None:
        raise CapsuleError(
            "CAP-V081",
            f"--receipt {receipt} requires --sign",
            fix="Name the private key that signs the receipt: --sign KEY.",
        )
    if vary is not None and sign is not None:
        raise CapsuleError(
            "CAP-V065",
            f"--vary {vary} contradicts --sign: a receipt is of one re-execution",
            fix="Remove --sign, or sign a receipt in a verification without --vary.",
        )
    if sign is not None and len(signatures) > MAX_SIGNATURES:
        raise CapsuleError(
            "CAP-B151",
            f"--sign with {len(signatures)} signature files, and a receipt can name the keys of "
            f"{MAX_SIGNATURES}",
            fix=f"Give at most {MAX_SIGNATURES} times --signature, or remove --sign.",
        )


def require_execution(mode: Mode) -> None:
    """Reject a receipt for a mode that does not execute the run again.

    Raises:
        CapsuleError: CAP-V080.
    """
    if mode.name in ("integrity", "environment", "fresh-seed"):
        raise CapsuleError(
            "CAP-V080",
            f"--sign with --mode {mode}: nothing of the run is executed, so there is nothing to "
            "attest",
            fix="Remove --sign, or use --mode full, prefix:N or segments:N.",
        )


def check_clock(finished: str, now: datetime) -> None:
    """Check that the time of a receipt, which this machine's clock gives, can be right.

    Args:
        finished: When the recorded run ended, as its signer states it (ISO 8601).
        now: The time of this machine's clock.

    Raises:
        CapsuleError: CAP-B176.
    """
    shown = now.strftime(TIME_FORMAT)
    if now.year < FIRST_YEAR:
        wrong = f"this machine's clock is at {shown}, and no receipt has a time before {FIRST_YEAR}"
    elif _seconds(finished) > (now + CLOCKS_APART).timestamp():
        wrong = (
            f"this machine's clock is at {shown}, which is before the end of the run, {finished} "
            "as the bundle states it"
        )
    else:
        return
    raise CapsuleError(
        "CAP-B176",
        f"--sign: {wrong}",
        fix="Correct this machine's clock. If it is right, the clock of the bundle's signer was "
        "wrong; then verify without --sign.",
    )


def _seconds(text: str) -> float:
    """Return a time in seconds since 1970; one that is not a time came before every other."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return -math.inf


def sign_report(report: Report, key: PrivateKey, bundle: Path, path: Path | None) -> str:
    """Write the receipt of a verification, if it decided anything, and say so in a line.

    Raises:
        CapsuleError: CAP-B173, the receipt cannot be written.
    """
    statement = statement_of(report)
    if statement is None:
        return f"no receipt: {report.verdict} decides nothing about the run"
    written = f"receipt: {write_receipt(statement, key, bundle, path)}"
    if key.public.fingerprint in signers_of(report):
        return (
            f"{written}; it will not count as independent, since the bundle names the same signer"
        )
    return written


def statement_of(report: Report) -> ReceiptStatement | None:
    """Return what a receipt says of a verification; None if it decided nothing."""
    if report.verdict not in get_args(Verdict):
        return None
    detail = Detail.model_validate(
        {
            "verdict": report.verdict,
            "expected": report.expected_grade,
            "policy": VerificationPolicy(
                mode=report.mode,
                image=report.image_source,
                own_code=bool(report.own_code),
                tolerance=None if report.statistics is None else report.statistics.tolerance,
            ),
            "signers": signers_of(report),
            "machine": report.machine,
            "difference": _difference(report),
        }
    )
    # A verdict that has a receipt was reached after the integrity stage, so that the claim id and
    # the digest of the manifest are known.
    time = datetime.now(UTC).strftime(TIME_FORMAT)
    return make_statement(str(report.claim_id), str(report.manifest), time, detail)


def signers_of(report: Report) -> tuple[str, ...]:
    """Return the fingerprints of the keys that signed the verified bundle, or that it names."""
    # Also a key that is only named, without a signature that was checked: a receipt by it may be
    # one by the author.
    # A keyless signature has no key.
    keys = {report.signer, *(signer.key for signer in report.signers)}
    return tuple(sorted(key for key in keys if key is not None))


def _difference(report: Report) -> str | None:
    """Return what differs; untrusted text may contain surrogates, which JSON in UTF-8 cannot."""
    if report.verdict not in ("not-reproduced", "reproduced-content", "reproduced-statistical"):
        return None
    return report.summary[:MAX_DIFFERENCE].encode(errors="replace").decode()
