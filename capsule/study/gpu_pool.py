"""The GPUs of this machine, of which each member that runs here has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition

from capsule.machine.devices import read_devices
from capsule.machine.gpu import load_nvml
from capsule.study.directory import Outcome

# Errors of a run that other members have on the same GPU, too. Too little memory (CAP-T116) is not
# one of them: another member may need less.
_OF_THE_GPU = (
    *("CAP-E003", "CAP-M001", "CAP-M002", "CAP-M009"),
    *("CAP-T105", "CAP-T110"),
)
# Errors that only the members with the same torch have on the same GPU.
_OF_TORCH = ("CAP-M011", "CAP-T115")


class GpuPool:
    """GPUs for members that run at the same time.

    A GPU on which a member failed because of it is not used again: every further member would fail
    on it within seconds. If the reason is the member's torch, other members may still use the GPU.
    """

    def __init__(self, gpus: Sequence[str], note: Callable[[str], None]) -> None:
        """Make a pool.

        Args:
            gpus: UUIDs.
            note: Called with a message about each GPU that is not used again.
        """
        self._note = note
        self._left = list(gpus)
        self._taken: set[str] = set()
        self._unfit: set[tuple[str, int]] = set()  # GPUs, and the pins of members that do not fit
        self._changed = Condition()

    def run(self, name: str, pins: int, run_on: Callable[[str], Outcome | None]) -> Outcome | None:
        """Run a member on the next free GPU.

        Args:
            name: The member.
            pins: Number of its pins, which members with the same packages share.
            run_on: Runs it on a GPU, and returns how it ended.

        Returns:
            How it ended; None if it was interrupted, or if no GPU is left for it.
        """
        gpu = self._take(pins)
        if gpu is None:
            return None
        outcome = None
        try:
            outcome = run_on(gpu)
        finally:
            code = None if outcome is None else outcome.code
            with self._changed:
                self._taken.discard(gpu)
                if code in _OF_TORCH:
                    self._exclude(gpu, name, pins, code)
                elif code is not None and _has_failed(gpu, code):
                    self._remove(gpu, f"{name} failed on it with {code}")
                self._changed.notify_all()
        return outcome

    def _take(self, pins: int) -> str | None:
        """Wait for a GPU, and take it; None if no GPU is left."""
        with self._changed:
            while usable := self._usable(pins):
                for gpu in usable:
                    if gpu not in self._taken:
                        self._taken.add(gpu)
                        return gpu
                self._changed.wait()
            return None

    def _usable(self, pins: int) -> list[str]:
        return [gpu for gpu in self._left if (gpu, pins) not in self._unfit]

    def _exclude(self, gpu: str, name: str, pins: int, code: str) -> None:
        self._note(
            f"{gpu} is not used again for members with the packages of {name}, which failed on it "
            f"with {code}"
        )
        self._unfit.add((gpu, pins))
        if not self._usable(pins):
            self._note("no GPU is left for them, so no further one of them is started")

    def _remove(self, gpu: str, reason: str) -> None:
        self._note(f"{gpu} is not used again, because {reason}")
        self._left.remove(gpu)
        if not self._left:
            self._note("no GPU is left, so no further member is started")


def _has_failed(gpu: str, code: str) -> bool:
    """Tell whether a member failed because of its GPU, or the driver has lost the GPU since."""
    return code in _OF_THE_GPU or gpu not in {each.uuid for each in read_devices(load_nvml())}
