"""What the environment says about connections over TLS."""

from __future__ import annotations

import os

# Files of certificates to trust, as other programs take them from the environment.
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def trusted_certificates() -> str | None:
    """Return the file of certificates that the environment names; None for the usual ones."""
    return next(filter(None, map(os.environ.get, CERTIFICATES)), None)
