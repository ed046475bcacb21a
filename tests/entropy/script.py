"""An experiment with no seed at all: prints a digest of everything random it came by."""

import hashlib
import os
import random
import secrets
import tempfile
import uuid
from pathlib import Path

import ale_py
import gymnasium
import numpy as np
import torch

gymnasium.register_envs(ale_py)


def show(name, value):
    print(name, hashlib.sha256(repr(value).encode()).hexdigest()[:16])  # noqa: T201


def play():
    environment = gymnasium.make("ALE/Breakout-v5")
    frames = [environment.reset()[0]]
    for _ in range(20):
        frames.append(environment.step(environment.action_space.sample())[0])
    environment.close()
    return [frame.tobytes() for frame in frames]


def train():
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    for _ in range(5):
        network.zero_grad()
        network(torch.randn(16, 8)).square().mean().backward()
        # One of torch's optimizers would import its compiler, which takes as long as torch itself.
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return [parameter.tolist() for parameter in network.parameters()]


if __name__ == "__main__":
    show("random", [random.random(), random.Random().random()])  # noqa: S311
    show("numpy", [np.random.default_rng().random(), np.random.rand()])
    show("uuid4", uuid.uuid4())
    show("secrets", secrets.token_bytes(8))
    show("urandom", os.urandom(8))
    with tempfile.NamedTemporaryFile() as file:
        show("tempfile", Path(file.name).name)
    show("hash", hash("text"))
    show("torch.seed", torch.seed())
    show("Generator.seed", torch.Generator().seed())
    show("play", play())
    show("train", train())
