"""The optional helper of a user program: metrics, checkpoints and evaluations as plain files.

    from capsule.training import run

    with run() as r:
        for step in range(1, 1001):
            ...
            r.log(step, loss=loss, episode_return=score)
        r.checkpoint(step, model.state_dict())
        r.evaluation(step, returns)

The same program runs without Capsule and writes the same files, into ``outputs`` of its working
folder. Every file is a pure function of what is passed in: no times, no host names.
"""

from __future__ import annotations

import json
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, SupportsFloat

from capsule.experiment.contract import (
    EVENTS,
    OUTPUT_VARIABLE,
    RESUMED_VARIABLE,
    RUN_VARIABLE,
    SEED_VARIABLE,
    STATE_VARIABLE,
    checkpoint_name,
)

METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
CHECKPOINTS = "checkpoints"
PROGRESS_SECONDS = 1.0


def run(total_steps: int | None = None) -> Recorder:
    """Return the recorder of this run, to be used as a context manager.

    Args:
        total_steps: How many steps there will be, if known: shown as progress.
    """
    return Recorder(total_steps)


class Recorder:
    """Writes what a program found out.

    Attributes:
        outputs: Folder of all that is written here; other files are as welcome in it.
        state: Folder for what a resumption needs, kept when a run is interrupted.
        resumed: Whether the program is to resume from what it saved in ``state``.
        seed: ``seeds.root`` of the spec; 0 without Capsule.
        under_capsule: Whether Capsule runs this program.
    """

    def __init__(self, total_steps: int | None = None) -> None:
        variable = os.environ.get
        self.outputs = Path(variable(OUTPUT_VARIABLE, "outputs"))
        self.state = Path(variable(STATE_VARIABLE, "state"))
        self.resumed = variable(RESUMED_VARIABLE) == "1"
        self.seed = int(variable(SEED_VARIABLE, "0"))
        self.under_capsule = RUN_VARIABLE in os.environ
        self._events = Path(variable(RUN_VARIABLE, "")) / EVENTS
        # Programs also pass 1e6, and NumPy's integers, neither of which an event may have.
        self._total_steps = None if total_steps is None else int(total_steps)
        self._shown = -math.inf
        # How often progress is shown depends on the machine's speed, and each reading advances a
        # virtual calendar clock. So that clock is read here only, and events are dated from it.
        self._date_of_zero = time.time() - time.monotonic()
        self._files: dict[str, IO[str]] = {}

    def log(self, step: int, **metrics: SupportsFloat) -> None:
        """Append a line to ``metrics.jsonl``.

        Args:
            step: Where the program is.
            metrics: Numbers by name; NumPy's and torch's scalars, too.
        """
        values = {name: _number(metrics[name]) for name in metrics}
        self._append(METRICS, {"step": int(step), **values})
        self._show(step, values)

    def evaluation(self, step: int, returns: Sequence[SupportsFloat]) -> None:
        """Append a line to ``evaluation.jsonl``.

        Args:
            step: Step of the network that was evaluated.
            returns: Return of each episode, in order.
        """
        self._append(
            EVALUATION, {"step": int(step), "returns": [_number(value) for value in returns]}
        )

    def checkpoint(self, step: int, tensors: Mapping[str, Any]) -> Path:
        """Write ``checkpoints/step-….safetensors``, in order of names, and return its path.

        Args:
            step: Where the program is.
            tensors: Arrays by name: torch's, as of ``state_dict()``, or NumPy's.
        """
        import numpy as np
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(_array(tensors[name])) for name in sorted(tensors)}
        path = self.outputs / CHECKPOINTS / f"{checkpoint_name(step)}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, save(arrays))
        return path

    def resume_from(self, step: int) -> None:
        """Drop the lines that an interrupted attempt wrote after ``step``, which come again.

        A resumed program calls this first, with the step of the state that it resumes from.
        """
        for name in (METRICS, EVALUATION):
            path = self.outputs / name
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                _write(path, "".join(_until(lines, step)).encode())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        self.outputs.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, name: str, values: dict[str, Any]) -> None:
        if name not in self._files:
            # A program that starts over must not append to the lines of an earlier run.
            mode = "a" if self.resumed else "w"
            self._files[name] = (self.outputs / name).open(mode, encoding="utf-8", newline="\n")
        self._files[name].write(json.dumps(values, allow_nan=False) + "\n")
        self._files[name].flush()

    def _show(self, step: int, values: dict[str, float | int | str]) -> None:
        """Tell Capsule's progress line, about once a second."""
        now = time.monotonic()
        if not self.under_capsule or now - self._shown < PROGRESS_SECONDS:
            return
        self._shown = now
        # Events are for the screen alone: they have times, and no claim is made from them.
        date = self._date_of_zero + now
        event: dict[str, Any] = {"time": date, "kind": "progress", "step": int(step)}
        if self._total_steps is not None:
            event["total_steps"] = self._total_steps
        event["message"] = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        with self._events.open("ab") as stream:
            stream.write(json.dumps(event).encode() + b"\n")


def _number(value: SupportsFloat) -> float | int | str:
    """Return what JSON can hold, exactly: an integer, a double, or the name of a non-number."""
    # NumPy's integers and torch's integer tensors are exact integers, too.
    with suppress(TypeError):
        return int(operator.index(value))  # type: ignore[arg-type]
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _array(tensor: Any) -> Any:
    """Return a NumPy array of a tensor, wherever it is."""
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor


def _write(path: Path, data: bytes) -> None:
    """Write a file so that an interruption leaves it as it was, and not a part of it."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _until(lines: list[str], step: int) -> Iterator[str]:
    for line in lines:  # a kill may have cut off the last one
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            yield line
