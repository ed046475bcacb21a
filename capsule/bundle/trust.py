"""Trust: whose signatures count, and how many of them it takes.

A reader trusts keys that he names, or the lines of a trust file, less those that were revoked.
Every signature over a bundle is judged by that and by nothing from the bundle: its time of signing
is only stated by the signer, so signatures by an expired key do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from capsule.bundle import keyless, sshsig
from capsule.bundle.allowed_signers import AllowedSigner, parse_allowed_signers
from capsule.bundle.archive import UntrustedError
from capsule.bundle.keys import PublicKey, fingerprint, load_public, openssh_blob
from capsule.experiment.fields import Model
from capsule.experiment.files import open_regular
from capsule.host.errors import CapsuleError
from capsule.host.streams import read_whole

MAX_FILE = 1 << 20  # bytes of a trust file, a revocation list or a signature

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")

Kind = Literal["dsse", "sshsig", "detached", "keyless"]


class Signer(Model):
    """A signer, and whether the signature counts."""

    kind: Kind = Field(
        description="Kind of signature: the envelope of the bundle, an SSH signature in the bundle "
        "or in a file next to it, or a signature of Sigstore."
    )
    key: str | None = Field(description="Fingerprint of the key; null for a keyless signature.")
    identity: str | None = Field(
        None,
        description="Identity that the reader's trust file or a certificate lists for the key; "
        "null: none.",
    )
    rejection_reason: str | None = Field(
        None, description="Reason why the signature does not count; null if it does."
    )

    def __str__(self) -> str:
        key = self.key or self.identity or ""
        return f"{key} ({self.identity})" if self.key and self.identity else key


class UntrustedSignersError(UntrustedError):
    """A bundle that is intact, and not signed as its reader asks.

    Attributes:
        signers: Who signed it, and why that does not count.
    """

    def __init__(self, code: str, message: str, *, fix: str, signers: Sequence[Signer]) -> None:
        super().__init__(code, message, fix=fix)
        self.signers = tuple(signers)


class KeySignature(NamedTuple):
    """A signature, and the key that verifies it if the key is known."""

    kind: Kind
    fingerprint: str
    key: PublicKey | None


class Detached(NamedTuple):
    """A signature from a separate file: the file name and the bytes."""

    name: str
    data: bytes


@dataclass(frozen=True)
class TrustPolicy:
    """The signatures that count, the required number of them, and separate signature files.

    Attributes:
        keys: Keys that count regardless of their owner.
        allowed: Lines of a trust file.
        revoked: Fingerprints of keys that never count.
        identities: If given, only lines of the trust file for one of these names count.
        threshold: How many distinct keys must have signed.
        detached: SSH signatures over the manifest from separate files.
        keyless: Sigstore bundles over the manifest.
        issuer: Identity provider that must have authenticated a keyless signature.
        now: The time at which keys must be valid.
    """

    keys: tuple[PublicKey, ...] = ()
    allowed: tuple[AllowedSigner, ...] = ()
    revoked: frozenset[str] = frozenset()
    identities: tuple[str, ...] = ()
    threshold: int = 1
    detached: tuple[Detached, ...] = ()
    keyless: tuple[Detached, ...] = ()
    issuer: str | None = None
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def of(cls, trust: TrustPolicy | Iterable[PublicKey]) -> TrustPolicy:
        """Return the policy that trusts some keys, or the policy given."""
        return trust if isinstance(trust, TrustPolicy) else cls(keys=tuple(trust))

    @property
    def trusts_nobody(self) -> bool:
        """Whether no signature could ever count."""
        return not (self.keys or self.allowed or self.keyless)

    @property
    def candidates(self) -> tuple[PublicKey, ...]:
        """The keys to try on a signature, each once; whether they count is asked later."""
        return tuple(dict.fromkeys((*self.keys, *(line.key for line in self.allowed))))

    def judge(self, signatures: Sequence[KeySignature], manifest: bytes) -> tuple[Signer, ...]:
        """Judge whether each signature over a manifest, in the bundle or beside it, counts.

        Raises:
            CapsuleError: CAP-B157 or CAP-B159: a separate signature is not over this
                manifest; CAP-B158: keyless signatures cannot be verified here.
        """
        apart = [self._read_detached(file, manifest) for file in self.detached]
        return (
            *(self._judge(signature) for signature in (*signatures, *apart)),
            *(self._judge_keyless(file, manifest) for file in self.keyless),
        )

    def require(self, signers: Sequence[Signer]) -> None:
        """Require the necessary number of distinct signers.

        Raises:
            UntrustedSignersError: CAP-B125 (no trusted key signed), B154 (the signatures of known
                keys do not count), B155 (too few trusted keys signed).
        """
        # A set: one key that signed the envelope and the manifest's SSH signature is one signer.
        # A keyless signer has no key and counts by its identity.
        counted = {
            str(signer.key or signer) for signer in signers if signer.rejection_reason is None
        }
        if len(counted) >= self.threshold:
            return
        objections = "; ".join(
            dict.fromkeys(
                f"{s} {s.rejection_reason}" for s in signers if s.rejection_reason is not None
            )
        )
        if counted:
            raise UntrustedSignersError(
                "CAP-B155",
                f"{len(counted)} of the required {self.threshold} trusted keys signed this bundle"
                + (f"; {objections}" if objections else ""),
                fix="Get further signatures (`capsule sign`) and pass each as `--signature FILE`; "
                "signatures by one key count once.",
                signers=signers,
            )
        if all(signer.rejection_reason == _UNKNOWN for signer in signers):
            fingerprint = signers[0].key
            raise UntrustedSignersError(
                "CAP-B125",
                f"the bundle is intact but untrusted: according to the bundle {fingerprint} signed "
                "it, but none of the trusted keys did",
                fix="Get the public key from the signer (not from the source of the bundle), check "
                f"that `ssh-keygen -lf KEY.pub` prints {fingerprint}, and pass `--key KEY.pub`.",
                signers=signers,
            )
        raise UntrustedSignersError(
            "CAP-B154",
            f"the bundle is intact but untrusted: {objections}",
            fix="Do not rely on it, or correct the trust file or revocation list if they are out "
            "of date; ask the signer to sign again with a key that is valid.",
            signers=signers,
        )

    def _judge(self, signature: KeySignature) -> Signer:
        names, now = self.identities, self.now
        lines = [
            (line.identity(names), line.rejection_reason(sshsig.NAMESPACE, names, now))
            for line in self.allowed
            if line.key == signature.key
        ]
        lines.sort(key=lambda line: line[1] is not None)  # one that allows it is enough
        identity, rejection_reason = lines[0] if lines else (None, _UNKNOWN)
        # Revocation overrules everything else. It goes by the stated fingerprint, which is all that
        # is known of a signature that no given key verifies.
        if signature.fingerprint in self.revoked:
            rejection_reason = "is revoked"
        elif signature.key in self.keys:
            rejection_reason = None
        return Signer(
            kind=signature.kind,
            key=signature.fingerprint,
            identity=identity,
            rejection_reason=rejection_reason,
        )

    def _read_detached(self, file: Detached, manifest: bytes) -> KeySignature:
        try:
            key = sshsig.verify(file.data, manifest)
        except CapsuleError as error:
            raise UntrustedError(
                "CAP-B157",
                f"{file.name!a} is not a signature of this bundle's manifest: {error.message}",
                fix="Give a file that `capsule sign` or `ssh-keygen -Y sign` made of this very "
                "bundle.",
            ) from error
        return KeySignature("detached", key.fingerprint, key)

    def _judge_keyless(self, file: Detached, manifest: bytes) -> Signer:
        # Exactly one: _check_options requires it of a policy with keyless signatures.
        (identity,) = self.identities
        keyless.verify(file.data, manifest, identity, str(self.issuer))
        return Signer(kind="keyless", key=None, identity=f"{identity} of {self.issuer}")


def load_policy(
    keys: Iterable[Path] = (),
    allowed_signers: Iterable[Path] = (),
    *,
    revoked: Iterable[Path] = (),
    identities: Sequence[str] = (),
    threshold: int = 1,
    signatures: Iterable[Path] = (),
    keyless_signatures: Sequence[Path] = (),
    issuer: str | None = None,
) -> TrustPolicy:
    """Read the keys, trust files and signatures that the user named.

    Raises:
        CapsuleError: A key is not acceptable (see :func:`keys.load_public`); CAP-B150 (a file
            cannot be read), B151 (a trust file or revocation list is malformed, or the options
            do not fit together).
    """
    policy = TrustPolicy(
        keys=load_trusted(keys),
        allowed=tuple(line for path in allowed_signers for line in _read_allowed(path)),
        revoked=frozenset(name for path in revoked for name in _read_revoked(path)),
        identities=tuple(identities),
        threshold=threshold,
        detached=tuple(read_signature(path) for path in signatures),
        keyless=tuple(read_signature(path) for path in keyless_signatures),
        issuer=issuer,
    )
    _check_options(policy)
    return policy


def _check_options(policy: TrustPolicy) -> None:
    """Reject options that have no effect or that require another option."""
    if policy.keyless and (policy.issuer is None or len(policy.identities) != 1):
        raise _misused(
            "--keyless requires exactly one --identity and its --issuer",
            "Give the identity that you expect and the provider that authenticated it.",
        )
    if policy.issuer is not None and not policy.keyless:
        raise _misused("--issuer requires --keyless", "Remove --issuer, or add --keyless FILE.")
    if policy.identities and not (policy.allowed or policy.keyless):
        raise _misused(
            "--identity requires --allowed-signers or --keyless",
            "A key given with `--key` is trusted without a name. Use a trust file to assign names "
            "to keys.",
        )
    # Such a policy would look strict and check nothing.
    if policy.trusts_nobody and (policy.detached or policy.revoked or policy.threshold > 1):
        raise _misused(
            "no trusted key was given",
            "Give --key, --allowed-signers or --keyless.",
        )


def load_trusted(paths: Iterable[Path]) -> tuple[PublicKey, ...]:
    """Read the keys to trust, each once, in the order given.

    Raises:
        CapsuleError: A file is not an acceptable public key (see :func:`keys.load_public`).
    """
    return tuple(dict.fromkeys(load_public(path) for path in paths))


_UNKNOWN = "is not a trusted key"


def _read_allowed(path: Path) -> tuple[AllowedSigner, ...]:
    try:
        lines = parse_allowed_signers(_read(path).decode())
        if not lines:
            raise ValueError("it lists no key that may sign a bundle")
        return lines
    except ValueError as error:
        raise _misused(
            f"the trust file {path} is malformed: {error}",
            'Lines are `alice@lab namespaces="capsule-manifest@*" ssh-ed25519 AAAA…`; see '
            "ALLOWED SIGNERS in ssh-keygen(1).",
        ) from error


def _read_revoked(path: Path) -> list[str]:
    """Read fingerprints and public keys of any type, one per line."""
    found = []
    try:
        for number, line in enumerate(_read(path).decode().split("\n"), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            if _FINGERPRINT.fullmatch(text.split()[0]):
                found.append(text.split()[0])
                continue
            try:
                # Not load_public(): ssh-keygen -r reads the same list, which may have keys of other
                # types.
                found.append(fingerprint(openssh_blob(text)))
            except ValueError as error:
                raise ValueError(
                    f"line {number} is neither a public key nor a SHA256: fingerprint"
                ) from error
    except ValueError as error:
        raise _misused(
            f"the revocation list {path} is malformed: {error}",
            "Give a text file with a public key or a fingerprint on each line; OpenSSH's binary "
            "KRLs are not read.",
        ) from error
    return found


def read_signature(path: Path) -> Detached:
    """Read a detached signature.

    Raises:
        CapsuleError: CAP-B150, the file cannot be read.
    """
    return Detached(str(path), _read(path))


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as stream:
            return read_whole(stream, MAX_FILE)
    except OSError as error:
        raise CapsuleError(
            "CAP-B150",
            f"cannot read {str(path)!r}: {error.strerror}",
            fix="Give the path of a readable trust file, revocation list or signature.",
        ) from error


def _misused(message: str, fix: str) -> CapsuleError:
    return CapsuleError("CAP-B151", message, fix=fix)
