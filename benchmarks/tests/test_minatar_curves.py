"""The learning curves at MinAtar's games."""

import json
import xml.etree.ElementTree as ET

import pytest
from minatar_curves import (
    BASELINES,
    FRAMES,
    GAMES,
    INTERVAL,
    RESULTS,
    baseline_lines,
    draw_curves,
    study_lines,
)

pytestmark = pytest.mark.slow  # the tables of the published studies are computed again

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


def test_the_page_shows_the_last_evaluations():
    lines = [*study_lines(), *baseline_lines(json.loads(RESULTS.read_text()))]
    last = {(name, game): curve[-1][1] for name, game, curve in lines}
    page = (RESULTS.parents[1] / "README.md").read_text()
    agents = ["Capsule's IMPALA", "Capsule's DQN", *BASELINES.values()]
    assert f"| game | {' | '.join(agents)} |" in page
    for game in GAMES:
        returns = [last.get((agent, game)) for agent in agents]
        cells = ["" if each is None else f"{each:.{int(each < 100)}f}" for each in returns]
        row = f"| {' | '.join([game.replace('_', ' ').title(), *cells])} |"
        assert row.replace("|  |", "| |") in page
