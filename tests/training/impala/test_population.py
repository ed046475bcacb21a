"""Population-based training: appendix F by hand, its distributions, what any returns keep."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Generation
from capsule.experiment.errors import CapsuleError
from capsule.experiment.scores import ReferenceScores
from capsule.experiment.trainers import PopulationSpec
from capsule.training.impala.population import (
    DMLAB_PRIORS,
    Population,
    choice,
    explore,
    is_fitter,
    log_uniform,
    mean_capped_score,
)
from capsule.training.state.streams import Stream

UNIT = {"task": ReferenceScores(0.0, 1.0)}  # returns are scores
SMALL = PopulationSpec(members=3, burn_in=100, episodes=2)


class Scripted(Stream):
    """A stream that gives out these uniforms."""

    def __init__(self, *uniforms):
        super().__init__("population", 0)
        self.left = list(uniforms)

    def uniform(self):
        return self.left.pop(0)


def population(rules=SMALL, references=UNIT, seed=0, priors=DMLAB_PRIORS):
    return Population(rules, references, Stream("population", seed), priors)


def ancestors(generations, number):
    """Return a generation, the one whose weights it began with, and so on."""
    line = [generations[number]]
    while line[-1].parent is not None:
        line.append(generations[line[-1].parent])
    return line


def generation(*facts):
    """Return a generation of its facts in order, whose numbers may be given as such."""
    document = dict(zip(Generation.model_fields, facts, strict=True))
    values = document["hyperparameters"].items()
    scores = {name: document[name] for name in ("score", "rival_score")}
    document["hyperparameters"] = {name: value.hex() for name, value in values}
    document |= {name: None if value is None else value.hex() for name, value in scores.items()}
    return Generation(**document)


def score_of(generation):
    return float.fromhex(generation.score)


def scores(value, count=2, task="task"):
    return [(task, value)] * count


LOG_UNIFORM = {"entropy_cost": (5e-5, 1e-2), "learning_rate": (5e-6, 5e-3)}


# --- the paper's figures --------------------------------------------------------------------------


def test_the_defaults_are_appendix_f_and_table_d1():
    assert PopulationSpec() == PopulationSpec(
        members=24, burn_in=5_000_000, episodes=5_000, margin=0.05, probability=0.33, factor=1.2,
    )  # fmt: skip
    assert set(DMLAB_PRIORS) == {*LOG_UNIFORM, "rmsprop_epsilon"}


def test_initial_values_by_hand():
    stream = Scripted(0.0, 0.5, 0.5, 0.25, 1.0 - 2.0**-53)
    prior = log_uniform(1.0, 100.0)
    assert [prior(stream), prior(stream)] == [1.0, 10.0]
    prior = choice(1.0, 2.0, 3.0, 4.0)
    assert [prior(stream) for _ in range(3)] == [3.0, 2.0, 4.0]


@pytest.mark.parametrize("name", LOG_UNIFORM)
def test_initial_values_are_uniform_in_the_logarithm(name):
    (low, high), stream = LOG_UNIFORM[name], Stream("population", 11)
    drawn = np.array([DMLAB_PRIORS[name](stream) for _ in range(5_000)])
    assert stream.draws == 5_000
    width = math.log(high / low)
    assert stats.kstest(np.log(drawn / low) / width, "uniform").pvalue > 0.01
    assert np.float32(low) <= drawn.min() < 1.01 * low
    assert 0.99 * high < drawn.max() <= np.float32(high)
    assert (drawn == drawn.astype(np.float32)).all()


def test_initial_epsilons_are_equally_likely():
    stream = Stream("population", 3)
    counts = Counter(DMLAB_PRIORS["rmsprop_epsilon"](stream) for _ in range(4_000))
    assert set(counts) == {1e-1, 1e-3, 1e-5, 1e-7}
    assert stats.chisquare(list(counts.values())).pvalue > 0.01


def test_members_begin_with_draws_in_the_order_of_members_and_names():
    stream = Stream("population", 5)
    priors = {name: DMLAB_PRIORS[name] for name in reversed(DMLAB_PRIORS)}
    found = population(seed=5, priors=priors)
    for member in range(3):
        expected = {name: DMLAB_PRIORS[name](stream) for name in sorted(DMLAB_PRIORS)}
        assert found.current(member).values == expected
        first = generation(member, member, None, 0, None, expected, None, None, None, False)
        assert found.current(member) == first
    assert len(found.generations) == 3


# --- fitness --------------------------------------------------------------------------------------


def test_the_fitness_caps_each_task_at_the_human():
    references = {
        "a": ReferenceScores(2.0, 12.0),
        "b": ReferenceScores(-20.0, 20.0),
        "c": ReferenceScores(0.0, 50.0),
    }
    means = {"a": 7.0, "b": 500.0, "c": -5.0}
    assert mean_capped_score(means, references) == pytest.approx((0.5 + 1.0 - 0.1) / 3)


def test_a_fitness_is_of_the_mean_return_of_each_task():
    references = {"a": ReferenceScores(0.0, 10.0), "b": ReferenceScores(0.0, 10.0)}
    found = population(SMALL.model_copy(update={"episodes": 4}), references)
    found.collect(0, 100, [("a", 30.0), ("b", 1.0), ("a", -20.0)])
    assert not found.ready(0)
    found.collect(0, 120, [("b", 2.0)])
    assert score_of(found.evolve(0)) == pytest.approx((0.5 + 0.15) / 2)


def test_every_task_needs_a_return():
    references = {"a": ReferenceScores(0.0, 1.0), "b": ReferenceScores(0.0, 1.0)}
    found = population(references=references)
    found.collect(0, 100, scores(1.0, 9, "a"))
    assert not found.ready(0)
    with pytest.raises(ValueError, match="member 0"):
        found.evolve(0)
    found.collect(0, 100, scores(1.0, 1, "b"))
    assert found.ready(0)
    with pytest.raises(KeyError, match="c"):
        found.collect(0, 100, [("c", 1.0)])


def test_returns_count_for_one_fitness_only():
    found = population()
    found.collect(0, 100, scores(1.0))
    assert score_of(found.evolve(0)) == 1.0
    assert not found.ready(0)
    found.collect(0, 110, scores(0.25))
    assert score_of(found.evolve(0)) == 0.25


def test_nothing_evolves_during_the_burn_in_and_its_returns_do_not_count():
    found = population()
    drawn = found.state()["stream"]
    found.collect(0, 99, scores(0.9, 50))
    assert not found.ready(0)
    with pytest.raises(ValueError, match="too few"):
        found.evolve(0)
    found.collect(0, 100, scores(0.1))
    assert found.state()["stream"] == drawn
    assert score_of(found.evolve(0)) == 0.1


# --- exploit and explore --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "own", "expected"),
    [(0.5625, 0.5, True), (0.55, 0.5, False), (0.5, 0.5, False), (0.9, 0.95, False),
     (-0.1, -0.2, True), (None, -9.0, False)],
)  # fmt: skip
def test_a_fitness_must_be_an_absolute_five_percent_higher(other, own, expected):
    assert is_fitter(other, own, 0.05) is expected


def test_changes_by_hand():
    values = {"b": 3.0, "a": 6.0, "d": 12.0, "c": 5.0}
    stream = Scripted(0.164, 0.166, 0.3299, 0.33)  # of a, b, c, d
    assert explore(values, PopulationSpec(), stream) == {
        "a": 6.0 * 1.2,
        "b": 3.0 / 1.2,
        "c": 5.0 / 1.2,
        "d": 12.0,
    }


def test_a_third_of_the_parameters_changes_up_and_down_alike():
    stream = Stream("population", 4)
    values = {str(name): 1.0 for name in range(9_000)}
    counts = Counter(explore(values, PopulationSpec(), stream).values())
    assert set(counts) == {1.0, 1.2, 1 / 1.2}
    expected = {1.0: 0.67, 1.2: 0.165, 1 / 1.2: 0.165}
    shares = [9_000 * expected[value] for value in counts]
    assert stats.chisquare(list(counts.values()), shares).pvalue > 0.01


def scripted(*uniforms):
    """Return a population with one hyper-parameter, initially 1, 2 and 3, and these draws next."""
    priors = {"rate": choice(1.0, 2.0, 3.0)}
    stream = Scripted(0.0, 0.4, 0.9, *uniforms)
    return Population(SMALL, UNIT, stream, priors)


def test_the_selected_member_is_copied_and_its_values_change():
    """Member 0 asks without a rival's fitness, 2 looks at 0 in vain, 1 copies 0, 0 looks at 1."""
    found = scripted(0.9, 0.99, 0.0, 0.1, 0.0, 0.2, 0.0, 0.99)
    for member, frames, score in ((0, 150, 0.75), (2, 140, 0.7), (1, 160, 0.5), (0, 200, 0.1)):
        if member == 1:
            found.collect(0, 180, [])
        found.collect(member, frames, scores(score))
        found.evolve(member)
    first, second, third, fourth = found.generations[3:]
    assert first == generation(3, 0, 0, 150, 150, {"rate": 1.0}, 0.75, 2, None, False)
    assert second == generation(4, 2, 2, 140, 140, {"rate": 3.0 * 1.2}, 0.7, 0, 0.75, False)
    assert third == generation(5, 1, 3, 160, 180, {"rate": 1.0 / 1.2}, 0.5, 0, 0.75, True)
    # With the weights member 1 has their fitness, and so gives member 0 back what it was.
    assert third.fitness == 0.75
    assert fourth == generation(6, 0, 5, 200, 160, {"rate": 1.0 / 1.2}, 0.1, 1, 0.75, True)
    assert found.current(0) == fourth


def test_a_learning_curve_goes_back_through_the_copies():
    found = scripted(0.9, 0.99, 0.0, 0.1, 0.0, 0.2, 0.0, 0.99)
    for member, frames, score in ((0, 150, 0.75), (2, 140, 0.7), (1, 160, 0.5), (0, 200, 0.1)):
        if member == 1:
            found.collect(0, 180, [])
        found.collect(member, frames, scores(score))
        found.evolve(member)
    found.collect(1, 170, [])
    line = ancestors(found.generations, 6)
    assert [(each.member, each.step, each.parent_step) for each in line] == [
        (0, 200, 160),
        (1, 160, 180),
        (0, 150, 150),
        (0, 0, None),
    ]


def test_any_other_member_may_be_selected_but_never_itself():
    found = population(SMALL.model_copy(update={"members": 5, "episodes": 1}))
    rivals = {member: Counter() for member in range(5)}
    for _ in range(200):
        for member in range(5):
            found.collect(member, 100, scores(0.5, 1))
            rivals[member][found.evolve(member).rival] += 1
    for member, counts in rivals.items():
        assert set(counts) == set(range(5)) - {member}
        assert stats.chisquare(list(counts.values())).pvalue > 0.001


# --- any returns ----------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # a member
        st.integers(0, 60),  # the frames that it trains
        st.lists(st.sampled_from([-0.5, 0.3, 0.34, 0.4, 0.9]), max_size=4),  # what it collects
    ),
    min_size=40,
    max_size=60,
)
FOUR = SMALL.model_copy(update={"members": 4, "episodes": 3})


def play(found, steps, frames=None):
    """Train as ``steps`` say; a member evolves as soon as it can."""
    frames = dict.fromkeys(range(4), 0) if frames is None else frames
    for member, trained, returns in steps:
        frames[member] += trained
        found.collect(member, frames[member], [("task", value) for value in returns])
        if found.ready(member):
            found.evolve(member)
    return frames


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 99))
def test_a_member_is_replaced_only_by_a_fitter_one_and_never_during_burn_in(steps, seed):
    found = population(FOUR, seed=seed)
    play(found, steps)
    published = dict.fromkeys(range(4))
    for each in found.generations[4:]:
        assert each.step >= FOUR.burn_in
        assert each.rival != each.member
        rival, own = published[each.rival], score_of(each)
        assert each.rival_score == (None if rival is None else rival.hex())
        assert each.copied is is_fitter(rival, own, FOUR.margin)
        if each.copied:
            assert rival > own
        published[each.member] = each.fitness
        assert each.fitness >= own
    assert found._stream.draws == 4 * 3 + (len(found.generations) - 4) * (1 + 3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 99))
def test_the_ancestry_is_a_forest_of_the_first_members(steps, seed):
    found = population(FOUR, seed=seed)
    play(found, steps)
    generations = found.generations
    current = {}
    for number, each in enumerate(generations):
        assert each.number == number
        if number < 4:
            assert (each.parent, each.member) == (None, number)
        else:
            origin = each.rival if each.copied else each.member
            assert each.parent == current[origin] < number
            for name, value in each.values.items():
                before = generations[each.parent].values[name]
                assert value in (before, before * 1.2, before / 1.2)
        current[each.member] = number
        for child, parent in pairwise(ancestors(generations, number)):
            assert parent.step <= child.parent_step
    assert [found.current(member).number for member in range(4)] == [current[m] for m in range(4)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(0, 99))
def test_a_seed_is_one_population(steps, seed):
    results = []
    for used in (seed, seed, seed + 1):
        found = population(FOUR, seed=used)
        play(found, steps)
        results.append([each.facts() for each in found.generations])
    assert results[0] == results[1]
    assert results[0] != results[2]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(STEPS, STEPS, st.integers(0, 99))
def test_a_restored_population_goes_on_as_it_would_have(before, after, seed):
    whole = population(FOUR, seed=seed)
    frames = play(whole, before)
    saved = canonical_json(whole.state())
    restored = population(FOUR, seed=seed)
    restored.restore(json.loads(saved))
    assert canonical_json(restored.state()) == saved
    play(whole, after, dict(frames))
    play(restored, after, dict(frames))
    assert restored.generations == whole.generations
    assert canonical_json(restored.state()) == canonical_json(whole.state())


def test_a_state_of_another_seed_is_refused():
    with pytest.raises(CapsuleError, match="key") as failure:
        population(seed=1).restore(population(seed=2).state())
    assert failure.value.code == "CAP-T201"
