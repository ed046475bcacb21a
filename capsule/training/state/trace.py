"""Writing the trace: a hash chain over the data of a training.

The format is described in :mod:`capsule.experiment.trace`. The data of one record are folded into
16 bytes per component as they come (``leaf = XXH3-128(leaf || data)``), so that a run can be
resumed in the middle of a record. The XXH3 leaves serve to find differences cheaply; the chain over
them is SHA-256.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from capsule.experiment.spec import RecordingSpec
from capsule.experiment.trace import COMPONENTS, GENESIS, SEGMENT_RECORDS, extend, segment_line
from capsule.training.state.run_directory import changed
from capsule.training.state.streams import Stream

_FLOWING = ("schedule", "observations", "actions", "rewards", "terminals", "indices", "loss")


class Trace:
    """The trace of one run.

    Attributes:
        records: Records written so far.
        head: Head of the chain, hexadecimal.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at ``path`` for appending; :meth:`restore` must follow."""
        self._file = path.open("ab")
        self.records = 0
        self._head = GENESIS
        self._leaves = dict.fromkeys(_FLOWING, b"")

    @property
    def head(self) -> str:
        """Head of the chain, hexadecimal."""
        return self._head.hex()

    def add(self, component: str, data: Any) -> None:
        """Fold ``data`` (any object with a contiguous buffer) into a component of the record."""
        leaf = xxhash.xxh3_128(self._leaves[component])
        leaf.update(data)
        self._leaves[component] = leaf.digest()

    def wants_tensors(self, step: int, recording: RecordingSpec) -> bool:
        """Return whether the next record has every tensor, as the first and periodic ones do."""
        return self.records == 0 or step % recording.tensor_interval == 0

    def record(
        self,
        step: int,
        streams: Mapping[Any, Stream],
        *,
        loss: float | None = None,
        minibatch: str | None = None,
        generations: Mapping[str, Any] | None = None,
        unrolls: Mapping[str, str] | None = None,
        tensors: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Write one record over the data added since the last one.

        Args:
            step: Agent steps taken.
            streams: Every stream; they are listed one by one together with ``tensors``, and
                otherwise folded into one digest.
            loss: Loss of the last minibatch (:attr:`Trainer.loss`).
            minibatch: Digest of the last minibatch as the replay memory returned it.
            generations: Document of each generation that began in a population, by name.
            unrolls: Digest of each unroll that was trained on, by name.
            tensors: Component to tensor name to digest.
        """
        digests = {str(name): f"{stream.draws}:{stream.digest}" for name, stream in streams.items()}
        folded = xxhash.xxh3_128_hexdigest(json.dumps(digests).encode())
        flowed = {name: leaf.hex() for name, leaf in self._leaves.items() if leaf}
        losses = {"last": None if loss is None else loss.hex(), "digest": flowed.pop("loss", "")}
        fields: dict[str, Any] = {"streams": digests if tensors else folded, **flowed}
        if generations is not None:
            fields["generations"] = generations
        if unrolls is not None:
            fields["unrolls"] = unrolls
        if minibatch is not None:
            fields["minibatch"] = minibatch
        fields |= {"loss": losses, **(tensors or {})}
        # In the order of the data flow, because a comparison reports the first component that
        # differs.
        ordered = {name: fields[name] for name in COMPONENTS if name in fields}
        self._append(json.dumps({"step": step, **ordered}, separators=(",", ":")).encode())
        self._leaves = dict.fromkeys(_FLOWING, b"")

    def flush(self) -> None:
        """Pass everything written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def state(self) -> dict[str, Any]:
        """Return a JSON-safe snapshot, after making the file durable up to here."""
        self._file.flush()
        # The saved state refers to this offset, so the file must reach it even after a crash
        # (CAP-T121).
        os.fsync(self._file.fileno())
        return {
            "records": self.records,
            "head": self.head,
            "offset": self._file.tell(),
            "leaves": {name: leaf.hex() for name, leaf in self._leaves.items()},
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a snapshot, or begin anew if it is None; later records are removed.

        Raises:
            CapsuleError: CAP-T121, the file is shorter than the offset of the snapshot.
        """
        offset = state["offset"] if state else 0
        size = self._file.seek(0, os.SEEK_END)
        if size < offset:
            what = f"trace.jsonl has {size} bytes, but the saved state ends at byte {offset}"
            raise changed("CAP-T121", what)
        self._file.truncate(offset)
        self._file.seek(offset)
        if state:
            self.records = state["records"]
            self._head = bytes.fromhex(state["head"])
            # Restored to their order in a record, because canonical JSON sorts the keys.
            self._leaves = {name: bytes.fromhex(state["leaves"][name]) for name in _FLOWING}

    def _append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._head = extend(self._head, line)
        self.records += 1
        # This line is not a link of the chain: readers compare it with the head that they compute.
        if self.records % SEGMENT_RECORDS == 0:
            self._file.write(segment_line(self._head, self.records) + b"\n")


def arrays_digest(arrays: Iterable[Any]) -> str:
    """Return the XXH3-128 of the elements of arrays, one after another in C order, hexadecimal."""
    state = xxhash.xxh3_128()
    for array in arrays:
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()
