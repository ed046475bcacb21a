"""Keyless signatures: Sigstore bundles over a manifest, made with a certificate of Fulcio's.

An identity (an e-mail address, a workflow) and its issuer take the place of a key. The ``sigstore``
package does the work, without network: certificate chain, proof of inclusion in the transparency
log, time, signature. It is an extra, because it has many dependencies of its own.
"""

from __future__ import annotations

import logging

from capsule.bundle.archive import UntrustedError
from capsule.host.errors import CapsuleError


def verify(data: bytes, message: bytes, identity: str, issuer: str) -> None:
    """Reject what is not a signature over ``message`` by ``identity``, as ``issuer`` attests.

    Trust is rooted in the public-good instance of Sigstore, as the installed package and its cache
    know it.

    Args:
        data: A Sigstore bundle in JSON.
        message: What must have been signed.
        identity: Subject alternative name of the certificate.
        issuer: URL of the OpenID Connect issuer.

    Raises:
        CapsuleError: CAP-B158 (the package is not installed), B159 (anything does not hold).
    """
    try:
        from sigstore.models import Bundle
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity
    except ModuleNotFoundError as error:
        raise CapsuleError(
            "CAP-B158",
            "--keyless requires the sigstore package, which is not installed",
            fix="Run: pip install 'capsule-rl[sigstore]'",
        ) from error
    logging.getLogger("sigstore").setLevel(logging.ERROR)  # it warns of being offline
    try:
        bundle = Bundle.from_json(data)
        policy = Identity(identity=identity, issuer=issuer)
        Verifier.production(offline=True).verify_artifact(message, bundle, policy)
    except Exception as error:  # an untrusted file in another project's parsers
        raise UntrustedError(
            "CAP-B159",
            f"the keyless signature of this bundle's manifest was not made by {identity!a}: "
            f"{str(error)[:200]!a}",
            fix="Check identity and issuer; the signature must be one of manifest.json of this "
            "very bundle, with its proof of inclusion in the log.",
        ) from error
