"""Names of images in registries: ``REGISTRY/NAME[:TAG][@DIGEST]``."""

from __future__ import annotations

import re
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from capsule.host.errors import CapsuleError

# Forms of the OCI distribution specification 1.1 ("Pulling manifests").
_HOST = r"(?:\[[0-9a-f:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_FORM = re.compile(
    rf"(?P<registry>{_HOST})/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?")
_DOCKER_HUB = "registry-1.docker.io"  # where the registry of docker.io is


class Reference(NamedTuple):
    """The name of an image in a registry.

    Attributes:
        registry: Host and perhaps port.
        name: Name of the repository.
        tag: None if it has none.
        digest: Digest of the manifest, ``sha256:…``; None if it has none.
    """

    registry: str
    name: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name, in which the registry must not be left out.

        Raises:
            CapsuleError: CAP-I401.
        """
        match = _FORM.fullmatch(text)
        # As Docker has it, a first part without dot, colon or "localhost" is not a host.
        if (
            match is None
            or not re.search(r"[.:]|^localhost$", match["registry"])
            or not _is_host(match["registry"])
        ):
            raise CapsuleError(
                "CAP-I401",
                f"{text!a} is not REGISTRY/NAME[:TAG][@DIGEST]",
                fix="Write, for example, registry.example.org/group/name:1.0, in lower case.",
            )
        return cls(match["registry"], match["name"], match["tag"], match["digest"])

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"{self.registry}/{self.name}{tag}{digest}"

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine, where plain HTTP is spoken."""
        return _LOOPBACK.fullmatch(self.registry) is not None

    @property
    def address(self) -> str:
        """The address of the repository."""
        host = _DOCKER_HUB if self.registry == "docker.io" else self.registry
        return f"{'http' if self.is_loopback else 'https'}://{host}/v2/{self.name}"


def _is_host(text: str) -> bool:
    """Tell whether an IPv6 address and a port, if there are any, are in their ranges."""
    try:
        return urlsplit(f"//{text}").port != 0
    except ValueError:
        return False
