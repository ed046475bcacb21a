"""PPO of stable-baselines3 as its documentation shows it: no seed, a saved model, TensorBoard."""

from stable_baselines3 import PPO

model = PPO(
    "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, verbose=1, tensorboard_log="runs"
)
model.learn(total_timesteps=512)
model.save("ppo_cartpole")
