"""The learning curves at MinAtar's games."""

import xml.etree.ElementTree as ET

import minatar_curves
import pytest
from minatar_curves import BASELINES, FRAMES, GAMES, INTERVAL, draw_curves, rounded_up, study_lines

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("score", "top"), [(0.45, 0.5), (1, 1), (5.9, 6), (9.5, 10), (22.8, 30), (129, 200)]
)
def test_an_axis_ends_at_the_next_number_with_one_digit(score, top):
    assert rounded_up(score) == pytest.approx(top)


def test_the_published_studies_have_a_curve_for_every_game():
    lines = [*study_lines()]
    assert {name for name, _, _ in lines} <= minatar_curves.STUDIES.keys()
    assert ("Capsule's IMPALA", *GAMES) == (
        lines[0][0],
        *(game for name, game, _ in lines if name == "Capsule's IMPALA"),
    )
    assert all(
        [step for step, _ in line] == [*range(0, FRAMES + 1, INTERVAL)] for *_, line in lines
    )


def test_each_game_has_a_panel_with_every_agent(tmp_path):
    curve = [[0, 0.5], [FRAMES, 4.0]]
    results = [{"agent": a, "game": g, "curve": curve} for a in BASELINES for g in GAMES]
    draw_curves(results, tmp_path / "curves.svg")
    root = ET.parse(tmp_path / "curves.svg").getroot()  # noqa: S314 - our own
    panels = root.findall(f"{SVG}g")
    agents = {name for name, _, _ in study_lines()} | {*BASELINES.values()}
    assert [len(panel.findall(f"{SVG}polyline")) for panel in panels] == [len(agents)] * len(GAMES)
    assert agents <= {text.text for text in root.iter(f"{SVG}text")}
