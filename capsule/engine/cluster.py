"""Runs whose actors play on a Ray cluster: an existing one, or containers beside the run's own.

``docker:N`` starts N workers beside the container of the run, which learns and is the head of the
cluster. All have the same image, and a network of their own that leads nowhere else. They are
confined like any run, except for what Ray needs: the network, and a token, a file that all of them
see. A worker sees no run directory.

The token is made for one start of a run, and is written nowhere but to a temporary folder of this
machine. It keeps others out of the cluster; Ray does not encrypt what it sends.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capsule.engine.bytecode import FOLDER as BYTECODE
from capsule.engine.connection import remove_container
from capsule.engine.interface import ChangedEngine, Exit, RemoteCluster, Task, Workers
from capsule.experiment import contract
from capsule.experiment.spec import Spec
from capsule.experiment.trainers import ImpalaTrainer
from capsule.host.errors import CapsuleError
from capsule.host.folders import home_folder
from capsule.host.owner import temporary_folder

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

TOKEN = "/run/ray-token"  # noqa: S105 - where a container sees the file
HEAD = "head"  # the name of the run's container on its network
MAX_WORKERS = 64

_NODE = ("python3", "-P", "-m", "capsule.training.impala.actors.ray.node")
_PORT = 6379
_STORE_SHARE = 0.75  # of /dev/shm
_API = "1.41"  # of the engine: names of a container on a network are older
_NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}
# Ray starts workers with niceness 15: on a busy machine, actors would wait for every other program.
_NODES = {**_NO_STATISTICS, "RAY_worker_niceness": "0"}


@dataclass(frozen=True)
class OnCluster(ChangedEngine):
    """An engine whose tasks have a cluster.

    Raises:
        CapsuleError: CAP-E016, the engine cannot make one.
    """

    cluster: Workers | RemoteCluster

    def __post_init__(self) -> None:
        """Check that the engine can give tasks the cluster."""
        if isinstance(self.cluster, Workers) and self.name != "docker":
            raise CapsuleError(
                "CAP-E016",
                f"--cluster docker:{self.cluster.count} requires Docker, not the engine "
                f"{self.name}",
                fix="Use --engine docker, or the address of a cluster.",
            )
        if self.name in ("bwrap", "apptainer"):
            raise CapsuleError(
                "CAP-E016",
                f"--cluster requires a network, which the engine {self.name} does not give to runs",
                fix="Use --engine docker, podman or process.",
            )

    def describe(self) -> dict[str, str]:
        """See :class:`Engine`; ``cluster`` is ``docker:N``, or ``remote`` without its address."""
        cluster = self.cluster
        which = f"docker:{cluster.count}" if isinstance(cluster, Workers) else "remote"
        return {**super().describe(), "cluster": which}

    def run(self, task: Task, on_poll: Callable[[], None] = lambda: None) -> Exit:
        """See :class:`Engine`."""
        given = replace(task, cluster=self.cluster)
        if self.name == "process" and isinstance(self.cluster, RemoteCluster):
            variables = remote_variables(self.cluster, str(self.cluster.token))
            given = replace(given, environment={**task.environment, **variables})
        return self.engine.run(given, on_poll=on_poll)


def parse_cluster(text: str, spec: Spec, environment: Mapping[str, str]) -> Workers | RemoteCluster:
    """Read the option ``--cluster``.

    Args:
        text: ``docker:N``, ``HOST:PORT`` or ``ray://HOST:PORT``.
        spec: What is run.
        environment: Variables of this process: ``RAY_AUTH_TOKEN_PATH`` names the token's file,
            else it is ``~/.ray/auth_token``, if that is there.

    Raises:
        CapsuleError: CAP-E017, ``text`` has another form, or the token cannot be read; CAP-E018,
            the spec has no actors to play there.
    """
    if not isinstance(spec.trainer, ImpalaTrainer):
        raise CapsuleError(
            "CAP-E018",
            "--cluster requires trainer.algorithm 'impala'; the spec has another trainer",
            fix="Remove --cluster.",
        )
    if spec.trainer.population is not None:
        raise CapsuleError(
            "CAP-E018",
            "--cluster is not supported with trainer.population",
            fix="Remove --cluster, or the section trainer.population.",
        )
    if spec.data is not None:
        raise CapsuleError(
            "CAP-E018",
            "--cluster is not supported for a spec with data sets, which actors on other machines "
            "would not see",
            fix="Remove --cluster, or the section data.",
        )
    if found := re.fullmatch(r"docker:([0-9]{1,2})", text):
        if 1 <= int(found[1]) <= MAX_WORKERS:
            return Workers(int(found[1]))
    elif re.fullmatch(r"(ray://)?[^\s/:]+:[0-9]{1,5}", text):
        return RemoteCluster(text, _token_file(environment.get("RAY_AUTH_TOKEN_PATH")))
    raise CapsuleError(
        "CAP-E017",
        f"--cluster {text!r} is not docker:N, with N from 1 to {MAX_WORKERS}, nor HOST:PORT or "
        "ray://HOST:PORT",
        fix="Write, for example, --cluster docker:2.",
    )


def _token_file(named: str | None) -> Path | None:
    token = Path(named) if named else home_folder("RAY_AUTH_TOKEN_PATH") / ".ray" / "auth_token"
    if not named and not token.exists():
        return None
    try:
        # Read now, because a run needs it only after its image was built.
        token.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CapsuleError(
            "CAP-E017",
            f"the token of the cluster cannot be read from {token}: {error}",
            fix="Set RAY_AUTH_TOKEN_PATH to the file with the token of the cluster.",
        ) from error
    return token.resolve()


def remote_variables(cluster: RemoteCluster, token: str) -> dict[str, str]:
    """Return the variables of a task that uses a cluster and sees its token at the path given."""
    variables = {contract.CLUSTER_VARIABLE: cluster.address, **_NO_STATISTICS}
    return variables if cluster.token is None else {**variables, **token_variables(token)}


def token_variables(path: str) -> dict[str, str]:
    """Return the variables by which Ray finds its token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


@contextmanager
def in_cluster(
    cluster: Workers | RemoteCluster | None,
    settings: dict[str, Any],
    client: DockerClient,
    start: Callable[[dict[str, Any]], Container],
) -> Iterator[dict[str, Any]]:
    """Have a cluster for a block.

    Args:
        cluster: Which, if any.
        settings: Settings of the task's container, without a cluster.
        client: Client of the engine.
        start: Starts a container.

    Yields:
        The settings of the task's container with it.

    Raises:
        CapsuleError: CAP-E005, a worker does not start.
        docker.errors.APIError: The engine makes no network.
    """
    if cluster is None:
        yield settings
    elif isinstance(cluster, RemoteCluster):
        added = remote_variables(cluster, TOKEN)
        # The engine's usual network, which leads to more than the cluster.
        reaching = {**settings, "network_mode": "bridge"}
        if cluster.token is None:
            yield _with(reaching, added, None)
            return
        # A copy, which the container's user can own; the original keeps its owner and mode.
        with _token(cluster.token.read_text(), settings["user"]) as path:
            yield _with(reaching, added, path)
    else:
        # The workers start first and wait for the head, which is the run's own container and starts
        # in the caller's block. Everything is removed in reverse, as an engine removes no network
        # that is in use.
        token = _token(secrets.token_hex(32), settings["user"])
        with token as path, _network(settings["labels"], client) as network, ExitStack() as stack:
            common = _with(settings, {**_NODES, **token_variables(TOKEN)}, path)
            for number in range(1, cluster.count + 1):
                stack.callback(remove_container, start(_worker(common, network, number)))
            yield _head(common, network, cluster.count)


@contextmanager
def _token(token: str, user: str) -> Iterator[Path]:
    """Write a token to a file, which a user of containers can read and no other."""
    with temporary_folder("capsule-token-") as folder:
        path = folder / "token"
        # The mode comes before the content.
        path.touch(mode=0o600)
        path.write_text(token)
        if os.getuid() == 0:
            owner, group = map(int, user.split(":"))
            os.chown(path, owner, group)
        yield path


@contextmanager
def _network(labels: dict[str, str], client: DockerClient) -> Iterator[str]:
    """Make a network that leads nowhere, and return its name."""
    name = f"capsule-{secrets.token_hex(8)}"
    network = client.networks.create(name, internal=True, labels=labels)
    try:
        yield name
    finally:
        network.remove()


def _with(
    settings: dict[str, Any], variables: dict[str, str], token: Path | None
) -> dict[str, Any]:
    """Add variables and a token to the settings of a container."""
    from docker.types import Mount

    mounts = list(settings["mounts"])
    if token is not None:
        mounts.append(Mount(TOKEN, str(token), type="bind", read_only=True))
    environment = {**settings["environment"], **variables}
    return {**settings, "environment": environment, "mounts": mounts}


def _head(settings: dict[str, Any], network: str, workers: int) -> dict[str, Any]:
    """Return the settings of the run's container, as the head of its cluster."""
    command = [*_NODE, "head", str(_store(settings)), *settings["entrypoint"]]
    hosts = {contract.CLUSTER_HOSTS_VARIABLE: str(workers)}
    environment = {**settings["environment"], **hosts}
    return _joined(settings, network, HEAD) | {"entrypoint": command, "environment": environment}


def _worker(settings: dict[str, Any], network: str, number: int) -> dict[str, Any]:
    """Return the settings of a container that plays actors, without the run directory."""
    name = f"worker-{number}"
    command = [*_NODE, "worker", str(_store(settings)), f"{HEAD}:{_PORT}", name]
    mounts = [mount for mount in settings["mounts"] if mount["Target"] in (TOKEN, BYTECODE)]
    changes = {"entrypoint": command, "mounts": mounts, "hostname": name, "device_requests": []}
    return _joined(settings, network, name) | changes


def _joined(settings: dict[str, Any], network: str, name: str) -> dict[str, Any]:
    """Put a container on a network, where it is found by a name."""
    from docker.types import EndpointConfig

    changed = {key: value for key, value in settings.items() if key != "network_mode"}
    endpoint = EndpointConfig(_API, aliases=[name])
    return changed | {"network": network, "networking_config": {network: endpoint}}


def _store(settings: dict[str, Any]) -> int:
    """Return the size of Ray's object store in MiB: most of ``/dev/shm``."""
    return int(_STORE_SHARE * int(settings["shm_size"].removesuffix("m")))
