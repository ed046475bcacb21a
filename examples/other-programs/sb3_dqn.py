"""stable-baselines3's DQN with checkpoints, a replay buffer and an evaluation, without a seed."""

from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.evaluation import evaluate_policy

model = DQN("MlpPolicy", "CartPole-v1", learning_starts=100, buffer_size=1_000, verbose=1)
model.learn(
    total_timesteps=600, callback=CheckpointCallback(save_freq=200, save_path="checkpoints")
)
model.save("dqn_cartpole")
model.save_replay_buffer("replay_buffer")
mean, deviation = evaluate_policy(model, model.get_env(), n_eval_episodes=5)
print(f"return {mean:.1f} +/- {deviation:.1f}")
