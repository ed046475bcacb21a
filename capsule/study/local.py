"""Running members on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from capsule.study.directory import StudyDirectory
from capsule.study.running import RunOptions, run_locally


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
        """Run members; see :class:`capsule.study.backends.Backend`."""
        cores = study.lock.study.resources.cores
        fitting = max(1, len(os.sched_getaffinity(0)) // cores)
        run_locally(study, names, options, self.processes or fitting, on_poll)
