"""Names and passwords for registries, where ``docker login`` and ``podman login`` keep them."""

from __future__ import annotations

import base64
import binascii
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from capsule.host.errors import CapsuleError
from capsule.host.folders import home_folder

_DOCKER_HUB = "https://index.docker.io/v1/"  # the key of docker.io
_TIMEOUT_S = 60.0
_MALFORMED = (OSError, ValueError, AttributeError, TypeError, LookupError, RecursionError)
# What Docker's own helpers print, with exit status 1, for a registry without a login.
_NOT_FOUND = "credentials not found in native keychain"


class Login(NamedTuple):
    """A name and a password or token."""

    username: str
    password: str


def find_login(registry: str) -> Login | None:
    """Return the login of a registry: of a credential helper, or of the configuration file.

    The file is ``config.json`` in ``$DOCKER_CONFIG`` or ``~/.docker``.

    Raises:
        CapsuleError: CAP-I403, the file is malformed, or the helper that it names fails;
            CAP-X006, the home directory is not known.
    """
    folder = os.environ.get("DOCKER_CONFIG") or home_folder("DOCKER_CONFIG") / ".docker"
    path = Path(folder) / "config.json"
    key = _DOCKER_HUB if registry == "docker.io" else registry
    try:
        document = json.loads(path.read_bytes())
        # As in Docker, the helper of a registry precedes the one for all, and both precede the
        # file.
        helper = document.get("credHelpers", {}).get(key) or document.get("credsStore")
        if helper:
            return _from_helper(helper, key)
        return _from_file(document.get("auths", {}).get(key, {}))
    except FileNotFoundError:
        return None
    except _MALFORMED as error:
        raise CapsuleError(
            "CAP-I403",
            f"{path} is not a configuration file of Docker: {error}",
            fix="Correct it, or set DOCKER_CONFIG to another folder.",
        ) from error


def _from_file(entry: dict[str, Any]) -> Login | None:
    if not entry.get("auth"):
        return None
    try:
        # A password may contain colons, but a name may not (RFC 7617).
        name, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("an 'auth' is not base64") from error
    return Login(name, password)


def _from_helper(helper: str, key: str) -> Login | None:
    """Ask a credential helper, by the protocol of docker-credential-helpers."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=key,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if not done.returncode:
            answer = json.loads(done.stdout)
            return Login(answer["Username"], answer["Secret"])
        reason = (done.stdout.strip() or done.stderr.strip())[:1000]
    except (subprocess.SubprocessError, *_MALFORMED) as error:
        reason = str(error)
    if _NOT_FOUND in reason:
        return None
    raise CapsuleError(
        "CAP-I403",
        f"the credential helper {program} returns no login for {key}: {reason}",
        fix="Correct it, or remove it from 'credsStore' and 'credHelpers' in Docker's config.json.",
    )
