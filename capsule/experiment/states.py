"""States that a run keeps at its checkpoints, so that others can resume from them.

With ``recording.segment_states`` a run keeps, at every claimed checkpoint but the last, the content
of its folder ``state`` at that moment, except for what only the evaluation needs. Each file is cut
into blocks of 1 MiB, of which the last one may be shorter. A block is named by its SHA-256 and kept
once, however many files and states contain it. For a ring buffer, a state therefore takes only the
space of the blocks that were written since the state before. A state is an *index* of its files and
a *pack*: the blocks that no earlier state contains, one after the other.

Nothing here needs torch or numpy: both sides use it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from capsule.experiment.contract import Checkpoint
from capsule.experiment.fields import Model, NonNegativeInt
from capsule.experiment.lock import Sha256

BLOCK_BYTES = 1 << 20
RESUME = "resume.json"  # ResumeState
MAX_FILES = 1_000  # of a state
# A component starts with neither a dot (``..``, hidden files) nor a dash, as in bundles.
_COMPONENT = "[A-Za-z0-9_][A-Za-z0-9._-]*"
FilePath = Annotated[str, Field(pattern=rf"^{_COMPONENT}(/{_COMPONENT})*$", max_length=100)]


class ResumeState(Model):
    """All that a run needs to resume, except for its tensors and the files of the replay memory."""

    # Otherwise pydantic would write null for a number that is not finite, and the run could not be
    # resumed from this state. canonical_json() rejects such a number.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    schema_id: Literal["capsule/resume/v1"] = Field("capsule/resume/v1", alias="schema")
    spec: Sha256 = Field(
        description="Digest of the spec, so that no other run resumes from this state."
    )
    step: int = Field(description="Number of agent steps so far.")
    seconds: float = Field(description="Wall-clock time of all attempts so far, in seconds.")
    tensors: dict[str, Sha256] = Field(description="Digest of each tensor, by name.")
    streams: dict[str, dict[str, Any]] = Field(description="State of each random stream, by name.")
    trainer: dict[str, Any] = Field(
        description="State of the trainer: episodes, their returns, the last loss, the "
        "environments and the replay memory."
    )
    trace: dict[str, Any] = Field(description="State of the trace.")
    checkpoints: tuple[Checkpoint, ...] = Field(description="The checkpoints so far.")


class StateFile(Model):
    """One file of a state."""

    size: NonNegativeInt = Field(description="Size in bytes.")
    blocks: tuple[Sha256, ...] = Field(
        description="Digests of the blocks of the file in order, of 1 MiB each except for the last."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{self.size} bytes are not {len(self.blocks)} blocks")
        return self

    def block_size(self, number: int) -> int:
        """Return the size of a block, by its position in the file, in bytes."""
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)


class StateIndex(Model):
    """The files of a state, and the blocks that its pack adds to the earlier packs."""

    schema_id: Literal["capsule/state/v1"] = Field("capsule/state/v1", alias="schema")
    step: NonNegativeInt = Field(description="Agent steps before the state.")
    files: Annotated[dict[FilePath, StateFile], Field(max_length=MAX_FILES)] = Field(
        description="The files, by path below the folder 'state'."
    )
    packed: tuple[Sha256, ...] = Field(description="Digests of the blocks of the pack, in order.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = self.block_sizes()
        if len({*self.packed}) < len(self.packed) or not {*self.packed} <= sizes.keys():
            raise ValueError("packed must name blocks of the files, each once")
        return self

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files.values())

    def block_sizes(self) -> dict[str, int]:
        """Return the size of each block in bytes, by digest.

        Raises:
            ValueError: Two blocks of different sizes have the same digest.
        """
        sizes: dict[str, int] = {}
        for file in self.files.values():
            for number, digest in enumerate(file.blocks):
                size = file.block_size(number)
                if sizes.setdefault(digest, size) != size:
                    raise ValueError(f"block {digest} has two sizes")
        return sizes
