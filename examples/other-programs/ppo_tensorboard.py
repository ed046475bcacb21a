"""A single-file PPO in the style of CleanRL. The run is named after the time and logs its speed."""

import random
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter

ENVIRONMENTS, STEPS, UPDATES, EPOCHS = 4, 32, 8, 4
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, outputs))


def main() -> None:
    """Train for a minute or less."""
    seed = int(time.time())
    writer = SummaryWriter(f"runs/CartPole-v1__ppo__{seed}")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

    environments = gym.make_vec("CartPole-v1", num_envs=ENVIRONMENTS)
    size = environments.single_observation_space.shape[0]
    actor, critic = network(size, environments.single_action_space.n), network(size, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)

    started = time.time()
    observation = torch.tensor(environments.reset(seed=seed % 2**31)[0])
    for update in range(1, UPDATES + 1):
        rows = []
        for _ in range(STEPS):
            with torch.no_grad():
                policy = Categorical(logits=actor(observation))
                action = policy.sample()
                value = critic(observation).squeeze(1)
            after, reward, terminated, truncated, _ = environments.step(action.numpy())
            ended = torch.tensor(terminated | truncated, dtype=torch.float32)
            reward = torch.tensor(reward, dtype=torch.float32)
            rows.append((observation, action, policy.log_prob(action), value, reward, ended))
            observation = torch.tensor(after)
        observations, actions, log_probabilities, values, rewards, ends = map(
            torch.stack, zip(*rows, strict=True)
        )

        with torch.no_grad():
            following = critic(observation).squeeze(1)
            advantages, advantage = torch.zeros_like(rewards), torch.zeros(ENVIRONMENTS)
            for step in reversed(range(STEPS)):
                alive = 1 - ends[step]
                error = rewards[step] + GAMMA * following * alive - values[step]
                advantage = error + GAMMA * LAMBDA * alive * advantage
                advantages[step], following = advantage, values[step]
        returns = advantages + values

        for _ in range(EPOCHS):
            policy = Categorical(logits=actor(observations))
            ratio = (policy.log_prob(actions) - log_probabilities).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
            value_loss = 0.5 * (critic(observations).squeeze(2) - returns).square().mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()

        steps = update * STEPS * ENVIRONMENTS
        speed = int(steps / (time.time() - started))
        print(f"steps {steps}  loss {loss.item():.4f}  steps per second {speed}")
        writer.add_scalar("losses/total", loss.item(), steps)
        writer.add_scalar("charts/steps_per_second", speed, steps)
    writer.close()
    torch.save({"actor": actor.state_dict(), "critic": critic.state_dict()}, "agent.pt")


if __name__ == "__main__":
    main()
