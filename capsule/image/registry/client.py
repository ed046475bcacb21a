"""A client of the OCI distribution specification 1.1: blobs and manifests of one repository.

Everything that a registry sends is checked against its digest before it is used.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import IO, Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from capsule.experiment.canonical import sha256_hex
from capsule.host.errors import CapsuleError, innermost_reason
from capsule.host.network import HttpClient, body
from capsule.host.wording import counted
from capsule.image.registry.credentials import find_login
from capsule.image.registry.reference import Reference

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
MAX_DOCUMENT_BYTES = 4 << 20  # the largest manifest that registries have to take
_OCTETS = "application/octet-stream"
_CHALLENGE = re.compile(r'([a-z]+)="([^"]*)"')


class Descriptor(NamedTuple):
    """A blob of a manifest: ``sha256:…`` of its bytes, and how many there are."""

    digest: str
    size: int


class _NoPlainHttp(HTTPAdapter):
    """Rejects requests over plain HTTP: a registry may redirect to such an address."""

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        raise requests.exceptions.InvalidSchema(f"{request.url} is plain HTTP")


class Repository(HttpClient):
    """A repository of a registry. Use it as a context manager."""

    def __init__(self, reference: Reference) -> None:
        """Open a repository; nothing is asked for yet.

        Raises:
            CapsuleError: CAP-I403 of :func:`find_login`.
        """
        super().__init__()
        self._reference = reference
        self._login = find_login(reference.registry)
        # A ~/.netrc would replace the authorisation below. What else the environment says counts.
        self._session.trust_env = False
        self._session.proxies = requests.utils.get_environ_proxies(reference.address)
        if not reference.is_loopback:
            self._session.mount("http://", _NoPlainHttp())
        self._authorisation: str | None = None

    def has_blob(self, blob: Descriptor) -> bool:
        """Tell whether the repository has a blob."""
        with self._request("HEAD", f"blobs/{blob.digest}", accepted=(200, 404)) as answer:
            return answer.status_code == requests.codes.ok

    def push_blob(self, blob: Descriptor, stream: IO[bytes] | bytes) -> None:
        """Upload a blob in one piece ("Pushing a blob monolithically", POST then PUT).

        Raises:
            CapsuleError: CAP-I402, I403, I404: the registry does not take it.
        """
        with (
            self._request("POST", "blobs/uploads/", accepted=(202,)) as answer,
            self._reachable(),  # a registry that gives a malformed address is not
        ):
            # The address for the upload may be relative. If it has a query, the digest is added to
            # that.
            place = urljoin(answer.url, answer.headers.get("Location", ""))
        separator = "&" if urlsplit(place).query else "?"
        headers = {"Content-Type": _OCTETS, "Content-Length": str(blob.size)}
        with self._request(
            "PUT",
            f"{place}{separator}digest={blob.digest}",
            accepted=(201,),
            headers=headers,
            data=stream,
        ):
            pass

    def push_manifest(self, manifest: bytes, tag: str) -> str:
        """Upload a manifest under a tag, and return its digest.

        Raises:
            CapsuleError: CAP-I402, I403: the registry denies access; CAP-I404: it has other bytes.
        """
        digest = f"sha256:{sha256_hex(manifest)}"
        headers = {"Content-Type": MANIFEST}
        with self._request(
            "PUT", f"manifests/{tag}", accepted=(201,), headers=headers, data=manifest
        ) as answer:
            stored = answer.headers.get("Docker-Content-Digest", digest)
        if stored != digest:
            raise self._other_bytes(f"the manifest {digest}", stored)
        return digest

    def manifest(self) -> bytes:
        """Return the manifest that the reference names, by its digest if it has one.

        Raises:
            CapsuleError: CAP-I402, I403: it is not available; CAP-I404: it has another digest.
        """
        name = self._reference.digest or self._reference.tag
        headers = {"Accept": f"{MANIFEST}, {DOCKER_MANIFEST}"}
        with self._request("GET", f"manifests/{name}", accepted=(200,), headers=headers) as answer:
            data = b"".join(self._content(answer, MAX_DOCUMENT_BYTES))
        stated = answer.headers.get("Docker-Content-Digest")
        for wanted in filter(None, (self._reference.digest, stated)):
            if (found := f"sha256:{sha256_hex(data)}") != wanted:
                raise self._other_bytes(f"the manifest {wanted}", found)
        return data

    def blob(self, blob: Descriptor) -> Iterator[bytes]:
        """Yield a blob in pieces. It is the right one only if the iteration ends without an error.

        Raises:
            CapsuleError: CAP-I402, I403: it is not available; CAP-I404: it is another one.
        """
        digest, found = hashlib.sha256(), 0
        with self._request("GET", f"blobs/{blob.digest}", accepted=(200,)) as answer:
            for chunk in self._content(answer, blob.size):
                digest.update(chunk)
                found += len(chunk)
                yield chunk
        if found != blob.size or f"sha256:{digest.hexdigest()}" != blob.digest:
            raise self._other_bytes(
                f"the blob {blob.digest} of {counted(blob.size, 'byte')}",
                f"sha256:{digest.hexdigest()} of {counted(found, 'byte')}",
            )

    def _content(self, answer: requests.Response, limit: int) -> Iterator[bytes]:
        """Yield the body of an answer, of at most ``limit`` bytes."""
        found = 0
        with self._reachable():
            for chunk in body(answer):
                found += len(chunk)
                if found > limit:
                    raise self._other_bytes(f"at most {limit} bytes", "more")
                yield chunk

    @contextmanager
    def _request(
        self, method: str, place: str, *, accepted: tuple[int, ...], **how: Any
    ) -> Iterator[requests.Response]:
        """Ask the registry, once more with an authorisation if it demands one.

        Args:
            method: Of HTTP.
            place: Below the repository, or a whole address that the registry gave.
            accepted: Statuses that are an answer.
            how: Headers and body.
        """
        address = place if "://" in place else f"{self._reference.address}/{place}"
        answer = self._send(method, address, how)
        # A registry may name an address on another host for an upload. That host gets no login.
        if answer.status_code == requests.codes.unauthorized and self._is_own(address):
            answer.close()
            self._authorisation = self._authorise(answer.headers.get("WWW-Authenticate", ""))
            answer = self._send(method, address, how)
        with answer:
            if answer.status_code in (requests.codes.unauthorized, requests.codes.forbidden):
                raise self._denied()
            if answer.status_code not in accepted:
                with self._reachable():
                    detail = answer.raw.read(1000).decode("utf-8", "replace")
                raise self._unavailable(f"{method} {place}: {answer.status_code} {detail!a}")
            yield answer

    def _send(self, method: str, address: str, how: dict[str, Any]) -> requests.Response:
        headers = dict(how.get("headers", {}))
        if self._authorisation is not None and self._is_own(address):
            headers["Authorization"] = self._authorisation
        data = how.get("data")
        # The second attempt, with an authorisation, sends the stream from its beginning again.
        if data is not None and not isinstance(data, bytes):
            data.seek(0)
        with self._reachable():
            return self.request(method, address, headers=headers, data=data)

    def _is_own(self, address: str) -> bool:
        """Tell whether an address is of this registry, so that credentials may go there."""
        own, other = urlsplit(self._reference.address), urlsplit(address)
        return (own.scheme, own.netloc) == (other.scheme, other.netloc)

    def _authorise(self, challenge: str) -> str:
        """Answer a demand for an authorisation: RFC 7617, or a token as Docker's registries give.

        Raises:
            CapsuleError: CAP-I403, there is no login, or it is not accepted; CAP-I402, the server
                of tokens is not available.
        """
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._login is not None:
            encoded = base64.b64encode(":".join(self._login).encode()).decode()
            return f"Basic {encoded}"
        facts = dict(_CHALLENGE.findall(rest))
        realm = facts.pop("realm", "")
        # The registry chooses the realm, to which the login is sent. Plain HTTP will do only if the
        # registry is on this machine.
        secure = realm.startswith("https://") or self._reference.is_loopback
        if scheme.lower() != "bearer" or not realm or not secure:
            raise self._denied()
        with (
            self._reachable(),
            self.request("GET", realm, params=facts, auth=self._login) as answer,
        ):
            data = answer.raw.read(MAX_DOCUMENT_BYTES, decode_content=False)
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self._unavailable(f"{realm}: {answer.status_code}")
        try:
            document = json.loads(data) if answer.ok else {}
            # Docker's token specification also allows the name of OAuth 2.0.
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise self._unavailable(f"{realm} answers with something else than a token") from error
        if not token:
            raise self._denied()
        return f"Bearer {token}"

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        # The errors of requests are of the first two kinds; the body is read by urllib3 itself.
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:
            raise self._unavailable(innermost_reason(error)) from error

    def _unavailable(self, reason: str) -> CapsuleError:
        return CapsuleError(
            "CAP-I402",
            f"{self._reference} is not available: {reason}",
            fix="Check the name and the network. Plain HTTP is used only for this machine itself.",
        )

    def _denied(self) -> CapsuleError:
        known = "without a login" if self._login is None else f"as {self._login.username!a}"
        return CapsuleError(
            "CAP-I403",
            f"{self._reference.registry} denies access to {self._reference.name} {known}",
            fix=f"Run 'docker login {self._reference.registry}', or ask for access.",
        )

    def _other_bytes(self, wanted: str, found: str) -> CapsuleError:
        return CapsuleError(
            "CAP-I404",
            f"{self._reference.registry} returns {found} for {wanted}",
            fix="Do not use this registry, or push the image again.",
        )
