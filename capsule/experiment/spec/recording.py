"""The spec's sections ``recording`` and ``limits``: records and resources of a run."""

from __future__ import annotations

from pydantic import Field

from capsule.experiment.fields import Model, PositiveInt


class RecordingSpec(Model):
    """The intervals of trace records and checkpoints. They are part of the claims."""

    trace_interval: PositiveInt = Field(4, description="Agent steps covered by one trace record.")
    tensor_interval: PositiveInt = Field(
        1_000,
        description="Agent steps between trace records that also contain a digest of every tensor.",
    )
    checkpoint_interval: PositiveInt = Field(
        250_000, description="Agent steps between checkpoints."
    )
    segment_states: bool = Field(
        False,
        description="Whether the run keeps, at every checkpoint but the last, the state from which "
        "training can resume, so that verifiers can execute single segments (capsule verify "
        "--challenge).",
    )


MAX_MEBIBYTES = 1 << 26  # 64 TiB
MAX_PROCESSES = 1 << 22  # PID_MAX_LIMIT of Linux
MAX_MINUTES = 366 * 24 * 60


class LimitsSpec(Model):
    """The resources that a run may use. Exceeding a limit stops the run with an error."""

    memory_mb: PositiveInt = Field(16_384, le=MAX_MEBIBYTES, description="Memory, in MiB.")
    processes: PositiveInt = Field(
        256, le=MAX_PROCESSES, description="Number of processes and threads together."
    )
    disk_mb: PositiveInt = Field(
        32_768, le=MAX_MEBIBYTES, description="Size of the run directory, in MiB."
    )
    minutes: PositiveInt = Field(20_160, le=MAX_MINUTES, description="Wall-clock time, in minutes.")
    temporary_mb: PositiveInt = Field(
        512, le=MAX_MEBIBYTES, description="Size of /tmp inside the container, in MiB."
    )
