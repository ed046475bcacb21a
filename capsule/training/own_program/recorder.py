"""The optional helper of a user program: metrics, checkpoints and evaluations as plain files.

    from capsule.training import run

    with run() as r:
        for step in range(1, 1001):
            ...
            r.log(step, loss=loss, episode_return=score)
        r.checkpoint(step, model.state_dict())
        r.evaluation(step, returns)

The same program also runs without Capsule, and writes the same files to the folder ``outputs`` of
its working folder. Every file is a pure function of the arguments, without times or host names.
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
        total_steps: Number of steps, if it is known, which is shown with the progress.
    """
    return Recorder(total_steps)


class Recorder:
    """Writes the metrics, checkpoints and evaluations of a program.

    Attributes:
        outputs: Folder of these files; the program can write other files to it.
        state: Folder for the state from which the program resumes, kept after an interruption.
        resumed: Whether the program must resume from the state that it saved in ``state``.
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
        # Converted, because programs also pass 1e6 or NumPy's integers, and an event must have an
        # integer.
        self._total_steps = None if total_steps is None else int(total_steps)
        self._shown = -math.inf
        # Every reading of a virtual calendar clock advances it, while the number of progress events
        # depends on the machine's speed. The clock is therefore read only here.
        self._date_of_zero = time.time() - time.monotonic()
        self._files: dict[str, IO[str]] = {}

    def log(self, step: int, **metrics: SupportsFloat) -> None:
        """Append a line to ``metrics.jsonl``.

        Args:
            step: Step of the program.
            metrics: Numbers by name, which can be scalars of NumPy or torch.
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
        """Write ``checkpoints/step-….safetensors``, with tensors sorted by name; return its path.

        Args:
            step: Step of the program.
            tensors: Tensors of torch, such as a ``state_dict()``, or arrays of NumPy, by name.
        """
        import numpy as np
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(_array(tensors[name])) for name in sorted(tensors)}
        path = self.outputs / CHECKPOINTS / f"{checkpoint_name(step)}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, save(arrays))
        return path

    def resume_from(self, step: int) -> None:
        """Remove the lines that an interrupted attempt wrote after ``step``.

        A resumed program calls this first, with the step of the state from which it resumes,
        because it will write these lines again.
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
        """Write an event for Capsule's progress line, about once a second."""
        now = time.monotonic()
        if not self.under_capsule or now - self._shown < PROGRESS_SECONDS:
            return
        self._shown = now
        # Events are only for display: they have times, and are not part of the claims.
        date = self._date_of_zero + now
        event: dict[str, Any] = {"time": date, "kind": "progress", "step": int(step)}
        if self._total_steps is not None:
            event["total_steps"] = self._total_steps
        event["message"] = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        with self._events.open("ab") as stream:
            stream.write(json.dumps(event).encode() + b"\n")


def _number(value: SupportsFloat) -> float | int | str:
    """Return an exact JSON value: an integer, a double, or the name of a non-finite number."""
    # operator.index() also accepts NumPy's integers and torch's integer tensors.
    with suppress(TypeError):
        return int(operator.index(value))  # type: ignore[arg-type]
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _array(tensor: Any) -> Any:
    """Return a NumPy array of a tensor on any device; return an array as it is."""
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically: an interruption leaves the previous file."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _until(lines: list[str], step: int) -> Iterator[str]:
    for line in lines:  # the last one may be incomplete after a kill
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            yield line
