"""The facts about inference for actors, most of which the actors count themselves."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt

_COUNTS = ("requests", "own_row", "own_stream", "misrouted")


class Inference(Model):
    """How the requests of actors were answered.

    The actors count the requests themselves. The counts cover all experience that was trained on,
    over all attempts; the other fields describe the last attempt.
    """

    rows: PositiveInt = Field(description="Number of rows of a batch of fixed size.")
    independent: bool = Field(
        description="Whether layers are computed so that a row depends on its inputs alone, in "
        "which case batches have no fixed size."
    )
    tested_rows: NonNegativeInt = Field(
        description="Number of rows that the test at the start evaluated alone and together with "
        "others, with equal bits; 0: the test was not made."
    )
    replicas: NonNegativeInt = Field(
        description="Number of processes that answered requests; 0: the processes that played "
        "answered their own requests."
    )
    requests: NonNegativeInt = Field(0, description="Number of requests that were answered.")
    own_row: NonNegativeInt = Field(
        0,
        description="Number of requests that were evaluated in a batch of fixed size, in the row "
        "of their actor.",
    )
    own_stream: NonNegativeInt = Field(
        0,
        description="Number of requests whose action was drawn from the random stream of the "
        "request, as the actor checked by computing it again.",
    )
    misrouted: NonNegativeInt = Field(
        0,
        description="Number of requests that were answered by a replica other than that of their "
        "actor.",
    )


def added(parts: Sequence[Inference]) -> Inference:
    """Add up the counts of a population's members, all of which use the same inference."""
    counts = {name: sum(getattr(each, name) for each in parts) for name in _COUNTS}
    return parts[0].model_copy(update=counts)
