"""The comparison of R2D2's strategies: what is run, that nothing is run twice, and the tables."""

import json

import pytest
import r2d2_paper
from r2d2_paper import BASELINE, STRATEGIES, TASKS, launch, make_spec, report, result_path

SMALL = {"total_steps": 1_200, "replay_start": 600, "target_interval": 5}


@pytest.mark.parametrize("task", TASKS)
def test_strategies_differ_by_the_recurrent_state_alone(task):
    trainers = {name: make_spec(task, name, 3, {}).trainer.model_dump() for name in STRATEGIES}
    reference = trainers["stored + burn-in"]
    assert reference["recurrent_units"]
    assert reference["burn_in"] == TASKS[task].burn_in > 0
    for strategy, trainer in trainers.items():
        state, burns_in = STRATEGIES[strategy]
        units = 0 if strategy == BASELINE else reference["recurrent_units"]
        burn_in = reference["burn_in"] if burns_in else 0
        expected = {"recurrent_state": state, "burn_in": burn_in, "recurrent_units": units}
        assert trainer == {**reference, **expected}
    assert make_spec(task, "zero", 3, {}).seeds.root == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stored + burn-in", BASELINE])
def test_a_run_leaves_its_measurements_and_is_not_repeated(tmp_path, capfd, strategy):
    launch(tmp_path, "cartpole-positions", strategy, 0, changes=SMALL)
    path = result_path(tmp_path, "cartpole-positions", strategy, 0)
    result = json.loads(path.read_text())
    assert result["score"] == result["histories"][-1]["score"] > 0
    assert [point["history"] for point in result["histories"]] == [
        *TASKS["cartpole-positions"].histories,
        None,
    ]
    updates = (1_200 - 600) // 40
    assert 0 < result["lag"] < updates
    assert 0 < result["replay_ratio"] <= 32 * 10 * updates / 1_200
    assert (result["discrepancy"]["last"] > 0) == (strategy != BASELINE)
    assert "seed 0" in capfd.readouterr().out
    before = path.stat().st_mtime_ns
    launch(tmp_path, "cartpole-positions", strategy, 0, changes=SMALL)
    assert path.stat().st_mtime_ns == before
    launch(tmp_path, "cartpole-positions", strategy, 0, changes={**SMALL, "target_interval": 3})
    assert path.stat().st_mtime_ns > before


def run_of(strategy, seed, score):
    points = [
        {"history": 1, "score": score / 2, "difference": 0.5, "agreement": 0.25},
        {"history": None, "score": score, "difference": 0.0, "agreement": 1.0},
    ]
    return {
        "task": "repeat-previous",
        "strategy": strategy,
        "seed": seed,
        "score": score,
        "histories": points,
        "lag": 12.4,
        "replay_ratio": 2.345,
        "discrepancy": {"first": 0.25, "last": 0.125},
    }


def test_tables_by_hand():
    results = [run_of("zero", seed, 1.0) for seed in range(4)]
    results += [run_of(BASELINE, seed, score) for seed, score in enumerate((-9, 1, 3, 99))]
    lines = report(results).splitlines()
    assert lines[0].startswith("**repeat-previous**: scores of 20 greedy episodes, 4 seeds; random")
    measured = "0.25 (0.25 to 0.25) | 0.125 (0.125 to 0.125) | 12 | 2.35 |"
    assert lines[4] == f"| zero | 1 (1 to 1) | {measured}"
    # Of four resampled scores, three or more are -9 with a chance of 13/256.
    assert lines[5].startswith(f"| {BASELINE} | 2 (-9 to 99) |")
    assert lines[5].endswith(" | - | - | 12 | 2.35 |")
    assert lines[9:] == [
        "| strategy | k = | 1 | all |",
        "|---|---|---|---|",
        "| zero | score | 0.5 | 1 |",
        "| zero | difference | 0.5 | 0 |",
        "| zero | agreement | 0.25 | 1 |",
        f"| {BASELINE} | score | 1 | 2 |",
        f"| {BASELINE} | difference | 0.5 | 0 |",
        f"| {BASELINE} | agreement | 0.25 | 1 |",
    ]


@pytest.mark.slow
def test_figures_are_drawn_where_matplotlib_is(tmp_path, monkeypatch, capsys):
    r2d2_paper.draw([run_of(strategy, 0, 1.0) for strategy in STRATEGIES], tmp_path)
    figure = tmp_path / "repeat-previous.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    figure.unlink()
    monkeypatch.setattr(r2d2_paper.importlib.util, "find_spec", lambda _: None)
    r2d2_paper.draw([run_of("zero", 0, 1.0)], tmp_path)
    assert not list(tmp_path.iterdir())
    assert "matplotlib is not installed" in capsys.readouterr().out
