"""The learning curves at MinAtar's games."""

import xml.etree.ElementTree as ET

import pytest
from minatar_curves import BASELINES, FRAMES, GAMES, INTERVAL, draw_curves, study_lines

SVG = "{http://www.w3.org/2000/svg}"
BREAKOUT = ("Capsule's IMPALA", "breakout")


def test_the_published_study_of_impala_has_a_curve_for_every_game():
    curves = {game: line for name, game, line in study_lines() if name == "Capsule's IMPALA"}
    assert [*curves] == [*GAMES]
    for line in curves.values():
        assert [step for step, _ in line] == [*range(0, FRAMES + 1, INTERVAL)]


def test_a_curve_is_the_mean_of_the_runs():
    (line,) = (line for name, game, line in study_lines() if (name, game) == BREAKOUT)
    assert line[-1] == (FRAMES, pytest.approx(11.006))  # results/README.md has 11.01


def test_each_game_has_a_panel_with_every_agent_that_played_it(tmp_path):
    curve = [[0, 0.5], [FRAMES, 4.0]]
    results = [{"agent": a, "game": g, "curve": curve} for a in BASELINES for g in GAMES]
    draw_curves(results, tmp_path / "curves.svg")
    root = ET.parse(tmp_path / "curves.svg").getroot()  # noqa: S314 - our own
    panels = root.findall(f"{SVG}g")
    played = [(name, game) for name, game, _ in study_lines()]
    played += [(name, game) for name in BASELINES.values() for game in GAMES]
    found = [len(panel.findall(f"{SVG}polyline")) for panel in panels]
    assert found == [sum(of == game for _, of in played) for game in GAMES]
    assert {name for name, _ in played} <= {text.text for text in root.iter(f"{SVG}text")}
