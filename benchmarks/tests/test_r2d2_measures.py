"""The paper's measurements: by hand on a network of one number, and on real runs."""

from itertools import product

import numpy as np
import pytest
import torch
from r2d2_measures import (
    HistoryPoint,
    Schedule,
    TruncatedPolicy,
    bootstrap_interval,
    make_recorded,
    parameter_lag,
    q_discrepancy,
    replay_ratio,
    truncated_evaluation,
)
from scipy import stats

from capsule.training.evaluation.protocol import ObservationBatch
from capsule.training.networks.recurrent import Sequences
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.replay import SequenceBatch
from capsule.training.registry import make_trainer
from capsule.training.state.streams import Stream, make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import make_spec
from tests.training.r2d2.test_learner import TASK

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUT = SequenceLayout(burn_in=2, trained=2, period=2, lookahead=1)


class Halving:
    """Its state is ``h <- h / 2 + o``; its Q-values are ``h`` and ``-2 h`` after that."""

    state_shape = (1,)
    actions = 2

    def unroll(self, parameters, seen):
        observations, actions, rewards, states, resets, _ = seen
        assert observations.shape[:2] == actions.shape == rewards.shape == resets.shape
        state, values = states, []
        for row in range(len(observations)):
            state = torch.where(resets[row, :, None], states, state) / 2 + observations[row, :, 0]
            values.append(torch.cat((state, -2 * state), 1) * parameters["sign"])
        return torch.stack(values), state


POSITIVE = {"sign": torch.tensor(1.0)}


def batch_of(valid, fronts):
    """Make sequences of ones as long as ``valid``, padded in front by ``fronts`` rows."""
    rows, count = LAYOUT.rows, len(fronts)
    places = np.arange(rows)[:, None] - np.array(fronts)
    return SequenceBatch(
        frames=(places >= 0).astype(np.float32)[:, :, None],
        states=np.zeros((count, 1), np.float32),
        resets=places <= 0,
        previous_actions=np.zeros((rows, count), np.int64),
        previous_rewards=np.zeros((rows, count), np.float32),
        actions=np.zeros((rows - 1, count), np.int64),
        rewards=np.zeros((rows - 1, count), np.float32),
        terminals=np.zeros((rows - 1, count), np.bool_),
        valid=np.array(valid),
        values=np.zeros((rows, count, 2), np.float32),
    )


# --- Q-value discrepancy --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("burn_in", "initial", "unrolled"),  # states after the two trained rows
    [
        (2, "stored", (2.75, 2.375)),  # 8 -> 5 -> 3.5 -> 2.75 -> 2.375
        (2, "zero", (1.75, 1.875)),
        (1, "stored", (2.0, 2.0)),  # from 2
        (1, "zero", (1.5, 1.75)),
        (0, "stored", (3.0, 2.5)),  # from 4, as the actor was
        (0, "zero", (1.0, 1.5)),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_discrepancies_by_hand(burn_in, initial, unrolled, sign):
    states = np.array([8, 2, 4, 6, 0], np.float32).reshape(5, 1, 1)
    found = q_discrepancy(
        Halving(),
        {"sign": torch.tensor(sign)},
        batch_of(np.ones((4, 1), np.bool_), fronts=[0]),
        states,
        layout=LAYOUT,
        burn_in=burn_in,
        initial=initial,
    )
    first, last = unrolled
    true = (3.0, 4.0)  # from 4 and from 6
    largest = max(unrolled) if sign == 1 else 2 * max(unrolled)  # of h and -2 h
    root = 5**0.5  # length of (1, -2)
    np.testing.assert_allclose(found.first, [abs(first - true[0]) * root / largest], rtol=1e-6)
    np.testing.assert_allclose(found.last, [abs(last - true[1]) * root / largest], rtol=1e-6)


def test_discrepancies_of_padded_and_of_short_sequences():
    valid = np.ones((4, 3), np.bool_)
    valid[0, 0] = False  # padding in front
    valid[3, 1] = False  # ends before the last trained row
    states = np.array([[0, 8, 8], [0, 2, 2], [2, 4, 4], [4, 0, 6], [0, 0, 0]], np.float32)
    batch = batch_of(valid, fronts=[1, 0, 0])
    found = {
        initial: q_discrepancy(
            Halving(),
            POSITIVE,
            batch,
            states[:, :, None],
            layout=LAYOUT,
            burn_in=2,
            initial=initial,
        )
        for initial in ("stored", "zero")
    }
    # The first begins with its episode, at zero either way: 1 -> 1.5 -> 1.75; true 2 and 3.
    for discrepancy in found.values():
        assert len(discrepancy.first) == len(discrepancy.last) == 2
        np.testing.assert_allclose(discrepancy.first[0], 0.5 * 5**0.5 / 1.75, rtol=1e-6)
        np.testing.assert_allclose(discrepancy.last[0], 1.25 * 5**0.5 / 1.75, rtol=1e-6)
    assert found["stored"].first[1] < found["zero"].first[1]


@pytest.mark.parametrize("burn_in", [-1, 3])
def test_a_prefix_that_is_not_there_is_refused(burn_in):
    batch = batch_of(np.ones((4, 1), np.bool_), fronts=[0])
    with pytest.raises(ValueError, match=f"burn_in {burn_in} of sequences with a prefix of 2"):
        q_discrepancy(
            Halving(),
            POSITIVE,
            batch,
            np.zeros((5, 1, 1), np.float32),
            layout=LAYOUT,
            burn_in=burn_in,
            initial="zero",
        )


# --- recording ------------------------------------------------------------------------------------


@pytest.fixture
def setting_of(tmp_path):
    traces = []

    def make(**trainer):
        spec = make_spec(TASK, trainer=trainer).training()
        folder = tmp_path / str(len(traces))
        folder.mkdir()
        traces.append(Trace(folder / "trace"))
        traces[-1].restore(None)
        streams = make_streams(spec.seeds)
        cpu = torch.device("cpu")
        return TrainerContext(folder, spec, spec.seeds, streams, traces[-1], cpu, workers=1)

    yield make
    for trace in traces:
        trace.close()


def train(learner, steps):
    while learner.step < steps:
        learner.train_step()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["stored", "zero"])
def test_recording_changes_nothing(setting_of, state):
    settings = [setting_of(recurrent_state=state) for _ in range(2)]
    plain = make_trainer(settings[0])
    recorded, replay = make_recorded(settings[1], settings[1].spec.trainer)
    for learner in (plain, recorded):
        train(learner, 600)
    assert torch.equal(plain.online.flat, recorded.online.flat)
    assert plain.updates == len(replay.replayed) == 10
    for learner in (plain, recorded):
        learner.close()


@pytest.fixture
def acted(setting_of):
    """Give a recorded trainer that acted with its first parameters, and all its sequences."""
    context = setting_of(replay_start=1_200)
    learner, replay = make_recorded(context, context.spec.trainer)
    train(learner, 1_200)
    assert learner.updates == 0
    assert learner.episodes
    indices = np.unique(replay.sample(Stream("test", 0), 400).indices)
    replay.replayed.clear()
    yield learner, replay, indices
    learner.close()


def test_every_state_leads_to_the_next(acted):
    learner, replay, indices = acted
    batch, states = replay.gather(indices), replay.states(indices)
    numbers = replay.step_numbers(indices)
    taken = numbers >= 0
    assert (taken[:-1] == batch.valid).all()
    assert not states[~taken].any()
    front = taken.argmax(0)
    np.testing.assert_array_equal(states[front, np.arange(len(indices))], batch.states)
    observations, actions, rewards, before, after = (
        torch.from_numpy(np.ascontiguousarray(array[rows]))
        for array, rows in (
            (batch.observations, slice(-1)),
            (batch.previous_actions, slice(-1)),
            (batch.previous_rewards, slice(-1)),
            (states, slice(-1)),
            (states, slice(1, None)),
        )
    )
    for row in range(len(before)):
        both = torch.from_numpy(taken[row] & taken[row + 1])
        _, found = learner.network.unroll(
            learner.acting.views,
            Sequences(
                observations[row, None],
                actions[row, None],
                rewards[row, None],
                before[row],
                torch.ones(1, len(indices), dtype=torch.bool),
            ),
        )
        assert torch.equal(found[both], after[row][both])
    assert ((numbers[1:] - numbers[:-1])[taken[1:] & taken[:-1]] == 1).all()
    # All steps of all actors are there but those of sequences that are not finished.
    last = numbers.max(0)
    assert 1_200 // 6 - 60 < last.max() < 1_200 // 6
    short = (~taken[-2]) & (batch.valid.sum(0) > 0)
    assert short.any()


@pytest.mark.slow
def test_without_learning_stored_states_are_no_staler_than_the_actors(acted):
    learner, replay, indices = acted
    batch, states = replay.gather(indices), replay.states(indices)

    def discrepancy(burn_in, initial):
        return q_discrepancy(
            learner.network,
            learner.acting.views,
            batch,
            states,
            layout=replay.layout,
            burn_in=burn_in,
            initial=initial,
        )

    for burn_in in (0, 2, 4):
        stored, zero = discrepancy(burn_in, "stored"), discrepancy(burn_in, "zero")
        assert not stored.first.any()
        assert not stored.last.any()
        assert zero.first.mean() > 0
        assert zero.last.mean() < zero.first.mean()
    assert discrepancy(4, "zero").first.mean() < discrepancy(0, "zero").first.mean()


# --- parameter lag and replay ratio ---------------------------------------------------------------


@pytest.mark.slow
def test_the_schedule_is_that_of_a_run(setting_of):
    context = setting_of(actor_update_interval=15, replay_start=310)
    trainer = context.spec.trainer
    learner, replay = make_recorded(context, trainer)
    schedule, versions = Schedule.of(trainer), {}
    while learner.step < 900:
        versions.setdefault(learner.online.flat.numpy().tobytes(), learner.updates)
        before, first = learner.updates, learner.step // trainer.actors
        learner.train_step()
        steps = np.arange(first, first + trainer.update_interval)
        assert (schedule.updates_at(steps) == before).all()
        with_parameters = versions[learner.acting.flat.numpy().tobytes()]
        assert (schedule.acted_with(steps) == with_parameters).all()
    assert learner.updates == len(replay.replayed) > 10
    assert len(versions) == learner.updates
    for update, steps in enumerate(replay.replayed):
        assert 8 <= len(steps) <= 8 * trainer.sequence_length
        assert (schedule.acted_with(steps) <= update).all()
        assert (schedule.updates_at(steps) <= update).all()  # taken before they were replayed
    assert 0 < parameter_lag(replay.replayed, schedule) < learner.updates
    most = 8 * trainer.sequence_length * learner.updates / learner.step
    assert most / 2 < replay_ratio(replay.replayed, learner.step) <= most
    learner.close()


def test_lag_and_ratio_by_hand():
    # An update every 5 steps from step 10 on; copies every 10 steps: at 10 (0), 20 (2), 30 (4).
    schedule = Schedule(update_interval=5, actor_update_interval=10, first_interval=2)
    steps = np.array([0, 9, 10, 19, 20, 29, 30])
    np.testing.assert_array_equal(schedule.updates_at(steps), [0, 0, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(schedule.acted_with(steps), [0, 0, 0, 0, 2, 2, 4])
    replayed = [np.array(numbers) for numbers in ([3], [3, 10], [11], [12, 19, 4], [29, 20])]
    # Update k has age k of the first ten: 0; 1, 1; 2; 3, 3, 3; then 4 - 2, twice.
    assert parameter_lag(replayed, schedule) == (0 + 1 + 1 + 2 + 9 + 4) / 9
    assert replay_ratio(replayed, 30) == 0.3


# --- history-truncated evaluation -----------------------------------------------------------------


def seen(observations, begins, active=(True, True)):
    return ObservationBatch(
        observations=np.array(observations, np.float32).reshape(2, 1, 1),
        previous_actions=np.array([0, 0]),
        previous_rewards=np.zeros(2, np.float32),
        instructions=[""] * 2,
        begins=np.array(begins),
        active=np.array(active),
    )


@pytest.mark.parametrize(
    ("history", "states"),  # of both rows, after each step
    [
        (1, [(1, 16), (2, 16), (4, 8), (8, 4)]),
        (2, [(1, 16), (2.5, 16), (5, 16), (8, 8)]),
        (9, [(1, 16), (2.5, 16), (5.25, 16), (8, 12)]),
    ],
)
def test_histories_by_hand(history, states):
    policy = TruncatedPolicy(Halving(), POSITIVE, history)
    shown = [
        seen([1, 16], [True, True]),
        seen([2, 99], [False, False], active=(True, False)),
        seen([4, 8], [False, False]),
        seen([8, 4], [True, False]),
    ]
    for step, (each, expected) in enumerate(zip(shown, states, strict=True)):
        rows = [0] if step == 1 else [0, 1]
        values = policy(each)[rows]
        np.testing.assert_array_equal(values, [[expected[r], -2 * expected[r]] for r in rows])


def test_with_its_whole_history_a_policy_is_the_full_one(setting_of):
    context = setting_of()
    learner, _ = make_recorded(context, context.spec.trainer)
    full = learner.policy(learner.online)
    limits = [TruncatedPolicy(learner.network, learner.online.views, k) for k in (3, 99)]
    random = np.random.default_rng(0)
    for step in range(12):
        active = (step == 0) | (random.random(5) < 0.8)
        each = ObservationBatch(
            observations=random.normal(size=(5, 1, 4)).astype(np.float32),
            previous_actions=random.integers(-1, 2, 5),
            previous_rewards=random.normal(size=5).astype(np.float32),
            instructions=[""] * 5,
            begins=active & ((step == 0) | (random.random(5) < 0.1)),
            active=active,
        )
        values, short, whole = (policy(each)[each.active] for policy in (full, *limits))
        np.testing.assert_array_equal(whole, values)
    assert not np.array_equal(short, values)
    learner.close()


class Constant:
    """Gives the same values in every state."""

    recurrent = True

    def __init__(self, values):
        self._values = np.array([values, values], np.float32)

    def __call__(self, _):
        return self._values


def test_truncated_evaluations_by_hand():
    def play(policy):
        """Score 1 for each greedy action 0, in an episode of three steps and one of two."""
        scores = np.zeros(2)
        for step in range(3):
            active = [True, step < 2]
            actions = policy(seen([0, 0], [False, False], active)).argmax(1)
            scores += (actions == 0) & active
        return list(scores)

    values = {1: [1.0, 2.0], 5: [4.0, 1.0]}
    points = truncated_evaluation(
        play, lambda: Constant([3.0, 1.0]), lambda history: Constant(values[history]), [1, 5]
    )
    assert points == [
        HistoryPoint(1, score=0.0, difference=1.0, agreement=0.0),
        HistoryPoint(5, score=2.5, difference=1.0, agreement=1.0),
        HistoryPoint(None, score=2.5, difference=0.0, agreement=1.0),
    ]


# --- several seeds --------------------------------------------------------------------------------


def test_bootstrap_intervals_are_those_of_all_resamples():
    scores = [3.0, -1.0, 4.0, 1.0, 5.0]
    resampled = stats.trim_mean(list(product(scores, repeat=5)), 0.25, axis=-1)
    for confidence in (0.5, 0.9, 0.95):
        tail = (1 - confidence) / 2
        found = bootstrap_interval(scores, confidence=confidence)
        np.testing.assert_allclose(found, np.quantile(resampled, [tail, 1 - tail]), atol=0.05)
    assert bootstrap_interval(scores) == bootstrap_interval(scores)


def test_equal_scores_leave_no_doubt():
    assert bootstrap_interval([2.5] * 5) == (2.5, 2.5)
