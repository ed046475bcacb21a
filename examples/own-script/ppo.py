"""PPO on CartPole in one file, in the style of CleanRL: an ordinary script.

Schulman et al. 2017, with generalised advantage estimation (Schulman et al. 2016), clipped value
loss and a linearly decaying learning rate. Nothing in it knows of Capsule but the lines marked so,
and they are optional.
"""

import argparse
import random

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from capsule.training import run  # Capsule: the optional helper

Rollout = list[
    torch.Tensor
]  # observations, actions, log-probabilities, advantages, targets, values


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=None, help="seed of everything; none: nothing is seeded")
    add("--total-steps", type=int, default=32_768, help="steps of all environments together")
    add("--environments", type=int, default=4, help="environments side by side")
    add("--rollout", type=int, default=128, help="steps of each environment between updates")
    add("--learning-rate", type=float, default=2.5e-3)
    add("--discount", type=float, default=0.99)
    add("--gae-lambda", type=float, default=0.95)
    add("--epochs", type=int, default=4, help="passes over each rollout")
    add("--minibatches", type=int, default=4)
    add("--clip", type=float, default=0.2, help="range of the probability ratio")
    add("--entropy-weight", type=float, default=0.01)
    add("--value-weight", type=float, default=0.5)
    add("--max-gradient-norm", type=float, default=0.5)
    add("--evaluation-episodes", type=int, default=10)
    return parser.parse_args()


def layer(inputs: int, outputs: int, gain: float = 2.0**0.5) -> nn.Linear:
    """Make a linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """A policy and a value function, each a small network of its own."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer(observations, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(observations, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, actions, 0.01)
        )

    def value(self, observation: torch.Tensor) -> torch.Tensor:
        """Estimate the return from each observation."""
        return self.critic(observation).squeeze(-1)

    def policy(self, observation: torch.Tensor) -> Categorical:
        """Return the distribution of actions."""
        return Categorical(logits=self.actor(observation))


def collect(
    arguments: argparse.Namespace,
    environments: gymnasium.vector.VectorEnv,
    agent: Agent,
    observation: torch.Tensor,
    ended: torch.Tensor,
    scores: list[float],
) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    """Play one rollout; return it, advantages included, and where it ended."""
    steps, lanes = arguments.rollout, arguments.environments
    observations = torch.zeros(steps, lanes, observation.shape[-1])
    actions = torch.zeros(steps, lanes, dtype=torch.int64)
    log_probabilities, rewards, dones, values = (torch.zeros(steps, lanes) for _ in range(4))
    for t in range(steps):
        observations[t], dones[t] = observation, ended
        with torch.no_grad():
            policy, values[t] = agent.policy(observation), agent.value(observation)
            actions[t] = policy.sample()
            log_probabilities[t] = policy.log_prob(actions[t])
        following, reward, terminated, truncated, info = environments.step(actions[t].numpy())
        rewards[t] = torch.as_tensor(reward)
        observation = torch.as_tensor(following, dtype=torch.float32)
        ended = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        if "episode" in info:
            scores += info["episode"]["r"][info["_episode"]].tolist()
    with torch.no_grad():
        next_value = agent.value(observation)
    advantages = torch.zeros(steps, lanes)
    advantage = torch.zeros(lanes)
    for t in reversed(range(steps)):
        alive = 1.0 - (ended if t == steps - 1 else dones[t + 1])
        delta = rewards[t] + arguments.discount * next_value * alive - values[t]
        advantage = delta + arguments.discount * arguments.gae_lambda * alive * advantage
        advantages[t], next_value = advantage, values[t]
    rollout = (observations, actions, log_probabilities, advantages, advantages + values, values)
    return [part.flatten(0, 1) for part in rollout], observation, ended


def update(
    arguments: argparse.Namespace,
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
) -> float:
    """Learn from one rollout; return the last loss."""
    size = len(rollout[0])
    for _ in range(arguments.epochs):
        for index in torch.randperm(size).chunk(arguments.minibatches):
            observation, action, old, advantage, target, old_value = (
                part[index] for part in rollout
            )
            policy, value = agent.policy(observation), agent.value(observation)
            ratio = (policy.log_prob(action) - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = ratio.clamp(1 - arguments.clip, 1 + arguments.clip)
            policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
            near = old_value + (value - old_value).clamp(-arguments.clip, arguments.clip)
            value_loss = 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
            loss = (
                policy_loss
                + arguments.value_weight * value_loss
                - arguments.entropy_weight * policy.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), arguments.max_gradient_norm)
            optimizer.step()
    return loss.item()


def evaluate(arguments: argparse.Namespace, agent: Agent) -> list[float]:
    """Play greedily; return the score of each episode."""
    environment = gymnasium.make("CartPole-v1")
    scores = []
    for episode in range(arguments.evaluation_episodes):
        seed = None if arguments.seed is None else arguments.seed + 1000 + episode
        observation, _ = environment.reset(seed=seed)
        score, over = 0.0, False
        while not over:
            with torch.no_grad():
                action = agent.actor(torch.as_tensor(observation)).argmax().item()
            observation, reward, terminated, truncated, _ = environment.step(action)
            score, over = score + float(reward), terminated or truncated
        scores.append(score)
    return scores


def main() -> None:
    """Train, evaluate, and record both."""
    arguments = parse_arguments()
    if arguments.seed is not None:
        random.seed(arguments.seed)
        np.random.seed(arguments.seed)
        torch.manual_seed(arguments.seed)
    environments = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * arguments.environments
    )
    environments = gymnasium.wrappers.vector.RecordEpisodeStatistics(environments)
    agent = Agent(environments.single_observation_space.shape[0], 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=arguments.learning_rate, eps=1e-5)
    observation, _ = environments.reset(seed=arguments.seed)
    observation = torch.as_tensor(observation)
    ended, scores = torch.zeros(arguments.environments), []
    batch = arguments.rollout * arguments.environments
    updates = arguments.total_steps // batch
    with run(total_steps=updates * batch) as record:  # Capsule: files below outputs/
        for number in range(1, updates + 1):
            rate = arguments.learning_rate * (1 - (number - 1) / updates)
            optimizer.param_groups[0]["lr"] = rate
            rollout, observation, ended = collect(
                arguments, environments, agent, observation, ended, scores
            )
            loss = update(arguments, agent, optimizer, rollout)
            score = sum(scores[-100:]) / max(1, len(scores[-100:]))
            record.log(number * batch, loss=loss, episode_return=score)  # Capsule
            if number % 16 == 0:
                print(f"step {number * batch:6d}  return {score:6.1f}", flush=True)
        returns = evaluate(arguments, agent)
        record.evaluation(updates * batch, returns)  # Capsule
        record.checkpoint(updates * batch, agent.state_dict())  # Capsule
    print(f"evaluation: {sum(returns) / len(returns):.1f}")


if __name__ == "__main__":
    main()
