"""Connecting to an engine that speaks the Docker API, and what its answers mean."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

from capsule.engine.docker_context import context_address
from capsule.engine.interface import WITHOUT_CONTAINERS
from capsule.host.errors import CapsuleError, innermost_reason
from capsule.host.platform import require_execution

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

ContainerEngineName = Literal["docker", "podman"]
CONTAINER_ENGINES: tuple[ContainerEngineName, ...] = get_args(ContainerEngineName)

_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 60  # until the version is known: an engine on a busy machine answers late
_REQUEST_SECONDS = 600  # loading gigabytes onto a slow disk is one request

_FIX = {
    "docker": "Start Docker, or let your user use it (group 'docker'), or choose another engine "
    "with DOCKER_HOST or 'docker context use NAME'; 'bash scripts/setup.sh' installs and starts "
    f"one as root. {WITHOUT_CONTAINERS}",
    "podman": "Start Podman's service (systemctl --user start podman.socket), or set "
    f"CONTAINER_HOST. {WITHOUT_CONTAINERS}",
}

CONFLICT = 409  # the status of what cannot be done now, or is done by another process already


def connect(name: ContainerEngineName) -> DockerClient:
    """Open the first address where the engine ``name`` answers.

    Raises:
        CapsuleError: CAP-E001, none answers, or Docker's current context cannot be used; CAP-E002,
            only another engine does.
    """
    refusals = []
    others = []
    for address in addresses(name, os.environ):
        try:
            client = _open(address)
        except Exception as error:  # noqa: BLE001 - the SDK raises its own, requests' and OSError
            refusals.append(f"{address}: {innermost_reason(error)}")
            continue
        # The address does not tell: podman-docker puts Podman's socket where Docker's is expected.
        found = engine_name(client.version())
        if found == name:
            return client
        client.close()
        others.append(f"{found} answers at {address}")
    if others:
        raise CapsuleError(
            "CAP-E002",
            f"{name} was requested, but {'; '.join(others)}",
            fix=f"Use --engine {found}, or correct DOCKER_HOST or CONTAINER_HOST.",
        )
    raise CapsuleError(
        "CAP-E001", f"no {name} engine answers ({'; '.join(refusals)})", fix=_FIX[name]
    )


def answering_engines() -> Iterator[tuple[ContainerEngineName, DockerClient]]:
    """Yield the container engines that answer, each with a client, which the caller closes.

    None does where runs cannot be executed.
    """
    try:
        require_execution()
    except CapsuleError:
        return
    for name in CONTAINER_ENGINES:
        try:
            client = connect(name)
        except CapsuleError:  # there is no such engine here
            continue
        yield name, client


def addresses(name: ContainerEngineName, environment: Mapping[str, str]) -> list[str]:
    """List where the engine may listen, most specific first.

    A variable or a context that names an address excludes the usual ones: the user chose.

    Raises:
        CapsuleError: CAP-E001, Docker's current context cannot be used.
    """
    variables = ("DOCKER_HOST",) if name == "docker" else ("CONTAINER_HOST", "DOCKER_HOST")
    for variable in variables:
        if address := environment.get(variable):
            return [address]
    if name == "docker" and (address := context_address(environment)):
        return [address]
    sockets = {
        "docker": (
            "/var/run/docker.sock",
            "{run}/docker.sock",
            "{home}/.docker/desktop/docker.sock",
            "{home}/.docker/run/docker.sock",
        ),
        "podman": ("{run}/podman/podman.sock", "/run/podman/podman.sock"),
    }[name]
    run = environment.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    # Unlike Path.home(), this does not fail for a user without a home directory.
    home = os.path.expanduser("~")  # noqa: PTH111
    return [f"unix://{path.format(run=run, home=home)}" for path in sockets]


def component(version: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the engine's own entry of a ``GET /version`` answer: ``Name``, ``Version``."""
    components = version.get("Components") or [{"Name": "Engine", "Version": version["Version"]}]
    first: Mapping[str, str] = components[0]
    return first


def engine_name(version: Mapping[str, Any]) -> ContainerEngineName:
    """Tell Docker from Podman by a ``GET /version`` answer."""
    return "podman" if "podman" in component(version)["Name"].lower() else "docker"


def is_rootless(info: Mapping[str, Any]) -> bool:
    """Tell by a ``GET /info`` answer whether an engine runs without root.

    Docker says so among its security options, Podman before 5 in a field of its own.
    """
    named = any("rootless" in option for option in info.get("SecurityOptions") or ())
    return named or bool(info.get("Rootless"))


@contextmanager
def engine_errors(name: ContainerEngineName) -> Iterator[None]:
    """Turn what the SDK raises into CAP-E006."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise CapsuleError(
            "CAP-E006",
            f"{name} fails: {innermost_reason(error)}",
            fix="See the engine's own log; is it running, and is there space on its disk? A run "
            "can be continued with 'capsule run --resume'.",
        ) from error


def _open(address: str) -> DockerClient:
    from docker import DockerClient

    if address.startswith("unix://"):
        # The SDK would leak its socket and hide the system's reason.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_SECONDS)  # connecting waits where the queue is full
            probe.connect(address.removeprefix("unix://"))
    client = DockerClient(base_url=address, version="auto", timeout=_ANSWER_SECONDS)
    client.api.timeout = _REQUEST_SECONDS
    return client


def remove_container(container: Container) -> None:
    """Remove a container. Another Capsule removes what any killed one left, and may be faster."""
    from docker.errors import APIError, NotFound

    with suppress(NotFound):
        try:
            container.remove(force=True, v=True)
        except APIError as error:
            if error.status_code != CONFLICT:
                raise
            container.wait(condition="removed")
