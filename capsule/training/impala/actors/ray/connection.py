"""This process's connection to a Ray cluster: opening, watching and closing it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError

HEAD_SECONDS = 10.0  # time in which the head must accept a connection

_ATTEMPTS = 3  # to connect: Ray's process for an outside client sometimes ends as it starts
_CHECK_SECONDS = 1.0  # between two checks whether the head still accepts connections
_CLIENT = "ray://"  # prefix of the address of a head that is reached from outside its cluster


class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        ray: The module ``ray``.
    """

    def __init__(self, address: str) -> None:
        """Connect.

        Args:
            address: Address of the head: ``HOST:PORT``, where this machine is one of its nodes, or
                ``ray://HOST:PORT``.

        Raises:
            CapsuleError: CAP-T107, the package ``ray`` is not in the image; CAP-T352, there is no
                cluster at this address, or it rejects the connection.
        """
        self.ray = _package()
        self._address = address
        self._lost = self._left = False
        self._seen = time.monotonic()
        host, _, port = address.removeprefix(_CLIENT).rpartition(":")
        if not host or not port.isdecimal():
            self._reject("it is not HOST:PORT or ray://HOST:PORT")
        self._head = host.strip("[]"), int(port)
        try:
            socket.create_connection(self._head, HEAD_SECONDS).close()
            with _own_signals():
                if address.startswith(_CLIENT):
                    _name_clients_apart()
                self._connect()
        except Exception as error:  # noqa: BLE001 - Ray raises anything here
            self._reject(brief(error))

    def free_processors(self) -> int:
        """Return how many processors of the cluster are not claimed, at least 1."""
        return max(1, int(self.ray.available_resources().get("CPU", 0)))

    def node_name(self, node: str) -> str:
        """Return the name of a node, by its id, and the beginning of the id."""
        nodes = {each["NodeID"]: each["NodeName"] for each in self.ray.nodes()}
        return f"node {nodes.get(node, 'of unknown name')} ({node[:8]})"

    def wait(self, calls: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """Wait until a call has been answered, and return all that have been.

        Args:
            calls: At least one.
            seconds: Time limit; None for no limit.

        Returns:
            The answered calls: at least one, or none if the time is up.

        Raises:
            CapsuleError: CAP-T353, the head is lost.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is None or time.monotonic() < deadline:
            self._look_at_head()
            # By default ray.wait() returns a single call. The second call, which does not wait,
            # returns all that have been answered.
            if self.ray.wait(calls, timeout=_CHECK_SECONDS)[0]:
                answered: list[Any] = self.ray.wait(calls, num_returns=len(calls), timeout=0)[0]
                return answered
        return []

    def kill(self, handle: Any) -> None:
        """End an actor, if it is still alive."""
        self.ray.kill(handle)

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Report the loss of the cluster in a block as such, and let other errors pass.

        Raises:
            CapsuleError: CAP-T353, the cluster is lost.
        """
        try:
            yield
        except (ConnectionError, self.ray.exceptions.RaySystemError) as error:
            self._give_up(brief(error))

    def leave(self, handles: Sequence[Any]) -> None:
        """End actors and disconnect; further calls have no effect."""
        if self._left:
            return
        self._left = True
        if self._lost:
            atexit.unregister(self.ray.shutdown)  # it would wait for the head
            return
        for handle in handles:
            self.kill(handle)
        with _own_signals():
            self.ray.shutdown()

    def _connect(self) -> None:
        """Connect, and retry if the head could not start the process that serves a client."""
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                self.ray.init(self._address, log_to_driver=False, logging_level="ERROR")
                return
            except ConnectionAbortedError:
                if not attempts_left:
                    raise

    def _look_at_head(self) -> None:
        """Check that the head accepts connections.

        Ray itself would notice its loss a minute later, and end this process.

        Raises:
            CapsuleError: CAP-T353, the head is lost.
        """
        now = time.monotonic()
        if now - self._seen < _CHECK_SECONDS:
            return
        self._seen = now
        try:
            socket.create_connection(self._head, HEAD_SECONDS).close()
        except OSError as error:
            self._give_up(brief(error))

    def _reject(self, reason: str) -> NoReturn:
        raise CapsuleError(
            "CAP-T352",
            f"no connection to a Ray cluster at {self._address}: {reason}",
            fix="Check that its head runs, with the same versions of Python and Ray, and that "
            "RAY_AUTH_TOKEN_PATH names a file with its token.",
        )

    def _give_up(self, reason: str) -> NoReturn:
        self._lost = True
        raise CapsuleError(
            "CAP-T353",
            f"the Ray cluster at {self._address} has lost its head: {reason}",
            fix="Start a cluster and run again, with or without it: the run resumes from its "
            "last saved state.",
        )


def brief(error: Exception) -> str:
    """Return the type of an error and its message in one line.

    A longer message is reduced to its first and its last line, because Ray appends the traceback of
    its server, which ends with the reason.
    """
    lines = str(error).strip().splitlines()
    return " ".join([f"{type(error).__name__}:", *lines[:1], *lines[1:][-1:]]).removesuffix(":")


def _package() -> Any:
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise CapsuleError(
            "CAP-T107",
            f"package 'ray' is not in the image: {error}",
            fix="Add it to image.packages and lock again.",
        ) from error
    return ray


def _name_clients_apart() -> None:
    """Give Ray Client names that do not come from the run's randomness.

    A head rejects two clients of the same name. Ray draws names from the operating system's
    entropy, which gives every start of a run the same name if the entropy is derived from a key.
    """
    from ray.util.client import worker

    worker.make_client_id = _client_name


def _client_name() -> str:
    """Return a name that no other process and no other call has."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return sha256_hex(f"{boot} {os.getpid()} {time.monotonic_ns()}".encode())[:32]


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handlers after the block; Ray's would end it on SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
