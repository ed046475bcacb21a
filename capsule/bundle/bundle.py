"""The bundle, one signed file per run: :func:`pack` writes it, :func:`open_bundle` checks it.

An open bundle was checked byte by byte through one descriptor, which it keeps. What is read of it
later comes through that descriptor, too, and is checked again, so that whatever happens to the
bundle file meanwhile does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from capsule.bundle import archive, envelope, sshsig
from capsule.bundle.archive import ArchiveReader, Data, tampered
from capsule.bundle.keys import PrivateKey, PublicKey
from capsule.bundle.manifest import (
    CHECKSUMS,
    ENVELOPE,
    MANIFEST,
    SSHSIG,
    BundleFile,
    BundleKind,
    Manifest,
    Role,
    SignatureKinds,
    parse_document,
)
from capsule.bundle.members import Member, Members
from capsule.bundle.trust import KeySignature, Signer, TrustPolicy
from capsule.experiment.canonical import MAX_DOCUMENT_BYTES, sha256_hex
from capsule.experiment.fields import Model
from capsule.experiment.files import open_regular
from capsule.host.errors import CapsuleError, coded
from capsule.host.outputs import open_output
from capsule.host.owner import temporary_folder

_M = TypeVar("_M", bound=Model)


class Content(NamedTuple):
    """The content of one file of a bundle.

    Attributes:
        source: Bytes, or the path of a regular file.
        role: What the file is in the bundle.
        media_type: Its media type.
        sha256: Hexadecimal SHA-256 that the claims of the bundle state; None: they state none.
    """

    source: Path | bytes
    role: Role
    media_type: str
    sha256: str | None = None


@dataclass(frozen=True)
class OpenedBundle:
    """A bundle that is intact: every file is what the manifest says, and nothing else is there.

    Use it as a context manager; leaving it deletes the staged copies.

    Attributes:
        manifest: The manifest.
        files: Staged copy of each file of the manifest, by its path in the bundle; each is made
            when it is first asked for.
        directory: The staging directory, which holds the copies as ``tar -xf`` would unpack them.
        fingerprint: The key that the envelope names. Also of an ``authentic`` bundle, it is a fact
            only if the signature that counts is the envelope's: see ``signer``.
        signers: Who signed, in the bundle or beside it, and whether the reader's policy counts it.
    """

    manifest: Manifest
    files: Members
    directory: Path
    fingerprint: str
    signers: tuple[Signer, ...]
    _resources: ExitStack

    @property
    def authentic(self) -> bool:
        """Whether a key the reader trusts signed this bundle."""
        return any(signer.rejection_reason is None for signer in self.signers)

    @property
    def signer(self) -> Signer:
        """The first signer whose signature counts, or else the one that the envelope names."""
        # The envelope can be replaced by one that names any key, so where another signature is the
        # trusted one, its key is not the signer.
        counted = (signer for signer in self.signers if signer.rejection_reason is None)
        return next(counted, self.signers[0])

    @property
    def claim_id(self) -> str:
        """SHA-256 of the claims file."""
        return self.manifest.claim_id

    def read(self, path: str, model: type[_M], limit: int = MAX_DOCUMENT_BYTES) -> _M:
        """Parse a file of the bundle, of at most ``limit`` bytes, as a canonical JSON document.

        Raises:
            CapsuleError: CAP-B144: no such file, not canonical JSON, or not a whole document
                of this model; CAP-B145: it has a field that this Capsule does not know;
                CAP-B160: too large for a document.
        """
        return parse_document(self.content(path, limit), model, path, "CAP-B144", grows=True)

    def content(self, path: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return what a small file of the bundle holds.

        Raises:
            CapsuleError: CAP-B144: no such file; CAP-B160: it has more than ``limit`` bytes;
                CAP-B108: the bundle has changed since it was checked.
        """
        self._require(path)
        return self.files.content(path, limit)

    def open(self, path: str) -> BinaryIO:
        """Open a file of the bundle where it lies: see :meth:`Members.open`.

        Raises:
            CapsuleError: CAP-B144: no such file.
        """
        self._require(path)
        return self.files.open(path)

    def member(self, path: str) -> Path:
        """Return the staged copy of a file of the bundle.

        Raises:
            CapsuleError: CAP-B144: no such file; CAP-B108: the bundle has changed since it was
                checked; CAP-B110: the copy cannot be written.
        """
        self._require(path)
        with _copying():
            return self.files[path]

    def sha256(self, path: str) -> str:
        """Return the digest that was signed for a file of the bundle, and checked.

        Raises:
            CapsuleError: CAP-B144: no such file.
        """
        self._require(path)
        return self.files.signed(path).sha256

    def _require(self, path: str) -> None:
        if path not in self.files:
            raise tampered("CAP-B144", f"the bundle has no file {path!a}")

    def close(self) -> None:
        """Delete the staged copies and close the bundle."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def pack(
    files: Mapping[str, Content],
    claim_id: str,
    key: PrivateKey,
    destination: Path,
    ssh_sign: Callable[[bytes], bytes] | None = None,
    kind: BundleKind = "run",
) -> Path:
    """Write a signed bundle; equal input gives equal bytes.

    Args:
        files: The content of each file, by its path in the bundle. Exactly one has the role
            ``claims``.
        claim_id: Hexadecimal SHA-256 of the claims file.
        key: Signs.
        destination: The bundle; it appears, or is replaced, all at once.
        ssh_sign: Makes an SSH signature over the manifest as well, if given.
        kind: Whether it is the bundle of one run, or of a study.

    Returns:
        ``destination``.

    Raises:
        CapsuleError: CAP-B141 (a path, role or digest cannot be bundled), B142 (a file cannot be
            read, is not the claimed one, or changed meanwhile), B143 (the bundle cannot be
            written), B163 (no reader would accept a bundle of this size).
    """
    manifest = _describe(files, claim_id, kind, with_sshsig=ssh_sign is not None)
    statement = envelope.BundleStatement.about(manifest)
    # The order in which open_bundle reads: a reader parses nothing but the bounded envelope before
    # a digest authenticates it, and needs to seek nowhere.
    documents = {
        ENVELOPE: envelope.sign(statement, key),
        MANIFEST: manifest.document(),
    }
    if ssh_sign is not None:
        documents[SSHSIG] = ssh_sign(manifest.document())
    documents[CHECKSUMS] = manifest.checksums
    members: list[tuple[str, int, Data]] = [
        (name, len(document), document) for name, document in documents.items()
    ]
    members += [(file.path, file.size, _data(files[file.path].source)) for file in manifest.files]
    _require_acceptable(manifest, archive.size_of(size for _, size, _ in members))
    what = f"cannot write the bundle {str(destination)!a}"
    fix = "Choose a folder you may write to, with enough free space."
    with coded("CAP-B143", what, fix=fix), open_output(destination) as stream:
        try:
            written = archive.write(stream, members)
        except EOFError as error:
            raise _unreadable("a file became shorter while it was packed") from error
        # Each file was hashed for the manifest and is read a second time here. If a program still
        # writes to it, the two digests differ and the temporary file is dropped.
        for file in manifest.files:
            if written[file.path] != file.sha256:
                raise _unreadable(f"{file.path} changed while it was packed")
    return destination


def open_bundle(
    path: Path,
    trust: TrustPolicy | Iterable[PublicKey],
    kind: BundleKind | None = "run",
) -> OpenedBundle:
    """Check a bundle completely and leave it open.

    The order is the defence. First the signature envelope, bounded in size; then the manifest,
    parsed only once its digest is the attested one; then each file against the manifest, byte by
    byte.

    Args:
        path: The bundle.
        trust: Whose signatures count, or just the keys that do. If none could, only integrity is
            checked: everything fits the digest chain that starts at the envelope, whose signature
            is *not* checked.
        kind: Whether the bundle must be of a run or of a study; None allows both.

    Raises:
        CapsuleError: CAP-B146 the bundle is of the other kind; with exit status 3 if it is not
            canonical, not intact, or not signed as the policy asks (CAP-B125, B154, B155);
            CAP-B101 if it cannot be opened; CAP-B114 if it never was a bundle; CAP-B110 if it
            cannot be read, or there is no place for copies.
    """
    with ExitStack() as stack:
        stream = stack.enter_context(archive.open_archive(path))
        _reject_files(stream, path)
        with _copying():
            root = stack.enter_context(temporary_folder("capsule-bundle-"))
            # Empty until every check has passed. Until then ``stack`` cleans up; afterwards its
            # duties move here, to be done by OpenedBundle.close.
            resources = ExitStack()
            opened = _check(stream, TrustPolicy.of(trust), root, resources)
        # The manifest states the kind, and counts only now that it has been checked.
        if kind not in (None, opened.manifest.kind):
            resources.close()
            found = opened.manifest.kind
            commands = (
                "'capsule verify' or 'capsule report'"
                if found == "run"
                else "'capsule study verify' or 'capsule study report'"
            )
            raise CapsuleError(
                "CAP-B146",
                f"{path.name} is the bundle of a {found}, which this command does not take",
                fix=f"Use it with {commands}.",
            )
        resources.callback(stack.pop_all().close)
        return opened


def _reject_files(stream: BinaryIO, path: Path) -> None:
    """Tell a file that never was a bundle from a bundle that was changed."""
    start = stream.read(archive.BLOCK)
    stream.seek(0)
    # No single change removes both. Wrapped and empty files have errors of their own.
    if start and b"ustar" not in start and ENVELOPE.encode() not in start:
        archive.reject_wrapped(start)
        raise CapsuleError(
            "CAP-B114",
            f"{path} is not a bundle",
            fix="Give the .tar file that 'capsule run' or 'capsule study bundle' wrote. 'capsule "
            "lock' checks a spec.",
        )


def _check(
    stream: BufferedReader, policy: TrustPolicy, root: Path, resources: ExitStack
) -> OpenedBundle:
    reader = ArchiveReader(stream)
    signed = reader.read(ENVELOPE, archive.MAX_ENVELOPE)
    statement, signature = envelope.examine(signed, policy.candidates)
    document = reader.read(MANIFEST, archive.MAX_MANIFEST)
    manifest = _attested_manifest(document, statement)
    signatures = [signature]
    # The attested manifest says whether this signature must be there, so that stripping it is
    # noticed.
    if "sshsig" in manifest.signatures:
        key = sshsig.verify(reader.read(SSHSIG, sshsig.MAX_SIZE), document)
        signatures.append(KeySignature("sshsig", key.fingerprint, key))
    checksums = manifest.checksums
    # SHA256SUMS is never parsed: all of its bytes follow from the manifest.
    reader.check(CHECKSUMS, len(checksums), sha256_hex(checksums))
    members = {
        file.path: Member(file, reader.check(file.path, file.size, file.sha256))
        for file in manifest.files
    }
    reader.finish()
    # Trust comes last: whether a signer is known matters only for a bundle that is intact.
    signers = policy.judge(signatures, document)
    # A policy without any key asks for integrity alone, so there is nothing to require.
    if not policy.trusts_nobody:
        policy.require(signers)
    files = Members(stream, members, root)
    return OpenedBundle(manifest, files, root, signature.fingerprint, signers, resources)


def _attested_manifest(document: bytes, statement: envelope.BundleStatement) -> Manifest:
    """Parse a manifest after its digest matched, and check that the statement says no more."""
    attested = statement.subject[0].digest.sha256
    # Before parsing, so that bytes which the statement does not name never reach a parser.
    if sha256_hex(document) != attested:
        raise tampered("CAP-B112", f"{MANIFEST} is not the attested one (SHA-256 {attested})")
    manifest = parse_document(document, Manifest, MANIFEST, "CAP-B111")
    if (count := len(manifest.files)) > archive.MAX_FILES:
        raise tampered("CAP-B105", f"{MANIFEST} lists {count} files, more than {archive.MAX_FILES}")
    # This covers SHA256SUMS and the claim id as well. Tools that read only the statement would show
    # other ones as signed.
    if statement != envelope.BundleStatement.about(manifest):
        raise tampered("CAP-B113", f"the signed statement and {MANIFEST} contradict each other")
    return manifest


def _describe(
    files: Mapping[str, Content], claim_id: str, kind: BundleKind, *, with_sshsig: bool
) -> Manifest:
    entries = []
    try:
        for path, content in sorted(files.items()):
            size, digest = _measure(content.source)
            if content.sha256 not in (None, digest):
                raise changed(path)
            if size > archive.MAX_SIZE:
                raise _too_large(f"{path} has {size:,} bytes", f"{archive.MAX_SIZE:,}")
            entries.append(
                BundleFile(
                    path=path,
                    size=size,
                    sha256=digest,
                    role=content.role,
                    mediaType=content.media_type,
                )
            )
        kinds: SignatureKinds = ("dsse", "sshsig") if with_sshsig else ("dsse",)
        return Manifest(claimId=claim_id, files=tuple(entries), signatures=kinds, kind=kind)
    except ValidationError as error:
        raise CapsuleError(
            "CAP-B141",
            f"these files cannot be bundled: {error.errors(include_url=False)[0]['msg']}",
            fix="Check the path, role and media type of each file, and that the claim id is the "
            "SHA-256 of the claims file.",
        ) from error


def _require_acceptable(manifest: Manifest, size: int) -> None:
    """Check that readers will accept an archive, before it is signed and written."""
    if size > archive.MAX_ARCHIVE:
        largest = max(manifest.files, key=lambda file: file.size)
        raise _too_large(
            f"the bundle would have {size:,} bytes ({largest.path} alone has {largest.size:,})",
            f"{archive.MAX_ARCHIVE:,}",
        )
    if (count := len(manifest.files)) > archive.MAX_FILES:
        raise _too_large(f"the bundle would have {count:,} files", f"{archive.MAX_FILES:,}")


def _too_large(what: str, limit: str) -> CapsuleError:
    return CapsuleError(
        "CAP-B163",
        f"{what}, and no reader accepts more than {limit}",
        fix="If --embed-image or --embed-data was given, pack the run without it: capsule run "
        "--resume. Otherwise start a new run that keeps less: fewer files in trainer.outputs, or "
        "fewer checkpoints with recording.segment_states.",
    )


def _measure(source: Path | bytes) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a source."""
    if isinstance(source, bytes):
        return len(source), sha256_hex(source)
    with _open_source(source) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        # The number of bytes that were hashed. The size that stat() gives may already be another
        # one.
        return stream.tell(), digest


def _data(source: Path | bytes) -> Data:
    return source if isinstance(source, bytes) else partial(_open_source, source)


def _open_source(path: Path) -> BufferedReader:
    """Open a regular file, not a link: run directories are written by programs we do not trust."""
    try:
        return open_regular(path, follow=False)
    except OSError as error:
        raise _unreadable(f"cannot read {str(path)!r}: {error.strerror}") from error


def changed(path: str) -> CapsuleError:
    """Return the error of a file whose content is not what the claims of its run state.

    A program does not sync its files, so a machine that loses power may lose their content,
    although their digests were kept. A user may also have changed a file.
    """
    return CapsuleError(
        "CAP-B142",
        f"{path!a} is not what it was when the run ended, so a bundle would contradict its claims",
        fix="Put the file back as it was, or start a new run.",
    )


def _unreadable(message: str) -> CapsuleError:
    return CapsuleError(
        "CAP-B142", message, fix="Let the run finish, do not change its directory, and pack again."
    )


_copying = partial(
    coded,
    "CAP-B110",
    "cannot read the bundle, or copy files of it for checking",
    fix="Set TMPDIR to a folder with room for the files of the bundle.",
)
