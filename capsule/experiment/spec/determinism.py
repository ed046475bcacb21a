"""The spec's section ``determinism``: what is fixed so that a run can be repeated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from capsule.experiment.fields import Model, PositiveInt


class DeterminismSpec(Model):
    """The determinism layers. Anything weaker than the default is a declared relaxation."""

    hash_seed: Annotated[int, Field(ge=0, le=4294967295)] | None = Field(
        0,
        description=(
            "PYTHONHASHSEED, set before the interpreter starts; null: random in each process."
        ),
    )
    propagation: bool = Field(
        True, description="Set and check the flags in every Python process that imports torch."
    )
    threads: PositiveInt | None = Field(
        1,
        description=(
            "Number of maths threads of each library call; null: as many as there are cores."
        ),
    )
    algorithms: Literal["error", "warn", "off"] = Field(
        "error",
        description=(
            "torch.use_deterministic_algorithms: 'error' raises where an operator has no "
            "deterministic implementation, 'warn' warns, 'off' does not ask for one."
        ),
    )
    fill_uninitialized_memory: bool = Field(
        True, description="torch.utils.deterministic.fill_uninitialized_memory."
    )
    cudnn_benchmark: bool = Field(
        False,
        description="torch.backends.cudnn.benchmark: choose the fastest cuDNN algorithm by timing.",
    )
    tf32: bool = Field(
        False, description="Allow TensorFloat-32 in matrix products and convolutions."
    )
    cores: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        4,
        description=(
            "Number of processors that programs are told the machine has; null: its real number."
        ),
    )
    sorted_listings: bool = Field(
        True,
        description=(
            "List directories in the order of names; false: in the order of the file system."
        ),
    )
    cublas_workspace: Literal[":4096:8", ":16:8"] | None = Field(
        ":4096:8", description="CUBLAS_WORKSPACE_CONFIG; null: unset, so that cuBLAS chooses."
    )
    batch_invariance: bool = Field(
        True,
        description=(
            "Compute the answer to an actor so that it does not depend on the other requests in "
            "its batch: in batches of a fixed size, or with layers whose rows are tested to be "
            "independent; false: in batches as requests arrive."
        ),
    )
    request_seeds: bool = Field(
        True,
        description=(
            "Draw each action of an actor from a random stream of its own request; false: from "
            "one stream of the replica that answers."
        ),
    )
    deterministic_routing: bool = Field(
        True,
        description=(
            "Choose the replica that answers by the number of the actor; false: by the order of "
            "arrival."
        ),
    )
