"""The files of checkpoints, which are claimed, and of resume states, from which a run continues.

Tensors are in safetensors files, everything else in canonical JSON; nothing is ever unpickled. A
resume state consists of two files: first ``tensors-STEP.safetensors`` is written and then, by
atomic rename, ``resume.json``, which refers to it. Until then, the previous state is complete.
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
from capsule.training.state.run_directory import changed, write_file

Tensors = Mapping[str, NDArray[Any]]
_DTYPES = {"float32": "F32", "int64": "I64", "uint8": "U8"}  # as safetensors calls them


def tensor_digests(tensors: Tensors) -> dict[str, str]:
    """Return the digest of each tensor, as :func:`tensor_digest` defines it, sorted by name."""
    return {name: _tensor_digest(tensors[name]) for name in sorted(tensors)}


def collective_digest(tensors: Tensors) -> str:
    """Return one SHA-256 for all tensors: that of the canonical JSON of names and digests."""
    return hashlib.sha256(canonical_json(tensor_digests(tensors))).hexdigest()


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file atomically.

    Raises:
        CapsuleError: CAP-T131, the file cannot be written.
    """
    write_file(path, save(dict(tensors)))


def load_tensors(path: Path, digests: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Read a safetensors file and check that it contains exactly the tensors of ``digests``.

    Raises:
        CapsuleError: CAP-T132, the file cannot be read, or its tensors are different.
    """
    try:
        tensors: dict[str, NDArray[Any]] = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path.name, f"cannot be read ({error})") from error
    found = tensor_digests(tensors)
    # Additional tensors are rejected as well as missing ones.
    for name in sorted(found.keys() | digests.keys()):
        if found.get(name) != digests.get(name):
            raise damaged(path.name, f"does not contain the tensor {name!r} as it was saved")
    return tensors


def save_resume_state(directory: Path, state: ResumeState, tensors: Tensors) -> None:
    """Save ``state`` in ``directory``, and remove the tensors of the previous state.

    Raises:
        CapsuleError: CAP-T131, a file cannot be written; the previous state is intact.
    """
    path = _tensor_file(directory, state.step)
    save_tensors(path, tensors)
    write_file(directory / RESUME, state.document())
    # Removed last, because the older tensors belong to the saved state until resume.json is
    # replaced. If the run is killed before, the next call removes them.
    for old in directory.glob("tensors-*.safetensors"):
        if old != path:
            old.unlink()


def load_resume_state(
    directory: Path, spec: str
) -> tuple[ResumeState, dict[str, NDArray[Any]]] | None:
    """Return the saved state and its tensors, or None if there is none.

    Args:
        directory: The folder of the state.
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
    return changed("CAP-T132", f"{name} {what}")


def array_document(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as a JSON-safe document, for states beside the tensors."""
    data = base64.b64encode(np.ascontiguousarray(array).data).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def document_array(document: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of a document of :func:`array_document`; it is read-only."""
    array = np.frombuffer(base64.b64decode(document["data"]), document["dtype"])
    return array.reshape(document["shape"])
