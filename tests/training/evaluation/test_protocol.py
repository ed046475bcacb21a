"""The evaluation protocol, on a game small enough to compute by hand and on real suites."""

import numpy as np
import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.evaluation import EvaluationSpec, StartSet
from capsule.experiment.spec import (
    AtariEnvironment,
    GymnasiumEnvironment,
    SeedsSpec,
)
from capsule.training.environments import Environment, Transition
from capsule.training.evaluation.protocol import (
    Reactive,
    check_candidates,
    choose_starts,
    evaluate,
    evaluation_environments,
    generate_starts,
)
from capsule.training.state.streams import Stream


class Corridor(Environment):
    """Action 1 walks on and earns 1, action 0 waits, action 2 leaves: the game is over."""

    actions = 3
    frame_shape = (1,)
    frame_dtype = np.dtype(np.uint8)
    frame_stack = 2

    def __init__(self, index=0, end=200, skip=1):
        super().__init__({})
        self.index, self.end, self.frame_skip = index, end, skip

    def _begin(self):
        self.place = 0
        return np.array([0], np.uint8)

    def _advance(self, action):
        self.place += action == 1
        terminal = action == 2
        return Transition(
            frame=np.array([self.place], np.uint8),
            reward=0.0,
            game_reward=float(action == 1),
            terminal=terminal,
            ended=terminal or self.place == self.end,
        )


class Network:
    """Q-values by a formula; remembers every batch it was asked about."""

    def __init__(self, value):
        self.value, self.batches = value, []

    def __call__(self, observations):
        self.batches.append(observations.copy())
        return np.array([self.value(observation) for observation in observations], np.float32)


def by_place(observation):
    return [0, int(observation[-1, 0]), 0]


def protocol(**changes):
    values = {"starts": 4, "candidates": 30, "shortlist": 8, "min_actions": 2, "max_actions": 5}
    return EvaluationSpec(**(values | changes))


def usable(spec, stream):
    """Every candidate that survives, in order, drawn as the documentation says."""
    candidates = []
    for _ in range(spec.candidates):
        length = spec.min_actions + stream.integer(spec.max_actions - spec.min_actions + 1)
        candidates.append(tuple(stream.integers(3, length).tolist()))
    return [candidate for candidate in candidates if 2 not in candidate]


def test_starts_are_drawn_from_the_best_survivors():
    spec = protocol(candidates=60)
    starts = generate_starts(
        Corridor, 3, spec, Stream("evaluation", 1), Reactive(Network(by_place))
    )
    stream = Stream("evaluation", 1)
    ranked = sorted(usable(spec, stream), key=lambda start: -sum(start))[:8]
    assert list(starts) == [ranked.pop(stream.integer(len(ranked))) for _ in range(4)]
    assert all(2 <= len(start) <= 5 for start in starts)


def test_candidates_are_ranked_by_what_their_states_promise():
    """Not by the largest number for an action, which is no value where it is a logit."""

    class Promising(Reactive):
        def state_values(self, seen):
            return -seen.observations[:, -1, 0].astype(np.float32)

    spec = protocol(starts=1, shortlist=1, candidates=60)
    stream = Stream("evaluation", 1)
    (found,) = generate_starts(Corridor, 3, spec, stream, Promising(Network(by_place)))
    assert sum(found) == min(map(sum, usable(spec, Stream("evaluation", 1))))


def test_equal_values_keep_the_order_of_the_candidates():
    spec = protocol(starts=2, shortlist=3)
    network = Network(lambda _: [7, 7, 7])
    starts = generate_starts(Corridor, 3, spec, Stream("evaluation", 2), Reactive(network))
    stream = Stream("evaluation", 2)
    first = usable(spec, stream)[:3]
    assert list(starts) == [first.pop(stream.integer(len(first))) for _ in range(2)]


def test_candidates_are_judged_by_what_the_agent_would_see():
    spec = protocol(starts=1, candidates=3, shortlist=1, min_actions=1, max_actions=1)
    network = Network(by_place)
    seed = next(seed for seed in range(99) if len(usable(spec, Stream("evaluation", seed))) == 3)
    generate_starts(Corridor, 3, spec, Stream("evaluation", seed), Reactive(network))
    places = [sum(start) for start in usable(spec, Stream("evaluation", seed))]
    assert [batch[0, :, 0].tolist() for batch in network.batches] == [
        [0, place] for place in places
    ]


def test_every_batch_has_the_same_shape():
    spec = protocol(min_actions=1, max_actions=2)
    network = Network(by_place)
    starts = generate_starts(Corridor, 3, spec, Stream("evaluation", 0), Reactive(network))
    evaluate(lambda index: Corridor(end=10 + index), starts, spec, Reactive(network), 0)
    assert {batch.shape for batch in network.batches} == {(4, 2, 1)}


def pinned(starts):
    made = {"candidates": 30, "shortlist": 8, "min_actions": 2, "max_actions": 5}
    of = {"run": "a" * 64, "task": "corridor", "full_action_set": False}
    return StartSet(schema="capsule/starts/v1", **of, **made, starts=starts)


def test_pinned_starts_are_taken_as_they_are_and_nothing_is_drawn_or_ranked():
    starts = ((1, 2), (), (0, 0), (2,))
    stream = Stream("evaluation", 1)
    spec = protocol(start_set=pinned(starts))
    assert choose_starts(None, 3, spec, stream, None) == starts
    assert stream.draws == 0


def test_a_pinned_start_with_an_action_that_there_is_not_is_refused():
    spec = protocol(start_set=pinned(((1,), (), (0, 3), (2,))))
    with pytest.raises(
        CapsuleError, match=r"start 2 has action 3, but .* actions are 0 to 2"
    ) as found:
        choose_starts(None, 3, spec, Stream("evaluation", 1), None)
    assert found.value.code == "CAP-T232"


def test_without_pinned_starts_a_run_ranks_its_own():
    arguments = Corridor, 3, protocol()
    found, expected = (
        function(*arguments, Stream("evaluation", 1), Reactive(Network(by_place)))
        for function in (choose_starts, generate_starts)
    )
    assert found == expected


def test_too_few_surviving_candidates_are_refused():
    spec = protocol(candidates=8, min_actions=40, max_actions=40)
    with pytest.raises(CapsuleError, match=r"CAP-T231 only 0 of evaluation.candidates 8"):
        generate_starts(Corridor, 3, spec, Stream("evaluation", 0), Reactive(Network(by_place)))


@pytest.mark.parametrize("seed", range(20))
def test_before_training_it_is_known_whether_enough_candidates_survive(seed):
    spec = protocol(candidates=8, min_actions=0, max_actions=30)

    def outcome(choose, *policy):
        try:
            choose(Corridor, 3, spec, Stream("evaluation", seed), *policy)
        except CapsuleError as error:
            return str(error)
        return "enough"

    ranked = outcome(generate_starts, Reactive(Network(by_place)))
    assert outcome(check_candidates) == ranked


def test_no_more_candidates_are_played_than_are_needed():
    played = []
    spec = protocol(candidates=8, min_actions=0, max_actions=0)
    check_candidates(
        lambda index: played.append(index) or Corridor(), 3, spec, Stream("evaluation", 0)
    )
    assert played == list(range(spec.starts))


def test_no_candidates_are_played_where_no_starts_are_ranked():
    for spec in (protocol(noop_max=3), protocol(start_set=pinned(((), (), (0, 0), (2,))))):
        check_candidates(None, 3, spec, Stream("evaluation", 0))


def test_scores_count_the_agents_own_rewards_and_steps():
    starts = ((1, 1), (), (0,), (2, 1))
    walk = Network(lambda _: [0, 1, 0])
    point = evaluate(lambda index: Corridor(end=5 + index), starts, protocol(), Reactive(walk), 40)
    assert point.step == 40
    assert [float.fromhex(score) for score in point.returns] == [3.0, 6.0, 7.0, 0.0]
    assert point.returns == ((3.0).hex(), (6.0).hex(), (7.0).hex(), (0.0).hex())
    assert point.lengths == (3, 6, 7, 0)


def test_finished_rows_are_zero_and_others_stay_in_place():
    walk = Network(lambda _: [0, 1, 0])
    evaluate(lambda index: Corridor(end=3 - index), ((), ()), protocol(), Reactive(walk), 0)
    assert [batch[..., 0].tolist() for batch in walk.batches] == [
        [[0, 0], [0, 0]],
        [[0, 1], [0, 1]],
        [[1, 2], [0, 0]],
    ]


def test_ties_go_to_the_lowest_action():
    tie = Network(lambda _: [-1, 3, 3])
    point = evaluate(lambda _: Corridor(end=2), ((),), protocol(), Reactive(tie), 0)
    assert point.lengths == (2,)
    assert float.fromhex(point.returns[0]) == 2.0


def by_skip(index):
    return Corridor(index, skip=4)


def test_the_cap_does_not_count_the_start():
    """0.01 minutes at 60 frames per second are 36 frames: 9 steps of 4 frames."""
    wait = Network(lambda _: [1, 0, 0])
    starts = ((1, 1), (), (0,) * 9, (0,) * 40)
    point = evaluate(by_skip, starts, protocol(max_minutes=0.01), Reactive(wait), 0)
    assert point.lengths == (9, 9, 9, 9)


def test_an_agent_sees_a_frame_after_every_frame_skip_actions_of_a_start():
    """Of ten actions the last two lead to no observation, as in the authors' code."""
    wait = Network(lambda _: [1, 0, 0])
    starts = ((1,) * 10, (1,) * 8, (1,) * 3)
    evaluate(by_skip, starts, protocol(max_minutes=0.002), Reactive(wait), 0)
    assert [batch[..., 0].tolist() for batch in wait.batches] == [[[4, 8], [4, 8], [0, 0]]]


class Remembering:
    """A policy with memory that notes what it is shown of row 0."""

    recurrent = True

    def __init__(self):
        self.shown = []

    def __call__(self, seen):
        if seen.active[0]:
            row = seen.observations[0, -1, 0], seen.previous_actions[0], seen.previous_rewards[0]
            self.shown.append((*(int(value) for value in row), bool(seen.begins[0])))
        return np.tile(np.array([1, 0, 0], np.float32), (len(seen.begins), 1))

    def state_values(self, seen):
        return self(seen).max(axis=1)


def test_a_policy_with_memory_is_shown_each_observation_of_a_start_once():
    policy = Remembering()
    start = (1, 1, 1, 0, 1, 1, 1, 1, 1, 0)
    evaluate(by_skip, (start,), protocol(max_minutes=0.003), policy, 0)
    assert policy.shown == [(0, -1, 0, True), (3, 0, 3, False), (7, 1, 4, False), (8, 0, 0, False)]


def test_a_start_too_short_to_see_leaves_an_agent_at_the_beginning():
    policy = Remembering()
    evaluate(by_skip, ((1, 1),), protocol(max_minutes=0.003), policy, 0)
    assert policy.shown == [(0, -1, 0, True), (2, 0, 0, False)]


class Cliff(Corridor):
    """A fall at every third place costs a life."""

    frame_skip = 4

    def _begin(self):
        self.lives, self.noted = 3, []
        return super()._begin()

    def _advance(self, action):
        transition = super()._advance(action)
        self.noted.append(action)
        if action == 1 and self.place % 3 == 0:
            self.lives -= 1
        return transition._replace(ended=transition.ended or not self.lives)

    def _advance_frame(self, action):
        self.noted.append(("frame", action))
        return super()._advance(0)


def test_an_action_sweep_follows_every_lost_life_but_the_last():
    walk = Network(lambda _: [0, 1, 0])
    worlds = [Cliff(), Cliff()]
    spec = protocol(action_sweep=True)
    point = evaluate(worlds.__getitem__, ((), (0,) * 4), spec, Reactive(walk), 0)
    sweep = [("frame", 0), ("frame", 1), ("frame", 2)]
    assert worlds[0].noted == [1, 1, 1, *sweep, 1, 1, 1, *sweep, 1, 1, 1]
    assert point.lengths == (9, 9)
    assert [float.fromhex(score) for score in point.returns] == [9.0, 9.0]
    assert [batch[0, :, 0].tolist() for batch in walk.batches[2:5]] == [[1, 2], [3, 3], [3, 4]]


def test_no_action_sweep_follows_a_life_that_is_gained():
    class Gift(Cliff):
        def _advance(self, action):
            transition = super()._advance(action)
            self.lives += 2 * (self.place == 3)
            return transition

    walk, world = Network(lambda _: [0, 1, 0]), Gift(end=5)
    evaluate(lambda _: world, ((),), protocol(action_sweep=True), Reactive(walk), 0)
    assert world.noted == [1] * 5


def test_without_an_action_sweep_a_lost_life_is_nothing_to_the_agent():
    walk, world = Network(lambda _: [0, 1, 0]), Cliff()
    evaluate(lambda _: world, ((),), protocol(), Reactive(walk), 0)
    assert world.noted == [1] * 9


def linear_network(actions, seed):
    """A fixed integer-weighted network, so that its float32 sums are exact."""

    def q_values(observations):
        flat = observations.reshape(len(observations), -1)
        weights = np.random.default_rng(seed).integers(-3, 4, (flat.shape[1], actions))
        return (np.round(flat.astype(np.float64) * 64) @ weights).astype(np.float32)

    return q_values


SUITES = {
    "cartpole": GymnasiumEnvironment(suite="gymnasium", id="CartPole-v1"),
    "sticky-pong": AtariEnvironment(suite="atari", game="pong", sticky_action_probability=0.25),
}


def whole_protocol(suite, seed, instances=3):
    spec = protocol(
        starts=3, candidates=5, shortlist=4, min_actions=0, max_actions=6, max_minutes=0.1
    )
    seeds = SeedsSpec(root=seed)
    make = evaluation_environments(SUITES[suite], seeds, instances)
    network = linear_network(make(0).actions, 3)
    starts = generate_starts(
        make, make(0).actions, spec, Stream("evaluation", seed), Reactive(network)
    )
    points = [evaluate(make, starts, spec, Reactive(network), step) for step in (1, 1)]
    return starts, *points


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_evaluation_plays_the_same_episodes(suite):
    starts, first, second = whole_protocol(suite, 5)
    assert first == second
    assert whole_protocol(suite, 5, instances=7) == (starts, first, second)
    assert whole_protocol(suite, 6)[1] != first or suite == "sticky-pong"


@pytest.mark.parametrize(("most", "lengths"), [(10_000, (100, 100)), (400, (93, 100))])
def test_the_limit_of_a_game_counts_the_start(most, lengths):
    """400 frames of play are 100 steps; after 30 no-ops, 370 frames are left of 400."""
    game = AtariEnvironment(suite="atari", game="breakout", max_episode_frames=most)
    make = evaluation_environments(game, SeedsSpec(root=1), 2)
    wait = Network(lambda _: [1, 0, 0, 0])
    spec = protocol(max_minutes=400 / 3600)
    assert evaluate(make, ((0,) * 30, ()), spec, Reactive(wait), 0).lengths == lengths


def test_starts_without_actions_differ_by_their_reset_seed():
    spec = protocol(starts=6, candidates=6, shortlist=6, min_actions=0, max_actions=0)
    make = evaluation_environments(SUITES["cartpole"], SeedsSpec(), 6)
    network = linear_network(2, 3)
    starts = generate_starts(make, 2, spec, Stream("evaluation", 0), Reactive(network))
    assert starts == ((),) * 6
    first = {make(index).reset().tobytes() for index in range(6)}
    assert len(first) == 6
    reference = evaluate(make, starts, spec, Reactive(network), 0)
    alone = evaluate(make, starts[:1], spec, Reactive(network), 0)
    assert alone.returns == reference.returns[:1]
    assert len(set(reference.lengths)) > 1


def test_the_evaluation_seed_can_be_overridden_alone():
    plain = evaluation_environments(SUITES["cartpole"], SeedsSpec(root=1), 1)
    other = evaluation_environments(
        SUITES["cartpole"], SeedsSpec(root=1, streams={"evaluation": 2}), 1
    )
    same = evaluation_environments(
        SUITES["cartpole"], SeedsSpec(root=2, streams={"environment": 9}), 1
    )
    frames = [make(0).reset().tobytes() for make in (plain, other, same)]
    assert frames[0] != frames[1]
    assert frames[1] == frames[2]
