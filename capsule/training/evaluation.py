"""Greedy evaluation from predetermined starts (Nagarajan et al. 2019, supplement).

A greedy policy in a deterministic game plays the same episode each time. So every evaluation plays
one episode from each of a fixed list of starts, random action sequences that a network judged
promising, and networks differ only by what they do from there.

Start ``k`` is played in environment ``k``: its own instance, with its own random stream (sticky
actions, reset seeds), at every evaluation alike. A suite whose resets are random needs no actions
to make starts differ: ``min_actions`` and ``max_actions`` may be 0, as in the paper's protocol for
sticky actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.contract import EvaluationPoint
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import EnvironmentSpec, EvaluationSpec, SeedsSpec, StreamName
from capsule.training.environments import Environment, Frame, make_environment
from capsule.training.streams import Stream

FRAMES_PER_MINUTE = 60 * 60

MakeEnvironment = Callable[[int], Environment]
QValues = Callable[[NDArray[Any]], NDArray[np.float32]]
Starts = tuple[tuple[int, ...], ...]


def evaluation_environments(
    spec: EnvironmentSpec, seeds: SeedsSpec, instances: int
) -> MakeEnvironment:
    """Return a function that gives evaluation environment number ``index``, not begun.

    Its only stream is ``evaluation-environment`` with that index, from the seed of the stream
    ``evaluation``; what training draws never matters. As loading a game takes long, environments
    whose indices agree modulo ``instances`` (at least ``evaluation.starts``) share one instance:
    asking for one ends the other.
    """
    seed = seeds.streams.get("evaluation", seeds.root)
    made: dict[int, Environment] = {}

    def make(index: int) -> Environment:
        stream = Stream("evaluation-environment", seed, index)
        streams: Mapping[StreamName, Stream] = {"environment": stream}
        slot = index % instances
        if slot in made:
            made[slot].rewire(streams)
        else:
            made[slot] = make_environment(spec, streams, training=False)
        return made[slot]

    return make


def generate_starts(
    make_env: MakeEnvironment,
    actions: int,
    spec: EvaluationSpec,
    stream: Stream,
    q_values: QValues,
) -> Starts:
    """Choose the start sequences of a run.

    All candidates are drawn first, each a length in ``[min_actions, max_actions]`` and then its
    actions. Candidate ``c`` is played in environment ``c``; those whose game ends are dropped, the
    others are ranked by the largest Q-value of the state they reach (ties: earlier candidate
    first). ``starts`` are drawn from the best ``shortlist`` without replacement. In a stochastic
    environment a start meets other chances in the evaluation than when it was ranked.

    Args:
        make_env: Makes the environment of an index; used for one index at a time.
        actions: Number of actions.
        spec: The spec's ``evaluation`` section.
        stream: The ``evaluation`` stream.
        q_values: Maps observations ``[starts, frame_stack, *frame_shape]`` to Q-values, float32
            ``[starts, actions]``; always called with that batch size, as a float result depends on
            it. Rows without a state are zero.

    Raises:
        CapsuleError: CAP-T231, fewer than ``starts`` candidates reach a state.
    """
    candidates = [_draw_sequence(actions, spec, stream) for _ in range(spec.candidates)]
    players = (_Player(make_env(index), start) for index, start in enumerate(candidates))
    reached = [
        (start, player.observation)
        for start, player in zip(candidates, players, strict=True)
        if not player.ended
    ]
    if len(reached) < spec.starts:
        raise CapsuleError(
            "CAP-T231",
            f"only {len(reached)} of evaluation.candidates {spec.candidates} random starts survive "
            f"{spec.min_actions} to {spec.max_actions} actions; evaluation.starts {spec.starts} "
            "are needed",
            fix="lower evaluation.min_actions and max_actions, or raise evaluation.candidates",
            exit_code=ExitCode.TRAINING_FAILED,
        )
    values: list[float] = []
    for first in range(0, len(reached), spec.starts):
        chunk = [observation for _, observation in reached[first : first + spec.starts]]
        values += q_values(_padded(chunk, spec.starts)).max(axis=1)[: len(chunk)].tolist()
    ranking = np.argsort(-np.array(values), kind="stable")
    shortlist = [reached[rank][0] for rank in ranking[: spec.shortlist]]
    return tuple(shortlist.pop(stream.below(len(shortlist))) for _ in range(spec.starts))


def evaluate(
    make_env: MakeEnvironment,
    starts: Starts,
    spec: EvaluationSpec,
    q_values: QValues,
    step: int,
) -> EvaluationPoint:
    """Play one greedy episode per start and return the scores.

    A score is the sum of the game's own rewards for the agent's own actions: what the start earns
    is not counted, as no network chose it. An episode lasts until the game ends (a lost life does
    not end it) or until ``max_minutes`` at 60 emulator frames per second, start included. A start
    that itself ends the game, possible where the environment is stochastic, scores 0 in 0 steps.

    Args:
        make_env: Makes the environment of an index; all ``len(starts)`` are used at once.
        starts: Start sequences, as ``generate_starts`` chose them.
        spec: The spec's ``evaluation`` section.
        q_values: As for ``generate_starts``, with a fixed batch of ``len(starts)``: row ``k`` is
            start ``k``, zero once its episode is over. Ties go to the lowest action index.
        step: Training step of the network, for the record.

    Returns:
        Per start, in order, the score as an exact hexadecimal float and the agent's steps.
    """
    players = [_Player(make_env(index), start) for index, start in enumerate(starts)]
    caps = [
        int(spec.max_minutes * FRAMES_PER_MINUTE) // player.frame_skip - len(start)
        for player, start in zip(players, starts, strict=True)
    ]
    scores = [0.0] * len(starts)
    lengths = [0] * len(starts)
    playing = [row for row, player in enumerate(players) if caps[row] > 0 and not player.ended]
    observations = np.zeros_like(_padded([player.observation for player in players], len(starts)))
    while playing:
        for row in playing:
            observations[row] = players[row].observation
        greedy = q_values(observations).argmax(axis=1)
        for row in playing:
            scores[row] += players[row].play(int(greedy[row]))
            lengths[row] += 1
        finished = [row for row in playing if players[row].ended or lengths[row] == caps[row]]
        observations[finished] = 0
        playing = [row for row in playing if row not in finished]
    return EvaluationPoint(
        step=step, returns=tuple(score.hex() for score in scores), lengths=tuple(lengths)
    )


class _Player:
    """An environment played through a start, with the observation an agent sees next."""

    def __init__(self, environment: Environment, start: Sequence[int]) -> None:
        self._environment = environment
        self.frame_skip = environment.frame_skip
        self.ended = False
        first = environment.reset()
        self.observation = np.zeros((environment.frame_stack, *first.shape), first.dtype)
        self._see(first)
        for action in start:
            if self.ended:
                break
            self.play(action)

    def play(self, action: int) -> float:
        """Take one step and return the game's reward."""
        transition = self._environment.step(action)
        self.ended = transition.ended
        self._see(transition.frame)
        return transition.game_reward

    def _see(self, frame: Frame) -> None:
        self.observation = np.concatenate([self.observation[1:], frame[None]])


def _draw_sequence(actions: int, spec: EvaluationSpec, stream: Stream) -> tuple[int, ...]:
    length = spec.min_actions + stream.below(spec.max_actions - spec.min_actions + 1)
    return tuple(stream.below_many(actions, length).tolist())


def _padded(observations: Sequence[NDArray[Any]], batch: int) -> NDArray[Any]:
    """Stack observations into ``[batch, ...]``, zero beyond the last."""
    padded = np.zeros((batch, *observations[0].shape), observations[0].dtype)
    padded[: len(observations)] = observations
    return padded
