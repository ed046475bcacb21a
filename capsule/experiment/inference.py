"""How the actors of a trainer were answered, as they counted it themselves."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt

_COUNTS = ("requests", "own_row", "own_stream", "misrouted")


class Inference(Model):
    """How the requests of actors were answered.

    The counts are the actors' own, of everything that was learned, over all attempts. The rest is
    of the last attempt.
    """

    rows: PositiveInt = Field(description="Of a batch of fixed size.")
    independent: bool = Field(
        description="Whether layers are computed so that a row depends on its inputs alone; then "
        "batches have no fixed size."
    )
    tested_rows: NonNegativeInt = Field(
        description="Rows that the test at the start evaluated alone and in company, to equal "
        "bits; 0: it was not made."
    )
    replicas: NonNegativeInt = Field(
        description="Processes that answered; 0: the processes that played answered themselves."
    )
    requests: NonNegativeInt = Field(0, description="Requests answered.")
    own_row: NonNegativeInt = Field(
        0, description="Of them, evaluated in a batch of fixed size, in the row of their actor."
    )
    own_stream: NonNegativeInt = Field(
        0, description="Of them, drawn from the request's own stream, as the actor computed again."
    )
    misrouted: NonNegativeInt = Field(
        0, description="Of them, answered by another replica than that of their actor."
    )


def added(parts: Sequence[Inference]) -> Inference:
    """Add up the counts of members of a population, who are answered in the same way."""
    counts = {name: sum(getattr(each, name) for each in parts) for name in _COUNTS}
    return parts[0].model_copy(update=counts)
