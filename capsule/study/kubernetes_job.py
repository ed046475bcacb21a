"""The manifest of a study's Job on Kubernetes: a template of the user, and what Capsule fills in.

The template is a Job manifest (``batch/v1``) with what only its site knows: the namespace, the
image in which Capsule is installed, the volume of the study's folder, node selectors and the like.
The study says what a member needs. Capsule sets the fields by which a Job runs every member, no
member in two pods at a time, and an evicted one again. They need Kubernetes 1.29 or newer:
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.host.errors import CapsuleError
from capsule.host.yaml_document import FieldPath, YamlDocument, dotted
from capsule.study.jobs import reservation
from capsule.study.running import STOP_SECONDS, MemberBatch

GRACE_SECONDS = int(STOP_SECONDS) + 30  # to save a run's state, and to say how it ended
GPU = "nvidia.com/gpu"
CONTAINER: FieldPath = ("spec", "template", "spec", "containers", 0)
_NAME_LENGTH = 40  # of the 63 of a pod's host name, which is the Job's name and the index
# 'exec': the container's first process is the one that the kubelet's SIGTERM reaches.
_SCRIPT = """\
shift "$JOB_COMPLETION_INDEX"
exec {command} "$1" {options}
"""


@dataclass(frozen=True)
class JobTemplate:
    """The Job manifest of a user."""

    document: YamlDocument

    @classmethod
    def load(cls, path: Path) -> JobTemplate:
        """Read a template.

        Raises:
            CapsuleError: CAP-S001 the file cannot be read, CAP-S002 it is not strict YAML, CAP-Y026
                it is not the manifest of a Job with an image.
        """
        document = YamlDocument.load(path, "template")
        for place, wanted in ((("apiVersion",), "batch/v1"), (("kind",), "Job")):
            if document.value(place) != wanted:
                raise _no_template(document, place, f"is not {wanted}", f"Write {wanted}.")
        if not isinstance(document.value((*CONTAINER, "image")), str):
            fix = "Name the image in which Capsule is installed."
            raise _no_template(document, (*CONTAINER, "image"), "is missing", fix)
        return cls(document)

    @property
    def namespace(self) -> str | None:
        """The namespace that the template names."""
        found = self.document.value(("metadata", "namespace"))
        return None if found is None else str(found)

    def manifest(self, name: str, batch: MemberBatch) -> dict[str, Any]:
        """Return the manifest of a Job with an index for each member.

        Args:
            name: Name of the Job.
            batch: The members, of which the first is index 0. The pods see the folder of the study
                at the same path.

        Raises:
            CapsuleError: CAP-Y026 a section is not a mapping, CAP-Y027 the template sets a field
                that Capsule sets to another value.
        """
        tree: dict[str, Any] = copy.deepcopy(self.document.tree)
        for place, value in _filled_in(name, batch):
            section, field = self._section(tree, place[:-1]), place[-1]
            given = section.get(field)
            # '2' and 2 are the same quantity.
            if given is not None and (value is None or str(given) != str(value)):
                raise self._taken(place, given, value)
            if value is not None:
                section[field] = value
        # Kubernetes itself would run one pod at a time.
        self._section(tree, ("spec",)).setdefault("parallelism", len(batch.names))
        return tree

    def _section(self, tree: dict[str, Any], place: FieldPath) -> dict[str | int, Any]:
        """Return a section of a manifest; those that are missing are made."""
        section: Any = tree
        for length, key in enumerate(place, 1):
            if isinstance(section, dict) and section.get(key) is None:
                section[key] = {}
            # The list of containers is never made here: load() has found an image in it.
            section = section[key]
            if not isinstance(section, dict | list):
                fix = "Write the fields of the section below it."
                raise _no_template(self.document, place[:length], "is not a section", fix)
        found: dict[str | int, Any] = section
        return found

    def _taken(self, place: FieldPath, given: Any, value: Any) -> CapsuleError:
        wanted = "must be absent" if value is None else f"is set by Capsule, to {value!r:.60}"
        where = self.document.place_of(place)
        return CapsuleError(
            "CAP-Y027",
            f"{where}: {dotted(place)} is {given!r:.60}, but it {wanted}",
            fix=f"Remove {dotted(place)} from the template. What a member needs is in 'resources' "
            "of the study.",
        )


def job_name(study: str, suffix: str) -> str:
    """Return the name of a Job: a label of RFC 1123, as its pods' host names need.

    Args:
        study: Name of the study.
        suffix: What distinguishes this Job from the others of the study.
    """
    # A label begins and ends with a letter or a digit.
    return f"{re.sub(r'[^a-z0-9-]+', '-', study)[:_NAME_LENGTH].strip('-')}-{suffix}"


def _filled_in(name: str, batch: MemberBatch) -> Iterator[tuple[FieldPath, Any]]:
    """Yield every field that Capsule sets, and None for those that must not be set."""
    cores, memory, minutes, gpus = reservation(batch)
    pod: FieldPath = ("spec", "template", "spec")
    yield ("metadata", "name"), name
    yield ("metadata", "generateName"), None
    yield ("spec", "completions"), len(batch.names)
    yield ("spec", "completionMode"), "Indexed"
    # A member that fails does so again, and does not stop the others.
    yield ("spec", "backoffLimitPerIndex"), 0
    yield ("spec", "backoffLimit"), None
    yield ("spec", "maxFailedIndexes"), None
    yield ("spec", "successPolicy"), None
    # After preemption, or with its node, a member continues from its last checkpoint.
    disruption = {"type": "DisruptionTarget", "status": "True"}
    rules = [{"action": "Ignore", "onPodConditions": [disruption]}]
    yield ("spec", "podFailurePolicy"), {"rules": rules}
    # Not while the first pod still saves its state.
    yield ("spec", "podReplacementPolicy"), "Failed"
    # The Job's deadline would be one for all members together.
    yield ("spec", "activeDeadlineSeconds"), None
    yield (*pod, "activeDeadlineSeconds"), 60 * minutes
    yield (*pod, "terminationGracePeriodSeconds"), GRACE_SECONDS
    # backoffLimitPerIndex and podFailurePolicy need it.
    yield (*pod, "restartPolicy"), "Never"
    yield (*CONTAINER, "command"), _command(batch)
    yield (*CONTAINER, "args"), None
    # Requests that equal the limits: such pods are evicted last, and can have cores of their own.
    quantities = {"cpu": str(cores), "memory": f"{memory}Mi", **({GPU: "1"} if gpus else {})}
    for kind in ("requests", "limits"):
        for resource, quantity in quantities.items():
            yield (*CONTAINER, "resources", kind, resource), quantity


def _command(batch: MemberBatch) -> list[str]:
    """Return the command of a pod, which takes its member from the list by its index."""
    script = _SCRIPT.format(
        command=shlex.join(["capsule", "study", "member", str(batch.study.path.absolute())]),
        options=shlex.join(batch.options.arguments()),
    )
    # Kubernetes replaces $(NAME) in a command, and $$ stands for one dollar.
    return ["/bin/sh", "-c", script.replace("$", "$$"), "capsule", *batch.names]


def _no_template(document: YamlDocument, place: FieldPath, what: str, fix: str) -> CapsuleError:
    where = document.place_of(place)
    return CapsuleError("CAP-Y026", f"{where}: {dotted(place)} {what}", fix=fix)
