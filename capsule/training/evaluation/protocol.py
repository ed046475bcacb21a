"""Evaluation from predetermined starts (Nagarajan et al. 2019, arXiv:1809.05676, supplement).

In a deterministic game, a greedy policy plays the same episode each time. An evaluation therefore
plays one episode from each of a fixed list of starts: random action sequences whose last state a
network values highly. Networks differ only in their play from there.

As in the authors' code (``eval.py`` of github.com/prabhatnagarajan/repro_dqn):

* An action of a start is held for one emulator frame, so that 95 actions end before the ball is
  lost in Breakout. Outside of Atari, a frame is a step.
* During a start the agent sees a frame after every ``frame_skip`` actions, as in its own play. Up
  to ``frame_skip - 1`` actions at the end lead to no observation. A policy with memory also reads
  these observations, with the last action before each as the previous action, and the sum of the
  game's rewards since the last observation as the previous reward.
* ``max_minutes`` are counted from the end of the start.
* With ``action_sweep``, every action is held for one frame after a lost life; the agent then sees
  one further frame.

Deviations from their code:

* The first observation has the frame before the first action. Theirs consists of zeros until
  ``frame_skip`` actions have been taken.
* The starts do not begin with two no-ops, as their published ones do.
* The environment's own limit ends an episode, too: ``max_episode_frames`` of an Atari game counts
  all frames, also those of the start and of action sweeps. Their code has no such limit.

Start ``k`` is played in environment ``k``, which has its own random stream for sticky actions and
reset seeds. The stream is the same at every evaluation. If the resets of a suite are random, starts
differ without actions: ``min_actions`` and ``max_actions`` may be 0, as in the paper's protocol for
sticky actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capsule.experiment.contract import EvaluationPoint
from capsule.experiment.errors import CapsuleError
from capsule.experiment.evaluation import EvaluationSpec, Starts
from capsule.experiment.spec import EnvironmentSpec, SeedsSpec, StreamName, tasks_of
from capsule.training.environments import Environment, Frame, Transition, make_environment
from capsule.training.evaluation.action_choice import Choose, greedy
from capsule.training.state.streams import Stream

FRAMES_PER_MINUTE = 60 * 60

MakeEnvironment = Callable[[int], Environment]
"""A function that returns the evaluation environment of an index."""

Watch = Callable[[int, Environment], None]
"""A function that is called with the index and the environment of an episode."""

QValues = Callable[[NDArray[Any]], NDArray[np.float32]]
"""A function from observations, ``[rows, …]``, to Q-values, float32 ``[rows, actions]``."""


class ObservationBatch(NamedTuple):
    """The observations of a batch of agents, one row each; rows that are not active are zero.

    Attributes:
        observations: ``[rows, frame_stack, *frame_shape]``.
        previous_actions: int64 ``[rows]``; -1 at the beginning of an episode.
        previous_rewards: float32 ``[rows]``: the game's own rewards; 0 at the beginning.
        instructions: ``rows`` texts, which are empty without instructions.
        begins: bool ``[rows]``: whether this is the first observation of an episode.
        active: bool ``[rows]``: the policy's memory of other rows must not change.
    """

    observations: NDArray[Any]
    previous_actions: NDArray[np.int64]
    previous_rewards: NDArray[np.float32]
    instructions: list[str]
    begins: NDArray[np.bool_]
    active: NDArray[np.bool_]


class EvaluatedPolicy(Protocol):
    """A network with its parameters, which returns Q-values or logits for observations.

    Attributes:
        recurrent: Whether it has a memory, and must therefore also read the starts.
    """

    recurrent: bool

    def __call__(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return Q-values or logits, float32 ``[rows, actions]``; inactive rows mean nothing."""

    def state_values(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the value of the state of each row, float32 ``[rows]``."""


class Reactive:
    """The policy of a network without memory."""

    recurrent = False

    def __init__(self, q_values: QValues) -> None:
        self._q_values = q_values

    def __call__(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the Q-values of the observations."""
        return self._q_values(seen.observations)

    def state_values(self, seen: ObservationBatch) -> NDArray[np.float32]:
        """Return the largest Q-value of each observation."""
        largest: NDArray[np.float32] = self(seen).max(axis=1)
        return largest


def evaluation_environments(
    spec: EnvironmentSpec, seeds: SeedsSpec, instances: int
) -> MakeEnvironment:
    """Return a function that returns the environment of an index, before its first episode.

    An environment draws from the stream ``evaluation-environment`` with its index, whose seed is
    that of the stream ``evaluation``, so the random draws of training have no effect. Because
    loading a game takes long, environments whose indices are equal modulo ``instances`` share one
    instance: the function ends the episode of one when it returns another. With several tasks,
    environment ``index`` has task ``index`` modulo their number.

    Args:
        spec: The spec's ``environment`` section.
        seeds: The spec's ``seeds`` section, with the root seed of the run.
        instances: Number of instances, at least ``evaluation.starts``, and a multiple of the number
            of tasks.
    """
    seed = seeds.root_of("evaluation")
    tasks = tasks_of(spec)
    made: dict[int, Environment] = {}

    def make(index: int) -> Environment:
        stream = Stream("evaluation-environment", seed, index)
        streams: Mapping[StreamName, Stream] = {"environment": stream}
        # The instance does not affect results, because rewire() gives it the stream of this index.
        slot = index % instances
        if slot in made:
            made[slot].rewire(streams)
        else:
            made[slot] = make_environment(tasks[index % len(tasks)], streams, training=False)
        return made[slot]

    return make


def choose_starts(
    make_env: MakeEnvironment,
    actions: int,
    spec: EvaluationSpec,
    stream: Stream,
    policy: EvaluatedPolicy,
) -> Starts:
    """Return the pinned start sequences of a spec, or generate some.

    The arguments are those of :func:`generate_starts`. Pinned starts draw nothing.

    Raises:
        CapsuleError: CAP-T231, as :func:`generate_starts`; CAP-T232, a pinned start has an unknown
            action.
    """
    if spec.start_set is None:
        return generate_starts(make_env, actions, spec, stream, policy)
    for number, start in enumerate(spec.start_set.starts):
        if max(start, default=0) >= actions:
            raise CapsuleError(
                "CAP-T232",
                f"evaluation.start_set: start {number} has action {max(start)}, but the "
                f"environment's actions are 0 to {actions - 1}",
                fix="Make the start set with a run of this environment.",
            )
    return spec.start_set.starts


def generate_starts(
    make_env: MakeEnvironment,
    actions: int,
    spec: EvaluationSpec,
    stream: Stream,
    policy: EvaluatedPolicy,
) -> Starts:
    """Generate the start sequences of a run.

    With ``noop_max``, each start consists of 1 to that many no-ops (Mnih et al. 2015,
    doi:10.1038/nature14236). Otherwise all candidates are drawn first: for each a length in
    ``[min_actions, max_actions]``, then its actions. Candidate ``c`` is played in environment
    ``c``. Candidates whose game ends are dropped; the others are ranked by the value of the last
    state that the agent sees, which is the largest Q-value, or IMPALA's baseline. Among equals, the
    earlier candidate is ranked first. ``starts`` are drawn from the best ``shortlist`` without
    replacement. In a stochastic environment, the random draws during a start are different in the
    evaluation.

    Args:
        make_env: Returns the environment of an index; ``starts`` consecutive ones are used at once.
        actions: Number of actions.
        spec: The spec's ``evaluation`` section.
        stream: The ``evaluation`` stream.
        policy: The policy whose values rank the candidates; it is always called with ``starts``
            rows.

    Raises:
        CapsuleError: CAP-T231, fewer than ``starts`` candidates reach a state.
    """
    if spec.noop_max:
        return tuple((0,) * (1 + stream.integer(spec.noop_max)) for _ in range(spec.starts))
    candidates = [_draw_sequence(actions, spec, stream) for _ in range(spec.candidates)]
    reached: list[tuple[float, Sequence[int]]] = []
    # As many at a time as in an evaluation, because the bits of a row may depend on the number of
    # rows with torch's libraries.
    for first in range(0, len(candidates), spec.starts):
        chunk = candidates[first : first + spec.starts]
        players = [_Player(make_env(first + row), start) for row, start in enumerate(chunk)]
        _play_starts(players, policy, spec.starts)
        alive = [row for row, player in enumerate(players) if not player.ended]
        values = policy.state_values(_seen(players, alive, spec.starts))
        reached += [(float(values[row]), chunk[row]) for row in alive]
    if len(reached) < spec.starts:
        raise _too_few(len(reached), spec)
    # The values are negated instead of reversing the order, so that the stable sort has the earlier
    # of equal candidates first.
    ranking = np.argsort([-value for value, _ in reached], kind="stable")
    shortlist = [tuple(reached[rank][1]) for rank in ranking[: spec.shortlist]]
    return tuple(shortlist.pop(stream.integer(len(shortlist))) for _ in range(spec.starts))


def check_candidates(
    make_env: MakeEnvironment, actions: int, spec: EvaluationSpec, stream: Stream
) -> None:
    """Check that :func:`generate_starts` will find enough candidates, before a long training.

    A network only ranks the candidates, so it is not needed to find out how many of them reach a
    state. They are played one after the other, and only until enough have reached one.

    Args:
        make_env: Returns the environment of an index; one is used at a time.
        actions: Number of actions.
        spec: The spec's ``evaluation`` section.
        stream: The ``evaluation`` stream, at the beginning of the run.

    Raises:
        CapsuleError: CAP-T231, fewer than ``starts`` candidates reach a state.
    """
    if spec.noop_max or spec.start_set is not None:
        return
    reached = 0
    for index in range(spec.candidates):
        player = _Player(make_env(index), _draw_sequence(actions, spec, stream))
        while player.script:
            player.continue_start()
        reached += not player.ended
        if reached == spec.starts:
            return
    raise _too_few(reached, spec)


def _too_few(reached: int, spec: EvaluationSpec) -> CapsuleError:
    return CapsuleError(
        "CAP-T231",
        f"only {reached} of evaluation.candidates {spec.candidates} random starts survive "
        f"{spec.min_actions} to {spec.max_actions} actions; evaluation.starts {spec.starts} "
        "are needed",
        fix="Lower evaluation.min_actions and max_actions, or raise evaluation.candidates.",
    )


def evaluate(
    make_env: MakeEnvironment,
    starts: Starts,
    spec: EvaluationSpec,
    policy: EvaluatedPolicy,
    step: int,
    choose: Choose = greedy,
    watch: Watch | None = None,
) -> EvaluationPoint:
    """Play one episode per start and return the scores.

    A score is the sum of the game's own rewards for the agent's actions. The rewards of the start
    and of action sweeps, which the network did not choose, do not count. An episode lasts until the
    game ends (a lost life does not end it), until the environment's own limit, or until the agent
    has played for ``max_minutes`` at 60 emulator frames per second, without the start and action
    sweeps. If a start itself ends the game, which can happen in a stochastic environment, the score
    is 0, in 0 steps.

    Args:
        make_env: Returns the environment of an index; all ``len(starts)`` are used at once.
        starts: Start sequences.
        spec: The spec's ``evaluation`` section.
        policy: The policy that plays. Row ``k`` is start ``k``, and is inactive after its episode.
        step: Training step of the network, for the result.
        choose: The choice of actions, which must begin anew for every evaluation.
        watch: Called with the index and the environment of each episode after its start, and after
            each of its steps.

    Returns:
        For each start, in order, the score as an exact hexadecimal float, and the number of steps.
    """
    rows = len(starts)
    players = [_Player(make_env(index), start) for index, start in enumerate(starts)]
    most = [int(spec.max_minutes * FRAMES_PER_MINUTE) // player.frame_skip for player in players]
    scores, lengths = [0.0] * rows, [0] * rows
    _play_starts(players, policy, rows)
    # ``max_minutes`` may be shorter than one step, and a stochastic start may have ended the game.
    playing = [row for row, player in enumerate(players) if most[row] > 0 and not player.ended]
    if watch:
        for row in playing:
            watch(row, players[row].environment)
    while playing:
        # The rows of finished episodes stay in the batch, so that its size is constant.
        actions = choose(policy(_seen(players, playing, rows)), playing)
        for row, action in zip(playing, actions, strict=True):
            scores[row] += players[row].play(action)
            lengths[row] += 1
            if spec.action_sweep and players[row].lost_life and not players[row].ended:
                players[row].sweep()
            if watch:
                watch(row, players[row].environment)
        playing = [row for row in playing if not players[row].ended and lengths[row] < most[row]]
    return EvaluationPoint(
        step=step, returns=tuple(score.hex() for score in scores), lengths=tuple(lengths)
    )


class _Player:
    """An environment, and the next observation of its agent.

    Attributes:
        environment: The environment.
        script: The remaining actions of the start.
        lost_life: Whether the agent's last step lost a life.
    """

    def __init__(self, environment: Environment, start: Sequence[int]) -> None:
        self.environment = environment
        self.frame_skip = environment.frame_skip
        self.script = deque(start)
        self.ended = self.lost_life = False
        self.begins = True
        self.previous_action = -1
        self.previous_reward = 0.0
        first = environment.reset()
        self.observation = np.zeros((environment.frame_stack, *first.shape), first.dtype)
        self._see(first)

    def play(self, action: int) -> float:
        """Take one step and return the game's reward."""
        before = self.environment.lives
        transition = self.environment.step(action)
        self.lost_life = self.environment.lives < before
        self._note(transition, action)
        return transition.game_reward

    @property
    def sees_more(self) -> bool:
        """Whether the rest of the start leads to a further observation."""
        return len(self.script) >= self.frame_skip

    def continue_start(self) -> None:
        """Take the next actions of the start, as many as a step has emulator frames.

        If fewer are left, the agent does not see their result: it chooses its first action by the
        observation before them.
        """
        sees = self.sees_more
        actions = [self.script.popleft() for _ in range(min(self.frame_skip, len(self.script)))]
        transition = self._take_frames(actions)
        if sees:
            self._note(transition, actions[-1])
        if self.ended:
            # In a stochastic environment, the game may end during the start.
            self.script.clear()

    def sweep(self) -> None:
        """Take every action for one emulator frame; in many games one of them serves the ball."""
        actions = range(self.environment.actions)
        self._note(self._take_frames(actions), actions[-1])

    def _take_frames(self, actions: Sequence[int]) -> Transition:
        """Take actions for one emulator frame each, until the game ends, and add the rewards."""
        reward = 0.0
        for action in actions:
            transition = self.environment.step_frame(action)
            reward += transition.game_reward
            self.ended = transition.ended
            if self.ended:
                break
        return transition._replace(game_reward=reward)

    def _note(self, transition: Transition, action: int) -> None:
        self.ended, self.begins = transition.ended, False
        self.previous_action, self.previous_reward = action, transition.game_reward
        self._see(transition.frame)

    def _see(self, frame: Frame) -> None:
        self.observation = np.concatenate([self.observation[1:], frame[None]])


def _play_starts(players: Sequence[_Player], policy: EvaluatedPolicy, rows: int) -> None:
    """Play every start to its end, or to the end of its game."""
    while acting := [row for row, player in enumerate(players) if player.script]:
        seeing = [row for row in acting if players[row].sees_more]
        if policy.recurrent and seeing:
            policy(_seen(players, seeing, rows))
        for row in acting:
            players[row].continue_start()


def _seen(players: Sequence[_Player], active: Sequence[int], rows: int) -> ObservationBatch:
    """Return the observations of the active players, in ``rows`` rows."""
    observation = players[0].observation
    seen = ObservationBatch(
        observations=np.zeros((rows, *observation.shape), observation.dtype),
        previous_actions=np.full(rows, -1),
        previous_rewards=np.zeros(rows, np.float32),
        instructions=[""] * rows,
        begins=np.zeros(rows, np.bool_),
        active=np.zeros(rows, np.bool_),
    )
    for row in active:
        seen.observations[row] = players[row].observation
        seen.previous_actions[row] = players[row].previous_action
        seen.previous_rewards[row] = players[row].previous_reward
        seen.instructions[row] = players[row].environment.instruction
        seen.begins[row] = players[row].begins
        seen.active[row] = True
    return seen


def _draw_sequence(actions: int, spec: EvaluationSpec, stream: Stream) -> tuple[int, ...]:
    length = spec.min_actions + stream.integer(spec.max_actions - spec.min_actions + 1)
    return tuple(stream.integers(actions, length).tolist())
