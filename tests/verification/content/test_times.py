"""A number or a text is a date if it lies in the time of the run that wrote it."""

import json
import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule import native
from capsule.verification.content.times import (
    CLOCKS_APART,
    EARLIEST,
    SLACK_SECONDS,
    UNKNOWN,
    VIRTUAL_START,
    Span,
    Times,
    stated_span,
)
from capsule.verification.content.values import parse
from tests.verification.content.comparing import CLAIMED, FOUND, TIMES, compare, summary


@pytest.mark.parametrize(
    ("claimed", "found", "nature"),
    [
        (CLAIMED + 1, FOUND + 1, "date"),
        ((CLAIMED + 1) * 10**3, (FOUND + 1) * 10**3, "date"),
        (CLAIMED + 1, FOUND - 86_400, "content"),  # not a time of the re-execution
        (CLAIMED + 1, (FOUND + 1) * 10**4, "content"),
        (9000.0, FOUND + 1, "content"),  # a score in place of a date
        (True, False, "content"),
    ],
)
def test_a_number_is_a_date_only_if_it_lies_in_the_time_of_its_own_run(claimed, found, nature):
    left, right = (json.dumps({"x": value}).encode() for value in (claimed, found))
    assert compare(left, right).nature == nature


@pytest.mark.parametrize(
    ("claimed", "found", "nature"),
    [
        ("2024-11-22T07:55:01", "2025-11-22T07:55:09.25", "date"),
        ("run-20241122_075501-x", "run-20251122_075509-x", "date"),
        ("events.1732262001.host", "events.1763798009.host", "date"),
        ("2024-11-22 07:55:01 loss 0.5", "2025-11-22 07:55:01 loss 0.6", "content"),
        ("2024-11-21 07:55:01", "2025-11-22 07:55:01", "content"),
        ("1732262001.5 a", "1763798009 a", "date"),
        ("1732262001.123 a", "1763798009.123 a", "date"),
        ("1732262001.1234 a", "1763798009.12 a", "date"),
        ("11732262001", "11763798009", "content"),
        ("0.1732262001", "0.1763798009", "content"),
        ("1732262001640013976", "1763798009242436841", "date"),
        ("score 920241122075501", "score 920251122075509", "content"),  # of fifteen digits
        ("score 202411220755011", "score 202511220755099", "content"),
        ("12024-11-22 07:55:01", "12025-11-22 07:55:09", "content"),
    ],
)
def test_dates_in_texts_are_told_from_everything_else(claimed, found, nature):
    left, right = (f"begin\n{text}\n".encode() for text in (claimed, found))
    result = compare(left, right)
    assert (result.format, summary(result)) == ("text", [("line 2", nature)])


SPAN = Span(CLAIMED, CLAIMED + 600)


@given(st.floats(-SLACK_SECONDS, 600 + SLACK_SECONDS), st.sampled_from([1, 10**3, 10**6, 10**9]))
def test_every_moment_of_a_span_is_held_in_every_unit(seconds, scale):
    assert SPAN.holds(CLAIMED * scale + int(seconds * scale))


@pytest.mark.parametrize("scale", [1, 10**3, 10**6, 10**9])
@pytest.mark.parametrize("moment", [CLAIMED - 3, CLAIMED + 603])
def test_no_moment_beside_a_span_is_held(moment, scale):
    assert not SPAN.holds(moment * scale)


def test_a_span_of_nan_holds_nothing():
    never = Span(math.nan, math.nan)
    assert not any(never.holds(number) for number in (0, CLAIMED, math.nan, math.inf))
    assert never.masked(f"{CLAIMED} 2024-11-22T07:55:01") == f"{CLAIMED} 2024-11-22T07:55:01"


def test_the_virtual_clock_shows_dates_of_its_own():
    begin = int(VIRTUAL_START)
    virtual = SPAN.with_clock("virtual")
    for clock in ("system", "fixed"):
        assert SPAN.with_clock(clock) == SPAN
    assert virtual.masked("2026-01-01 00:00:21,022 ready") == "\0d ready"
    assert virtual.masked(f"tfevents.{begin}.capsule") == "tfevents.\0d.capsule"
    assert virtual.masked("2026-01-02 00:00:21,022") == "2026-01-02 00:00:21,022"  # too late
    for number, held in (
        (CLAIMED + 600, True),
        (begin, True),
        ((begin + 1_200 + 3_600) * 1000, True),  # twice as long as the run, and an hour
        (begin + 1_200 + 3_600 + 3, False),
        (begin - 3, False),
    ):
        assert virtual.holds(number) is held
    assert not SPAN.holds(begin)
    # A run of an impossible time has no dates, on this clock neither.
    assert not UNKNOWN.with_clock("virtual").holds(begin)


def test_the_virtual_clock_starts_where_the_preloaded_library_starts_it():
    source = Path(native.__file__).parent / "source" / "interposer" / "clock.c"
    assert f"#define START (INT64_C({int(VIRTUAL_START)}) * NANOSECONDS)" in source.read_text()


FORMATS = ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H-%M-%S", "%Y-%m-%d_%H.%M.%S", "%Y%m%d%H%M%S",
           "%Y%m%d-%H%M%S", "%Y-%m-%dT%H:%M:%S.%f"]  # fmt: skip


@given(st.integers(0, 599), st.integers(1, 9))
def test_a_moment_of_the_span_is_masked_with_any_number_of_decimals(seconds, decimals):
    assert SPAN.masked(f"at {CLAIMED + seconds}.{'7' * decimals}!") == "at \0d!"
    late = f"at {CLAIMED + seconds + 86_400}.{'7' * decimals}!"
    assert SPAN.masked(late) == late


@given(st.integers(0, 600), st.sampled_from(FORMATS))
def test_a_moment_of_the_span_is_masked_however_it_is_written(seconds, form):
    moment = datetime.fromtimestamp(CLAIMED + seconds, UTC)
    assert SPAN.masked(f"at {moment.strftime(form)}!") == "at \0d!"
    late = moment + timedelta(days=1)
    assert SPAN.masked(f"at {late.strftime(form)}!") == f"at {late.strftime(form)}!"


@pytest.mark.parametrize("text", ["2024-02-30T00:00:00", "99999999999999", "20241399000000"])
def test_digits_that_are_no_date_of_the_calendar_are_left(text):
    assert SPAN.masked(text) == text


@given(st.text("ab\0nd"))
def test_a_text_without_dates_can_be_read_back(text):
    """So no text can hold the sign that stands for a date."""
    masked = SPAN.masked(text)
    assert masked.replace("\0n", "\0") == text
    assert "\0d" not in masked


@pytest.mark.parametrize(
    ("claimed", "found", "dates"),
    [
        (CLAIMED + 1, FOUND + 1, True),
        (CLAIMED + 1.5, (FOUND + 1) * 1000, True),
        (CLAIMED + 1, str(FOUND + 1), False),
        (True, True, False),
        (parse(f"{CLAIMED}.123456789"), parse(f"{FOUND}.123456789"), True),  # beyond a float
        (None, None, False),
        ([CLAIMED], [FOUND], False),
        (FOUND + 1, CLAIMED + 1, False),  # each in the time of the other
        (f"run-{CLAIMED}", f"run-{FOUND}", True),
        (f"run-{CLAIMED}", f"job-{FOUND}", False),
        ("same", "same", True),
    ],
)
def test_two_values_are_dates_if_each_is_of_its_own_run(claimed, found, dates):
    assert TIMES.dates(claimed, found) is dates


def test_the_two_runs_may_overlap():
    both = Times(SPAN, SPAN)
    assert both.dates(CLAIMED + 1, CLAIMED + 2)


# --- the time that a signer states ----------------------------------------------------------------

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def stated(started, finished):
    return stated_span(started.isoformat(), finished.isoformat(), NOW.timestamp())


def test_a_stated_time_is_read_with_its_offset():
    east = timezone(timedelta(hours=2))
    start, end = NOW - 2 * HOUR, NOW - HOUR
    wanted = Span(start.timestamp(), end.timestamp())
    assert stated(start, end) == stated(start.astimezone(east), end.astimezone(east)) == wanted


def test_the_earliest_and_the_latest_possible_times_are_accepted():
    first = datetime.fromtimestamp(EARLIEST, UTC)
    last = NOW + timedelta(seconds=CLOCKS_APART)
    assert stated(first, last) == Span(first.timestamp(), last.timestamp())
    assert stated(NOW, NOW) == Span(NOW.timestamp(), NOW.timestamp())


@pytest.mark.parametrize(
    ("started", "finished"),
    [
        (datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC), NOW),
        (NOW, NOW + timedelta(days=1, seconds=1)),
        (NOW, NOW - timedelta(seconds=1)),
    ],
)
def test_an_impossible_time_holds_no_moment(started, finished):
    span = stated(started, finished)
    assert math.isnan(span.start)
    assert math.isnan(span.end)


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_breaks_the_reading_of_a_stated_time(started, finished):
    span = stated_span(started, finished, NOW.timestamp())
    assert not span.holds(0)
