"""The arrival log: the order in which results and messages reached a user program.

A program that uses ``capsule.training.arrivals`` writes a log, and ``capsule verify`` follows it.
It is canonical JSON (RFC 8785), so one order of arrival has one document and one digest.
``docs/bundle-format.md`` specifies it.

Nothing here needs torch or numpy: hosts read logs with it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import DigestedModel, Model, NonNegativeInt

MAX_LOG_BYTES = 64 << 20
MAX_ENTRIES = 1_900_000  # of a log; canonical documents have at most 2,000,000 values
ENTRIES_OF_WAIT = 5  # besides its arrivals and the sources of its messages, which are one each
MAX_NAME = 500  # characters of a wait's or a source's name
NOTHING = -1  # in Messages.order
LINES = "*.jsonl"  # what processes append their arrivals to, in contract.ARRIVALS_FOLDER

_ATTEMPTS = re.compile(r"~[0-9]+ cancellations")  # in the name of a wait for them; see Messages
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class Completions(Model):
    """A wait for the results of tasks."""

    kind: Literal["completions"] = "completions"
    tasks: NonNegativeInt | None = Field(
        description="Number of tasks that were waited for; null if it is known only at the end."
    )
    order: tuple[NonNegativeInt, ...] = Field(
        description="Numbers of the tasks (from 0, as submitted) in the order of completion, "
        "without those for which the program did not wait."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Completions:
        if len(set(self.order)) < len(self.order):
            raise ValueError("a task completes twice")
        if self.tasks is not None and max(self.order, default=-1) >= self.tasks:
            raise ValueError(f"a task is not one of the {self.tasks}")
        return self


class Messages(Model):
    """A wait for the messages of a queue."""

    kind: Literal["messages"] = "messages"
    sources: tuple[_Name, ...] = Field(
        description="Senders of messages, in the order of their first arrival."
    )
    order: tuple[Annotated[int, Field(ge=NOTHING)], ...] = Field(
        description="Index in 'sources' of the sender of each message, in the order of arrival; -1 "
        "where the program stopped waiting because no message had arrived. The messages of one "
        "source arrive in the order in which it sent them. In a wait called '… cancellations', a "
        "message is an attempt that ended, and -1 one that the program cancelled."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Messages:
        if len(set(self.sources)) < len(self.sources):
            raise ValueError("a source is listed twice")
        # The order of the sources follows from that of the messages: one order has one document.
        first = [place for place in dict.fromkeys(self.order) if place != NOTHING]
        if first != list(range(len(self.sources))):
            raise ValueError("the sources are not those of the messages, in order of first arrival")
        return self


Wait = Annotated[Completions | Messages, Field(discriminator="kind")]


class ArrivalLog(DigestedModel):
    """The order of every arrival of a run."""

    schema_id: Literal["capsule/arrivals/v1"] = Field("capsule/arrivals/v1", alias="schema")
    waits: dict[_Name, Wait] = Field(min_length=1, description="The waits, by their names.")

    @property
    def arrivals(self) -> int:
        """The number of results and messages that arrived."""
        return sum(sum(place != NOTHING for place in wait.order) for wait in self.waits.values())

    def repeats(self, recorded: ArrivalLog) -> bool:
        """Return whether this order is the recorded one, except for attempts at its end.

        A program that ends cancels what its tasks attempt at this moment. How far each of them is
        then depends on time, so a repetition may make fewer attempts. What was received does not
        depend on them: it is in the other waits, which must be equal.
        """
        made = {
            name: self.waits[name].order if name in self.waits else () for name in recorded.waits
        }
        cut = {
            name: wait
            for name, wait in recorded.waits.items()
            if _ATTEMPTS.search(name) and wait.order[: len(made[name])] == made[name]
        }
        return {**self.waits, **cut} == recorded.waits


def parse_arrivals(data: bytes) -> ArrivalLog:
    """Read an untrusted log.

    Raises:
        CapsuleError: CAP-T385, it is too large, not canonical, or not of this form.
    """
    try:
        if len(data) > MAX_LOG_BYTES:
            raise ValueError(f"it has more than {MAX_LOG_BYTES} bytes")
        return ArrivalLog.parse(data)
    except ValueError as error:
        raise CapsuleError(
            "CAP-T385",
            f"the arrival log is malformed: {str(error).splitlines()[0]}",
            fix="Take the log from the bundle again; do not trust a bundle that contains such "
            "a log.",
        ) from error
