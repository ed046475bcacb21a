"""Checkpoints (claims about a run) and resume states (from which a run continues).

Tensors are safetensors files, everything else is canonical JSON; nothing is ever unpickled. A
resume state is two files: ``tensors-STEP.safetensors`` and then, by atomic rename, ``resume.json``,
which names it. Until the second exists the previous state is untouched and still complete.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import tensor_digest
from capsule.experiment.errors import CapsuleError
from capsule.experiment.states import RESUME, ResumeState
from capsule.training.state.run_directory import write_file

Tensors = Mapping[str, NDArray[Any]]
_DTYPES = {"float32": "F32", "int64": "I64", "uint8": "U8"}  # as safetensors calls them


def tensor_digests(tensors: Tensors) -> dict[str, str]:
    """Return name to :func:`capsule.experiment.contract.tensor_digest`, in order of names."""
    return {name: _tensor_digest(tensors[name]) for name in sorted(tensors)}


def collective_digest(tensors: Tensors) -> str:
    """Return one SHA-256 for all tensors: over the canonical JSON of their names and digests."""
    return hashlib.sha256(canonical_json(tensor_digests(tensors))).hexdigest()


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file atomically.

    Raises:
        CapsuleError: CAP-T131, the file cannot be written.
    """
    write_file(path, save(dict(tensors)))


def load_tensors(path: Path, digests: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Read a safetensors file and check that it holds exactly the tensors of ``digests``.

    Raises:
        CapsuleError: CAP-T132, unreadable or not as it was written.
    """
    try:
        tensors: dict[str, NDArray[Any]] = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path.name, f"cannot be read ({error})") from error
    found = tensor_digests(tensors)
    # A tensor too many is rejected as well as one that is missing.
    for name in sorted(found.keys() | digests.keys()):
        if found.get(name) != digests.get(name):
            raise damaged(path.name, f"holds another tensor {name!r} than was saved")
    return tensors


def save_resume_state(directory: Path, state: ResumeState, tensors: Tensors) -> None:
    """Make ``directory`` hold ``state``, and remove the tensors of the state before it.

    Raises:
        CapsuleError: CAP-T131, a file cannot be written; the previous state is intact.
    """
    path = _tensor_file(directory, state.step)
    save_tensors(path, tensors)
    write_file(directory / RESUME, state.document())
    # Last, since the older file belongs to the saved state until resume.json is replaced. What a
    # kill leaves of it is removed the next time.
    for old in directory.glob("tensors-*.safetensors"):
        if old != path:
            old.unlink()


def load_resume_state(
    directory: Path, spec: str
) -> tuple[ResumeState, dict[str, NDArray[Any]]] | None:
    """Return the saved state and its tensors, or None if there is none.

    Args:
        directory: Where the state lies.
        spec: Digest of the spec that is resumed.

    Raises:
        CapsuleError: CAP-T132, a file is damaged; CAP-T133, the state belongs to another spec.
    """
    path = directory / RESUME
    if not path.exists():
        return None
    try:
        state = ResumeState.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(path.name, "is not a saved state") from error
    if state.spec != spec:
        raise CapsuleError(
            "CAP-T133",
            f"the state at step {state.step} was saved by a run of another spec",
            fix="Give the job its own run directory.",
        )
    return state, load_tensors(_tensor_file(directory, state.step), state.tensors)


def _tensor_digest(array: NDArray[Any]) -> str:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return tensor_digest(_DTYPES[array.dtype.name], array.shape, little.tobytes())


def _tensor_file(directory: Path, step: int) -> Path:
    return directory / f"tensors-{step}.safetensors"


def damaged(name: str, what: str) -> CapsuleError:
    """Return the error of a file of a saved state."""
    return CapsuleError(
        "CAP-T132",
        f"{name} {what}",
        fix="Start a new run directory: this one was changed or is incomplete.",
    )


def array_document(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as a JSON-safe document, for what belongs beside the tensors."""
    data = base64.b64encode(np.ascontiguousarray(array).data).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def document_array(document: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of :func:`array_document`; it is not to be written to."""
    array = np.frombuffer(base64.b64decode(document["data"]), document["dtype"])
    return array.reshape(document["shape"])
