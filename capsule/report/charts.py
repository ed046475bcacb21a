"""Charts for the page: curves with bands, and the map of where two runs differ.

Every curve has a colour (Okabe and Ito's, which colour-blind people can tell apart), a kind of line
and a marker of its own. Sizes are units of the view box; a chart is as wide as its column. The
macros of ``parts.html.jinja`` draw what is laid out here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from capsule.experiment.trace import COMPONENTS
from capsule.verification.verdict import DivergenceMap

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 26, 40
STYLES = 4  # curves beyond them take the first one again
MARKER_POINTS = 24  # markers on longer curves would run into each other
MAX_POINTS = 600
MAP_LEFT, MAP_TOP, MAP_ROW, MAP_NAME = 112, 4, 20, 14
MAX_INTERVALS = 400
# Values are at most HUGE (subject.py), so that sums and quotients on the way to a place are finite.
TINY = 1e-90

Point = tuple[float, float]


@dataclass(frozen=True)
class Band:
    """An area between two values at each x."""

    xs: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """A line, and the bands around it, widest first. Points are finite, ascending in x."""

    label: str
    points: tuple[Point, ...]
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True)
class _Chart:
    """The parts of every chart: an identity, unique in the page, title, description and ticks."""

    identity: str
    title: str
    description: str
    across: list[tuple[float, str]]
    left: int
    bottom: int
    height: int
    width: int = WIDTH
    right: int = WIDTH - RIGHT


@dataclass(frozen=True)
class LineChart(_Chart):
    """Curves, each with its style, line and markers, and the outlines of bands below them."""

    labels: Sequence[str] = ()
    note: str = ""
    x_name: str = ""
    y_name: str = ""
    up: Sequence[tuple[float, str]] = ()
    bands: Sequence[tuple[int, Markup]] = ()
    curves: Sequence[tuple[int, Markup, Sequence[Point]]] = ()


@dataclass(frozen=True)
class DivergenceChart(_Chart):
    """Rows of name, place, and start and width of each stretch of records that differ."""

    rows: Sequence[tuple[str, int, list[tuple[float, float]]]] = ()


def line_chart(
    identity: str, title: str, x_name: str, y_name: str, curves: Sequence[Curve], note: str = ""
) -> LineChart:
    """Lay out curves on each other, the first one below.

    Args:
        identity: Identity of the element, unique in the page.
        title: What it shows; read out and shown above.
        x_name: What is on the horizontal axis.
        y_name: What is on the vertical one.
        curves: At least one of them has a point.
        note: What else is to be said of it.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    ys += [y for curve in curves for band in curve.bands for y in (*band.low, *band.high)]
    across = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)

    def placed(points: Iterable[Point]) -> list[Point]:
        return [(across.at(x), up.at(y)) for x, y in points]

    bands, lines = [], []
    for number, curve in enumerate(curves):
        style, places = number % STYLES, placed(curve.points)
        # The outline goes along the upper edge and back along the lower one.
        for band in curve.bands:
            back = zip(band.xs[::-1], band.low[::-1], strict=True)
            bands.append((style, _path(placed([*zip(band.xs, band.high, strict=True), *back]))))
        # A line through one point would not be seen; its marker is.
        line = _path(places) if len(places) > 1 else Markup()
        lines.append((style, line, places if len(places) <= MARKER_POINTS else ()))
    labels = [curve.label for curve in curves]
    return LineChart(
        identity,
        title,
        f"{y_name} over {x_name}: {', '.join(labels)}. The numbers are in the tables of this page.",
        across=across.ticks(),
        left=LEFT,
        bottom=HEIGHT - BOTTOM,
        height=HEIGHT,
        labels=labels,
        note=note,
        x_name=x_name,
        y_name=y_name,
        up=up.ticks(),
        bands=bands,
        curves=lines,
    )


def divergence_chart(identity: str, title: str, divergence: DivergenceMap) -> DivergenceChart:
    """Lay out, for each component of the trace, the steps at which two runs differ."""
    # As data flow through a step; the components of later versions come last.
    order = {name: number for number, name in enumerate(COMPONENTS)}
    names = sorted(divergence.components, key=lambda name: (order.get(name, len(order)), name))
    across = _Axis(0, max(1, divergence.steps), MAP_LEFT, WIDTH - RIGHT, tight=True)
    differing = [name for name in names if divergence.components[name]]
    said = f"differ: {', '.join(differing)}" if differing else "no component differs"
    bottom = MAP_TOP + MAP_ROW * len(names)
    stretches = [_stretches(divergence.components[name], across) for name in names]
    rows = [
        (name[:MAP_NAME], MAP_TOP + MAP_ROW * number, found)
        for number, (name, found) in enumerate(zip(names, stretches, strict=True))
    ]
    return DivergenceChart(
        identity,
        title,
        f"By component: {said}.",
        across=across.ticks(),
        left=MAP_LEFT,
        bottom=bottom,
        height=bottom + 42,
        rows=rows,
    )


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> tuple[Point, ...]:
    """Leave out points of a long curve at equal distances; the last one stays."""
    if len(points) <= most:
        return tuple(points)
    stride = math.ceil((len(points) - 1) / (most - 1))
    return (*points[:-1:stride], points[-1])


# --- pieces -------------------------------------------------------------------------------------


class _Axis:
    """From values to places."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, tight: bool = False
    ) -> None:
        scale = max(abs(low), abs(high), TINY)
        if high - low <= scale * 1e-9:  # one value, as far as a picture can tell
            half = 0.5 if scale == TINY else scale / 2
            low, high = low - half, high + half
        margin = 0.0 if tight else (high - low) * 0.04
        self._low, self._high = low - margin, high + margin
        self._start, self._end = start, end
        self._first, self._last = low, high

    def at(self, value: float) -> float:
        """Return where a value is, rounded to a tenth, so that equal input gives equal bytes."""
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and texts of about four values, by 1, 2 or 5 times a power of ten."""
        raw = (self._last - self._first) / 4
        power = 10.0 ** math.floor(math.log10(raw))
        # A step that only rounding makes smaller than wanted is accepted.
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        first = math.ceil(self._first / step)
        values = (step * number for number in range(first, math.floor(self._last / step) + 1))
        return [(self.at(value), _short(value, step)) for value in values]


def _path(places: Sequence[Point]) -> Markup:
    return Markup(" ".join(f"{x},{y}" for x, y in places))  # noqa: S704 - numbers alone


def _stretches(intervals: Sequence[tuple[int, int]], across: _Axis) -> list[tuple[float, float]]:
    """Return where records differ: at least two units wide, so that a single one is seen."""
    found = []
    for first, last in _merged(intervals):
        # A stretch at the very end keeps its least width within the chart.
        start = min(across.at(first), WIDTH - RIGHT - 2)
        found.append((start, max(2.0, round(across.at(last) - start, 1))))
    return found


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Close the narrowest gaps until there are no more intervals than can be seen."""
    ordered = sorted(intervals)
    surplus = len(ordered) - MAX_INTERVALS
    if surplus <= 0:
        return ordered
    gaps = sorted(b[0] - a[1] for a, b in pairwise(ordered))
    # Closing all gaps up to this one leaves at most MAX_INTERVALS.
    narrow, merged = gaps[surplus - 1], [ordered[0]]
    for first, last in ordered[1:]:
        if first - merged[-1][1] <= narrow:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _short(value: float, step: float) -> str:
    """Write a tick in few characters: 2000 as 2k, 1.5e9 as 1.5G.

    It has as many digits as distinguish it from the next one, a step away.
    """
    size = max(abs(value), step)
    digits = max(4, 1 + math.floor(math.log10(size)) - math.floor(math.log10(step) + 1e-9))
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.{digits}g}{unit}"
    return f"{value:.{digits}g}"
