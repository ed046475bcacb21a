"""Where the members of a study run: on this machine, or as jobs of a scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from capsule.host.errors import CapsuleError
from capsule.study.kubernetes import Kubernetes
from capsule.study.kubernetes_job import JobTemplate
from capsule.study.local import Local
from capsule.study.ray import Ray
from capsule.study.running import MemberBatch
from capsule.study.slurm import Slurm


class Backend(Protocol):
    """A way of running members."""

    def run(self, batch: MemberBatch, on_poll: Callable[[], None]) -> None:
        """Run members until each has ended, and call ``on_poll`` meanwhile.

        Raises:
            CapsuleError: The members cannot be run there.
        """


def parse_backend(text: str, note: Callable[[str], None] = lambda _: None) -> Backend:
    """Parse ``--on``.

    Args:
        text: The option.
        note: Given what the user should know while members run, such as the number of a job.

    Raises:
        CapsuleError: CAP-Y014 it is not known; CAP-S001, CAP-S002, CAP-Y026 the template is not a
            manifest of a Job.
    """
    if text == "local":
        return Local(note=note)
    if match := re.fullmatch(r"local:([1-9][0-9]{0,3})", text):
        return Local(int(match[1]), note)
    if text == "slurm":
        return Slurm(note)
    if match := re.fullmatch("kubernetes:(.+)", text):
        return Kubernetes(note, JobTemplate.load(Path(match[1])))
    if re.fullmatch(r"ray://[^\s/:]+:[0-9]{1,5}", text):
        return Ray(text, note)
    raise CapsuleError(
        "CAP-Y014",
        f"--on {text!r} is not known",
        fix="Use local, local:N, slurm, kubernetes:TEMPLATE.yaml or ray://HOST:PORT.",
    )
