"""The spec's section ``determinism``: the settings that make a run repeatable."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from capsule.experiment.fields import Model, PositiveInt


class DeterminismSpec(Model):
    """The determinism layers. Anything weaker than the default is a declared relaxation."""

    # The range is the one that Python accepts for PYTHONHASHSEED.
    hash_seed: Annotated[int, Field(ge=0, le=4294967295)] | None = Field(
        0,
        description="Value of PYTHONHASHSEED, set before the interpreter starts; null: random in "
        "each process.",
    )
    propagation: bool = Field(
        True,
        description="Whether the determinism flags of torch are set and checked in every Python "
        "process that imports torch.",
    )
    threads: PositiveInt | None = Field(
        1,
        description="Number of maths threads of each library call; null: as many as there are "
        "cores.",
    )
    algorithms: Literal["error", "warn", "off"] = Field(
        "error",
        description="Mode of torch.use_deterministic_algorithms: 'error' raises an error where an "
        "operator has no deterministic implementation, 'warn' warns, 'off' does not request one.",
    )
    fill_uninitialized_memory: bool = Field(
        True, description="Value of torch.utils.deterministic.fill_uninitialized_memory."
    )
    cudnn_benchmark: bool = Field(
        False,
        description="Value of torch.backends.cudnn.benchmark: whether the fastest cuDNN algorithm "
        "is chosen by timing.",
    )
    tf32: bool = Field(
        False, description="Whether TensorFloat-32 is allowed in matrix products and convolutions."
    )
    # The C library's sets of processors have room for 1024 (CPU_SETSIZE).
    cores: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        4,
        description="Number of processors that programs see; null: the real number.",
    )
    sorted_listings: bool = Field(
        True,
        description="Whether directories are listed in the order of their names; false: in the "
        "order of the file system.",
    )
    cublas_workspace: Literal[":4096:8", ":16:8"] | None = Field(
        ":4096:8",
        description="Value of CUBLAS_WORKSPACE_CONFIG; null: unset, so that cuBLAS chooses.",
    )
    batch_invariance: bool = Field(
        True,
        description="Whether the answer to an actor is independent of the other requests in its "
        "batch: it is computed in batches of a fixed size, or with layers whose rows are tested to "
        "be independent; false: it is computed together with the requests that happen to arrive.",
    )
    request_seeds: bool = Field(
        True,
        description="Whether each action of an actor is drawn from a random stream of its own "
        "request; false: from the one stream of the replica that answers.",
    )
    deterministic_routing: bool = Field(
        True,
        description="Whether the replica that answers is chosen by the number of the actor; false: "
        "by the order of arrival.",
    )
