"""Charts of the page: curves with bands, and the map of where two runs differ."""

import re

import pytest
from hypothesis import given
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
