"""Self-tests of the processor, by the bits that a numerics profile promises, and of the GPU.

The tests themselves are the training side's (:mod:`capsule.training.determinism.self_test`,
:mod:`capsule.training.determinism.gpu_test`). Each runs in a process of its own, because what it
tests is settled before an interpreter starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any, Literal

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.experiment.spec import Numerics
from capsule.experiment.variables import maths_variables
from capsule.host.errors import CapsuleError
from capsule.native import native_part

Status = Literal["as expected", "differs", "unchecked", "impossible"]
# No other variable of this process reaches a test, because many of them change what the maths
# libraries compute.
_KEPT_VARIABLES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR"}
)
# As in runs: see capsule.experiment.variables.
_GPU_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NVIDIA_TF32_OVERRIDE": "0",
}


class SelfTest(Model):
    """The result of one profile's self-test."""

    profile: Numerics
    status: Status = Field(
        description="'unchecked': no answers are known for these libraries; 'impossible': the test "
        "did not run, for the reason given."
    )
    answers: int = Field(0, description="Operators and trainings that were computed.")
    different: tuple[str, ...] = Field((), description="Those that differ, in the test's order.")
    libraries: dict[str, str] = Field(default_factory=dict, description="Name to version.")
    reason: str | None = Field(None, description="Why the test did not run.")


class GpuSelfTest(Model):
    """The result of a GPU's self-test. A GPU that fails it has no such document."""

    gpu: str
    compute_capability: str
    libraries: dict[str, str] = Field(description="Name to version.")
    found: str


def self_test(numerics: Numerics) -> SelfTest:
    """Compute every known answer of a profile with this Python's torch, and compare.

    Raises:
        CapsuleError: CAP-M007, this Python has no torch.
    """
    _require_torch()
    done = _run("self_test", numerics, environment=_environment(numerics))
    if done.returncode != 0:
        return SelfTest(profile=numerics, status="impossible", reason=_reason(done))
    return _judged(numerics, json.loads(done.stdout))


def gpu_self_test() -> GpuSelfTest | str:
    """Compare torch's first GPU with the CPU, and with itself; return why it failed, if it did.

    Raises:
        CapsuleError: CAP-M007, this Python has no torch.
    """
    _require_torch()
    done = _run("gpu_test", environment=_environment("native") | _GPU_VARIABLES)
    if done.returncode != 0:
        return _reason(done)
    return GpuSelfTest.model_validate_json(done.stdout)


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CapsuleError(
            "CAP-M007",
            f"{sys.executable} has no torch, whose numerics are to be tested",
            fix="Install 'capsule-rl[train]' there; or run 'python3 -m "
            "capsule.training.determinism.self_test PROFILE' inside an image built by Capsule, "
            "with its libcapsule-math.so in LD_PRELOAD.",
        )


def _run(
    module: str, *arguments: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"capsule.training.determinism.{module}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _judged(numerics: Numerics, document: dict[str, Any]) -> SelfTest:
    different = tuple(document["different"])
    known: Status = "differs" if different else "as expected"
    return SelfTest(
        profile=numerics,
        status=known if document["known"] else "unchecked",
        answers=len(document["answers"]),
        different=different,
        libraries=document["libraries"],
    )


def _environment(numerics: Numerics) -> dict[str, str]:
    """Return the environment that runs have, as far as numbers are concerned."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    shim = str(native_part("libcapsule-math.so"))
    # The known answers are those of one thread.
    return kept | maths_variables(numerics, threads=1) | {"LD_PRELOAD": shim}


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"it was killed by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    coded = [line for line in lines if line.startswith("CAP-")]
    return (coded or lines[-1:])[0]
