"""stable-baselines3's PPO as in its documentation: a saved model, TensorBoard, and no seed."""

from stable_baselines3 import PPO

model = PPO(
    "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, verbose=1, tensorboard_log="runs"
)
model.learn(total_timesteps=512)
model.save("ppo_cartpole")
