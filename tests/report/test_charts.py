"""Charts of the page: curves with bands, and the map of where two runs differ."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.report.charts import Band, Curve, divergence_chart, line_chart, thinned
from capsule.verification.verdict import DivergenceMap
from tests.report.pages import Reader, drawn


def test_components_stand_in_data_flow_order_and_unknown_ones_last():
    components = {"zeta": (), "parameters": ((1, 2),), "streams": (), "loss": ()}
    laid_out = divergence_chart("m", "map", DivergenceMap(steps=9, components=components))
    chart = drawn("divergence_chart", laid_out)
    names = re.findall(r'text-anchor="end">([a-z]+)<', chart)
    assert names == ["streams", "loss", "parameters", "zeta"]


def test_countless_intervals_are_merged_until_they_can_be_drawn():
    intervals = tuple((step, step) for step in range(0, 100_000, 10))
    components = {"loss": intervals}
    laid_out = divergence_chart("m", "map", DivergenceMap(steps=100_000, components=components))
    chart = drawn("divergence_chart", laid_out)
    assert 0 < chart.count('class="differs"') <= 400


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e90, max_value=1e90)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2**53), NUMBERS), min_size=1, max_size=30))
def test_any_curve_lies_within_its_chart(points):
    points = tuple((float(x), y) for x, y in sorted(points))
    xs, ys = zip(*points, strict=True)
    laid_out = line_chart("c", "t", "x", "y", [Curve("l", points, (Band(xs, ys, ys),))])
    chart = drawn("line_chart", laid_out)
    places = re.findall(r"(-?[0-9.e+]+),(-?[0-9.e+]+)", chart)
    assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 250 for x, y in places)
    assert "nan" not in chart
    assert Reader(chart).open == []


@given(st.lists(st.integers(), max_size=3000), st.integers(2, 100))
def test_thinning_keeps_the_ends_and_the_order(values, most):
    points = [(float(number), 0.0) for number in range(len(values))]
    kept = thinned(points, most)
    assert len(kept) <= max(most, 1)
    assert list(kept) == sorted(kept)
    assert kept[:1] == tuple(points[:1])
    assert kept[-1:] == tuple(points[-1:])


# --- curves -------------------------------------------------------------------------------------


def chart_of(*curves):
    return line_chart("c", "title", "agent steps", "loss", curves)


def straight(number, label="l"):
    """Return a curve through as many points on a line."""
    return Curve(label, tuple((float(n), 2.0 * n) for n in range(number)))


def places(path):
    return [tuple(map(float, place.split(","))) for place in path.split()]


@settings(max_examples=40)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20, unique=True))
def test_equal_distances_are_equally_long_and_larger_values_are_higher(values):
    points = tuple((float(x), float(x)) for x in sorted(values))
    ((_, line, _),) = chart_of(Curve("l", points)).curves
    (x0, y0), (x1, y1) = places(line)[0], places(line)[-1]
    for (x, y), (value, _) in zip(places(line), points, strict=True):
        share = (value - points[0][0]) / (points[-1][0] - points[0][0])
        assert x == pytest.approx(x0 + share * (x1 - x0), abs=0.11)  # places have one decimal
        assert y == pytest.approx(y0 + share * (y1 - y0), abs=0.11)
    assert x1 > x0
    assert y1 < y0  # the vertical axis of SVG points downwards


def test_the_description_names_the_axes_and_the_curves():
    chart = chart_of(straight(3, "recorded"), straight(3, "here"))
    assert chart.title == "title"
    assert chart.description.startswith("loss over agent steps: recorded, here.")


def test_one_point_has_a_marker_and_no_line():
    ((style, line, markers),) = chart_of(Curve("l", ((5.0, 7.0),))).curves
    assert (style, line) == (0, "")
    assert len(markers) == 1
    chart = drawn("line_chart", chart_of(Curve("l", ((5.0, 7.0),))))
    assert (chart.count("<polyline"), chart.count('class="marker')) == (0, 1)


@pytest.mark.parametrize(("points", "markers"), [(24, 24), (25, 0)])
def test_long_curves_have_no_markers(points, markers):
    chart = drawn("line_chart", chart_of(straight(points)))
    assert (chart.count("<polyline"), chart.count('class="marker')) == (1, markers)


def test_curves_beyond_the_fourth_have_the_first_styles_again():
    styles = [style for style, *_ in chart_of(*(straight(2) for _ in range(6))).curves]
    assert styles == [0, 1, 2, 3, 0, 1]


def test_the_outline_of_a_band_goes_along_its_upper_edge_and_back_along_the_lower_one():
    band = Band((0.0, 10.0), (0.0, 0.0), (4.0, 8.0))
    chart = chart_of(Curve("l", ((0.0, 2.0), (10.0, 4.0)), (band,)))
    ((style, outline),) = chart.bands
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = places(outline)
    assert style == 0
    assert ax == dx < bx == cx
    assert by < ay < cy == dy


def test_bands_count_for_the_range_of_the_vertical_axis():
    band = Band((0.0, 1.0), (-100.0, -100.0), (100.0, 100.0))
    chart = chart_of(Curve("l", ((0.0, 0.0), (1.0, 0.0)), (band,)))
    assert [text for _, text in chart.up] == ["-100", "-50", "0", "50", "100"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 400.0, ["0", "100", "200", "300", "400"]),
        (0.0, 8000.0, ["0", "2k", "4k", "6k", "8k"]),
        (0.0, 2e8, ["0", "50M", "100M", "150M", "200M"]),
        (0.0, 4e9, ["0", "1G", "2G", "3G", "4G"]),
        (-0.3, 0.9, ["0", "0.5"]),
        (1.0, 1.0, ["0.5", "1", "1.5"]),
    ],
)
def test_ticks_are_at_round_values(low, high, expected):
    chart = chart_of(Curve("l", ((low, 0.0), (high, 1.0))))
    assert [text for _, text in chart.across] == expected


@settings(max_examples=40)
@given(NUMBERS, NUMBERS)
def test_ticks_ascend_within_the_chart_by_equal_steps(one, other):
    chart = chart_of(Curve("l", ((min(one, other), 0.0), (max(one, other), 1.0))))
    at = [place for place, _ in chart.across]
    assert 1 <= len(at) <= 6
    assert at == sorted(at)
    assert chart.left <= at[0] <= at[-1] <= chart.right
    steps = [later - earlier for earlier, later in pairwise(at)]
    assert all(step == pytest.approx(steps[0], abs=0.21) for step in steps)


def test_equal_curves_give_equal_bytes():
    assert drawn("line_chart", chart_of(straight(9))) == drawn("line_chart", chart_of(straight(9)))


# --- the map of differences ---------------------------------------------------------------------


def map_of(steps=100, **components):
    divergence = DivergenceMap(steps=steps, components=components)
    return divergence_chart("m", "map", divergence)


def test_the_description_names_the_components_that_differ():
    assert map_of(loss=(), streams=()).description == "By component: no component differs."
    chart = map_of(parameters=((1, 2),), loss=((1, 2),), streams=())
    assert chart.description == "By component: differ: loss, parameters."


def test_a_stretch_lies_where_its_steps_are():
    chart = map_of(loss=((25, 50), (75, 100)))
    ((_, _, ((first, width), (second, other))),) = chart.rows
    span = chart.right - chart.left
    assert (first - chart.left) / span == pytest.approx(0.25, abs=0.001)
    assert (second - chart.left) / span == pytest.approx(0.75, abs=0.001)
    assert width == pytest.approx(span / 4, abs=0.11)
    assert other == pytest.approx(span / 4, abs=0.11)


INTERVALS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), max_size=20)


@settings(max_examples=40)
@given(INTERVALS)
def test_every_difference_can_be_seen_and_lies_within_the_chart(found):
    intervals = tuple((first, min(10**6, first + length)) for first, length in found)
    chart = map_of(10**6, loss=intervals)
    ((_, _, stretches),) = chart.rows
    assert len(stretches) == len(intervals)
    for start, width in stretches:
        assert width >= 2
        assert chart.left <= start
        assert start + width <= chart.right + 0.1


def test_merging_closes_narrow_gaps_and_loses_no_difference():
    """Two far intervals stay apart, whatever becomes of a thousand close ones."""
    close = tuple((step, step + 1) for step in range(0, 4000, 4))
    chart = map_of(100_000, loss=(*close, (50_000, 50_001), (99_000, 100_000)))
    ((_, _, stretches),) = chart.rows
    assert 3 <= len(stretches) <= 400
    span = chart.right - chart.left
    assert stretches[0][0] == pytest.approx(chart.left, abs=0.1)
    assert stretches[-2][0] - chart.left == pytest.approx(span * 0.5, abs=0.1)
    assert stretches[-1][0] - chart.left == pytest.approx(span * 0.99, abs=0.1)


def test_rows_are_below_each_other_and_long_names_are_cut():
    chart = map_of(**{"a" * 40: (), "loss": ()})
    (loss, first, _), (name, second, _) = chart.rows
    assert (loss, name) == ("loss", "a" * 14)
    assert first < second < chart.bottom < chart.height


def test_a_map_of_no_steps_has_a_chart():
    chart = map_of(0, loss=((0, 0),))
    assert "nan" not in drawn("divergence_chart", chart)


# --- thinning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (99_998, 100_002), (1e6, 1e6 + 40), (0.12345, 0.12346), (-5e9, -5e9 + 2000), (0, 9e6)],
)
def test_ticks_have_different_labels(low, high):
    chart = line_chart("id", "t", "x", "y", [Curve("c", ((low, 0.0), (high, 1.0)))])
    labels = [label for _, label in chart.across]
    assert len(labels) >= 2
    assert len(set(labels)) == len(labels)


def test_a_short_curve_is_kept_whole_and_a_long_one_has_equal_distances():
    points = [(float(n), 1.0) for n in range(10)]
    assert thinned(points, 10) == tuple(points)
    assert [x for x, _ in thinned(points, 4)] == [0.0, 3.0, 6.0, 9.0]
    assert [x for x, _ in thinned(points, 3)] == [0.0, 5.0, 9.0]
