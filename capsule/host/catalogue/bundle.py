"""The codes of bundles."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-B060": ErrorEntry(
        ExitCode.USAGE,
        "a licence is not an SPDX expression",
        "leave it out, or give its SPDX id",
    ),
    "CAP-B061": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a wheel's METADATA cannot be read",
        "delete the wheel from the cache, build again",
    ),
    "CAP-B062": ErrorEntry(
        ExitCode.TAMPERED,
        "an SBOM is not sound CycloneDX 1.6",
        "do not trust the bundle",
    ),
    "CAP-B090": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a document of the run directory is missing or malformed",
        "see `output.log`",
    ),
    "CAP-B101": ErrorEntry(
        ExitCode.USAGE,
        "the bundle cannot be opened",
        "give a readable `.capsule.tar`",
    ),
    "CAP-B102": ErrorEntry(
        ExitCode.TAMPERED,
        "not a regular file",
        "save it as a plain file",
    ),
    "CAP-B103": ErrorEntry(
        ExitCode.TAMPERED,
        "wrapped in gzip, zstd, xz, bzip2 or zip",
        "unwrap it",
    ),
    "CAP-B104": ErrorEntry(
        ExitCode.TAMPERED,
        "cut off",
        "get it again",
    ),
    "CAP-B105": ErrorEntry(
        ExitCode.TAMPERED,
        "larger than a limit",
        "raise the limit if this is expected",
    ),
    "CAP-B106": ErrorEntry(
        ExitCode.TAMPERED,
        "padding or end blocks are not zero",
        "get it again",
    ),
    "CAP-B107": ErrorEntry(
        ExitCode.TAMPERED,
        "a header is not the canonical one",
        "get it again",
    ),
    "CAP-B108": ErrorEntry(
        ExitCode.TAMPERED,
        "content is not what was signed",
        "get it again",
    ),
    "CAP-B109": ErrorEntry(
        ExitCode.TAMPERED,
        "a member that was not signed, or data after the end",
        "get it again",
    ),
    "CAP-B110": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the bundle cannot be read, or private copies cannot be written",
        "set `TMPDIR` to a folder with room",
    ),
    "CAP-B111": ErrorEntry(
        ExitCode.TAMPERED,
        "the manifest is malformed",
        "get it again",
    ),
    "CAP-B112": ErrorEntry(
        ExitCode.TAMPERED,
        "the manifest is not the attested one",
        "get it again",
    ),
    "CAP-B113": ErrorEntry(
        ExitCode.TAMPERED,
        "statement and manifest contradict each other",
        "get it again",
    ),
    "CAP-B121": ErrorEntry(
        ExitCode.TAMPERED,
        "the signature envelope is malformed",
        "get it again",
    ),
    "CAP-B122": ErrorEntry(
        ExitCode.TAMPERED,
        "a trusted key is named but did not sign this, or its signature was respelt",
        "get it again",
    ),
    "CAP-B123": ErrorEntry(
        ExitCode.TAMPERED,
        "a trusted key signed but another is named",
        "get it again",
    ),
    "CAP-B124": ErrorEntry(
        ExitCode.TAMPERED,
        "the signed statement is malformed or of another type",
        "get it again",
    ),
    "CAP-B125": ErrorEntry(
        ExitCode.TAMPERED,
        "intact, but signed by none of the keys you gave",
        "get the signer's key from the signer",
    ),
    "CAP-B131": ErrorEntry(
        ExitCode.USAGE,
        "a key file cannot be read",
        "give a readable key file",
    ),
    "CAP-B132": ErrorEntry(
        ExitCode.USAGE,
        "not a key, or a private key given as public",
        "`capsule keygen`, or the `.pub` file",
    ),
    "CAP-B133": ErrorEntry(
        ExitCode.USAGE,
        "a key of another type than Ed25519 and ECDSA P-256",
        "use one of those",
    ),
    "CAP-B134": ErrorEntry(
        ExitCode.USAGE,
        "a weak or non-canonical public key",
        "use another key",
    ),
    "CAP-B135": ErrorEntry(
        ExitCode.USAGE,
        "a key file exists, or cannot be written",
        "another name or folder",
    ),
    "CAP-B136": ErrorEntry(
        ExitCode.USAGE,
        "passphrase wrong or needless",
        "give the right one, or none",
    ),
    "CAP-B137": ErrorEntry(
        ExitCode.USAGE,
        "others may read the private key, or the passphrase",
        "`chmod 600`",
    ),
    "CAP-B138": ErrorEntry(
        ExitCode.USAGE,
        "the private key has a passphrase, and none was given",
        "run the command on a terminal, or pass `--passphrase-file`",
    ),
    "CAP-B139": ErrorEntry(
        ExitCode.USAGE,
        "the file of `--passphrase-file` holds no passphrase",
        "write it into the first line, in UTF-8",
    ),
    "CAP-B141": ErrorEntry(
        ExitCode.USAGE,
        "a path, role or claim id cannot be bundled",
        "correct it",
    ),
    "CAP-B142": ErrorEntry(
        ExitCode.USAGE,
        "a file cannot be read, is a link, or changed while it was packed",
        "let the run finish, pack again",
    ),
    "CAP-B143": ErrorEntry(
        ExitCode.USAGE,
        "the bundle, or a co-signature, cannot be written",
        "another folder or name",
    ),
    "CAP-B144": ErrorEntry(
        ExitCode.TAMPERED,
        "a document of a bundle is missing, not canonical, or not of its form",
        "get it again",
    ),
    "CAP-B145": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "a document of a bundle has a field that this Capsule does not know",
        "use the version of Capsule that made the bundle, or a later one",
    ),
    "CAP-B150": ErrorEntry(
        ExitCode.USAGE,
        "a trust file, revocation list or signature cannot be read",
        "give a readable file",
    ),
    "CAP-B151": ErrorEntry(
        ExitCode.USAGE,
        "a trust file or revocation list is malformed (the line is named), or options of trust do "
        "not fit together",
        "correct them ([trust.md](trust.md))",
    ),
    "CAP-B152": ErrorEntry(
        ExitCode.TAMPERED,
        "an SSH signature is malformed, or of another version, namespace, hash or type of key",
        "get it again, or sign with an Ed25519 or P-256 key",
    ),
    "CAP-B153": ErrorEntry(
        ExitCode.TAMPERED,
        "an SSH signature is not one over this manifest",
        "get it again",
    ),
    "CAP-B154": ErrorEntry(
        ExitCode.TAMPERED,
        "the key is known, but revoked, expired, not yet valid, or listed for another identity",
        "do not rely on it, or correct the trust file",
    ),
    "CAP-B155": ErrorEntry(
        ExitCode.TAMPERED,
        "fewer distinct keys signed than `--threshold` asks for",
        "get further signatures: `capsule sign`, `--signature`",
    ),
    "CAP-B156": ErrorEntry(
        ExitCode.USAGE,
        "`ssh-keygen` is missing or did not sign, or not exactly one key was given",
        "see its message",
    ),
    "CAP-B157": ErrorEntry(
        ExitCode.TAMPERED,
        "a `--signature` file is not one over this bundle",
        "give one made of this very bundle",
    ),
    "CAP-B158": ErrorEntry(
        ExitCode.USAGE,
        "`--keyless` without the `sigstore` package",
        "`pip install 'capsule-rl[sigstore]'`",
    ),
    "CAP-B159": ErrorEntry(
        ExitCode.TAMPERED,
        "a keyless signature does not hold",
        "check identity, issuer, and that it is over `manifest.json`",
    ),
    "CAP-B160": ErrorEntry(
        ExitCode.TAMPERED,
        "a document of a bundle is larger than any run makes it",
        "do not trust the bundle",
    ),
    "CAP-B161": ErrorEntry(
        ExitCode.USAGE,
        "the source tree compresses more than a verifier would unpack",
        "leave nearly empty files out of it",
    ),
    "CAP-B170": ErrorEntry(
        ExitCode.TAMPERED,
        "a receipt cannot be read",
        "name a readable file",
    ),
    "CAP-B171": ErrorEntry(
        ExitCode.TAMPERED,
        "not a receipt, or one that contradicts itself",
        "do not count it; ask its signer for another",
    ),
    "CAP-B172": ErrorEntry(
        ExitCode.TAMPERED,
        "a receipt of another run",
        "name receipts of this bundle",
    ),
    "CAP-B173": ErrorEntry(
        ExitCode.USAGE,
        "a receipt cannot be written",
        "`--receipt` in another folder",
    ),
    "CAP-B174": ErrorEntry(
        ExitCode.USAGE,
        "no receipts beside the bundle",
        "name them, or make one: `capsule verify --sign`",
    ),
    "CAP-B175": ErrorEntry(
        ExitCode.TAMPERED,
        "a receipt is of a time that is more than a day ahead",
        "check this machine's clock; otherwise do not rely on the receipt",
    ),
}
