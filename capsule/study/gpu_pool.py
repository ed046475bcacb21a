"""The GPUs of this machine, of which each member that runs here has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue

from capsule.machine.devices import read_devices
from capsule.machine.gpu import load_nvml
from capsule.study.directory import Outcome

# Errors of a run that other members have on the same GPU, too. Too little memory (CAP-T116) is not
# one of them: another member may need less.
_OF_THE_GPU = (
    *("CAP-E003", "CAP-M001", "CAP-M002", "CAP-M009", "CAP-M011"),
    *("CAP-T105", "CAP-T110", "CAP-T115"),
)


class GpuPool:
    """GPUs for members that run at the same time.

    A GPU on which a member failed because of it is not used again: every further member would fail
    on it within seconds.
    """

    def __init__(self, gpus: Sequence[str], note: Callable[[str], None]) -> None:
        """Make a pool.

        Args:
            gpus: UUIDs.
            note: Called with a message about each GPU that is not used again.
        """
        self._note = note
        self._left = set(gpus)
        self._free: SimpleQueue[str | None] = SimpleQueue()  # None: no GPU is left
        for gpu in gpus:
            self._free.put(gpu)

    def run(self, name: str, run_on: Callable[[str], Outcome | None]) -> Outcome | None:
        """Run a member on the next free GPU.

        Args:
            name: The member.
            run_on: Runs it on a GPU, and returns how it ended.

        Returns:
            How it ended; None if it was interrupted, or if no GPU is left.
        """
        gpu = self._free.get()
        if gpu is None:
            self._free.put(None)  # for the other threads
            return None
        outcome = None
        try:
            outcome = run_on(gpu)
        finally:
            if outcome is not None and _has_failed(gpu, outcome):
                self._remove(gpu, f"{name} failed on it with {outcome.code}")
            else:
                self._free.put(gpu)
        return outcome

    def _remove(self, gpu: str, reason: str) -> None:
        self._note(f"{gpu} is not used again, because {reason}")
        self._left.discard(gpu)
        if not self._left:
            self._note("no GPU is left, so no further member is started")
            self._free.put(None)


def _has_failed(gpu: str, outcome: Outcome) -> bool:
    """Tell whether a member failed because of its GPU, or the driver has lost the GPU since."""
    if outcome.code is None:
        return False
    present = {device.uuid for device in read_devices(load_nvml())}
    return outcome.code in _OF_THE_GPU or gpu not in present
