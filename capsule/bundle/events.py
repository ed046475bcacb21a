"""``events.jsonl`` of a bundle: the progress that a run reported, one canonical document a line.

A user's program may write into that file itself, so a run directory may contain anything under
its name. A bundle contains events only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from pydantic import ValidationError

from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Event

MAX_EVENTS = 2_000_000  # three weeks of one a second
MAX_EVENT_BYTES = 1 << 14


def event_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, none longer than :data:`MAX_EVENT_BYTES`."""
    while line := stream.readline(MAX_EVENT_BYTES):
        yield line


def sound_events(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the events among the lines of a file, each as :func:`parse_event` accepts it."""
    count = 0
    for line in event_lines(stream):
        try:
            event = Event.model_validate_json(line)
            # In canonical form, the only one that parse_event() accepts from a bundle.
            document = canonical_json(event.model_dump(mode="json", exclude_none=True)) + b"\n"
        except ValueError:
            # This also drops the pieces of a line that is too long.
            continue
        if len(document) <= MAX_EVENT_BYTES:
            yield document
            count += 1
        if count == MAX_EVENTS:
            return


def parse_event(line: bytes) -> Event:
    """Parse one line of a bundle's events.

    Raises:
        ValueError: It is not an event in its canonical form.
    """
    try:
        event = Event.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(str(error.errors(include_url=False)[0]["msg"])) from error
    if canonical_json(event.model_dump(mode="json", exclude_none=True)) + b"\n" != line:
        raise ValueError("not in canonical form")
    return event
