"""Line charts side by side, as SVG without a library, so that equal data give equal files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

Line = Sequence[tuple[float, float]]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH, HEIGHT = 260, 190  # of the area that lines are drawn in
LEFT, TOP, GAP, BELOW = 56, 34, 62, 74  # around it


@dataclass(frozen=True)
class Axis:
    """A range of numbers.

    Attributes:
        label: Name of the quantity.
        low: Lower end of the range.
        high: Upper end of the range.
        marks: Numbers that are printed at the axis.
        logarithmic: Whether equal distances are equal ratios.
    """

    label: str
    low: float
    high: float
    marks: Sequence[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of a number on the axis: 0 at the beginning, 1 at the end."""
        scale = math.log if self.logarithmic else float
        low, high = scale(self.low), scale(self.high)
        return (scale(value) - low) / (high - low)


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: Title above the chart.
        lines: Name to points; a line may have no points.
        up: Vertical axis.
    """

    title: str
    lines: Mapping[str, Line]
    up: Axis


def score_axis(highest: float) -> Axis:
    """Return a vertical axis for mean returns from 0 to a positive value."""
    top = math.ceil(highest)
    return Axis("mean return", 0, top, (0, top / 2, top))


def draw(path: Path, panels: Sequence[Panel], across: Axis, *, columns: int = 4) -> None:
    """Draw panels with the same horizontal axis and one legend; a name has one colour in all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = dict(zip(names, COLOURS, strict=False))
    if len(colours) < len(names):
        raise ValueError(f"{len(names)} lines, but {len(COLOURS)} colours")
    # Half of the last mark lies beyond the last panel.
    beyond = max(24, 4 + 3.3 * len(_shown(across.marks[-1])))
    charts = min(columns, len(panels)) * (WIDTH + GAP) - GAP + math.ceil(beyond)
    width = LEFT + max(charts, math.ceil(sum(map(_legend_width, names))))
    height = -(-len(panels) // columns) * (TOP + HEIGHT + BELOW)
    size = f'width="{width}" height="{height}"'
    font = 'font-family="sans-serif" font-size="11" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        place = LEFT + column * (WIDTH + GAP), TOP + row * (TOP + HEIGHT + BELOW)
        parts.append(f'<g transform="translate({place[0]},{place[1]})">')
        parts += [*_frame(panel, across), *_lines(panel, colours, across)]
        parts.append("</g>")
    parts += [*_legend(colours, height - 14), "</svg>", ""]
    path.write_text("\n".join(parts))


def _frame(panel: Panel, across: Axis) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
    yield _text(WIDTH / 2, -12, panel.title, size=13)
    yield _text(WIDTH / 2, HEIGHT + 34, across.label)
    yield _text(-40, HEIGHT / 2, panel.up.label, turned=True)
    for mark in across.marks:
        yield _text(across.place(mark) * WIDTH, HEIGHT + 16, _shown(mark))
    for mark in panel.up.marks:
        level = (1 - panel.up.place(mark)) * HEIGHT
        yield f'<path d="M0 {level:.1f}H{WIDTH}" stroke="#ddd"/>'
        yield _text(-6, level + 4, _shown(mark), anchor="end")


def _shown(mark: float) -> str:
    return f"{mark:,.12g}"


def _lines(panel: Panel, colours: Mapping[str, str], across: Axis) -> Iterator[str]:
    for name, line in panel.lines.items():
        points = " ".join(
            f"{across.place(x) * WIDTH:.1f},{(1 - panel.up.place(y)) * HEIGHT:.1f}" for x, y in line
        )
        stroke = f'fill="none" stroke="{colours[name]}" stroke-width="1.8"'
        yield f'<polyline points="{points}" {stroke}/>'


def _legend(colours: Mapping[str, str], level: float) -> Iterator[str]:
    left = float(LEFT)
    for name, colour in colours.items():
        yield f'<path d="M{left} {level - 4}h18" stroke="{colour}" stroke-width="3"/>'
        yield _text(left + 23, level, name, anchor="start")
        left += _legend_width(name)


def _legend_width(name: str) -> float:
    return 46 + 6.5 * len(name)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    anchor: str = "middle",
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}{turn}>{escape(text)}</text>"
