"""Which numbers and texts of an output are dates: those that lie in the time of its own run.

A number that is, as seconds, milliseconds, microseconds or nanoseconds since 1970, a moment of the
run that wrote it, is a reading of the clock. A signer who states a false time of the recorded run
gains nothing by it: what the re-execution wrote must also be a reading of the verifier's own clock,
or of the virtual one that the run was given, and the verifier has measured the time of the
re-execution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeGuard

SLACK_SECONDS = 2.0  # clocks are read before and after the run, and written in whole seconds
# Without these two bounds, a signer could state a time in which any number is a date.
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC).timestamp()  # there were no bundles before
CLOCKS_APART = 86_400.0  # by how much the signer's clock may be ahead of the verifier's, in seconds
# The virtual clock (docs/random-profiles.md) starts here. A wait advances it by at most twice its
# duration, and each of its readings by a millisecond, for which an hour is allowed.
VIRTUAL_START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
VIRTUAL_READINGS_SECONDS = 3_600.0
_SCALES = (1.0, 1e3, 1e6, 1e9)  # seconds to nanoseconds
_TOKEN = re.compile(  # no part of a longer number
    r"(?<!\d)(?:"
    r"\d{4}-\d\d-\d\d[T _]\d\d[:.-]\d\d[:.-]\d\d(?:[.,]\d{1,9})?"  # ISO 8601, also as in file names
    r"|\d{8}[T_-]?\d{6}"
    r"|(?<!\d\.)\d{10}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?"
    r")(?!\d)"
)


@dataclass(frozen=True)
class Span:
    """The time of a run, in seconds since 1970.

    Attributes:
        start: When it began.
        end: When it ended.
        virtual: The time that its virtual clock may have shown, if it had one.
    """

    start: float
    end: float
    virtual: Span | None = None

    def with_clock(self, clock: str) -> Span:
        """Return the time of a run with this ``entropy.clock``."""
        if clock != "virtual":
            return self
        seconds = 2 * (self.end - self.start) + VIRTUAL_READINGS_SECONDS
        return replace(self, virtual=Span(VIRTUAL_START, VIRTUAL_START + seconds))

    def holds(self, number: float, scales: Sequence[float] = _SCALES) -> bool:
        """Tell whether a number is a moment of this time, in a usual unit or one of ``scales``."""
        low, high = self.start - SLACK_SECONDS, self.end + SLACK_SECONDS
        # NaN compares false with everything, so a span of NaN holds no number.
        held = any(low * scale <= number <= high * scale for scale in scales)
        return held or (self.virtual is not None and self.virtual.holds(number, scales))

    def masked(self, text: str) -> str:
        """Return a text with every date of this time replaced by one sign, which no text holds."""
        # A text may itself hold NUL, as JSON can write it, and must not pass for a masked date.
        escaped = text.replace("\0", "\0n")
        return _TOKEN.sub(lambda match: "\0d" if self._is_date(match[0]) else match[0], escaped)

    def _is_date(self, token: str) -> bool:
        digits = re.sub(r"\D", "", token)
        # This is YYYYMMDDHHMMSS: a moment in nanoseconds and the like has another length.
        compact = len(token) == 14 and token.isdigit()
        if token.replace(".", "", 1).isdigit() and not compact:
            return self.holds(float(token))
        try:
            # The fraction of a second is cut off, for which SLACK_SECONDS makes up.
            moment = datetime.strptime(digits[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
        except ValueError:
            return False
        return self.holds(moment.timestamp(), _SCALES[:1])


UNKNOWN = Span(math.nan, math.nan)  # the time of a run of which no moment is known


def stated_span(started: str, finished: str, now: float) -> Span:
    """Return the time of a run by its signer's word, or one without a moment if that is impossible.

    Args:
        started: ISO 8601.
        finished: ISO 8601.
        now: When it is read, in seconds since 1970.
    """
    try:
        start, end = (datetime.fromisoformat(text).timestamp() for text in (started, finished))
    except (ValueError, OverflowError):
        return UNKNOWN
    if EARLIEST <= start <= end <= now + CLOCKS_APART:
        return Span(start, end)
    return UNKNOWN


@dataclass(frozen=True)
class Times:
    """When the recorded run and its re-execution took place."""

    claimed: Span
    found: Span

    def dates(self, claimed: object, found: object) -> bool:
        """Tell whether two values are dates, each of its own run."""
        if isinstance(claimed, str) and isinstance(found, str):
            return self.claimed.masked(claimed) == self.found.masked(found)
        if not (_is_number(claimed) and _is_number(found)):
            return False
        return self.claimed.holds(claimed) and self.found.holds(found)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
