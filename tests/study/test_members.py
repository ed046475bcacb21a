"""The members of a study follow from its spec alone."""

import hashlib
import math
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.host.errors import CapsuleError
from capsule.study.members import plan_members, sampled, seed_of_run
from capsule.study.spec import LogUniformRange, SampleSpec, UniformRange
from tests.study.small_studies import of_groups

STREAMS = ["environment", "no-op", "exploration", "initialization", "minibatch", "evaluation"]
# Espeholt et al. 2018, Table D.1.
IMPALA = SampleSpec.model_validate(
    {
        "count": 24,
        "fields": {
            "trainer.learning_rate": {"log_uniform": [5e-6, 5e-3]},
            "trainer.entropy_cost": {"log_uniform": [5e-5, 1e-2]},
            "trainer.min_squared_gradient": {"choice": [1e-1, 1e-3, 1e-5, 1e-7]},
        },
    },
    strict=False,
)

values = st.integers(0, 9) | st.booleans() | st.text("abc", max_size=2)
fields = st.sampled_from(["trainer.batch_size", "trainer.discount", "seeds.root", "name"])
several = st.lists(values, min_size=1, max_size=3)
distributions = st.one_of(
    st.builds(lambda choice: {"choice": choice}, several),
    st.tuples(st.floats(1e-6, 1.0), st.floats(2.0, 9.0)).map(lambda pair: {"uniform": [*pair]}),
    st.tuples(st.floats(1e-6, 1.0), st.floats(2.0, 9.0)).map(lambda pair: {"log_uniform": [*pair]}),
)
samples = st.fixed_dictionaries(
    {
        "count": st.integers(1, 4),
        "fields": st.dictionaries(fields, distributions, min_size=1, max_size=2),
    }
)
varied = st.lists(st.sampled_from(STREAMS), unique=True, max_size=3) | st.just(["root"])
groups = st.fixed_dictionaries(
    {"vary": varied, "runs": st.integers(1, 3), "set": st.dictionaries(fields, values, max_size=2)},
    optional={"grid": st.dictionaries(fields, several, min_size=1, max_size=2)},
) | st.fixed_dictionaries(
    {"vary": varied, "runs": st.integers(1, 3)},
    optional={"sample": samples},
)
studies = st.dictionaries(st.sampled_from(["a", "b", "c-d"]), groups, min_size=1, max_size=3)


def settings_of(spec):
    return {member.name: member.settings for member in plan_members(spec)}


def unchanged(before, after):
    assert before.items() <= after.items()
    return len(after) - len(before)


def test_members_share_the_settings_that_are_the_same_for_all():
    first, second = plan_members(of_groups(g={"runs": 2, "set": {"seeds.root": 5}}))
    assert all(one is other for one, other in zip(first.settings, second.settings, strict=True))
    assert first.settings


@pytest.mark.slow
@given(studies, groups, st.booleans())
def test_a_further_group_changes_no_member(document, group, first):
    before = settings_of(of_groups(**document))
    more = {"new": group, **document} if first else {**document, "new": group}
    assert unchanged(before, settings_of(of_groups(**more))) > 0


@pytest.mark.slow
@given(studies)
def test_a_further_run_changes_no_member(document):
    more = {name: {**group, "runs": group["runs"] + 1} for name, group in document.items()}
    before, after = settings_of(of_groups(**document)), settings_of(of_groups(**more))
    assert unchanged(before, after) > 0


@given(st.dictionaries(fields, several, min_size=1, max_size=3), fields, values)
def test_a_value_that_is_appended_to_any_field_of_a_grid_changes_no_member(grid, field, value):
    field = field if field in grid else next(iter(grid))
    more = {**grid, field: [*grid[field], value]}
    before = settings_of(of_groups(g={"grid": grid}))
    assert unchanged(before, settings_of(of_groups(g={"grid": more}))) > 0


@given(st.lists(st.dictionaries(fields, values, max_size=2), min_size=1, max_size=3))
def test_a_setting_that_is_appended_to_a_list_changes_no_member(listed):
    before = settings_of(of_groups(g={"settings": listed}))
    more = {"settings": [*listed, {"seeds.root": 5}]}
    assert unchanged(before, settings_of(of_groups(g=more))) == 5


@given(samples, distributions)
def test_a_larger_sample_and_a_further_field_change_no_draw(sample, distribution):
    more = {"count": sample["count"] + 1, "fields": {**sample["fields"], "new": distribution}}
    before = plan_members(of_groups(g={"sample": sample}))
    after = {member.name: member for member in plan_members(of_groups(g={"sample": more}))}
    for member in before:
        larger = after[member.name].setting_values
        assert member.setting_values.items() <= larger.items()
        assert "new" in larger


def test_names_are_those_of_group_setting_and_run():
    spec = of_groups(
        plain={"runs": 2},
        listed={"runs": 1, "settings": [{}, {}]},
        grid={"runs": 1, "grid": {"seeds.root": [1, 2], "name": ["x"]}},  # name, seeds.root
        drawn={"runs": 1, "sample": {"count": 1, "fields": {"seeds.root": {"choice": [1]}}}},
    )
    members = plan_members(spec)
    assert [member.name for member in members] == [
        *("plain.1", "plain.2", "listed.1.1", "listed.2.1"),
        *("grid.1-1.1", "grid.1-2.1", "drawn.1.1"),
    ]
    assert [member.setting for member in members] == [1, 1, 1, 2, 1, 2, 1]
    assert members[5].setting_values == {"seeds.root": 2, "name": "x"}


def test_later_settings_follow_earlier_ones_and_seeds_come_last():
    spec = of_groups(
        g={"set": {"seeds.root": 2}, "settings": [{"seeds.root": 3}], "vary": ["root"]}
    )
    spec = spec.model_copy(update={"set": {"seeds.root": 1}, "runs": 1})
    (member,) = plan_members(spec)
    given = [("seeds.root", 1), ("seeds.root", 2), ("seeds.root", 3)]
    assert member.settings == (*given, ("seeds.root", seed_of_run(0, "root", 1)))


def hash_fraction(*parts):
    """The first 64 bits of SHA-256 over a JSON array of strings and integers, as a fraction."""
    shown = ",".join(f'"{part}"' if isinstance(part, str) else str(part) for part in parts)
    digest = hashlib.sha256(f"[{shown}]".encode()).digest()
    return Fraction(int.from_bytes(digest[:8], "big"), 2**64)


@pytest.mark.parametrize(("seed", "stream", "run"), [(0, "exploration", 1), (7, "no-op", 12)])
def test_the_seed_of_a_run_is_53_bits_of_a_hash(seed, stream, run):
    share = hash_fraction("capsule/study-seed/v1", seed, stream, run)
    assert seed_of_run(seed, stream, run) == math.floor(share * 2**53)


def test_a_varied_stream_has_the_same_seed_in_every_group_and_another_in_every_run():
    spec = of_groups(
        one={"vary": ["exploration"]},
        two={"vary": ["minibatch", "exploration"]},
        all={"vary": ["root"]},
    )
    seeds = {member.name: dict(member.settings) for member in plan_members(spec)}
    field = "seeds.streams.exploration"
    for run in range(1, 6):
        assert seeds[f"one.{run}"] == {field: seed_of_run(0, "exploration", run)}
        assert seeds[f"two.{run}"][field] == seeds[f"one.{run}"][field]
        assert seeds[f"all.{run}"] == {"seeds.root": seed_of_run(0, "root", run)}
    everything = [seed for member in seeds.values() for seed in member.values()]
    assert Counter(Counter(everything).values()) == {1: 10, 2: 5}
    assert all(0 <= seed < 2**53 for seed in everything)


def test_a_group_without_varied_streams_sets_the_same_in_every_run():
    members = plan_members(of_groups(g={"set": {"seeds.root": 4}}))
    assert {member.settings for member in members} == {(("seeds.root", 4),)}


def test_draws_are_those_of_hand_computation():
    draws = [sampled(IMPALA, 0, number) for number in range(1, 25)]
    for number, draw in enumerate(draws, 1):
        for field, (low, high) in {
            "trainer.learning_rate": (5e-6, 5e-3),
            "trainer.entropy_cost": (5e-5, 1e-2),
        }.items():
            share = float(hash_fraction("capsule/study-sample/v1", 0, field, number))
            wanted = low * (high / low) ** share
            assert draw[field] == pytest.approx(wanted, rel=1e-11)
            assert low <= draw[field] <= high
            digits = re.sub(r"e.*|\D", "", repr(draw[field])).strip("0")
            assert len(digits) <= 12
        share = hash_fraction("capsule/study-sample/v1", 0, "trainer.min_squared_gradient", number)
        values = (1e-1, 1e-3, 1e-5, 1e-7)
        assert draw["trainer.min_squared_gradient"] == values[math.floor(share * 4)]


def test_uniform_draws_are_those_of_hand_computation():
    spec = {"count": 1, "fields": {"trainer.discount": {"uniform": [-1.5, 2.5]}}}
    sample = SampleSpec.model_validate(spec, strict=False)
    for number in range(1, 50):
        share = float(hash_fraction("capsule/study-sample/v1", 3, "trainer.discount", number))
        drawn = sampled(sample, 3, number)["trainer.discount"]
        assert drawn == pytest.approx(-1.5 + 4 * share, abs=1e-11)


def test_the_draws_of_impala_are_spread_log_uniformly():
    # Kolmogorov's distance of 24 draws exceeds 0.27 by chance in one of twenty studies.
    for field, low, high in (
        ("trainer.learning_rate", 5e-6, 5e-3),
        ("trainer.entropy_cost", 5e-5, 1e-2),
    ):
        drawn = sorted(sampled(IMPALA, 0, number)[field] for number in range(1, 25))
        shares = [math.log(value / low) / math.log(high / low) for value in drawn]
        assert max(abs((i + 0.5) / 24 - share) for i, share in enumerate(shares)) < 0.27
    epsilons = Counter(sampled(IMPALA, 0, n)["trainer.min_squared_gradient"] for n in range(1, 401))
    assert set(epsilons) == {1e-1, 1e-3, 1e-5, 1e-7}
    assert min(epsilons.values()) > 70


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300), st.integers(1, 50))
def test_draws_lie_within_their_bounds_however_close_these_are(low, high, number):
    low, high = sorted((low, high))
    if low == high:
        high = math.nextafter(high, math.inf)
    for distribution in (
        LogUniformRange(log_uniform=(low, high)),
        UniformRange(uniform=(low, high)),
    ):
        sample = SampleSpec(count=1, fields={"name": distribution})
        assert low <= sampled(sample, 0, number)["name"] <= high


def test_a_sample_with_a_seed_of_its_own_does_not_follow_that_of_the_study():
    own = IMPALA.model_copy(update={"seed": 5})
    assert sampled(own, 0, 1) == sampled(own, 9, 1) == sampled(IMPALA, 5, 1)
    assert sampled(IMPALA, 0, 1) != sampled(IMPALA, 9, 1)


@pytest.mark.slow
def test_draws_are_the_same_in_another_process_whatever_its_decimal_context():
    program = (
        "import decimal, tests.study.test_members as t\n"
        "decimal.setcontext(decimal.Context(prec=3, rounding=decimal.ROUND_UP))\n"
        "print([t.sampled(t.IMPALA, 0, number) for number in range(1, 25)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "1", "LC_ALL": "C"},
    )
    assert done.stdout.strip() == str([sampled(IMPALA, 0, number) for number in range(1, 25)])


def test_too_many_members_are_refused_before_they_are_made():
    fields = [f"trainer.{letter}" for letter in "abcdefgh"]
    grid = {field: list(range(100)) for field in fields}
    with pytest.raises(CapsuleError, match="more than 2000 members") as caught:
        plan_members(of_groups(g={"grid": grid}))
    assert caught.value.code == "CAP-Y001"
    assert len(plan_members(of_groups(g={"runs": 2000}))) == 2000
