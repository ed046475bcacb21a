"""The measurements of R2D2 by Kapturowski et al. 2019: sections 3 and 5, and the appendix.

*Q-value discrepancy* (section 3): :func:`q_discrepancy`. *Parameter lag* and *replay ratio*
(appendix): :func:`parameter_lag`, :func:`replay_ratio`. *History-truncated evaluation* (section 5,
Figure 5): :func:`truncated_evaluation`.

The discrepancy needs every recurrent state of the actor, not only those with which sequences begin.
:func:`make_recorded` makes the trainer with a replay memory that keeps all states and the numbers
of the replayed steps: :class:`RecordingReplay`. It changes no bit of the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capsule.experiment.trainers import R2d2Trainer
from capsule.training.acting.transports import Serial
from capsule.training.environments import make_environment
from capsule.training.evaluation.protocol import EvaluatedPolicy, ObservationBatch
from capsule.training.networks.recurrent import RecurrentNetwork, Sequences
from capsule.training.r2d2.actor_worker import Experience
from capsule.training.r2d2.actors import Actors
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.factory import actor_settings, make_network, replay_options
from capsule.training.r2d2.learner import R2D2
from capsule.training.r2d2.replay import Draw, SequenceBatch, SequenceReplay
from capsule.training.state.streams import Stream, make_streams
from capsule.training.trainer import TrainerContext
from capsule.verification.equivalence.statistics import bootstrap, interquartile_mean, quantile

InitialState = Literal["stored", "zero"]
Tensors = Mapping[str, torch.Tensor]
NO_STEP = -1


# --- recording ------------------------------------------------------------------------------------


class EveryStep(SequenceLayout):
    """A layout with which actors return the recurrent state before every step."""

    def begins(self, step: int) -> bool:  # noqa: ARG002 - whichever step it is
        """Return True."""
        return True


class RecordingReplay(SequenceReplay):
    """A replay memory that also keeps every recurrent state, and the number of each step.

    Steps of an actor are numbered from 0, through all its episodes. Checkpoints do not contain the
    recorded data.

    Attributes:
        replayed: For each draw so far, in order, the numbers of the trained steps that were drawn,
            int64 ``[steps]``.
    """

    def __init__(self, network: RecurrentNetwork, **options: Any) -> None:
        """Make a memory that keeps everything in main memory.

        Args:
            network: The network that has the states.
            options: Arguments of :class:`SequenceReplay`.
        """
        super().__init__(None, **options)
        size = self.actors * self._entries.slots
        self._every_state = np.zeros((size, *network.state_shape), np.float32)
        self._announced: list[deque[NDArray[np.float32]]] = [deque() for _ in range(self.actors)]
        self._step_numbers = np.full(size, NO_STEP)
        self._taken = np.zeros(self.actors, np.int64)
        self.replayed: list[NDArray[np.int64]] = []

    def announce(self, experiences: Sequence[Experience]) -> None:
        """Take the states before the steps that are appended next, by actor."""
        for announced, experience in zip(self._announced, experiences, strict=True):
            announced.extend(experience.states[step] for step in range(len(experience.actions)))

    def append(self, actor: int, *entry: Any, **options: Any) -> list[int]:
        """Add one step, as :meth:`SequenceReplay.append` does; it must have been announced."""
        slot = self._next_slot(actor)
        self._every_state[slot] = self._announced[actor].popleft()
        self._step_numbers[slot] = self._taken[actor]
        self._taken[actor] += 1
        return super().append(actor, *entry, **options)

    def end_episode(
        self, actor: int, last_frame: NDArray[Any], last_value: float = 0.0
    ) -> list[int]:
        """Close a truncated episode, as :meth:`SequenceReplay.end_episode` does."""
        slot = self._next_slot(actor)
        self._every_state[slot] = 0
        self._step_numbers[slot] = NO_STEP
        return super().end_episode(actor, last_frame, last_value)

    def sample(self, stream: Stream, batch: int) -> Draw:
        """Draw, as :meth:`SequenceReplay.sample` does, and note the steps that are trained on."""
        draw = super().sample(stream, batch)
        numbers = self.step_numbers(draw.indices)[self._trained]
        self.replayed.append(numbers[numbers != NO_STEP])
        return draw

    def states(self, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the recurrent state before each row, as the actor had it.

        Returns:
            float32 ``[rows, batch, *state_shape]``; 0 where no step was taken.
        """
        slots, taken = self._rows(indices)
        wide = taken.reshape(*taken.shape, *[1] * (self._every_state.ndim - 1))
        return np.where(wide, self._every_state[slots], np.float32(0))

    def step_numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each row's step, int64 ``[rows, batch]``, -1 where there is none."""
        slots, taken = self._rows(indices)
        return np.where(taken, self._step_numbers[slots], NO_STEP)

    @property
    def _trained(self) -> slice:
        return slice(self.layout.burn_in, self.layout.burn_in + self.layout.trained)

    def _next_slot(self, actor: int) -> int:
        return self._entries.at(int(self._entries.counts[actor]), actor)

    def _rows(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the position of each row's entry, and whether the entry has a step."""
        numbers, actors = np.divmod(indices, self.actors)
        at = self._sequences.at(numbers, actors)
        of = {name: self._sequences.fields[name][at] for name in ("starts", "fronts", "steps")}
        places = np.arange(self.layout.rows)[:, None] - of["fronts"]
        slots = self._entries.at(of["starts"] + places, actors)
        return slots, (places >= 0) & (places < of["steps"])


class RecordedActors(Actors):
    """Actors that announce their states to a replay memory."""

    def __init__(self, replay: RecordingReplay, *arguments: Any, **options: Any) -> None:
        """Make actors like :class:`Actors`; their settings need the layout :class:`EveryStep`."""
        super().__init__(*arguments, **options)
        self._replay = replay

    def finish(self) -> list[Experience]:
        """Wait for all actors and return their experience, by actor."""
        experiences = super().finish()
        self._replay.announce(experiences)
        return experiences


def make_recorded(context: TrainerContext, trainer: R2d2Trainer) -> tuple[R2D2, RecordingReplay]:
    """Make the trainer as ``make_r2d2`` does, with a memory that records.

    It trains on the CPU, keeps everything in main memory and plays all actors in this process.
    """
    spec = context.spec
    example = make_environment(spec.environment, make_streams(context.seeds), training=True)
    network = make_network(trainer, example, spec.accelerator)
    replay = RecordingReplay(network, **replay_options(context, trainer, example, network))
    settings = actor_settings(context, trainer, example)
    settings = replace(settings, layout=EveryStep(**asdict(settings.layout)))
    actors = RecordedActors(replay, settings, Serial(settings, trainer.actors, lag=0))
    return R2D2(context, trainer, network, actors, replay), replay


# --- Q-value discrepancy --------------------------------------------------------------------------


class Discrepancy(NamedTuple):
    """Q-value discrepancies of sequences.

    Attributes:
        first: float32 ``[sequences]``, discrepancy of the first trained state.
        last: float32 ``[sequences]``, discrepancy of the last trained state.
    """

    first: NDArray[np.float32]
    last: NDArray[np.float32]


def q_discrepancy(
    network: RecurrentNetwork,
    parameters: Tensors,
    batch: SequenceBatch,
    states: NDArray[np.float32],
    *,
    layout: SequenceLayout,
    burn_in: int,
    initial: InitialState,
) -> Discrepancy:
    """Return ``dQ = |q(h'_i) - q(h_i)|_2 / |max_a,j q(h'_j)_a|`` (section 3).

    ``h_i`` is the recurrent state that the actor had at row ``i``. ``h'_i`` is the state that
    results from unrolling, as in training, from ``burn_in`` rows before the trained ones, beginning
    with the actor's state there or with zero. Both are evaluated with the same ``parameters`` and
    the same observation. ``i`` is the first or the last trained row; ``j`` runs over the trained
    rows.

    Only sequences in which every trained step was taken are used.

    Args:
        network: Architecture.
        parameters: Name to tensor, on the CPU.
        batch: Sequences, gathered with frames.
        states: float32 ``[rows, batch, *state_shape]``, every ``h``.
        layout: Layout of the sequences.
        burn_in: Number of rows to unroll before the trained ones; at most ``layout.burn_in``.
        initial: The state with which the unrolling begins.

    Raises:
        ValueError: The sequences have no such prefix.
    """
    if not 0 <= burn_in <= layout.burn_in:
        raise ValueError(f"burn_in {burn_in} of sequences with a prefix of {layout.burn_in}")
    first, end = layout.burn_in, layout.burn_in + layout.trained
    full = batch.valid[end - 1]
    inputs = [
        torch.from_numpy(np.ascontiguousarray(array[:end, full]))
        for array in (
            batch.observations,
            batch.previous_actions,
            batch.previous_rewards,
            states,
            batch.resets,
        )
    ]
    begin = first - burn_in
    start = inputs[3][begin]  # zero in padding, as before the first step of an episode
    if initial == "zero":
        start = torch.zeros_like(start)

    def values(rows: slice, state: torch.Tensor) -> torch.Tensor:
        observations, actions, rewards, _, resets = (each[rows] for each in inputs)
        seen = Sequences(observations, actions, rewards, state, resets)
        return network.unroll(parameters, seen)[0]

    with torch.inference_mode():
        unrolled = values(slice(begin, end), start)[burn_in:]
        largest = unrolled.amax((0, 2)).abs()
        found = []
        for row, seen in ((first, unrolled[0]), (end - 1, unrolled[-1])):
            true = values(slice(row, row + 1), inputs[3][row])[0]
            found.append(((seen - true).norm(dim=1) / largest).numpy())
    return Discrepancy(*found)


# --- parameter lag and replay ratio ---------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The lockstep schedule of :mod:`capsule.training.r2d2.learner`, counted in updates.

    Attributes:
        update_interval: Steps of an actor between updates.
        actor_update_interval: Steps of an actor between its copies of the parameters.
        first_interval: Number of the first interval with an update.
    """

    update_interval: int
    actor_update_interval: int
    first_interval: int

    @classmethod
    def of(cls, trainer: R2d2Trainer) -> Schedule:
        """Return the schedule of a spec's section ``trainer``."""
        return cls(
            update_interval=trainer.update_interval,
            actor_update_interval=trainer.actor_update_interval,
            first_interval=-(-trainer.replay_start // trainer.interval_steps),
        )

    def updates_at(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the updates made before an actor's step, int64 of the shape of ``steps``."""
        return np.maximum(steps // self.update_interval - self.first_interval, 0)

    def acted_with(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of updates of the parameters with which steps were taken."""
        return self.updates_at(steps - steps % self.actor_update_interval)


def parameter_lag(replayed: Sequence[NDArray[np.int64]], schedule: Schedule) -> float:
    """Return the mean age, in updates, of the behaviour policy of a step when it is replayed.

    Update ``k`` learns from the steps ``S_k``, of which step ``s`` was taken with the parameters
    after ``v(s)`` updates: ``sum_k sum_{s in S_k} (k - v(s)) / sum_k |S_k|``. This follows from the
    schedule, so nothing is stored for it.

    Args:
        replayed: By update, the numbers of the actors' steps that were trained on.
        schedule: The schedule by which parameters were updated and copied.
    """
    ages = [k - schedule.acted_with(steps) for k, steps in enumerate(replayed)]
    return float(np.concatenate(ages).mean())


def replay_ratio(replayed: Sequence[NDArray[np.int64]], steps: int) -> float:
    """Return how many times a step is trained on, on average: ``sum_k |S_k| / steps``.

    Args:
        replayed: As for :func:`parameter_lag`.
        steps: Steps that all actors took together.
    """
    return sum(map(len, replayed)) / steps


# --- history-truncated evaluation -----------------------------------------------------------------


class TruncatedPolicy:
    """The greedy policy that remembers only the last ``history`` observations.

    At step ``t`` the network is unrolled from zero over ``o_{t-k+1}, ..., o_t`` (section 5), each
    with the previous action and reward. With ``history`` 1 it sees only the newest observation. The
    parameters are on the CPU.
    """

    recurrent = True

    def __init__(self, network: RecurrentNetwork, parameters: Tensors, history: int) -> None:
        self._network = network
        self._parameters = parameters
        self._history = history
        self._seen: list[deque[tuple[Any, ...]]] = []

    def __call__(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the Q-values of each row, and remember the observations of the active rows."""
        rows = len(seen.active)
        if not self._seen:
            self._seen = [deque(maxlen=self._history) for _ in range(rows)]
        values: NDArray[np.float32] = np.zeros((rows, self._network.actions), np.float32)
        for row in np.flatnonzero(seen.active):
            if seen.begins[row]:
                self._seen[row].clear()
            self._seen[row].append(
                (seen.observations[row], seen.previous_actions[row], seen.previous_rewards[row])
            )
        for length in sorted({len(self._seen[row]) for row in np.flatnonzero(seen.active)}):
            same = [row for row in np.flatnonzero(seen.active) if len(self._seen[row]) == length]
            values[same] = self._unroll([list(self._seen[row]) for row in same])
        return values

    def state_values(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the largest Q-value of each row, float32 ``[rows]``."""
        largest: NDArray[np.float32] = self(seen).max(axis=1)
        return largest

    def _unroll(self, histories: Sequence[Sequence[tuple[Any, ...]]]) -> NDArray[np.float32]:
        """Return the Q-values after histories of one length."""
        observations, actions, rewards = (
            torch.from_numpy(np.stack([np.stack(column) for column in columns], 1))
            for columns in zip(*(zip(*history, strict=True) for history in histories), strict=True)
        )
        time, count = actions.shape
        states = torch.zeros(count, *self._network.state_shape)
        resets = torch.zeros(time, count, dtype=torch.bool)
        with torch.inference_mode():
            values, _ = self._network.unroll(
                self._parameters, Sequences(observations, actions, rewards, states, resets)
            )
        last: NDArray[np.float32] = values[-1].numpy()
        return last


class HistoryPoint(NamedTuple):
    """The results of an agent with a history of limited length.

    Attributes:
        history: Length ``k`` of the history; None: the full history.
        score: Mean return of the policy with this history.
        difference: Mean of ``|max_a q(h_t)_a - max_a q(h^k_t)_a|``.
        agreement: Fraction of steps at which the greedy action is that of the full history.
    """

    history: int | None
    score: float
    difference: float
    agreement: float


def truncated_evaluation(
    play: Callable[[EvaluatedPolicy], Sequence[float]],
    full: Callable[[], EvaluatedPolicy],
    truncated: Callable[[int], EvaluatedPolicy],
    histories: Sequence[int],
) -> list[HistoryPoint]:
    """Measure how much an agent needs its memory (Figure 5).

    Scores are those of the limited policies. Values and actions are compared in the states that
    the policy with the full history visits, which are the same for all lengths.

    Args:
        play: Function that plays episodes and returns their scores.
        full: Function that makes the policy with the full history.
        truncated: Function that makes a policy with a history of a given length, such as
            :class:`TruncatedPolicy`.
        histories: Lengths of the histories.

    Returns:
        A point for each length, in order, and one for the full history.
    """
    comparison = _Comparison(full(), [truncated(history) for history in histories])
    complete = float(np.mean(play(comparison)))
    points = [
        HistoryPoint(
            history,
            score=float(np.mean(play(truncated(history)))),
            difference=total / comparison.steps,
            agreement=equal / comparison.steps,
        )
        for history, total, equal in zip(
            histories, comparison.differences, comparison.agreements, strict=True
        )
    ]
    return [*points, HistoryPoint(None, complete, 0.0, 1.0)]


class _Comparison:
    """A policy that acts as another policy does, and compares further policies with it.

    Attributes:
        steps: Number of compared steps.
        differences: By policy, the sum of ``|max_a q - max_a q'|``.
        agreements: By policy, the number of steps with the same greedy action.
    """

    recurrent = True

    def __init__(self, acting: EvaluatedPolicy, others: Sequence[EvaluatedPolicy]) -> None:
        self._acting = acting
        self._others = others
        self.steps = 0
        self.differences = [0.0] * len(others)
        self.agreements = [0] * len(others)

    def __call__(self, seen: ObservationBatch) -> NDArray[np.float32]:
        values = self._acting(seen)
        active = values[seen.active]
        self.steps += len(active)
        for index, other in enumerate(self._others):
            theirs = other(seen)[seen.active]
            apart = np.abs(active.max(1).astype(np.float64) - theirs.max(1))
            self.differences[index] += float(apart.sum())
            self.agreements[index] += int((active.argmax(1) == theirs.argmax(1)).sum())
        return values

    def state_values(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the value of the state for the acting policy."""
        return self._acting.state_values(seen)


# --- several seeds --------------------------------------------------------------------------------


def bootstrap_interval(
    scores: Sequence[float], *, confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float]:
    """Return a percentile bootstrap interval of the interquartile mean (Efron 1979).

    Args:
        scores: One score per seed.
        confidence: Fraction of the resampled means within the interval.
        resamples: Number of resamples, each with replacement; the draws are always the same.
    """
    places = Stream("bootstrap", 0).integers(len(scores), resamples * len(scores)).tolist()
    (means,) = bootstrap(
        [scores], lambda drawn: [interquartile_mean(drawn[0])], [iter(places)], resamples
    )
    tail = (1 - confidence) / 2
    return quantile(means, tail), quantile(means, 1 - tail)
