"""The tables of a study, against the scores that they follow from."""

from statistics import fmean, stdev

import pytest

from capsule.host.errors import CapsuleError
from capsule.study import tables as study_tables
from capsule.study.program_scores import ScoreReader
from capsule.study.results import MemberIdentity, member_result
from capsule.study.tables import AGGREGATES, differing_table, tables_of
from tests.study.studies import (
    BASE,
    STEPS,
    ZERO,
    final_score,
    make_claims,
    make_lock,
    make_results,
    no_outputs,
)

ATARI = {
    **BASE,
    "environment": {"suite": "atari", "game": "pong"},
    "trainer": {"algorithm": "dqn", "network": "nature", "total_steps": 8},
    "evaluation": {"noop_max": 30},
}


@pytest.fixture(scope="module")
def results():
    return make_results()


@pytest.fixture(scope="module")
def tables(results):
    return tables_of(results)


def finals(results, group):
    names = {member.plan.name for member in results.members if member.plan.group == group}
    return [final_score(member) for member in results.lock.members if member.name in names]


def row(tables, group, network):
    (found,) = (each for each in tables.groups if (each.group, each.network) == (group, network))
    return found


def test_a_deterministic_group_has_one_claim_id_and_no_spread(tables):
    found = row(tables, "deterministic", "final")
    assert (found.runs, found.claim_ids, found.standard_deviation) == (3, 1, 0)
    assert found.relative_standard_deviation in (0, None)
    assert found.interquartile_mean.low == found.interquartile_mean.high == found.mean


@pytest.mark.parametrize(("network", "factor"), [("final", 1), ("best", 2)])
def test_mean_and_spread_of_a_group(results, tables, network, factor):
    scores = [factor * score for score in finals(results, "exploration")]
    found = row(tables, "exploration", network)
    assert (found.runs, found.claim_ids) == (3, 3)
    assert found.mean == pytest.approx(fmean(scores))
    assert found.standard_deviation == pytest.approx(stdev(scores))
    assert found.relative_standard_deviation == pytest.approx(stdev(scores) / fmean(scores))
    interval = found.interquartile_mean
    assert min(scores) <= interval.low <= interval.estimate <= interval.high <= max(scores)


def test_the_curve_of_a_group(results, tables):
    (curve,) = (each for each in tables.curves if each.group == "exploration")
    scores = finals(results, "exploration")
    assert [point.step for point in curve.points] == list(STEPS)
    assert [point.mean for point in curve.points] == pytest.approx(
        [0, 2 * fmean(scores), fmean(scores)]
    )
    assert curve.points[0].standard_deviation == 0


def test_every_pair_of_groups_is_compared_once(tables):
    pairs = [(each.first, each.second) for each in tables.variances if each.network == "final"]
    assert pairs == [
        ("deterministic", "exploration"),
        ("deterministic", "rates"),
        ("exploration", "rates"),
    ]
    assert all(each.holm_p_value >= each.permutation_p_value for each in tables.variances)
    assert len(tables.improvements) == 3


def test_settings_are_listed_with_their_values_and_scores(results, tables):
    assert [each.values for each in tables.settings] == [
        {"trainer.learning_rate": rate} for rate in (0.1, 0.01, 0.001)
    ]
    assert [each.score for each in tables.settings] == finals(results, "rates")


def test_tables_are_the_same_each_time(results, tables):
    assert tables_of(results) == tables


def test_several_games_are_summarised_by_human_normalised_scores():
    groups = {"games": {"grid": {"environment.game": ["pong", "breakout"]}}}
    tables = tables_of(make_results(make_lock(groups, base=ATARI)))
    assert [each.task for each in tables.groups] == ["pong", "pong", "breakout", "breakout"]
    (aggregate,) = tables.aggregates
    assert aggregate.tasks == 2
    for name in AGGREGATES:
        interval = getattr(aggregate, name)
        assert interval.low <= interval.estimate <= interval.high
    # Two tasks have their mean as their median.
    assert aggregate.median == aggregate.mean


def test_a_test_of_variance_needs_three_runs_of_each_group():
    found = tables_of(make_results(missing=("exploration.2",)))
    assert {(each.first, each.second) for each in found.variances} == {("deterministic", "rates")}


def test_one_game_has_no_aggregate_over_games(tables):
    assert tables.aggregates == ()


def test_members_without_results_are_left_out():
    found = row(tables_of(make_results(missing=("exploration.2",))), "exploration", "final")
    assert found.runs == 2


@pytest.mark.parametrize("returns", [(), ("0x1.0p+0",), ("0x1.0p+0",) * 3])
def test_an_evaluation_needs_a_return_of_each_start(returns):
    lock = make_lock({"a": {"runs": 1}})
    member = lock.members[0]
    claims = make_claims(member.lock, (0, 1, 2))
    first = claims.evaluation.points[0].model_copy(update={"returns": returns})
    points = (first, *claims.evaluation.points[1:])
    changed = {"evaluation": claims.evaluation.model_copy(update={"points": points})}
    identity = MemberIdentity(name=member.name, claim_id=ZERO, bundle=ZERO)
    with pytest.raises(CapsuleError, match="evaluation of step 0 has") as refused:
        changed = claims.model_copy(update=changed)
        member_result(lock, identity, changed, no_outputs, ScoreReader(lock.study))
    assert refused.value.code == "CAP-Y016"


def with_row(table, place, **facts):
    return (*table[:place], table[place].model_copy(update=facts), *table[place + 1 :])


@pytest.mark.parametrize("place", [0, 1])
def test_no_row_is_computed_after_the_first_that_differs(results, tables, monkeypatch, place):
    """An invented table must not cost its reader the hours that an honest one takes."""
    tested = []
    test = study_tables.equal_variance
    monkeypatch.setattr(
        study_tables, "equal_variance", lambda *each: tested.append(each) or test(*each)
    )
    assert differing_table(results, tables) is None
    assert len(tested) == len(tables.variances)
    forged = with_row(tables.variances, place, permutation_p_value=0.0)
    for variances in (forged, tables.variances[:place]):
        tested.clear()
        stated = tables.model_copy(update={"variances": variances})
        assert differing_table(results, stated) == "variances"
        assert len(tested) == place + 1
    tested.clear()
    groups = with_row(tables.groups, 0, mean=99.0)
    assert differing_table(results, tables.model_copy(update={"groups": groups})) == "groups"
    assert tested == []


def test_a_correction_is_compared_although_it_follows_from_all_tests(results, tables):
    last = with_row(tables.variances, len(tables.variances) - 1, holm_p_value=0.0)
    stated = tables.model_copy(update={"variances": last})
    assert differing_table(results, stated) == "variances"
    longer = tables.model_copy(update={"variances": (*tables.variances, tables.variances[0])})
    assert differing_table(results, longer) == "variances"
