"""Connections over HTTP, and what the environment says about TLS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Self

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from capsule import __version__

# Files of certificates to trust, as other programs take them from the environment.
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20


# A server may close a kept connection when the next request is sent, and a proxy in front of it may
# be overloaded for a moment. An address without a server is not tried again: mirrors have others.
_RETRIES = Retry(
    total=2,
    connect=0,
    other=0,
    allowed_methods=("GET", "HEAD"),
    status_forcelist=(502, 503, 504),
    backoff_factor=1.0,
    raise_on_status=False,
    respect_retry_after_header=False,  # which could name any time
)


class HttpClient:
    """Keeps its connections open while it is used as a context manager."""

    def __init__(self) -> None:
        self._session = requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=_RETRIES))
        self._session.headers["User-Agent"] = f"capsule/{__version__}"
        # Digests are those of the stored bytes. By default, requests accepts compressed ones, too.
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.verify = trusted_certificates() or True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._session.close()

    def request(self, method: str, address: str, **how: Any) -> requests.Response:
        """Send a request, and return the answer, of which :func:`body` reads the rest."""
        return self._session.request(method, address, stream=True, timeout=_TIMEOUT_S, **how)


def body(answer: requests.Response) -> Iterator[bytes]:
    """Yield the body of an answer in pieces, as the server has it stored."""
    # requests would decode it, and some servers call an .xz file itself an encoding.
    yield from answer.raw.stream(_CHUNK, decode_content=False)


def trusted_certificates() -> str | None:
    """Return the file of certificates that the environment names; None for the usual ones."""
    return next(filter(None, map(os.environ.get, CERTIFICATES)), None)
