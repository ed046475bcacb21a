"""Agents that call tools, and one policy that learns from them in the order in which they finish.

A prize is behind one of four doors. In each turn of an episode an agent asks the policy what to do:
call one of two tools, each of which tells half of the prize's place, or open a door, which ends the
episode. The prize is worth 1, and a tool costs 0.1. So the best return is 0.8, and opening any door
at once gives 0.25 on average.

The tools take an uncontrolled amount of time. A server answers questions and learns from episodes
as they reach it. So the parameters with which an agent acts, and the order in which they are
updated, depend on the speed of every agent. Nothing is seeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import mean

from capsule.training import Recorder, arrivals, run

TOOLS, DOORS, MAX_TURNS = 2, 4, 6
ACTIONS = TOOLS + DOORS
LEARNING_RATE, EXPLORATION = 0.2, 0.2
UNKNOWN = 2  # of a half of the prize's place, which is 0 or 1

State = tuple[int, int]  # what is known of the prize's place
Turn = tuple[State, int]  # and the action


class Policy:
    """Values of actions in each state of knowledge, by Monte Carlo control with exploration."""

    def __init__(self) -> None:
        self.generator = random.Random()
        self.values: dict[State, list[float]] = {}

    def act(self, state: State) -> int:
        """Choose the best action known; one time in five, any action."""
        if self.generator.random() < EXPLORATION:
            return self.generator.randrange(ACTIONS)
        row = self.values.setdefault(state, [1.0] * ACTIONS)
        return row.index(max(row))

    def learn(self, turns: list[Turn], score: float) -> None:
        """Move the value of each action of an episode towards its return."""
        for state, action in turns:
            row = self.values.setdefault(state, [1.0] * ACTIONS)
            row[action] += LEARNING_RATE * (score - row[action])


@dataclass(frozen=True)
class Question:
    """An agent wants to know what to do."""

    agent: int
    state: State


@dataclass(frozen=True)
class Episode:
    """What an agent did, and what it was worth."""

    agent: int
    turns: list[Turn]
    score: float


async def call_tool(prize: int, tool: int) -> int:
    """Tell a half of the prize's place, after a while."""
    await asyncio.sleep(time.perf_counter_ns() % 4_000_000 / 1e9)
    return prize >> tool & 1


async def play(ask: Callable[[State], Awaitable[int]]) -> tuple[list[Turn], float]:
    """Play an episode; return its turns and its return."""
    prize = random.Random().randrange(DOORS)
    known, turns = [UNKNOWN] * TOOLS, []
    for _ in range(MAX_TURNS):
        state = (known[0], known[1])
        action = await ask(state)
        turns.append((state, action))
        if action >= TOOLS:
            return turns, (action - TOOLS == prize) - 0.1 * (len(turns) - 1)
        known[action] = await call_tool(prize, action)
    return turns, -0.1 * len(turns)


async def act(
    number: int,
    episodes: int,
    inbox: arrivals.AsyncInbox[Question | Episode],
    answers: asyncio.Queue[int],
) -> None:
    """Play episodes, and send each to the server."""

    async def ask(state: State) -> int:
        await inbox.put(Question(number, state), source=f"agent {number}")
        return await answers.get()

    for _ in range(episodes):
        turns, score = await play(ask)
        await inbox.put(Episode(number, turns, score), source=f"agent {number}")


async def serve(
    inbox: arrivals.AsyncInbox[Question | Episode],
    answers: list[asyncio.Queue[int]],
    episodes: int,
    record: Recorder,
) -> Policy:
    """Answer questions, and learn from episodes, in the order in which they arrive."""
    policy, learned = Policy(), 0
    while learned < episodes:
        message = await inbox.get()
        if isinstance(message, Question):
            answers[message.agent].put_nowait(policy.act(message.state))
        else:
            policy.learn(message.turns, message.score)
            learned += 1
            record.log(learned, agent=message.agent, episode_return=message.score)
    return policy


async def train(agents: int, episodes: int, record: Recorder) -> Policy:
    """Let each agent play some episodes; return the policy that learned from all of them."""
    inbox: arrivals.AsyncInbox[Question | Episode]
    inbox = arrivals.AsyncInbox(asyncio.Queue(), name="server")
    answers: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(agents)]
    async with asyncio.TaskGroup() as group:
        for number in range(agents):
            acting = act(number, episodes, inbox, answers[number])
            group.create_task(arrivals.scoped(acting))
        return await serve(inbox, answers, agents * episodes, record)


def main() -> None:
    """Train, and write what was learned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=250, help="of each agent")
    arguments = parser.parse_args()
    with run(total_steps=arguments.agents * arguments.episodes) as record:
        policy = asyncio.run(train(arguments.agents, arguments.episodes, record))
        values = {str(state): row for state, row in sorted(policy.values.items())}
        (record.outputs / "policy.json").write_text(json.dumps(values, indent=1))
    lines = (record.outputs / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["episode_return"] for line in lines]
    half = len(scores) // 2
    print(f"mean return: {mean(scores[:half]):.3f}, then {mean(scores[half:]):.3f}")


if __name__ == "__main__":
    main()
