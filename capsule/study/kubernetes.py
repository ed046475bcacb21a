"""Running members on Kubernetes: one Indexed Job, with an index for each member.

``kubectl`` is called as it is, with its own configuration: the cluster, the user and the namespace
are those of its current context, unless the template names another namespace.

The folder of the study gets a file for each Job::

    kubernetes/NAMESPACE_NAME.members    the names of the members; the first is index 0
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from capsule.engine.supervise import Interrupts
from capsule.host.errors import CapsuleError
from capsule.study.directory import CONSOLE, StudyDirectory
from capsule.study.jobs import Element, JobArray, Programs, Scheduler
from capsule.study.kubernetes_job import JobTemplate, job_name
from capsule.study.running import MemberBatch

INDEX = "batch.kubernetes.io/job-completion-index"
JOB = "batch.kubernetes.io/job-name"
KUBECTL = ("kubectl", "--request-timeout=60s")
PROGRAMS = Programs(
    on="kubernetes",
    absent="Install kubectl and configure it for the cluster, or choose another --on.",
    failed="Correct what the message names, then add --resume. 'kubectl auth can-i create jobs' "
    "shows whether you may; the template sets the namespace, the image and the volumes.",
)
EXCEPTIONS = "status.phase!=Running,status.phase!=Succeeded"
USUAL_REASONS = frozenset({"ContainerCreating", "PodInitializing"})  # for which a pod is pending
NOT_FOUND = 127  # how a shell ends whose command does not exist
FIXES = {
    "DeadlineExceeded": "Raise resources.minutes of the study, or add --resume as often as "
    "necessary: a run continues from its last checkpoint.",
    "OOMKilled": "Raise resources.memory_mb of the study, then add --resume.",
    f"exit status {NOT_FOUND}": "Name an image in the template that has capsule on its PATH, then "
    "add --resume.",
}


class IndexedJob(JobArray):
    """A Job, as ``NAMESPACE_NAME``: neither of the two has an underscore."""

    @property
    def name(self) -> str:
        """The name of the Job."""
        return self.job.partition("_")[2]

    @property
    def cancellation(self) -> list[str]:
        """The command that deletes the Job with all its pods."""
        return ["kubectl", "delete", "job", self._namespace, self.name]

    @property
    def _namespace(self) -> str:
        return f"--namespace={self.job.partition('_')[0]}"

    def elements(self) -> dict[str, Element]:
        """Ask Kubernetes for the indexes, by their members; none if the Job was deleted."""
        get = [*KUBECTL, "get", self._namespace, "--output=json"]
        found = PROGRAMS.call([*get, "job", self.name, "--ignore-not-found"])
        if not found:
            return {}
        # Pods that run or are done say nothing that is needed here, and all pods are megabytes.
        chosen = [f"--selector={JOB}={self.name}", f"--field-selector={EXCEPTIONS}"]
        pods = json.loads(PROGRAMS.call([*get, "pods", *chosen]))["items"]
        job = json.loads(found)
        status = job.get("status", {})
        # Events are only asked for if no pod exists and the Job has not ended.
        busy = status.get("active") or any(map(_is_final, status.get("conditions", ())))
        other = Element("Active") if busy else self._without_pods(get)
        return dict(zip(self.members, _states(job, pods, other), strict=True))

    def _without_pods(self, get: Sequence[str]) -> Element:
        """Return the state of the indexes of a Job without pods: a quota or a policy may be why."""
        about = f"involvedObject.kind=Job,involvedObject.name={self.name},type=Warning"
        # Not every user who may create a Job may read events.
        found = PROGRAMS.call(
            [*get, "events", f"--field-selector={about}"], accepted="is forbidden"
        )
        events = json.loads(found)["items"] if found else []
        if not events:
            return Element("Active")
        last = max(events, key=lambda event: event.get("lastTimestamp") or "")
        reason, details = last.get("reason", "Warning"), last.get("message", "")
        return Element("Pending", reason, details, hindered=True)

    def element_name(self, member: str) -> str:
        """Return the pods' name of a member, without its random end."""
        return f"{self.name}-{self.members.index(member)}"

    def log(self, study: StudyDirectory, member: str) -> str:
        """Return where to see what a member printed."""
        selector = f"--selector={JOB}={self.name},{INDEX}={self.members.index(member)}"
        command = shlex.join(["kubectl", "logs", self._namespace, selector])
        return f"{study.folder(member) / CONSOLE} and '{command}'"


@dataclass(frozen=True)
class Kubernetes(Scheduler):
    """Pods of a Kubernetes cluster.

    Attributes:
        template: The manifest that Capsule completes.
    """

    template: JobTemplate

    title = "Kubernetes"
    folder = "kubernetes"
    array = IndexedJob
    programs = PROGRAMS

    def submit(self, batch: MemberBatch, interruptions: Interrupts) -> list[JobArray]:
        """Create one Job for all members: an Indexed Job has up to 100,000 indexes."""
        name = job_name(batch.study.lock.study.name, secrets.token_hex(4))
        manifest = self.template.manifest(name, batch)
        create = [*KUBECTL, "create", "--filename=-", "--output=json"]
        failure: BaseException | None = None
        try:
            created = PROGRAMS.call(create, json.dumps(manifest))
        except CapsuleError as error:
            if error.code != "CAP-Y022":  # kubectl is not installed
                raise
            failure = error
        if interruptions.count:  # Ctrl-C on the terminal ends kubectl, too
            failure = KeyboardInterrupt()
        if failure is not None:
            # The Job may exist, because the answer of the cluster may have been lost.
            self._delete(name, failure)
            raise failure
        namespace = json.loads(created)["metadata"]["namespace"]
        return [IndexedJob(f"{namespace}_{name}", tuple(batch.names))]

    def _delete(self, name: str, failure: BaseException) -> None:
        """Delete a Job that may exist.

        Raises:
            CapsuleError: CAP-Y022, that failed.
        """
        namespace = self.template.namespace
        chosen = [f"--namespace={namespace}"] if namespace else []
        try:
            PROGRAMS.call([*KUBECTL, "delete", "job", *chosen, name, "--ignore-not-found"])
        except CapsuleError as error:
            reason = failure.message if isinstance(failure, CapsuleError) else error.message
            command = shlex.join(["kubectl", "delete", "job", *chosen, name])
            raise CapsuleError(
                "CAP-Y022",
                f"{reason}; Job {name} may exist, and could not be deleted",
                fix=f"'{command}' deletes it if it exists. {PROGRAMS.failed}",
            ) from error


def _states(job: dict[str, Any], pods: list[dict[str, Any]], other: Element) -> list[Element]:
    """Return the state of every index of a Job.

    Args:
        job: The Job.
        pods: Its pods that wait or have failed.
        other: The state of every other index that has not ended.
    """
    status = job.get("status", {})
    done, failed = (_indexes(status.get(f"{key}Indexes", "")) for key in ("completed", "failed"))
    # Kubernetes before 1.31 gives no reason why a Job is complete, and the API leaves out what is
    # empty.
    over = [each.get("reason", "") for each in status.get("conditions", ()) if _is_final(each)]
    # An index that was evicted has several pods: the newest replaces the others here.
    latest = {
        int(pod["metadata"]["annotations"][INDEX]): pod
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    }

    def state(index: int) -> Element:
        if index in done:
            return Element("Complete", ended=True)
        if index in failed or over:
            return _end(latest.get(index), over)
        if job["spec"].get("suspend"):
            return Element("Pending", "the Job is suspended", hindered=True)
        pod = latest.get(index)
        return other if pod is None or pod["status"]["phase"] != "Pending" else _start(pod)

    return [state(index) for index in range(job["spec"]["completions"])]


def _indexes(text: str) -> set[int]:
    """Parse a list of indexes, such as ``1,3-5``."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _is_final(condition: dict[str, Any]) -> bool:
    return condition["type"] in ("Complete", "Failed") and condition["status"] == "True"


def _start(pod: dict[str, Any]) -> Element:
    """Return the state of an index whose pod waits."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason", "")
            return Element("Pending", reason, condition.get("message", ""), hindered=True)
    for container in _containers(pod):
        waits = container.get("waiting", {})
        reason = waits.get("reason", "")
        if reason and reason not in USUAL_REASONS:
            return Element("Pending", reason, waits.get("message", ""), hindered=True)
    return Element("Pending")


def _end(pod: dict[str, Any] | None, over: list[str]) -> Element:
    """Return the state of an index that has failed.

    Args:
        pod: Its last pod; None if it was deleted.
        over: Why the whole Job has ended, if it has.
    """
    if pod is None:
        return Element("Failed", next(iter(over), ""), ended=True)
    status = pod["status"]
    reason, details = status.get("reason", ""), status.get("message", "")
    ends = [end for each in _containers(pod) if (end := each.get("terminated"))]
    broken = next((end for end in ends if end["exitCode"] != 0), None)
    # The reason of the pod, such as an eviction, explains the end of its containers.
    if not reason and broken is not None:
        reason, details = broken.get("reason", "Error"), broken.get("message", "")
        # The kubelet calls every status but 0 an 'Error', so the status says more.
        if reason == "Error":
            reason = f"exit status {broken['exitCode']}"
    return Element("Failed", reason, details, ended=True, fix=FIXES.get(reason, ""))


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of a pod's containers."""
    status = pod["status"]
    kinds = ("initContainerStatuses", "containerStatuses")
    return [each.get("state", {}) for kind in kinds for each in status.get(kind, ())]
