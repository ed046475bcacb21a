"""Co-signing: a further signature over a bundle's manifest, in a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from capsule.bundle import sshsig
from capsule.bundle.bundle import open_bundle
from capsule.bundle.manifest import BundleKind
from capsule.host.errors import coded
from capsule.host.outputs import write_new

SUFFIX = ".sshsig"  # BUNDLE.KEY.sshsig


class Signed(NamedTuple):
    """The signed claims, the signing key, and whether they are of a run or of a study."""

    claim_id: str
    fingerprint: str
    kind: BundleKind


def cosign(bundle: Path, sign: Callable[[bytes], bytes], destination: Path) -> Signed:
    """Sign an intact bundle. Its other signatures are not checked.

    Args:
        bundle: The bundle; it stays as it is.
        sign: Makes an SSH signature over the manifest.
        destination: The signature; a new file.

    Raises:
        CapsuleError: The bundle is not intact, ``sign`` failed, or the file exists or cannot be
            written (CAP-B143).
    """
    with open_bundle(bundle, (), kind=None) as opened:
        manifest, kind = opened.manifest.document(), opened.manifest.kind
        claim_id = opened.claim_id
    signature = sign(manifest)
    # The signature names its key. Where an agent or a token signed, nothing else here does.
    signer = sshsig.verify(signature, manifest)
    what = f"cannot write the signature {str(destination)!a}"
    with coded("CAP-B143", what, fix="Use -o to name another file."):
        write_new(destination, signature)
    return Signed(claim_id, signer.fingerprint, kind)
