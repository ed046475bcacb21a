"""Charts as SVG: curves with bands, and the map of where two runs differ.

Every curve has a colour (Okabe and Ito's, which colour-blind people can tell apart), a kind of line
and a marker of its own. Sizes are units of the view box; a chart is as wide as its column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from capsule.experiment.trace import COMPONENTS
from capsule.report.markup import Markup, element
from capsule.verification.verdict import DivergenceMap

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 26, 40
STYLES = 4  # curves beyond them take the first one again
MARKER_POINTS = 24  # markers on longer curves would run into each other
MAX_POINTS = 600
MAP_LEFT, MAP_TOP, MAP_ROW, MAP_NAME = 112, 4, 20, 14
MAX_INTERVALS = 400
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


def line_chart(identity: str, title: str, x_name: str, y_name: str, curves: list[Curve]) -> Markup:
    """Draw curves on each other, the first one below.

    Args:
        identity: Of the element, unique in the page.
        title: What it shows; read out and shown above.
        x_name: What is on the horizontal axis.
        y_name: What is on the vertical one.
        curves: At least one of them has a point.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    ys += [y for curve in curves for band in curve.bands for y in (*band.low, *band.high)]
    across = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    names = ", ".join(curve.label for curve in curves)
    return _svg(
        identity,
        HEIGHT,
        title,
        f"{y_name} over {x_name}: {names}. The numbers are in the tables of this page.",
        [
            *_grid(across, up),
            *(
                _band(band, across, up, number)
                for number, curve in enumerate(curves)
                for band in curve.bands
            ),
            *(piece for n, curve in enumerate(curves) for piece in _curve(curve, across, up, n)),
            _label(WIDTH - RIGHT, HEIGHT - 6, x_name, "end"),
            _label(4, 14, y_name, "start"),
        ],
    )


def legend(labels: Sequence[str]) -> Markup:
    """Return what tells the curves of a chart apart, with a sample of each."""
    return element(
        "ul",
        *(element("li", _sample(number), " ", label) for number, label in enumerate(labels)),
        class_="legend",
    )


def divergence_chart(identity: str, title: str, divergence: DivergenceMap) -> Markup:
    """Draw, for each component of the trace, the steps at which two runs differ."""
    names = sorted(divergence.components, key=_flow)
    bottom = MAP_TOP + MAP_ROW * len(names)
    across = _Axis(0, max(1, divergence.steps), MAP_LEFT, WIDTH - RIGHT, tight=True)
    differing = [name for name in names if divergence.components[name]]
    rows: list[Markup] = []
    for number, name in enumerate(names):
        top = MAP_TOP + MAP_ROW * number
        rows.append(_label(MAP_LEFT - 8, top + 14, name[:MAP_NAME], "end"))
        rows.append(
            element(
                "rect",
                class_="same",
                x=MAP_LEFT,
                y=top + 2,
                width=WIDTH - RIGHT - MAP_LEFT,
                height=MAP_ROW - 4,
            )
        )
        rows += _differing(divergence.components[name], across, top + 2, f"url(#{identity}-hatch)")
    ticks = [
        _label(across.at(tick), bottom + 16, _short(tick), "middle") for tick in across.ticks(4)
    ]
    said = f"differ: {', '.join(differing)}" if differing else "no component differs"
    hatch = element(
        "defs",
        element(
            "pattern",
            element("rect", class_="hatch-ground", width=6, height=6),
            element("path", class_="hatch-line", d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2"),
            id=f"{identity}-hatch",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        ),
    )
    name = _label(WIDTH - RIGHT, bottom + 34, "agent steps", "end")
    return _svg(
        identity, bottom + 42, title, f"By component: {said}.", [hatch, *rows, *ticks, name]
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

    def ticks(self, about: int) -> list[float]:
        """Return round values, by 1, 2 or 5 times a power of ten."""
        raw = (self._last - self._first) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        first = math.ceil(self._first / step)
        return [number * step for number in range(first, math.floor(self._last / step) + 1)]


def _svg(
    identity: str, height: int, title: str, description: str, pieces: Iterable[Markup]
) -> Markup:
    return element(
        "svg",
        element("title", title, id=f"{identity}-title"),
        element("desc", description, id=f"{identity}-desc"),
        *pieces,
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_labelledby=f"{identity}-title {identity}-desc",
    )


def _grid(across: _Axis, up: _Axis) -> Iterable[Markup]:
    for tick in up.ticks(4):
        y = up.at(tick)
        yield element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
        yield _label(LEFT - 6, y + 4, _short(tick), "end")
    for tick in across.ticks(4):
        x = across.at(tick)
        yield element("line", class_="tick", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4)
        yield _label(x, HEIGHT - BOTTOM + 17, _short(tick), "middle")
    yield element(
        "line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM
    )


def _band(band: Band, across: _Axis, up: _Axis, number: int) -> Markup:
    there = [f"{across.at(x)},{up.at(y)}" for x, y in zip(band.xs, band.high, strict=True)]
    back = [f"{across.at(x)},{up.at(y)}" for x, y in zip(band.xs, band.low, strict=True)]
    outline = Markup(" ".join(there + back[::-1]))
    return element("polygon", class_=f"band s{number % STYLES}", points=outline)


def _curve(curve: Curve, across: _Axis, up: _Axis, number: int) -> Iterable[Markup]:
    style = f"s{number % STYLES}"
    places = [(across.at(x), up.at(y)) for x, y in curve.points]
    if len(places) > 1:
        line = Markup(" ".join(f"{x},{y}" for x, y in places))
        yield element("polyline", class_=f"curve {style}", points=line)
    if len(places) <= MARKER_POINTS:
        yield from (_marker(x, y, number) for x, y in places)


def _marker(x: float, y: float, number: int) -> Markup:
    """Draw a circle, a square, a triangle or a diamond; later ones are smaller, to see both."""
    class_ = f"marker s{number % STYLES}"
    if number % STYLES == 0:
        return element("circle", class_=class_, cx=x, cy=y, r=4.5)
    shape = (
        "M-2.8,-2.8 h5.6 v5.6 h-5.6 z",
        "M0,-3.6 L3.4,2.6 L-3.4,2.6 z",
        "M0,-3.8 L3.8,0 L0,3.8 L-3.8,0 z",
    )[number % STYLES - 1]
    return element("path", class_=class_, d=shape, transform=f"translate({x} {y})")


def _sample(number: int) -> Markup:
    style = f"s{number % STYLES}"
    return element(
        "svg",
        element("polyline", class_=f"curve {style}", points="1,7 35,7"),
        _marker(18, 7, number),
        viewBox="0 0 36 14",
        aria_hidden="true",
    )


def _differing(
    intervals: Sequence[tuple[int, int]], across: _Axis, top: float, fill: str
) -> list[Markup]:
    """Draw where records differ: at least two units wide, so that a single one is seen."""
    pieces = []
    for first, last in _merged(intervals):
        start = min(across.at(first), WIDTH - RIGHT - 2)
        pieces.append(
            element(
                "rect",
                class_="differs",
                fill=fill,
                x=start,
                y=top,
                width=max(2.0, round(across.at(last) - start, 1)),
                height=MAP_ROW - 4,
            )
        )
    return pieces


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Close the narrowest gaps until there are no more intervals than can be seen."""
    ordered = sorted(intervals)
    surplus = len(ordered) - MAX_INTERVALS
    if surplus <= 0:
        return ordered
    gaps = sorted(b[0] - a[1] for a, b in pairwise(ordered))
    narrow, merged = gaps[surplus - 1], [ordered[0]]
    for first, last in ordered[1:]:
        if first - merged[-1][1] <= narrow:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _flow(name: str) -> tuple[int, str]:
    """Order components as data flow through a step; those of later versions come last."""
    return (COMPONENTS.index(name) if name in COMPONENTS else len(COMPONENTS), name)


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return element("text", text, x=x, y=round(y, 1), text_anchor=anchor)


def _short(value: float) -> str:
    """Write a tick in few characters: 2000 as 2k, 1.5e9 as 1.5G."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g}{unit}"
    return f"{value:.4g}"
