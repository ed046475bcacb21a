"""Unseeded worker processes: data loaders by start method, and environments in subprocesses."""

import hashlib
import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index + np.random.default_rng().random() + random.random() + torch.rand(1).item()  # noqa: S311


def make():
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Breakout-v5")


def play():
    import gymnasium

    environments = gymnasium.vector.AsyncVectorEnv([make] * 2)
    digest = hashlib.sha256(environments.reset()[0].tobytes())
    for _ in range(20):
        digest.update(environments.step(environments.action_space.sample())[0].tobytes())
    environments.close()
    return digest.hexdigest()


if __name__ == "__main__":
    for method in sys.argv[1:]:
        loader = DataLoader(Noise(), shuffle=True, num_workers=2, multiprocessing_context=method)
        print(method, [batch.item() for batch in loader], flush=True)  # noqa: T201
    print("vector", play())  # noqa: T201
