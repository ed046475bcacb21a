"""Scores of runs and of groups: computed by hand, and as the command and the page show them."""

import io
import json
from math import inf, nan, sqrt
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.cli.scores import _show, _show_groups, _show_runs
from capsule.report.page import report_page
from capsule.report.scores import (
    RunScores,
    SampleSummary,
    Score,
    ScoredTask,
    aggregates,
    group_scores,
    run_scores,
    summarize,
)
from tests.report import runs
from tests.report.conftest import read
from tests.report.pages import Reader

STUDY = Path(__file__).parents[1] / "corpus" / "study.capsule-study.tar"

BREAKOUT, CARTPOLE = ScoredTask("atari", "breakout"), ScoredTask("gymnasium", "CartPole-v1")


def test_a_sample_is_summarised_by_hand():
    # mean 5; squared deviations 9, 1, 1, 1, 0, 0, 4, 16 add up to 32; 32 / 7
    summary = summarize([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert summary == pytest.approx(SampleSummary(5.0, sqrt(32 / 7), sqrt(32 / 7) / 5))


def test_the_relative_deviation_is_a_share_of_the_size_of_the_mean():
    # Pong: -20 and -18 lie 1 on either side of -19
    assert summarize([-20.0, -18.0]) == pytest.approx(SampleSummary(-19.0, sqrt(2), sqrt(2) / 19))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], SampleSummary(3.0, None, None)),
        ([-1.0, 1.0], SampleSummary(0.0, sqrt(2), None)),
        ([146.7] * 5, SampleSummary(146.7, 0.0, 0.0)),
    ],
)
def test_what_has_no_deviation_has_none(values, expected):
    assert summarize(values) == expected


def scores(task, final, best, bundle="a"):
    def score(step, mean):
        return Score(step, 1, SampleSummary(mean, None, None))

    return RunScores(
        bundle, "id", "training", task, {"final": score(9, final), "best": score(5, best)}
    )


def test_groups_are_summaries_over_the_scores_of_runs():
    found = [(30.5, 59.3), (16.1, 30.5), (1.7, 1.7)]
    breakout, cartpole = group_scores(
        [scores(CARTPOLE, 500.0, 500.0), *(scores(BREAKOUT, *pair) for pair in found)]
    )
    assert (breakout.task, breakout.runs, cartpole.task, cartpole.runs) == (
        BREAKOUT,
        3,
        CARTPOLE,
        1,
    )
    # 14.4 on either side of 16.1: the sum of squares is 2 * 14.4 ** 2, and N - 1 is 2
    assert breakout.summaries["final"] == pytest.approx(SampleSummary(16.1, 14.4, 14.4 / 16.1))
    # a person is 28.8 points above random play
    assert breakout.human_normalized["final"] == pytest.approx(0.5)
    assert breakout.human_normalized["best"] == pytest.approx((91.5 / 3 - 1.7) / 28.8)
    assert cartpole.human_normalized == {"final": None, "best": None}


def test_aggregates_are_over_the_games_that_have_references():
    # freeway: random play 0, a person 29.6
    found = [
        scores(BREAKOUT, 16.1, 30.5),
        scores(ScoredTask("atari", "freeway"), 59.2, 59.2),
        scores(CARTPOLE, 500.0, 500.0),
    ]
    total = aggregates(group_scores(found))
    assert total["final"] == pytest.approx((1.25, 1.25, 0.75))
    assert total["best"] == pytest.approx((1.5, 1.5, 1.0))
    assert aggregates(group_scores([scores(CARTPOLE, 1.0, 1.0)])) is None


def test_the_breakout_of_minatar_is_not_that_of_atari():
    minatar = scores(ScoredTask("minatar", "breakout"), 16.1, 16.1)
    atari, other = group_scores([minatar, scores(BREAKOUT, 16.1, 16.1)])
    assert (atari.runs, other.runs) == (1, 1)
    assert (atari.task.suite, other.human_normalized["final"]) == ("atari", None)


def packed(folder, returns, document=runs.DQN):
    return runs.pack(folder, document, evaluation=runs.evaluation(returns))


def test_the_best_network_has_the_highest_mean_and_is_the_earliest_of_equals(tmp_path):
    returns = {0: (0.0, 0.0), 100: (4.0, 8.0), 200: (6.0, 6.0), 400: (1.0, 3.0)}
    (found,) = run_scores(read(packed(tmp_path, returns)))
    assert found.task == CARTPOLE
    assert found.scores["best"] == Score(100, 2, SampleSummary(6.0, sqrt(8), sqrt(8) / 6))
    assert found.scores["final"] == Score(400, 2, SampleSummary(2.0, sqrt(2), sqrt(2) / 2))


def test_games_that_take_turns_are_scored_apart(tmp_path):
    returns = {200: (-20.0, 10.0, -18.0, 20.0), 640: (-21.0, 40.0, -21.0, 50.0)}
    pong, breakout = run_scores(read(packed(tmp_path, returns, runs.POPULATION)))
    assert (pong.task.name, breakout.task.name) == ("pong", "breakout")
    assert (pong.scores["best"].step, pong.scores["best"].summary.mean) == (200, -19.0)
    assert (breakout.scores["best"].step, breakout.scores["best"].summary.mean) == (640, 45.0)
    assert pong.scores["final"].summary.mean == -21.0


def program(tmp_path, lines):
    outputs = {"out/evaluation.jsonl": "".join(json.dumps(line) + "\n" for line in lines)}
    return runs.pack(tmp_path, runs.PROGRAM, outputs=outputs)


def test_a_program_is_scored_by_the_evaluations_it_wrote(tmp_path):
    lines = [{"step": 10, "returns": [1, 3]}, {"step": 20, "returns": [2, 2]}]
    (found,) = run_scores(read(program(tmp_path, lines)))
    assert found.task == ScoredTask("program", "own")
    assert found.scores["final"] == Score(20, 2, SampleSummary(2.0, 0.0, 0.0))


# --- the command --------------------------------------------------------------------------------


def capsule_scores(*arguments):
    return CliRunner().invoke(app, ["scores", *map(str, arguments)])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Three runs whose final scores are 1, 2 and 3, and whose best ones are 10, 10 and 13."""
    folders = [tmp_path_factory.mktemp("group") for _ in range(3)]
    final, best = (1.0, 2.0, 3.0), (10.0, 10.0, 13.0)
    rows = zip(folders, final, best, strict=True)
    return [packed(folder, {200: (b, b), 400: (f, f)}) for folder, f, b in rows]


def test_the_command_writes_table_1_of_nagarajan_et_al_as_json(group):
    done = capsule_scores(*group, "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    (game,) = document["games"]
    assert document["ddof"] == 1
    assert (game["suite"], game["name"], game["runs"]) == ("gymnasium", "CartPole-v1", 3)
    assert game["final"] == pytest.approx(
        {
            "mean": 2.0,
            "standard_deviation": 1.0,
            "relative_standard_deviation": 0.5,
            "human_normalized": None,
        }
    )
    assert game["best"] == pytest.approx(
        {
            "mean": 11.0,
            "standard_deviation": sqrt(3),
            "relative_standard_deviation": sqrt(3) / 11,
            "human_normalized": None,
        }
    )
    assert document["human_normalized"] is None
    assert [run["bundle"] for run in document["runs"]] == [str(path) for path in group]
    assert [run["final"]["step"] for run in document["runs"]] == [400] * 3
    assert [run["best"]["step"] for run in document["runs"]] == [200] * 3


def test_runs_of_equal_names_are_told_apart(group):
    same = [path.with_name("same.capsule.tar") for path in group]
    for path, copy in zip(group, same, strict=True):
        copy.hardlink_to(path)
    shown = capsule_scores(*same).stdout
    assert all(f"run {number}: {path}" in shown for number, path in enumerate(same, 1))


def test_a_run_does_not_count_twice(group, tmp_path):
    copy = tmp_path / "copy.capsule.tar"
    copy.write_bytes(group[0].read_bytes())
    for again in (group[0], copy):
        done = capsule_scores(*group, again)
        assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-S013")


def test_a_run_does_not_count_again_with_another_engine(group, tmp_path):
    """Its claims have other flags then, an image, and no relaxation."""
    flags = {"environment.PYTHONHASHSEED": "0", "environment.PATH": "/usr/bin"}
    evaluation = runs.evaluation({200: (10.0, 10.0), 400: (1.0, 1.0)})
    other = runs.pack(tmp_path, evaluation=evaluation, flags=flags)
    (one,), (again,) = (run_scores(read(path)) for path in (group[0], other))
    assert (one.claim_id != again.claim_id, one.training) == (True, again.training)
    done = capsule_scores(*group, other)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-S013")


def test_a_folder_and_a_study_are_answered_with_the_command_for_them(tmp_path):
    done = capsule_scores(tmp_path)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (2, "CAP-B101")
    assert "capsule study report" in done.stderr
    done = capsule_scores(STUDY)
    assert (done.exit_code, "capsule study report" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_command_shows_runs_and_groups_in_tables(group):
    done = capsule_scores(*group)
    assert done.exit_code == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    assert "3 CartPole-v1 final 400 2 3 0 0.0%" in rows
    assert "CartPole-v1 best 3 11 1.73205 15.7% -" in rows
    assert "human-normalised over games" not in done.stdout


def test_references_are_used_where_there_are_some(tmp_path):
    returns = {640: (-20.7, 1.7, -20.7, 30.5)}
    bundle = packed(tmp_path, returns, runs.POPULATION)
    document = json.loads(capsule_scores(bundle, "--json").stdout)
    breakout, pong = document["games"]
    assert breakout["final"]["human_normalized"] == pytest.approx(0.5)
    assert pong["final"]["human_normalized"] == pytest.approx(0.0)
    assert document["human_normalized"]["final"]["mean"] == pytest.approx(0.25)
    shown = capsule_scores(bundle).stdout
    assert "human-normalised over games, final: median 25.0%, mean 25.0%" in shown


def test_a_run_without_evaluations_is_refused(bundles):
    done = capsule_scores(bundles["own"])
    assert done.exit_code == 2
    assert "CAP-S008" in done.stderr
    assert "the run has no evaluation" in done.stderr


@pytest.mark.parametrize("value", [nan, inf, 1e300])
def test_a_return_that_is_no_finite_number_is_refused_and_the_page_says_so(tmp_path, value):
    bundle = packed(tmp_path, {200: (1.0, value), 400: (1.0, 1.0)})
    done = capsule_scores(bundle)
    assert done.exit_code == 2
    reason = "the evaluation of step 200 has a return that is not a finite number"
    assert reason in " ".join(done.stderr.split())
    assert f"There are no scores: {reason}." in Reader(report_page(read(bundle))).words


def test_names_from_a_bundle_style_nothing(tmp_path):
    document = {**runs.DQN, "environment": {"suite": "gymnasium", "id": "[b]C[/b]-v1"}}
    done = capsule_scores(packed(tmp_path, {400: (1.0,)}, document))
    assert "[b]C[/b]-v1" in done.stdout


# --- the report ---------------------------------------------------------------------------------


def test_the_terminal_shows_the_same_scores(tmp_path):
    bundle = packed(tmp_path, {200: (10.0, 12.0), 400: (1.0, 3.0)})
    shown = CliRunner().invoke(app, ["report", str(bundle)]).stdout
    assert "final network, step 400: 2, standard deviation 1.41421 (70.7%)" in shown
    assert "best network, step 200: 11, standard deviation 1.41421 (12.9%)" in shown


def test_the_page_shows_the_same_scores(tmp_path):
    returns = {640: (-20.7, 1.7, -20.7, 30.5)}
    words = Reader(report_page(read(packed(tmp_path, returns, runs.POPULATION)))).words
    assert "Scores of the run" in words
    assert "final, breakout 640 2 16.1 20.3647 126.5% 50.0%" in words
    assert "best, pong 640 2 -20.7 0 0.0% 0.0%" in words


def test_nothing_of_a_table_is_left_out_in_a_pipe(capsys):
    score = Score(50_000_000, 30, SampleSummary(123456.7, 23456.78, 0.19))
    pair = {"final": score, "best": score}
    names = ("montezuma_revenge", "demonstrations_of_a_game_with_a_long_name")
    found = [RunScores("a", "0", name, ScoredTask("atari", name), pair) for name in names]
    _show(found, group_scores(found))
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = ["final", "50,000,000", "30", "123457", "23456.8", "19.0%"]
    assert all(["1", name, *numbers] in cells for name in names)


def test_the_tables_of_atari_fit_a_terminal():
    score = Score(50_000_000, 30, SampleSummary(123456.7, 23456.78, 0.19))
    pair = {"final": score, "best": score}
    found = [RunScores("a", "0", "0", ScoredTask("atari", "montezuma_revenge"), pair)]
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    _show_runs(found, console)
    _show_groups(group_scores(found), console)
    assert "…" not in stream.getvalue()
    # In the wider of the two tables, the name takes two lines.
    assert stream.getvalue().count("montezuma") == 4
    assert stream.getvalue().count("50,000,000") == 2
