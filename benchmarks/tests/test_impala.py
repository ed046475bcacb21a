"""IMPALA's benchmarks: what they train and compare, their tables and figures by hand."""

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import catch
import gymnasium
import impala
import learning
import numpy as np
import plain_impala
import pytest
import torch
from chart import COLOURS, Axis, Panel, draw
from learning import CORRECTIONS, LAGS, TASKS, Run, lag_variants, runs_of, train_all

from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.losses.impala import impala_losses, softmax_policy
from capsule.training.losses.v_trace import corrected_targets
from capsule.training.state.frames import FrameLayout

SVG = "{http://www.w3.org/2000/svg}"
SMALL = (
    "trainer.total_steps=400",
    "evaluation.interval=400",
    "recording.trace_interval=40",
    "recording.tensor_interval=400",
    "recording.checkpoint_interval=400",
)


# Catch


def play(environment, seed, choose):
    board, _ = environment.reset(seed=seed)
    boards, rewards, ended = [board], [], False
    while not ended:
        board, reward, ended, truncated, _ = environment.step(choose(board))
        assert not truncated
        boards.append(board)
        rewards.append(reward)
    return boards, rewards


def towards_the_ball(board):
    ball = np.argwhere(board[:-1])[0][1]
    paddle = np.argmax(board[-1])
    return np.sign(ball - paddle) + 1


def test_a_paddle_that_follows_the_ball_catches_it_and_one_that_flees_does_not():
    environment = gymnasium.make(catch.ID, disable_env_checker=True)
    for seed in range(20):
        boards, rewards = play(environment, seed, towards_the_ball)
        assert rewards == [0.0] * (catch.ROWS - 2) + [1.0]
        assert [np.argwhere(board[:-1]).shape for board in boards[:-1]] == [(1, 2)] * 9
        assert boards[0].sum() == boards[-2].sum() == 2
        assert boards[-1].sum() == 1  # the ball is where the paddle is
        missed = play(environment, seed, lambda board: 2 - towards_the_ball(board))[1]
        assert sum(missed) == -1 or np.argmax(boards[0][0]) == catch.COLUMNS // 2


def test_balls_differ_by_seed_and_random_play_scores_what_the_table_says():
    environment = gymnasium.make(catch.ID, disable_env_checker=True)
    draw_action = np.random.default_rng(0).integers
    scores, columns = [], set()
    for seed in range(2_000):
        boards, rewards = play(environment, seed, lambda _: draw_action(3))
        scores.append(sum(rewards))
        columns.add(int(np.argmax(boards[0][0])))
    assert columns == set(range(catch.COLUMNS))
    assert np.mean(scores) == pytest.approx(TASKS["impala-catch"].random, abs=0.05)


# Learning and figure E.1


def test_every_correction_is_trained_at_every_lag_and_nothing_else_differs():
    runs = list(runs_of("lag", 2))
    specs = [run.spec().model_dump(mode="json") for run in runs]
    found = [
        (spec["trainer"].pop("correction"), spec["trainer"].pop("schedule")["policy_lag"])
        for spec in specs
    ]
    assert found == 2 * [(name, lag) for name in CORRECTIONS for lag in LAGS]
    assert [spec.pop("seeds")["root"] for spec in specs] == [0] * 20 + [1] * 20
    assert all(spec == specs[0] for spec in specs)
    assert (
        max(LAGS) * specs[0]["trainer"]["batch_size"] * specs[0]["trainer"]["unroll_length"]
        < specs[0]["trainer"]["total_steps"] / 2
    )


@pytest.mark.parametrize("task", TASKS)
def test_tasks_have_specs_that_differ_by_seed_alone(task):
    first, second = (run.spec() for run in runs_of(task, 2))
    assert first.trainer == second.trainer
    assert (first.seeds.root, second.seeds.root) == (0, 1)
    assert TASKS[task].random < TASKS[task].score


@pytest.mark.slow
def test_results_are_kept_and_not_trained_again(tmp_path, capfd):
    path = tmp_path / "results.json"
    runs = [Run("impala-catch", SMALL, seed) for seed in range(2)]
    first = train_all(runs, path)
    assert [point for point, _ in first[0]["curve"]] == list(range(20, 401, 20))
    assert all(-1 <= first[0][name] <= 1 for name in ("score", "evaluated"))
    assert first[0]["score"] == first[0]["curve"][-1][1]
    assert first[0]["curve"] != first[1]["curve"]
    assert "seed 1" in capfd.readouterr().out
    assert train_all(runs, path) == first == json.loads(path.read_text())
    assert not capfd.readouterr().out
    changed = Run("impala-catch", (*SMALL, "trainer.learning_rate=0.5"), 0)
    assert train_all([changed, *runs], path)[1:] == first
    assert len(json.loads(path.read_text())) == 3


def result_of(correction, lag, seed, score):
    run = Run("lag", learning.changes_of(correction, lag), seed)
    curve = [[20_000, None if seed else -0.5], [40_000, score]]
    spec = learning.said(run.spec())
    return {"spec": spec, "score": score, "curve": curve, "processor_seconds": 3.0 + seed}


@pytest.fixture
def results():
    return [
        result_of(correction, lag, seed, lag / 500 + seed / 10 - (correction == "none"))
        for seed in range(2)
        for correction, lag in lag_variants()
    ]


def test_the_table_of_lags_by_hand(results):
    lines = learning.lag_table(results).splitlines()
    assert lines[0] == "| correction (2 seeds) | lag 0 | lag 1 | lag 10 | lag 100 | lag 500 |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in CORRECTIONS]
    assert lines[2].endswith("| 0.25 (0.20 to 0.30) | 1.05 (1.00 to 1.10) |")
    assert lines[5].endswith("| -0.75 (-0.80 to -0.70) | 0.05 (0.00 to 0.10) |")


def test_figure_e1_has_a_panel_for_each_correction_and_a_line_for_each_lag(results, tmp_path):
    learning.draw_figure(results, 40_000, tmp_path)
    root = ET.parse(tmp_path / "impala-lag.svg").getroot()  # noqa: S314 - our own
    panels = root.findall(f"{SVG}g")
    assert [panel.find(f"{SVG}text").text for panel in panels] == list(CORRECTIONS)
    assert [len(panel.findall(f"{SVG}polyline")) for panel in panels] == [len(LAGS)] * 4


def test_a_mean_curve_begins_where_every_seed_has_a_score(results):
    both = [each for each in results if each["score"] in (0.2, 0.2 + 0.1)]
    assert learning.mean_curve(both[:1]) == [(20_000, -0.5), (40_000, 0.2)]
    assert learning.mean_curve([both[0], both[-1]]) == [(40_000, pytest.approx(0.25))]


def test_the_row_of_a_task_by_hand():
    runs = runs_of("impala-catch", 3)
    spec = learning.said(next(iter(runs)).spec())
    results = [
        {"spec": spec, "score": 0.5, "evaluated": score, "processor_seconds": seconds}
        for score, seconds in ((0.5, 8), (1.0, 9), (0.96, 30))
    ]
    row = learning.task_row("impala-catch", results)
    assert row == "| impala-catch | 40,000 | 0.5, 1, 0.96 | 0.96 | 0.5 | -0.6 | 0.9 | 9 |"


@pytest.mark.parametrize(("score", "status"), [(0.95, 0), (0.2, 1)])
def test_a_task_below_its_bar_is_told_by_the_exit_status(monkeypatch, tmp_path, score, status):
    spec = learning.said(next(iter(runs_of("impala-catch", 1))).spec())
    result = {"spec": spec, "score": 0.5, "evaluated": score, "processor_seconds": 1}
    monkeypatch.setattr(learning, "train_all", lambda *_: [result])
    arguments = ["learning.py", "impala-catch", "--seeds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert learning.main() == status


# Charts


def test_numbers_lie_where_axes_have_them():
    assert Axis("x", -1, 1, ()).place(0.5) == 0.75
    doubling = Axis("x", 1, 256, (), logarithmic=True)
    assert [doubling.place(x) for x in (1, 16, 256)] == pytest.approx([0, 0.5, 1])


def test_a_line_is_drawn_from_its_points_and_names_are_escaped(tmp_path):
    lines = {"a < b": [(0, 0), (5, 10), (10, 5)]}
    axis = Axis("both", 0, 10, (0, 10))
    draw(tmp_path / "chart.svg", [Panel("one", lines, axis), Panel("two", {}, axis)], axis)
    root = ET.parse(tmp_path / "chart.svg").getroot()  # noqa: S314 - our own
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "0.0,190.0 130.0,0.0 260.0,95.0"
    assert "a < b" in [text.text for text in root.iter(f"{SVG}text")]


def test_more_lines_than_colours_are_refused(tmp_path):
    lines = {str(number): [] for number in range(len(COLOURS) + 1)}
    axis = Axis("both", 0, 1, ())
    with pytest.raises(ValueError, match="7 lines"):
        draw(tmp_path / "chart.svg", [Panel("one", lines, axis)], axis)


def test_a_chart_is_wide_enough_for_the_last_mark(tmp_path: Path) -> None:
    def width(last: int) -> int:
        panel = Panel("one", {"a": [(0, 1)]}, Axis("y", 0, 1, (0, 1)))
        draw(tmp_path / "chart.svg", [panel], Axis("x", 0, last, (0, last)))
        return int(ET.parse(tmp_path / "chart.svg").getroot().get("width", ""))  # noqa: S314

    assert width(10) < width(1_000_000) < width(1_000_000_000)


# Speed


def noise_batch():
    draw = torch.Generator().manual_seed(0)
    rows = plain_impala.UNROLL + 1, plain_impala.BATCH
    batch = {
        "observations": torch.randint(0, 256, (*rows, 4, 84, 84), generator=draw).byte(),
        "rewards": torch.randint(-1, 2, rows, generator=draw).float(),
        "ended": torch.rand(rows, generator=draw) < 0.1,
        "actions": torch.randint(0, 4, rows, generator=draw),
    }
    return batch | {"log_behaviour": -2 * torch.rand(rows, generator=draw)}


@pytest.mark.slow
def test_the_shared_queue_learns_with_the_same_loss():
    torch.manual_seed(0)
    network, batch = plain_impala.make_torch_network(), noise_batch()
    with torch.no_grad():
        logits, baselines = network(batch["observations"])
        policy = softmax_policy(logits[:-1])
        log_target = policy.of(batch["actions"][:-1])
        targets = corrected_targets(
            ImpalaTrainer(algorithm="impala"),
            log_target,
            batch["log_behaviour"][:-1],
            batch["rewards"][1:],
            0.99 * ~batch["ended"][1:],
            baselines,
        )
        expected = impala_losses(log_target, policy.entropies, baselines[:-1], targets).total
        assert plain_impala.torch_loss(network, batch).item() == pytest.approx(
            expected.item(), rel=1e-4
        )


def test_the_shared_queue_has_the_same_network():
    from capsule.training.layers.backends import FIXED_ORDER
    from capsule.training.networks.actor_critic import make_actor_critic_network

    ours = make_actor_critic_network(
        "shallow",
        frame_stack=4,
        layout=FrameLayout((84, 84)),
        actions=len(plain_impala.minimal_actions()),
        recurrent_units=0,
        hidden_units=256,
        products=FIXED_ORDER,
    )
    theirs = plain_impala.make_torch_network().parameters()
    sizes = sorted(int(np.prod(shape)) for shape in ours.shapes.values())
    assert sizes == sorted(parameter.numel() for parameter in theirs)


def test_the_shared_queue_plays_the_same_game():
    game = plain_impala.make_gymnasium_game()
    observation, _ = game.reset(seed=0)
    assert (observation.shape, observation.dtype) == ((4, 84, 84), np.uint8)
    assert game.action_space.n == len(plain_impala.minimal_actions())


def test_contenders_differ_by_what_their_names_say():
    specs = [impala.spec_of(each).trainer for each in (*impala.LOCKSTEP, impala.ASYNCHRONOUS)]
    assert [(each.schedule.mode, each.schedule.policy_lag) for each in specs] == [
        ("lockstep", 0),
        ("lockstep", 1),
        ("lockstep", 2),
        ("recorded", 8),
    ]
    same = {each.model_dump_json(exclude={"schedule"}) for each in specs}
    assert len(same) == 1


def test_processes_stand_still_when_it_is_not_their_turn(monkeypatch):
    with subprocess.Popen(["sleep", "6000"]) as process:
        monkeypatch.setattr(impala.multiprocessing, "active_children", lambda: [process])

        def state():
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]

        with impala.its_turn():
            assert state() != "T"
        deadline = time.monotonic() + 600
        while state() != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state() == "T"
        process.kill()


def test_processor_time_is_that_of_all_processes(monkeypatch):
    this = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(impala.multiprocessing, "active_children", lambda: [this])
    before, found, after = time.process_time(), impala.processor_seconds(), time.process_time()
    # The kernel counts the time of other processes in hundredths of a second.
    assert 2 * before - 0.05 <= found <= 2 * after + 0.05


def test_a_stopwatch_counts_what_methods_take(monkeypatch):
    class Sleeper:
        def sleep(self, seconds):
            time.sleep(seconds)
            return "slept"

    watch = impala.Stopwatch((Sleeper, "sleep"))
    began = time.perf_counter()
    assert Sleeper().sleep(0.02) == "slept"
    assert 0.02 <= watch.seconds <= time.perf_counter() - began


def test_the_table_of_costs_by_hand():
    speeds = {"1": {1: 10.4, 16: 20.6}, "2": {1: 11.0, 16: 39.5}}
    assert impala.cost_table(speeds).splitlines() == [
        "| actors | processes: 1 | processes: 2 |",
        "|---|---|---|",
        "| 1 | 10 | 11 |",
        "| 16 | 21 | 40 |",
    ]


def test_the_page_shows_the_kept_costs():
    kept = json.loads((impala.RESULTS / "impala-cost.json").read_text())
    page = (impala.RESULTS.parent / "README.md").read_text()
    assert impala.cost_table(kept["frames_per_second"]) in page


def test_costs_are_kept_with_their_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(impala, "RESULTS", tmp_path / "results")
    impala.keep_cost({"1": {1: 900.0, 256: 2_100.0}}, "wall")
    kept = json.loads((tmp_path / "results" / "impala-cost.json").read_text())
    assert kept["frames_per_second"] == {"1": {"1": 900.0, "256": 2_100.0}}
    root = ET.parse(tmp_path / "results" / "impala-cost.svg").getroot()  # noqa: S314
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "0.0,133.0 260.0,57.0"
