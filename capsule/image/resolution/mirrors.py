"""Mirrors of Debian's and Ubuntu's archives: which are asked, in which order, and how.

They are those of the spec, else of ``CAPSULE_DEBIAN_MIRROR`` or ``CAPSULE_UBUNTU_MIRROR``, else of
this machine's apt, else the vendor's own. Where the machine has apt, its proxies and certificates
are used, unless the environment names others. Whatever is downloaded is checked by the caller, by a
signature or a SHA-256.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies

import requests
import urllib3

from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import innermost_reason
from capsule.host.network import HttpClient, body, trusted_certificates
from capsule.image.distribution import Vendor

_SCHEMES = ("http", "https", "file")
_SNAPSHOT = re.compile(r"/[0-9]{8}T[0-9]{6}Z(?=/|$)")


class DownloadError(Exception):
    """A file could not be downloaded. The message names its address."""


def mirrors(vendor: Vendor, sources: SourcesSpec) -> list[str]:
    """Return the base addresses below which pool paths are looked up, in order, snapshots last.

    Args:
        vendor: Whose archive it is.
        sources: The spec's sources, which replace what the machine says.
    """
    chosen = sources.debian or os.environ.get(vendor.variable, "").split()
    addresses = chosen or _from_apt(vendor) or vendor.mirrors
    unique = dict.fromkeys(address.rstrip("/") for address in addresses)
    # The sort is stable, so only snapshots change their places.
    return sorted(unique, key=is_snapshot)


def is_snapshot(address: str) -> bool:
    """Tell whether an address is a dated snapshot, e.g. ``…/archive/debian/20260901T000000Z``."""
    return _SNAPSHOT.search(address) is not None


class Downloader(HttpClient):
    """Downloads files from mirrors, over one connection each. Use it as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self._proxies, certificates = _apt_network()
        self._session.verify = trusted_certificates() or certificates or True

    def download(self, address: str, path: str, target: BinaryIO, limit: int) -> None:
        """Write the file at ``path`` below a mirror's address to ``target``.

        Args:
            address: The mirror.
            path: Relative path, not quoted.
            target: Where the bytes go.
            limit: Size in bytes beyond which the download is given up.

        Raises:
            DownloadError: It is not there, too large, or the mirror does not answer.
            OSError: It cannot be written.
        """
        place = f"{address}/{quote(path)}"
        size = 0
        for chunk in self._chunks(place):
            size += len(chunk)
            if size > limit:
                raise DownloadError(f"{place}: larger than {limit:,} bytes")
            target.write(chunk)

    def _proxies_for(self, place: str) -> dict[str, str]:
        """Return apt's proxies, unless the environment says how an address is reached."""
        named = getproxies().keys() & {urlsplit(place).scheme, "all"}
        excepted = requests.utils.should_bypass_proxies(place, no_proxy=None)
        return {} if named or excepted else self._proxies

    def _chunks(self, place: str) -> Iterator[bytes]:
        """Yield the file at an address.

        Raises:
            DownloadError: It cannot be read.
        """
        try:
            parts = urlsplit(place)
            if parts.scheme not in _SCHEMES:
                raise DownloadError(f"{place}: a mirror's address begins with http, https or file")
            if parts.scheme == "file":
                yield Path(unquote(parts.path)).read_bytes()
                return
            with self.request("GET", place, proxies=self._proxies_for(place)) as answer:
                answer.raise_for_status()
                yield from body(answer)
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
            ValueError,  # of a malformed address
        ) as error:
            raise DownloadError(f"{place}: {innermost_reason(error)}") from error


def _from_apt(vendor: Vendor) -> list[str]:
    """Return the addresses of an archive in this machine's apt configuration, if it has any."""
    # apt has several files of sources, in two formats. This asks it for the result.
    lines = _apt(
        "apt-get", "indextargets", "--format", "$(ORIGIN)|$(RELEASE)|$(REPO_URI)",
        "Created-By: Packages",
    )  # fmt: skip
    found = []
    for origin, suite, address in (line.split("|", 2) for line in lines):
        # The origin is unknown until the machine's first 'apt-get update'.
        of_vendor = re.match(rf"({vendor.suites})\b", suite)
        if origin == vendor.name or (origin == "" and of_vendor):
            found.append(address)
    return [address for address in found if urlsplit(address).scheme in _SCHEMES]


def _apt_network() -> tuple[dict[str, str], str | None]:
    """Return the proxies of this machine's apt, as requests takes them, and its certificates."""
    proxies, certificates = {}, None
    for line in _apt("apt-config", "dump"):
        if match := re.fullmatch(r'Acquire::(https?)::Proxy(?:::([^ ]+))? "(.+)";', line):
            scheme, host, proxy = match.groups()
            # requests prefers a key with a host, and takes an empty value for no proxy.
            proxies[f"{scheme}://{host}" if host else scheme] = "" if proxy == "DIRECT" else proxy
        elif match := re.fullmatch(r'Acquire::https::CAInfo "(.+)";', line):
            certificates = match[1]
    return proxies, certificates


def _apt(*command: str) -> list[str]:
    """Return the lines that one of apt's programs prints; none where it does not exist."""
    if shutil.which(command[0]) is None:
        return []
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.stdout.splitlines()
