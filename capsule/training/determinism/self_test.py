"""The self-test of a machine: whether it computes the bits that a portable profile promises.

The folder ``golden/`` contains, in one file per profile, the digests of every operator of the sweep
and of the sample trainings, in sets for exact versions of the libraries. A run compares all of them
except those of ``torch.optim`` before it begins, and fails if any differs. If there is no set for
the versions of the libraries, the run continues, and its flags state this.

``python -m capsule.training.determinism.self_test PROFILE`` prints the comparison as JSON, for
``capsule doctor``; with ``--record`` this machine's digests become the golden ones.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import Numerics
from capsule.training.determinism import cpu, torch_flags

if TYPE_CHECKING:
    from numpy.typing import NDArray

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = "capsule/known-answers/v1"
_DIGITS = 16  # hexadecimal digits of SHA-256: enough to detect mistakes, and not forgeries
Answers = dict[str, str]


def start_up_test(numerics: Numerics) -> str:
    """Compare this machine with the golden answers of a profile.

    Returns:
        The result, for the flags of the run: "N answers as expected"; "no expectation" for a
        profile that promises nothing; "unchecked: ..." if no answers are known.

    Raises:
        CapsuleError: CAP-T109, an answer differs.
    """
    if not cpu.is_portable(numerics):
        return "no expectation"
    if not importlib.util.find_spec("numpy"):  # torch also works without numpy
        return "unchecked: numpy is missing"
    versions = libraries()
    golden = expected(numerics, versions)
    if golden is None:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        return f"unchecked: no answers are known for {listed}"
    found = answers(complete=False)
    # Only the computed answers are compared, because the golden set includes torch.optim.
    different = differences({name: golden.get(name, "") for name in found}, found)
    if different:
        raise CapsuleError(
            "CAP-T109",
            f"this machine computes other bits than accelerator.numerics {numerics!r} promises: "
            f"{different[0]} is the first of {len(different)} of {len(found)} answers that differ",
            fix="Compare with 'capsule doctor', and report it with the processor's name; meanwhile "
            "numerics 'portable-v3-strict', 'portable-v2' or 'native' may do.",
        )
    return f"{len(found)} answers as expected"


def answers(*, complete: bool = True) -> Answers:
    """Compute the answers with one thread: name to digest. Torch's generator is restored.

    Args:
        complete: Whether to include those of ``torch.optim``, which takes a second to import.
    """
    import torch

    from capsule.training.determinism.operator_sweep import operators
    from capsule.training.determinism.sample_trainings import trainings

    # By default fork_rng() would also save the generators of all GPUs, and start CUDA for that.
    with cpu.one_thread(), torch.random.fork_rng(devices=()):
        entries = {**operators(optimizers=complete), **trainings()}
        return {name: digest(compute()) for name, compute in entries.items()}


def digest(result: Any) -> str:
    """Return the digest of an operator's result: a tensor, array or number, or a sequence of them.

    It covers type, shape and bytes.
    """
    parts = result if isinstance(result, list | tuple) else [result]
    state = hashlib.sha256()
    for part in parts:
        array = _array(part)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(array.tobytes())
    return state.hexdigest()[:_DIGITS]


def libraries() -> dict[str, str]:
    """Return the versions of the libraries on which the answers depend."""
    import numpy as np
    import torch

    c_library = os.confstr("CS_GNU_LIBC_VERSION") or "unknown"  # e.g. "glibc 2.36"
    return {
        "glibc": c_library.removeprefix("glibc "),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


def expected(numerics: Numerics, versions: Mapping[str, str]) -> Answers | None:
    """Return the golden answers of a profile with these libraries; None if there are none."""
    sets = _golden_sets(numerics)
    return next((known["answers"] for known in sets if known["libraries"] == versions), None)


def differences(golden: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the names of answers that differ or are missing on one side, in golden order."""
    names = [*golden, *(name for name in found if name not in golden)]
    return [name for name in names if golden.get(name) != found.get(name)]


def record(numerics: Numerics) -> Path:
    """Make this machine's answers the golden ones for its libraries; return the file's path."""
    versions = libraries()
    others = [known for known in _golden_sets(numerics) if known["libraries"] != versions]
    sets = [*others, {"libraries": versions, "answers": answers()}]
    # Sorted, so that recording a set again does not move the others in the file.
    sets.sort(key=lambda known: sorted(known["libraries"].items()))
    document = {"schema": SCHEMA, "profile": numerics, "sets": sets}
    path = _golden_file(numerics)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _golden_file(numerics: Numerics) -> Path:
    return GOLDEN / f"{numerics}.json"


def _golden_sets(numerics: Numerics) -> list[dict[str, Any]]:
    path = _golden_file(numerics)
    return json.loads(path.read_bytes())["sets"] if path.exists() else []


def _array(part: Any) -> NDArray[Any]:
    import numpy as np
    import torch

    if isinstance(part, torch.Tensor):
        # numpy has neither bfloat16 nor lazy conjugates.
        part = part.detach().resolve_conj().contiguous()
        part = (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()
    return np.asarray(part)


def _compare(numerics: Numerics, threads: int) -> dict[str, Any]:
    """Settle and read back the numerics, and compare all answers."""
    cpu.require(numerics)
    cpu.settle(numerics)
    flags = torch_flags.expect(cpu.read_back(numerics, threads), "library")
    versions, found = libraries(), answers()
    golden = expected(numerics, versions)
    return {
        "schema": "capsule/self-test/v1",
        "profile": numerics,
        "processor": cpu.cpu_facts().get("model name", "unknown"),
        "libraries": versions,
        "flags": flags,
        "answers": found,
        "known": golden is not None,
        "different": [] if golden is None else differences(golden, found),
    }


def main(arguments: list[str]) -> int:
    """Print the comparison, or record golden answers; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m capsule.training.determinism.self_test")
    parser.add_argument("profile", choices=get_args(Numerics))
    parser.add_argument("--record", action="store_true", help="make this machine's answers golden")
    options = parser.parse_args(arguments)
    try:
        document = _compare(options.profile, threads=1)
        if options.record:
            sys.stderr.write(f"wrote {record(options.profile)}\n")
    except CapsuleError as error:
        sys.stderr.write(f"{error}\n{error.fix}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(document) + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
