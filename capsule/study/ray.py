"""Running members as tasks of a Ray cluster, a task for each member.

A task reserves the study's resources, and calls ``capsule study member`` with the folder of the
study, which all nodes see, and with the Python of the node that Ray chooses. When a node is lost,
Ray starts its tasks on others, where the runs continue from their last checkpoints.

Tasks end with the program that started them. So an interruption here interrupts the members, which
can be resumed, as on one machine.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capsule.engine.supervise import interrupts
from capsule.host.errors import CapsuleError
from capsule.study.directory import Outcome, StudyDirectory
from capsule.study.jobs import SETTLE_SECONDS, reservation
from capsule.study.running import STOP_SECONDS, MemberBatch, stop_signals_interrupt

if TYPE_CHECKING:
    from capsule.training.impala.actors.ray.connection import Cluster

POLL_SECONDS = 1.0
MAX_SAID_BYTES = 2_000
LOST_HEAD = "CAP-T353"

_NAMES = {"num_cpus": "CPU", "memory": "memory", "num_gpus": "GPU"}  # of nodes' resources


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster.

    Attributes:
        address: Address of its head, ``ray://HOST:PORT``.
        note: Told why no node takes a member.
        settle_seconds: From the end of a task to the report that it left no outcome.
    """

    address: str
    note: Callable[[str], None]
    settle_seconds: float = SETTLE_SECONDS

    def run(self, batch: MemberBatch, on_poll: Callable[[], None]) -> None:
        """Run members; see :class:`capsule.study.backends.Backend`.

        Raises:
            CapsuleError: CAP-Y021 Ray is not installed, CAP-Y022 the cluster cannot be reached,
                CAP-Y023 it was lost.
            KeyboardInterrupt: It was interrupted; the runs have been, too, and can be resumed.
        """
        cluster = _connected(self.address)
        try:
            with stop_signals_interrupt(), cluster.reached():
                self._run(cluster, batch, on_poll)
        except CapsuleError as error:
            if error.code != LOST_HEAD:
                raise
            raise CapsuleError(
                "CAP-Y023",
                error.message,
                fix="Start the cluster, then add --resume: runs continue from their checkpoints.",
            ) from error
        finally:
            cluster.leave([])

    def _run(self, cluster: Cluster, batch: MemberBatch, on_poll: Callable[[], None]) -> None:
        """Run members; after any error, interrupt them, so that they save their state."""
        tasks: dict[Any, str] = {}
        try:
            with cluster.reached():
                resources = _resources(batch)
                self._note_shortage(cluster, resources)
                # An interruption waits until the task is known here that is being submitted.
                with interrupts() as interruptions:
                    for name in batch.names:
                        if interruptions.count:
                            break
                        # This precedes the submission: the task may begin, and even end, at once.
                        batch.study.forget(name)
                        tasks[_submit(cluster, batch, name, resources)] = name
                if interruptions.count:
                    raise KeyboardInterrupt
                self._wait(cluster, batch.study, tasks, on_poll)
        except BaseException as error:
            lost = isinstance(error, CapsuleError) and error.code == LOST_HEAD
            # This precedes leave(): Ray ends the tasks of a program that disconnects.
            if tasks and not lost:
                _interrupt(cluster, [*tasks])
            raise

    def _note_shortage(self, cluster: Cluster, resources: dict[str, int]) -> None:
        """Say that no node has what a member needs; one that does may join later."""
        nodes = [node["Resources"] for node in cluster.ray.nodes() if node["Alive"]]
        needed = {_NAMES[kind]: amount for kind, amount in resources.items() if amount}
        if not any(all(node.get(kind, 0) >= needed[kind] for kind in needed) for node in nodes):
            words = ", ".join(f"{kind} {amount}" for kind, amount in needed.items())
            self.note(f"members wait: no node of the Ray cluster has {words}")

    def _wait(
        self,
        cluster: Cluster,
        study: StudyDirectory,
        tasks: dict[Any, str],
        on_poll: Callable[[], None],
    ) -> None:
        """Wait for tasks, and write down which members left no outcome."""
        waiting = [*tasks]
        ended: dict[str, tuple[float, Outcome]] = {}
        while waiting or ended:
            # Cluster.wait() needs a task. Without one, only the files of members that ended are
            # awaited.
            for task in cluster.wait(waiting, POLL_SECONDS) if waiting else ():
                waiting.remove(task)
                ended[tasks[task]] = time.monotonic(), _end_of(cluster, task)
            for name, (when, how) in [*ended.items()]:
                if study.outcome(name) is not None:
                    del ended[name]
                elif time.monotonic() - when >= self.settle_seconds:
                    study.fail(name, how)
                    del ended[name]
            on_poll()
            # Nothing else has waited in this round.
            if ended and not waiting:
                time.sleep(POLL_SECONDS)


def run_member(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command of Capsule on a node, as a task of Ray.

    Args:
        arguments: Of ``python -m capsule``.

    Returns:
        Its exit status, and the end of what it printed.
    """
    with tempfile.TemporaryFile() as said:
        # Ray blocks SIGINT in its processes, which others would inherit from them.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        process = subprocess.Popen(
            [sys.executable, "-m", "capsule", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            # Ray interrupts a task as a signal to this thread would, but wakes it from no call.
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            # Ray repeats it until the task ends, and would kill the command before it is done.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.send_signal(signal.SIGINT)
            process.wait()
            signal.signal(signal.SIGINT, handler)
            raise
        said.seek(max(0, said.seek(0, os.SEEK_END) - MAX_SAID_BYTES))
        return process.returncode, said.read().decode(errors="replace")


def _connected(address: str) -> Cluster:
    """Connect to a cluster.

    Raises:
        CapsuleError: CAP-Y021 Ray is not installed, CAP-Y022 the cluster cannot be reached.
    """
    if importlib.util.find_spec("ray") is None:
        raise CapsuleError(
            "CAP-Y021",
            "--on ray:// needs the package ray, which is not installed here",
            fix="Run: pip install 'capsule-rl[cluster]'.",
        )
    from capsule.training.impala.actors.ray.connection import Cluster

    try:
        return Cluster(address)
    except CapsuleError as error:
        raise CapsuleError("CAP-Y022", error.message, fix=error.fix) from error


def _resources(batch: MemberBatch) -> dict[str, int]:
    """Return what a task reserves, as options of Ray's."""
    needed = reservation(batch)
    # Ray counts memory in bytes.
    return {"num_cpus": needed.cores, "memory": needed.memory_mb << 20, "num_gpus": needed.gpus}


def _submit(cluster: Cluster, batch: MemberBatch, name: str, resources: dict[str, int]) -> Any:
    """Submit a member, and return what Ray knows its task by."""
    folder = str(batch.study.path.absolute())
    arguments = ["study", "member", folder, name, *batch.options.arguments()]
    # The function is pickled by its name, as its module can be imported on nodes, too: they have to
    # have Capsule.
    return cluster.ray.remote(run_member).options(name=name, **resources).remote(arguments)


def _end_of(cluster: Cluster, task: Any) -> Outcome:
    """Return the outcome of a member whose task has ended, if it left none itself."""
    from capsule.training.impala.actors.ray.connection import brief

    try:
        status, said = cluster.ray.get(task)
        how = f"ended with status {status}: {' '.join(said.split())}"
    except cluster.ray.exceptions.RayError as error:
        how = f"failed: {brief(error)}"
    return Outcome(
        code="CAP-Y025",
        message=f"the Ray task of the member {how}",
        fix="Correct the cause, then add --resume to run the member again.",
    )


def _interrupt(cluster: Cluster, tasks: Sequence[Any]) -> None:
    """Interrupt members, and wait until they have saved their state."""
    for task in tasks:
        cluster.ray.cancel(task)
    cluster.ray.wait(tasks, num_returns=len(tasks), timeout=STOP_SECONDS)
