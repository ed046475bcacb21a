"""One start of a run under the launcher: what it is given before, and what is kept of it after.

Each start has a folder of its own in the run directory for the journal and the launcher's reports.
When the run has finished, what people and verifiers need is kept as documents of the run directory
(:meth:`Attempt.finish`), and the folders go (:func:`clear`).
"""

from __future__ import annotations

from pathlib import Path

from capsule.entropy.launch import REPLAYED, launch_arguments
from capsule.entropy.profile import check_consumed, check_room, merge, parse
from capsule.entropy.report import (
    FAILURE,
    REPORT,
    EntropyReport,
    collect,
    launch_failure,
    readable_document,
)
from capsule.experiment import contract
from capsule.experiment.beneath import remove_folder
from capsule.experiment.files import write_atomic
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError


def is_complete(run_directory: Path) -> bool:
    """Tell whether the launcher reported the end of the last start, so that it can be finished."""
    starts = sorted((run_directory / contract.ENTROPY_STARTS).glob("start-*"))
    if not starts:
        return False
    # A launcher that fails leaves no report. If both exist, the program wrote one of them, and this
    # start can never be finished.
    return (starts[-1] / REPORT).exists() and not (starts[-1] / FAILURE).exists()


def clear(run_directory: Path) -> None:
    """Remove the folders of the starts of a run that has finished."""
    starts = run_directory / contract.ENTROPY_STARTS
    if starts.exists():
        remove_folder(starts)


class Attempt:
    """A start of a run, to be made once and then finished."""

    def __init__(
        self, run_directory: Path, spec: Spec, *, replay: Path | None, ended: bool = False
    ) -> None:
        """Make the folder of the start.

        Args:
            run_directory: The run directory, as this process sees it.
            spec: What is run.
            replay: The profile to replay; only for ``entropy.mode: recorded``.
            ended: The program has ended in the last start, which is taken up to be finished.

        Raises:
            CapsuleError: CAP-R301, randomness was recorded by an earlier start, and what that one
                had drawn until it was interrupted cannot be told from what this one will draw;
                CAP-R211 to CAP-R215, the profile is damaged. No folder is made then.
        """
        self._run_directory = run_directory
        self._spec = spec
        starts = run_directory / contract.ENTROPY_STARTS
        self._number = sum(1 for _ in starts.glob("start-*")) + (not ended)
        if self._number > 1 and not ended and spec.entropy.mode == "recorded":
            raise CapsuleError(
                "CAP-R301",
                f"the run in {run_directory} records its randomness and was interrupted; such a "
                "run cannot be resumed",
                fix="Start a new run, or use entropy.mode: virtual.",
            )
        # Read once: what is checked at the end must be what the run was served from.
        self._replay = None if replay is None else replay.read_bytes()
        if self._replay is not None:
            # A damaged profile is rejected before anything is made or executed.
            parse(self._replay)
        # Always as long: the name is in the environment, whose size moves the stack.
        self._name = f"{contract.ENTROPY_STARTS}/start-{self._number:04}"
        self._folder = run_directory / self._name
        # The launcher takes a folder for one start only, so a start that is still to be made gets a
        # new one.
        self._folder.mkdir(parents=True, exist_ok=ended)
        self._ended = ended
        if self._replay is not None:
            (self._folder / REPLAYED).write_bytes(self._replay)

    def arguments(self, *, native: str, run_directory: str, seconds: int) -> list[str]:
        """Return the words before the program's own, with both folders as the program sees them.

        There are none once the program has ended: what only lists its outputs is no part of it.

        Args:
            native: Folder of the native parts.
            run_directory: The run directory.
            seconds: When the launcher ends the run if nothing else has done so.
        """
        if self._ended:
            return []
        return launch_arguments(
            self._spec,
            native=native,
            directory=f"{run_directory}/{self._name}",
            replay=self._replay is not None,
            seconds=seconds,
        )

    def check(self) -> None:
        """Raise what the launcher or the replay found wrong, whatever the program said.

        Raises:
            CapsuleError: CAP-R1… the launcher failed; CAP-R203, the journal had no room for a
                recorded run; CAP-R221, a replay asked for other randomness than was recorded.
        """
        if failure := launch_failure(self._folder):
            raise failure
        if self._replay is not None:
            check_consumed(self._folder, parse(self._replay), partial=True)
        elif self._spec.entropy.mode == "recorded":
            check_room(self._folder)

    def finish(self, *, prefix: bool) -> EntropyReport:
        """Keep the report and the profile of a run that has ended well.

        The folder of the start stays until :func:`clear`, so that this can be repeated.

        Args:
            prefix: Only a part was executed, so that a replay may leave some of its profile over.

        Raises:
            CapsuleError: CAP-R113, CAP-R2…: what was left is incomplete or a replay was not one;
                CAP-R115, it is too large.
        """
        report = collect(self._folder, self._number)
        document = readable_document(report)
        write_atomic(self._run_directory / contract.ENTROPY_REPORT, document)
        profile = self._profile(prefix=prefix)
        if profile is not None:
            write_atomic(self._run_directory / contract.ENTROPY_PROFILE, profile)
        return report

    def _profile(self, *, prefix: bool) -> bytes | None:
        """Return the profile by which the run can be repeated; None if there is none.

        A replay that was given derived bytes beyond its profile has none.
        """
        if self._spec.entropy.mode != "recorded":
            return None
        if self._replay is None:
            return merge(self._folder)
        derived = check_consumed(self._folder, parse(self._replay), partial=prefix)
        return None if derived else self._replay
