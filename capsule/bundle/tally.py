"""Counting receipts: who re-executed a run, without being its author.

A receipt is independent if its signer is not among those who signed the bundle. Anybody can sign a
bundle again, with a key made for the purpose, and so make its author look like another person. So a
receipt counts only if a key that the reader named signed the bundle, if the receipt is about this
very bundle, and if its signer verified a bundle that was signed by others. A verifier who accepted
the author's image or training code has shown that these give the claims, and not that the lock
does: such a receipt is listed, and counts only if the result was not reproduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from pydantic import Field

from capsule.bundle.archive import tampered
from capsule.bundle.bundle import OpenedBundle, open_bundle
from capsule.bundle.envelope import DsseEnvelope, Fingerprint, unseal
from capsule.bundle.keys import PublicKey
from capsule.bundle.manifest import parse_document
from capsule.bundle.receipts import LEVELS, MAX_RECEIPT, TIME_FORMAT, ReceiptStatement, Verdict
from capsule.bundle.trust import KeySignature, TrustPolicy, UntrustedSignersError
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.fields import Model
from capsule.experiment.files import open_regular
from capsule.experiment.lock import Sha256
from capsule.host.errors import CapsuleError, ExitCode
from capsule.host.wording import counted
from capsule.machine.kind import MachineKind

CLOCKS_APART = timedelta(days=1)  # how far the clock of another machine may be ahead


@dataclass(frozen=True)
class Original:
    """The bundle that receipts are about.

    Attributes:
        claim_id: Its claim id.
        manifest: SHA-256 of its ``manifest.json``.
        authors: Fingerprints of the keys that signed it, and of the one that its envelope names.
        authentic: Whether one of them is a key that the reader trusts.
        objections: Why the signatures of keys that the reader named do not count, if none does.
    """

    claim_id: str
    manifest: str
    authors: frozenset[str]
    authentic: bool
    objections: str = ""

    @classmethod
    def of(cls, bundle: OpenedBundle, objections: str = "") -> Original:
        """Return what receipts about an open bundle are held against."""
        return cls(
            claim_id=bundle.claim_id,
            manifest=sha256_hex(bundle.manifest.document()),
            authors=frozenset(
                (bundle.fingerprint, *(each.key for each in bundle.signers if each.key))
            ),
            authentic=bundle.authentic,
            objections=objections,
        )


def read_original(bundle: Path, policy: TrustPolicy) -> Original:
    """Check that a bundle is intact, and find out who signed it, trusted or not.

    Raises:
        CapsuleError: See :func:`capsule.bundle.bundle.open_bundle`.
    """
    objections = ""
    try:
        opened = open_bundle(bundle, policy)
    except UntrustedSignersError as error:
        # Whom the reader does not trust is needed as well: receipts must be independent of every
        # author.
        opened = open_bundle(bundle, ())
        objections = "; ".join(f"{each} {each.rejection_reason}" for each in error.signers)
    with opened:
        return Original.of(opened, objections)


class Receipt(Model):
    """A receipt that is well-formed and about the claim id in question."""

    file: str
    signer: Fingerprint = Field(
        description="Fingerprint of the signing key as the receipt states it, which is reliable "
        "only if the receipt is trusted."
    )
    trusted: bool
    identity: str | None = Field(
        None, description="Identity that the reader's trust file lists for the key; null: none."
    )
    rejection_reason: str | None = Field(
        None, description="Reason why the receipt is not trusted; null if it is."
    )
    own: bool = Field(
        description="Whether the signer of the receipt also signed the bundle, so that the receipt "
        "is not independent."
    )
    of_this_bundle: bool = Field(description="Whether the signer verified this very bundle.")
    author_known: bool = Field(
        description="Whether the bundle is signed by a key that the reader named, so that other "
        "signers can be distinguished from its author."
    )
    verdict: Verdict
    mode: str
    image: Literal["rebuilt", "supplied-base", "embedded", "registry"] | None
    own_code: bool
    expected: Literal["bitwise", "statistical"]
    machine: MachineKind
    time: str
    capsule: str = Field(description="Version of Capsule that verified.")
    difference: str | None

    @property
    def counts(self) -> bool:
        """Whether it counts: its signer is trusted and is not the author of the bundle."""
        known = self.of_this_bundle and self.author_known
        return self.trusted and not self.own and known and not self.borrowed

    @property
    def borrowed(self) -> bool:
        """Whether it was reproduced by code to which only the author of the bundle attests."""
        supplied = self.image in ("supplied-base", "embedded", "registry") or not self.own_code
        return supplied and self.verdict != "not-reproduced"

    @property
    def standing(self) -> str:
        """Whether it counts, and if not, why."""
        if not self.trusted:
            return "not trusted"
        if self.own:
            return "the author's"
        if not self.of_this_bundle:
            return "of another bundle"
        if not self.author_known:
            return "independence not shown"
        return "by the author's code" if self.borrowed else "counts"


class Refusal(Model):
    """A file that is not a receipt for the claim id in question, and why."""

    file: str
    code: str
    message: str


class ReceiptTally(Model):
    """The number of independent attestations of one verdict."""

    signers: int = Field(description="Number of distinct trusted keys.")
    machines: int = Field(description="Number of distinct kinds of machine, by processor and GPU.")


class Receipts(Model):
    """The tallies of all receipts of a claim id."""

    schema_id: Literal["capsule/receipts/v1"] = Field("capsule/receipts/v1", alias="schema")
    claim_id: Sha256
    summary: str = Field(description="The tallies in one sentence.")
    tallies: dict[Verdict, ReceiptTally] = Field(
        description="The receipts that count, by verdict, the strongest one first."
    )
    receipts: tuple[Receipt, ...]
    refused: tuple[Refusal, ...]

    def exit_code(self, threshold: int = 1) -> ExitCode:
        """Return the exit status.

        Args:
            threshold: How many signers must have reproduced the run bit for bit.

        Returns:
            0 if they did; 1 if fewer did, or one did not reproduce it; 3 if a file was rejected, or
            no receipt counts.
        """
        if self.refused or not self.tallies:
            return ExitCode.TAMPERED
        if "not-reproduced" in self.tallies or self.bitwise < threshold:
            return ExitCode.DIFFERS
        return ExitCode.OK

    @property
    def bitwise(self) -> int:
        """Distinct trusted keys whose holders reproduced the run bit for bit."""
        tally = self.tallies.get("reproduced-bitwise")
        return 0 if tally is None else tally.signers


def read_receipts(
    original: Original, paths: Iterable[Path], trust: TrustPolicy | Iterable[PublicKey]
) -> Receipts:
    """Check receipts and count the trusted, independent attestations among them.

    Args:
        original: What they must be about.
        paths: The files, from any source.
        trust: Whose receipts count.
    """
    policy = replace(TrustPolicy.of(trust), detached=())  # such signatures are of the bundle
    receipts, refused = [], []
    for path in paths:
        try:
            receipts.append(_read(path, original, policy))
        except CapsuleError as error:
            refused.append(Refusal(file=path.name, code=error.code, message=error.message))
    tallies = _tallies(receipts)
    return Receipts(
        claim_id=original.claim_id,
        summary=_sentence(tallies, receipts, original),
        tallies=tallies,
        receipts=tuple(receipts),
        refused=tuple(refused),
    )


def _read(path: Path, original: Original, policy: TrustPolicy) -> Receipt:
    """Read one receipt.

    Raises:
        CapsuleError: CAP-B170 (cannot be read), B171 (not a receipt), B172 (of another run), B175
            (of a time to come), or B121, B122, B123 of its envelope.
    """
    envelope = parse_document(_bytes(path), DsseEnvelope, "the receipt", "CAP-B171")
    payload, key = unseal(envelope, policy.candidates)
    statement = parse_document(payload, ReceiptStatement, "the receipt's statement", "CAP-B171")
    summary, detail = statement.predicate, statement.predicate.detail
    if statement.claim_id != original.claim_id:
        raise tampered("CAP-B172", f"the receipt is about another run: {statement.claim_id}")
    # Both times are UTC in one format of fixed width, so the texts compare as the times do.
    latest = (policy.now + CLOCKS_APART).strftime(TIME_FORMAT)
    if summary.time_verified > latest:
        raise tampered(
            "CAP-B175", f"the receipt is dated {summary.time_verified}, which is in the future"
        )
    fingerprint = envelope.signatures[0].keyid
    # A policy needs the manifest for separate signature files only, and this one has none.
    (signer,) = policy.judge([KeySignature("dsse", fingerprint, key)], b"")
    return Receipt(
        file=path.name,
        signer=fingerprint,
        trusted=signer.rejection_reason is None,
        identity=signer.identity,
        rejection_reason=signer.rejection_reason,
        # The signers whom the receipt itself names count, too: the bundle that was verified may
        # have been signed anew since, by a key made for the purpose.
        own=fingerprint in original.authors.union(detail.signers),
        of_this_bundle=summary.input_attestations[0].digest.sha256 == original.manifest,
        author_known=original.authentic,
        verdict=detail.verdict,
        mode=detail.policy.mode,
        image=detail.policy.image,
        own_code=detail.policy.own_code,
        expected=detail.expected,
        machine=detail.machine,
        time=summary.time_verified,
        capsule=summary.verifier.version.capsule,
        difference=detail.difference,
    )


def _bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_RECEIPT + 1)
    except OSError as error:
        raise tampered("CAP-B170", f"cannot read the receipt: {error.strerror}") from error
    if len(data) > MAX_RECEIPT:
        raise tampered("CAP-B171", f"the receipt is larger than {MAX_RECEIPT} bytes")
    return data


def _tallies(receipts: Sequence[Receipt]) -> dict[Verdict, ReceiptTally]:
    tallies = {}
    for verdict in LEVELS:
        those = [each for each in receipts if each.counts and each.verdict == verdict]
        if those:
            # A signer may have made several receipts, and several signers may have used machines of
            # one kind.
            signers = {receipt.signer for receipt in those}
            machines = {receipt.machine.key for receipt in those}
            tallies[verdict] = ReceiptTally(signers=len(signers), machines=len(machines))
    return tallies


_PHRASES: dict[Verdict, str] = {
    "reproduced-bitwise": "reproduced bitwise",
    "reproduced-content": "reproduced in content",
    "reproduced-segments": "reproduced in segments",
    "reproduced-prefix": "reproduced in a prefix",
    "reproduced-statistical": "reproduced statistically",
    "not-reproduced": "not reproduced",
}


def _sentence(
    tallies: dict[Verdict, ReceiptTally], receipts: Sequence[Receipt], original: Original
) -> str:
    parts = [
        f"{_PHRASES[verdict]} by {counted(tally.signers, 'signer')} on "
        f"{counted(tally.machines, 'kind')} of machine"
        for verdict, tally in tallies.items()
    ]
    if not parts and any(receipt.standing == "independence not shown" for receipt in receipts):
        why = f" ({original.objections})" if original.objections else ""
        return (
            "nothing counts: independence is not shown, since no key that you trust signed the "
            f"bundle{why}"
        )
    if not parts and any(receipt.standing == "by the author's code" for receipt in receipts):
        return "nothing counts: the author's own image or training code was executed"
    return "; ".join(parts) or "no independent receipt by a trusted verifier"
