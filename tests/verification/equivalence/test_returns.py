"""When returns within a tolerance count as reproduced, when they do not, and when nobody knows."""

import io
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console
from scipy import stats

from capsule.experiment.contract import Evaluation, EvaluationPoint
from capsule.experiment.evaluation import EvaluationSpec, ToleranceSpec
from capsule.experiment.spec import (
    AtariEnvironment,
    GymnasiumEnvironment,
    Spec,
)
from capsule.experiment.trainers import DqnTrainer
from capsule.report.terminal import show_report
from capsule.verification.equivalence import statistics
from capsule.verification.equivalence.returns import compare_returns, minimum_starts, outcome_of
from capsule.verification.verdict import Report

CARTPOLE = GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1")
CLAIM = "ab" * 32


def spec(environment=CARTPOLE, **tolerance):
    declared = ToleranceSpec(**tolerance) if tolerance else None
    # Not validated as a whole: several games need another trainer.
    return Spec.model_construct(
        name="test",
        environment=environment,
        trainer=DqnTrainer(algorithm="dqn", network="mlp"),
        evaluation=EvaluationSpec(tolerance=declared),
    )


def evaluation(returns, step=400, starts=None):
    texts = tuple(value if isinstance(value, str) else float(value).hex() for value in returns)
    point = EvaluationPoint(step=step, returns=texts, lengths=(1,) * len(texts))
    earlier = EvaluationPoint(step=step // 2, returns=("nan",), lengths=(1,))
    return Evaluation(starts=starts or ((0,),) * len(texts), points=(earlier, point))


def compared(recorded, found, *, starts=None, **tolerance):
    return compare_returns(
        spec(**tolerance), CLAIM, evaluation(recorded), evaluation(found, starts=starts)
    )


def sample(seed, size=50, mean=200.0, spread=20.0):
    return stats.norm.rvs(mean, spread, size, random_state=seed).tolist()


def shifted(returns, by, seed=9, noise=5.0):
    return [a + by + b for a, b in zip(returns, sample(seed, len(returns), 0, noise), strict=True)]


@cache
def statistics_of(by, **tolerance):
    recorded = sample(1)
    return compared(recorded, shifted(recorded, by), **tolerance)


# --- what is decided ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "outcome"), [(0, "within"), (-8, "within"), (-60, "outside"), (60, "outside")]
)
def test_a_difference_is_held_against_the_tolerance(by, outcome):
    found = statistics_of(by, relative=0.1)
    (task,) = found.tasks
    (criterion,) = task.criteria
    assert outcome_of(found) == criterion.outcome == outcome
    assert criterion.bound == pytest.approx(0.1 * task.recorded_metric.estimate)
    assert task.recorded_metric.estimate == pytest.approx(stats.trim_mean(sample(1), 0.25))
    assert task.difference.low < task.difference.estimate < task.difference.high
    assert (found.confidence, found.step, len(task.recorded)) == (0.9, 400, 50)


def test_an_interval_has_the_declared_risk_and_the_draws_of_its_claim():
    recorded = sample(1)
    found = shifted(recorded, 0)

    def apart(a, b):
        return (statistics.interquartile_mean(b) - statistics.interquartile_mean(a),)

    pairs = list(zip(recorded, found, strict=True))
    (column,) = statistics.bootstrap_pairs(pairs, apart, f"{CLAIM}/0", paired=True)
    (task,) = compared(recorded, found, relative=0.1, alpha=0.02).tasks
    assert task.difference.low == statistics.quantile(column, 0.02)
    assert task.difference.high == statistics.quantile(column, 0.98)


def test_no_significant_difference_is_not_enough():
    """Twenty noisy returns: the tests find nothing, and the interval decides nothing."""
    recorded, other = sample(2, 20), sample(3, 20)
    starts = tuple((start,) for start in range(20))
    found = compared(recorded, other, starts=starts, relative=0.03)
    (task,) = found.tasks
    assert not task.paired
    assert task.rank_sum.p_value > 0.3
    assert outcome_of(found) == "undecided"
    (criterion,) = task.criteria
    assert criterion.starts_needed > 20
    assert f"about {criterion.starts_needed} starts would be needed" in found.shown


def test_an_absolute_tolerance_is_held_to_the_scale_of_the_verifiers_own_returns():
    """Pong ends between -21 and 21: a tolerance of 1,000 would accept whatever is claimed."""
    forged, found = [15.0] * 30, [-21.0] * 29 + [-20.0]
    result = compared(forged, found, absolute=1000.0)
    assert result.tasks[0].criteria[0].bound == pytest.approx(0.2 * 21)
    assert outcome_of(result) == "outside"
    assert outcome_of(compared(found, found, absolute=1000.0)) == "within"


@pytest.mark.slow
def test_as_many_starts_as_said_to_be_needed_decide():
    recorded = sample(4, 25)
    found = compared(recorded, shifted(recorded, 0, noise=25), absolute=12.0)
    (criterion,) = found.tasks[0].criteria
    assert criterion.outcome == "undecided"
    assert 25 < criterion.starts_needed < 200
    more = sample(4, 2 * criterion.starts_needed)
    again = compared(more, shifted(more, 0, noise=25), absolute=12.0)
    assert outcome_of(again) == "within"


def test_too_few_starts_decide_nothing_however_equal():
    few = [500.0] * (minimum_starts(0.05) - 1)
    found = compared(few, few, relative=0.05)
    (criterion,) = found.tasks[0].criteria
    assert (outcome_of(found), criterion.starts_needed) == ("undecided", minimum_starts(0.05))
    enough = [500.0] * minimum_starts(0.05)
    assert outcome_of(compared(enough, enough, relative=0.05)) == "within"


def test_enough_starts_meet_a_quarter_that_behaves_otherwise():
    for alpha in (0.01, 0.05, 0.2):
        starts = minimum_starts(alpha)
        assert 0.75**starts <= alpha < 0.75 ** (starts - 1)


def test_a_difference_as_large_as_the_tolerance_is_not_shown_by_more_starts():
    recorded = sample(5, 30)
    found = compared(recorded, shifted(recorded, 21, noise=40), absolute=20.0)
    (criterion,) = found.tasks[0].criteria
    assert (criterion.outcome, criterion.starts_needed) == ("undecided", None)
    assert "the difference that was found is at least as large" in found.shown


def test_a_relative_tolerance_of_nothing_is_none():
    found = compared([0.0] * 30, [0.0] * 30, relative=0.05)
    (criterion,) = found.tasks[0].criteria
    assert (criterion.bound, criterion.outcome) == (0.0, "undecided")


def test_cliffs_delta_is_a_further_bound():
    recorded = sample(6, spread=1.0)
    other = shifted(recorded, 2, noise=0.1)  # 1 % more, but nearly always more
    assert outcome_of(compared(recorded, other, relative=0.05)) == "within"
    both = compared(recorded, other, relative=0.05, cliffs_delta=0.147)
    assert [criterion.outcome for criterion in both.tasks[0].criteria] == ["within", "outside"]
    assert outcome_of(both) == "outside"
    assert "Cliff's delta" in both.shown


def test_the_mean_sees_what_the_interquartile_mean_leaves_out():
    recorded = [100.0] * 80 + [0.0] * 20
    other = [100.0] * 100
    assert outcome_of(compared(recorded, other, relative=0.05)) == "within"
    assert outcome_of(compared(recorded, other, metric="mean", relative=0.05)) == "outside"


def test_pairs_see_what_separate_samples_cannot():
    recorded = sample(7, spread=60.0)
    other = shifted(recorded, 1, noise=1.0)
    starts = tuple((start,) for start in range(50))
    assert outcome_of(compared(recorded, other, relative=0.02)) == "within"
    assert outcome_of(compared(recorded, other, starts=starts, relative=0.02)) == "undecided"
    assert compared(recorded, other, starts=starts).tasks[0].signed_rank is None


def test_every_game_is_judged_by_itself():
    games = AtariEnvironment(suite="atari", game="pong", further_games=("breakout",))
    both = zip(sample(1, 30, 20, 1), sample(2, 30, 400, 9), strict=True)
    recorded = [value for pair in both for value in pair]
    other = [value * (0.5 if index % 2 else 1) for index, value in enumerate(recorded)]
    found = compare_returns(
        spec(games, relative=0.1), CLAIM, evaluation(recorded), evaluation(other)
    )
    outcomes = {task.task: task.criteria[0].outcome for task in found.tasks}
    assert outcomes == {"pong": "within", "breakout": "outside"}
    assert outcome_of(found) == "outside"


def test_without_a_tolerance_there_are_numbers_and_no_decision():
    recorded = sample(1)
    found = compared(recorded, shifted(recorded, 0))
    assert found.tasks[0].criteria == ()
    assert outcome_of(found) == "undecided"


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        (["nan"], [1.0]),
        (["0x1p+99999"], [1.0]),
        (["inf"], [1.0]),
        (["0x1p+1023"] * 4, [1.0] * 4),
        ([1e101] * 4, [1.0] * 4),
        ([1.0, 2.0], [1.0]),
        ([], []),
    ],
)
def test_what_is_not_a_sample_is_not_compared(recorded, found):
    assert compared(recorded, found, relative=0.1) is None


def test_fewer_returns_than_games_are_not_compared():
    games = spec(AtariEnvironment(suite="atari", game="pong", further_games=("breakout",)))
    assert compare_returns(games, CLAIM, evaluation([1.0]), evaluation([1.0])) is None


def test_networks_of_different_steps_are_not_compared():
    assert compare_returns(spec(), CLAIM, evaluation([1.0]), evaluation([1.0], step=8)) is None


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.integers(0, 9), min_size=11, max_size=14), st.integers(1, 4))
def test_scale_and_order_of_starts_change_no_outcome(values, scale):
    recorded = [float(value) for value in values]
    other = [float(10 - value) for value in values]
    plain = compared(recorded, other, absolute=2.0)
    scaled = compared(
        [v * scale for v in recorded], [v * scale for v in other], absolute=2.0 * scale
    )
    assert outcome_of(plain) == outcome_of(scaled)
    assert plain.tasks[0].rank_sum == scaled.tasks[0].rank_sum
    assert plain == compared(recorded, other, absolute=2.0)


HEX = st.floats(allow_nan=True, allow_infinity=True).map(float.hex) | st.just("0x1p+99999")


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.tuples(HEX, st.floats(-1e6, 1e6)), min_size=1, max_size=12),
    st.floats(0, 1000, exclude_min=True),
)
def test_no_strangers_evaluation_breaks_the_comparison(pairs, bound):
    recorded, found = zip(*pairs, strict=True)
    compared(recorded, found, absolute=bound)


def test_the_terminal_tells_numbers_bounds_and_what_is_not_shown():
    stream = io.StringIO()
    report = Report(
        bundle="b",
        mode="full",
        verdict="reproduced-statistical",
        summary="s",
        expected="statistical: another processor",
        statistics=statistics_of(0, relative=0.1),
    )
    show_report(report, Console(file=stream, width=120))
    text = stream.getvalue()
    assert text.index("another processor") < text.index("interquartile mean")
    assert "rank sum p = " in text
    assert "a high p shows nothing" in text
    assert ": within" in text
    assert "not shown: " in text


# --- the declaration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"relative": 0.1, "absolute": 1.0},
        {"relative": 0.21},
        {"relative": 0.0},
        {"absolute": -1.0},
        {"absolute": 1000.5},
        {"absolute": float("inf")},
        {"relative": 0.1, "alpha": 0.11},
        {"relative": 0.1, "cliffs_delta": 1.0},
        {"relative": 0.1, "metric": "max"},
    ],
)
def test_a_tolerance_that_says_nothing_is_refused(declared):
    with pytest.raises(ValidationError):
        ToleranceSpec(**declared)


def test_a_tolerance_is_part_of_the_lock():
    plain = {"suite": "gymnasium", "id": "CartPole-v1"}
    trainer = {"algorithm": "dqn", "network": "mlp"}
    facts = {"name": "test", "environment": plain, "trainer": trainer}
    declared = {"evaluation": {"tolerance": {"relative": 0.05}}}
    assert Spec(**facts).digest() != Spec(**facts, **declared).digest()
