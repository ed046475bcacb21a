"""A Ray cluster of processes of this machine."""

import atexit
import secrets
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import free_port

SECONDS = 600  # in which a part of a cluster begins, or its end is noticed, on a busy machine
# In which a process of a node begins on a busy machine. Ray waits this long for one that has died,
# too, before it starts another one.
PROCESS_SECONDS = 180

# A head without what no test reads: the dashboard, the autoscaler, and the copies of logs.
HEAD = {
    "wait": False,  # for 30 seconds only
    "num_cpus": 0,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}


@cache
def token_file():
    """Return the file with the token of every cluster: Ray reads it once in a process."""
    path = Path(tempfile.mkdtemp(prefix="ray-token-")) / "token"
    atexit.register(shutil.rmtree, path.parent)
    path.write_text(secrets.token_hex(32))
    return path


@contextmanager
def ray_token():
    """Have Ray use tokens in a block."""
    path = token_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        # A worker here has variables of its own, so none that Ray starts ahead is used.
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_enable_metrics_collection", "0")
        # Ray's own limit is a minute.
        patch.setenv("RAY_worker_register_timeout_seconds", str(PROCESS_SECONDS))
        patch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", str(PROCESS_SECONDS))
        yield path


@contextmanager
def cluster_of(*nodes):
    """Start a head without processors, and nodes with one each; needs :func:`ray_token`.

    Args:
        nodes: What :meth:`ray.cluster_utils.Cluster.add_node` is given for each.

    Yields:
        The cluster; its ``client_address`` is where programs outside reach it, and its ``nodes``
        are those that were asked for.
    """
    from ray.cluster_utils import Cluster  # reads the variables of the token

    port = free_port()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves logs of that server open
        started = Cluster(True, head_node_args={**HEAD, "ray_client_server_port": port})
    try:
        started.wait_for_nodes(SECONDS)
        started.client_address = f"ray://127.0.0.1:{port}"
        started.nodes = [started.add_node(wait=False, num_cpus=1, **node) for node in nodes]
        started.wait_for_nodes(SECONDS)
        yield started
    finally:
        started.shutdown()
