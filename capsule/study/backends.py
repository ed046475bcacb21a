"""Where the members of a study run: on this machine, or as jobs of a scheduler."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from capsule.host.errors import CapsuleError
from capsule.study.directory import StudyDirectory
from capsule.study.running import RunOptions, run_locally


class Backend(Protocol):
    """A way of running members."""

    def run(
        self,
        study: StudyDirectory,
        names: Sequence[str],
        options: RunOptions,
        on_poll: Callable[[], None],
    ) -> None:
        """Run members until each has ended, and call ``on_poll`` meanwhile.

        Raises:
            CapsuleError: The members cannot be run there.
        """


@dataclass(frozen=True)
class Local:
    """Processes of this machine.

    Attributes:
        processes: Members that run at a time; None: as many as fit the cores of the study's
            resources.
    """

    processes: int | None = None

    def run(
        self,
        study: StudyDirectory,
        names: Sequence[str],
        options: RunOptions,
        on_poll: Callable[[], None],
    ) -> None:
        """Run members; see :class:`Backend`."""
        cores = study.lock.study.resources.cores
        fitting = max(1, len(os.sched_getaffinity(0)) // cores)
        run_locally(study, names, options, self.processes or fitting, on_poll)


def parse_backend(text: str) -> Backend:
    """Parse ``--on``.

    Raises:
        CapsuleError: CAP-Y014, it is not known.
    """
    if text == "local":
        return Local()
    if match := re.fullmatch(r"local:([1-9][0-9]{0,3})", text):
        return Local(int(match[1]))
    raise CapsuleError(
        "CAP-Y014",
        f"--on {text!r} is not known",
        fix="Use local or local:N.",
    )
