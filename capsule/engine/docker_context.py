"""The context that Docker's own command uses: where it finds its engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsule.engine.interface import WITHOUT_CONTAINERS
from capsule.experiment.canonical import sha256_hex
from capsule.host.errors import CapsuleError


def context_address(environment: Mapping[str, str]) -> str | None:
    """Return the address that the current context names, or None of the default context.

    The context is ``$DOCKER_CONTEXT``, or else ``currentContext`` in ``config.json``. As in Docker,
    the folder of a context has the SHA-256 of its name.

    Raises:
        CapsuleError: CAP-E001, there is no such context, its engine is reached by TLS or SSH, or a
            file is malformed.
    """
    # Unlike Path.home(), this does not fail for a user without a home directory.
    folder = Path(environment.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))  # noqa: PTH111
    name = environment.get("DOCKER_CONTEXT") or _read(folder / "config.json", "currentContext")
    if not name or name == "default":
        return None
    digest = sha256_hex(name.encode())
    path = folder / "contexts" / "meta" / digest / "meta.json"
    if not path.is_file():
        raise _error(f"Docker's context {name!r} does not exist: there is no {path}")
    host = _read(path, "Endpoints", "docker", "Host")
    if host is None or host.startswith("unix://"):
        return host
    secured = (folder / "contexts" / "tls" / digest).exists()
    if secured or not host.startswith("tcp://"):
        how = "TLS" if secured else "an address of this kind"
        raise _error(f"Docker's context {name!r} names {host}, and Capsule does not support {how}")
    return host


def _read(path: Path, *keys: str) -> str | None:
    """Return a text of a JSON file; None if the text or the file is empty or missing."""
    try:
        found: Any = json.loads(path.read_bytes())
        for key in keys:
            found = found.get(key) or {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise _error(f"{path} cannot be read as a file of Docker: {error}") from error
    if found and not isinstance(found, str):
        raise _error(f"{path} has a {'.'.join(keys)} that is not a text")
    return found or None


def _error(message: str) -> CapsuleError:
    return CapsuleError(
        "CAP-E001",
        message,
        fix="Choose another context with 'docker context use NAME' or DOCKER_CONTEXT, or set "
        f"DOCKER_HOST to the engine's socket (unix://…). {WITHOUT_CONTAINERS}",
    )
