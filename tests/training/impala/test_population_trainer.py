"""A population of IMPALA trainers: its members, its evolution, what is traced, resumption."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json
from capsule.experiment.contract import Ancestry
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trace import first_difference, read_trace
from capsule.training.impala.population_trainer import member_seeds
from capsule.training.state.streams import Stream
from tests.conftest import strictly
from tests.training.conftest import kill_when_traced, make_spec, merge, new_run, trainers_in
from tests.training.impala.conftest import TASK
from tests.training.impala.test_learner import finish, go_on, state_of
from tests.training.impala.trainers import Trainers

pytestmark = pytest.mark.usefixtures("deterministic", "importable")

REFERENCES = {"CartPole-v1": {"random": 5.0, "human": 200.0}}
POPULATION = {
    "members": 3, "burn_in": 60, "episodes": 3, "margin": 0.0, "references": REFERENCES,
}  # fmt: skip
SMALL = merge(TASK, {"name": "population", "trainer": {"population": POPULATION}})
SMALL["trainer"].pop("learning_rate")
DRAWN = {"entropy_cost", "learning_rate", "rmsprop_epsilon", "max_gradient_norm"}


def population(make, **changes):
    return make(SMALL, **changes)


def train(learner, steps=600):
    while learner.step < steps:
        learner.train_step()
    return learner


def bits(tensors):
    return {name: array.tobytes() for name, array in tensors.items()}


def results(learner):
    """Return what a re-execution must give again, bit for bit."""
    profiles = {profile.name: profile for profile in learner.stream_profiles()}
    return learner.trace.head, bits(learner.tensors()), profiles, learner.artifacts()


def ancestry(learner):
    data = learner.artifacts()[contract.POPULATION]
    return Ancestry.model_validate_json(data).generations


def without_evolution(make, **changes):
    """Return a population whose burn-in lasts for ever."""
    return population(make, **merge({"trainer": {"population": {"burn_in": 10**6}}}, changes))


# --- evolution ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A trained population, not to be changed."""
    with trainers_in(tmp_path_factory.mktemp("grown")) as make:
        with strictly():
            learner = train(population(make))
        yield learner


@pytest.mark.slow
def test_it_evolves_and_its_ancestry_is_a_forest(grown):
    generations = ancestry(grown)
    begun = Counter(generation.member for generation in generations)
    assert set(begun) == {0, 1, 2}
    assert min(begun.values()) > 2
    assert [each.number for each in generations] == list(range(len(generations)))
    assert [each.parent for each in generations[:3]] == [None] * 3
    for each in generations[3:]:
        parent = generations[each.parent]
        assert parent.number < each.number
        assert parent.member == (each.rival if each.copied else each.member)
        assert each.step >= 60
    assert any(each.copied for each in generations)
    assert [set(each.values) for each in generations] == [DRAWN] * len(generations)


def test_members_begin_with_values_of_their_own_and_the_norm_of_the_spec(make):
    first = ancestry(population(make, trainer={"max_gradient_norm": 7.0}))
    values = [generation.values for generation in first]
    assert [each.pop("max_gradient_norm") for each in values] == [7.0] * 3
    assert len({each["learning_rate"] for each in values}) == 3
    without = ancestry(population(make, trainer={"max_gradient_norm": None}))
    assert {"max_gradient_norm"} | set(without[0].values) == DRAWN
    assert "max_gradient_norm" not in without[0].values


def at_its_first_copy(learner):
    """Train until a member copies, before any other learns; return what all had, and the copy."""
    while True:
        before = [(member.state(), learned(member)) for member in learner._members]
        learner._evolve()  # an interval finds nobody ready then
        if copies := [each for each in ancestry(learner) if each.copied]:
            return before, copies[0]
        learner.train_step()


def learned(member):
    tensors = member.tensors().items()
    return bits({name: array for name, array in tensors if not name.startswith("versions/")})


@pytest.mark.slow
def test_a_copy_is_of_parameters_and_means_and_of_nothing_else(make):
    learner = population(make)
    before, copy = at_its_first_copy(learner)
    own, rival = (learner._members[number] for number in (copy.member, copy.rival))
    assert learned(own) == before[copy.rival][1] == learned(rival)
    assert learned(own) != before[copy.member][1]
    assert {name.split("/")[0] for name in learned(own)} == {"parameters", "optimizer"}
    assert own.state() == before[copy.member][0]
    assert {name: getattr(own._trainer, name) for name in DRAWN} == copy.values
    learner.train_step()
    assert learned(own) != learned(rival)


def test_actors_play_with_what_was_copied(make):
    """As lag 0 has them play with the newest version."""
    learner = population(make, trainer={"schedule": {"mode": "lockstep", "policy_lag": 0}})
    _, copy = at_its_first_copy(learner)
    own, rival = (learner._members[number] for number in (copy.member, copy.rival))
    own.publish()
    (version,) = own._executor.versions.values()
    assert version.tobytes() == rival.online.flat.numpy().tobytes()


@pytest.mark.slow
def test_the_names_of_the_last_tensors_are_known(grown):
    assert grown.tensor_names() == list(grown.tensors())


@pytest.mark.slow
def test_the_fittest_member_is_the_network_of_the_run(grown):
    fitness = [grown._population.current(member).fitness for member in range(3)]
    best = max(range(3), key=lambda member: fitness[member] or -1.0)
    assert grown.online is grown._members[best].online
    assert grown.loss == grown._members[best].loss
    assert grown.mean_return == grown._members[best].mean_return
    assert grown.episodes == sum(member.episodes for member in grown._members)


def test_without_a_fitness_the_first_member_is_the_network_of_the_run(make):
    learner = train(without_evolution(make), 100)
    assert learner.online is learner._members[0].online
    assert len(ancestry(learner)) == 3


# --- members are plain trainers -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("streams", [{}, {"initialization": 5}])
def test_a_member_is_the_plain_trainer_of_its_seed_and_values(make, streams):
    seeds = {"root": 3, "streams": streams}
    learner = train(without_evolution(make, seeds=seeds), 160)
    for number, generation in enumerate(ancestry(learner)):
        derived = member_seeds(make_spec(SMALL, seeds=seeds).seeds, number)
        assert derived.root == Stream("population", 3, 1 + number).integer(2**53)
        plain = make(
            seeds=derived.model_dump(mode="json", exclude={"random"}),
            trainer={**generation.values, "annealing": False},
        )
        train(plain, 160)
        prefix = f"member {number}/"
        own = {n.removeprefix(prefix): a for n, a in learner.tensors().items() if prefix in n}
        assert bits(own) == bits(plain.tensors())
        assert learner._members[number].returns == plain.returns
        profiles = {each.name: each for each in learner.stream_profiles()}
        for each in plain.stream_profiles():
            theirs = profiles[prefix + each.name]
            assert theirs == each.model_copy(update={"name": theirs.name})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.02),
        ("entropy_cost", 0.3),
        ("rmsprop_epsilon", 1e-5),
        ("max_gradient_norm", 1e-3),
    ],
)
def test_every_hyperparameter_acts_from_the_next_update_on(make, name, value):
    fixed = {"learning_rate": 0.01, "max_gradient_norm": 40.0}
    changed, never = make(trainer=fixed), make(trainer=fixed)
    train(changed, 100)
    train(never, 100)
    changed.adopt({name: value})
    always = make(trainer=fixed | {name: value})
    state, tensors = json.loads(canonical_json(never.state())), never.tensors()
    always.restore(100, state, tensors)
    for learner in (changed, never, always):
        learner.train_step()
    assert learned(changed) == learned(always)
    assert learned(changed) != learned(never)


# --- processes, seeds, learners -------------------------------------------------------------------


@pytest.mark.slow
def test_processes_change_nothing(make):
    two = {"trainer": {"population": {"members": 2}}}
    expected = train(population(make, **two), 160)
    assert len(ancestry(expected)) > 3
    assert results(train(population(make, workers=2, **two), 160)) == results(expected)


@pytest.mark.slow
def test_learners_in_processes_learn_with_the_values_of_the_moment(tmp_path):
    trainers = Trainers(tmp_path)
    changes = {
        "environment": {"max_episode_steps": 6},
        "trainer": {"population": POPULATION | {"members": 2, "burn_in": 120}},
    }
    try:
        one, two = (train(trainers(learners=count, **changes), 180) for count in (1, 2))
        assert len(ancestry(one)) == 4
        assert bits(one.tensors()) == bits(two.tensors())
    finally:
        trainers.close()


@pytest.mark.slow
def test_another_seed_is_another_population(make, grown):
    other = train(population(make, seeds={"root": 1}))
    assert ancestry(other)[:3] != ancestry(grown)[:3]
    assert not set(bits(other.tensors()).values()) & {
        data for name, data in bits(grown.tensors()).items() if "weight" in name
    }


def test_an_error_names_the_member(make):
    learner = train(population(make), 40)
    learner._members[1].online.flat.fill_(np.nan)
    with pytest.raises(CapsuleError, match="member 1: ") as failure:
        train(learner)
    assert failure.value.code == "CAP-T151"


def test_a_cluster_is_refused(make, monkeypatch):
    monkeypatch.setenv(contract.CLUSTER_VARIABLE, "head:6379")
    with pytest.raises(CapsuleError, match="cannot share the Ray cluster at head:6379") as refusal:
        population(make)
    assert refusal.value.code == "CAP-T371"


# --- the trace ------------------------------------------------------------------------------------


def records_of(learner):
    learner.trace.flush()
    return list(read_trace(learner.directory / contract.TRACE))


@pytest.mark.slow
def test_the_trace_has_every_generation_and_names_members(grown):
    records = records_of(grown)
    traced = [item for each in records for item in each.values.get("generations", {}).items()]
    assert traced == [(each.name, each.facts()) for each in ancestry(grown)]
    names = [name for each in records for name in each.values["unrolls"]]
    assert len(names) == len(set(names)) == 3 * 600 // 5
    assert "member 2, update 1, actor 4, unroll 0" in names
    tensors = records[0].values
    assert {name.split("/")[0] for name in tensors["parameters"]} == {
        "member 0", "member 1", "member 2",
    }  # fmt: skip
    assert {"population", "member 1/minibatch", "evaluation"} <= set(tensors["streams"])


@pytest.mark.slow
def test_a_first_difference_names_the_generation(make, monkeypatch, grown):
    """One return is told otherwise, once; nothing else differs before."""
    other = population(make)
    collect = other._population.collect

    def lie(member, frames, returns):
        collect(member, frames, [(task, 300.0) for task, _ in returns] if member == 1 else returns)

    monkeypatch.setattr(other._population, "collect", lie)
    train(other)
    grown.trace.flush()
    other.trace.flush()
    found = first_difference(*(each.directory / contract.TRACE for each in (grown, other)))
    assert found.component == "generations"
    assert found.name.endswith("member 1")
    assert found.a != found.b


# --- resumption -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_snapshot_continues_to_the_same_bits(make, grown):
    """Also in the middle of a trace record, and with returns of an unfinished fitness."""
    first, continued = population(make), []
    for step in (40, 220, 300):
        train(first, step)
        continued.append(go_on(population(make), first, step, state_of(first)))
    for learner in (first, *continued):
        assert results(train(learner)) == results(grown)


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_to_the_same_bytes(tmp_path, one_core):
    spec = make_spec(SMALL, trainer={"total_steps": 400}, evaluation={"interval": 400})
    whole = new_run(tmp_path / "whole", spec)
    expected = finish(whole, warm=False)
    ancestors = (whole / contract.POPULATION).read_bytes()
    assert len(Ancestry.model_validate_json(ancestors).generations) > 3
    moment = random.SystemRandom().random()
    killed = new_run(tmp_path / "killed", spec)
    kill_when_traced(killed, (whole / contract.TRACE).stat().st_size * moment)
    assert finish(killed) == expected, f"killed at {moment}"
    assert (killed / contract.POPULATION).read_bytes() == ancestors
