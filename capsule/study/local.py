"""Running members on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from capsule.experiment.spec import CudaAccelerator
from capsule.host.errors import CapsuleError
from capsule.host.wording import agreeing, counted
from capsule.machine.devices import choose_devices, read_devices, visible_devices
from capsule.machine.gpu import load_nvml
from capsule.study.running import MemberBatch, run_locally


@dataclass(frozen=True)
class Local:
    """Processes of this machine. Members that run at a time on GPUs have one each.

    Attributes:
        processes: Members that run at a time; None: as many as fit the cores of the study's
            resources, and the GPUs if members need them.
        note: Called with a message about each GPU that is not used again, and if the members need
            more cores than this machine has.
    """

    processes: int | None = None
    note: Callable[[str], None] = lambda _: None

    def run(self, batch: MemberBatch, on_poll: Callable[[], None]) -> None:
        """Run members; see :class:`capsule.study.backends.Backend`.

        Raises:
            CapsuleError: CAP-Y028, more members are to run at a time than there are GPUs for them;
                CAP-M008 of :func:`capsule.machine.devices.visible_devices`.
        """
        cores = batch.study.lock.study.resources.cores
        available = len(os.sched_getaffinity(0))
        processes = self.processes or max(1, available // cores)
        at_a_time = min(processes, len(batch.names))
        if self.processes is not None and at_a_time * cores > available:
            need = agreeing(at_a_time, "needs", "need")
            self.note(
                f"  {counted(at_a_time, 'member')} at a time {need} {at_a_time * cores} cores "
                f"(resources.cores: {cores}), and this machine has {available}"
            )
        gpus: tuple[str, ...] = ()
        sections = [spec.accelerator for spec in batch.specs]
        accelerators = [each for each in sections if isinstance(each, CudaAccelerator)]
        if accelerators:
            gpus = _gpus_for(accelerators)
            # Without any, a member says itself what is missing, or an engine elsewhere has one.
            most = max(1, len(gpus))
            if self.processes is not None and self.processes > most:
                raise CapsuleError(
                    "CAP-Y028",
                    f"--on local:{self.processes} would run {counted(self.processes, 'member')} at "
                    f"a time, each needs a GPU, and "
                    f"{counted(len(gpus), 'suitable GPU is visible', 'suitable GPUs are visible')}",
                    fix=f"Use --on local:{most}, or --on local.",
                )
            processes = min(processes, most)
        run_locally(batch, processes, on_poll, gpus, self.note)


def _gpus_for(accelerators: Sequence[CudaAccelerator]) -> tuple[str, ...]:
    """Return the UUIDs of the visible GPUs that every one of the members can use."""
    visible = visible_devices(read_devices(load_nvml()), os.environ)
    return tuple(
        device.uuid
        for device in visible
        if all(choose_devices([device], accelerator) for accelerator in accelerators)
    )
