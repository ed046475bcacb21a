"""Small specs of each trainer and of a program, with changes, and what is said of wrong ones."""

import json

import pytest
from pydantic import ValidationError

from capsule.experiment.spec import Spec

ATARI = {"suite": "atari", "game": "breakout"}
CARTPOLE = {"suite": "gymnasium", "id": "CartPole-v1"}
IMAGES = {"suite": "gymnasium", "id": "Mine-v0", "modules": ["mine"], "frames": "image"}
MINATAR = {"suite": "minatar", "game": "breakout"}
CUDA = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9.10", "driver": ">=580.65"}

DQN = {
    "schema": "capsule/spec/v1",
    "name": "dqn",
    "environment": CARTPOLE,
    "trainer": {"algorithm": "dqn", "network": "mlp"},
}
R2D2 = {  # 160 agent steps between parameter updates
    **DQN,
    "name": "r2d2",
    "trainer": {"algorithm": "r2d2", "network": "mlp", "actors": 40, "update_interval": 4},
    "evaluation": {"interval": 1_600},
    "recording": {"trace_interval": 160, "tensor_interval": 1_600, "checkpoint_interval": 1_600},
}
IMPALA = {  # 160, too
    **R2D2,
    "name": "impala",
    "trainer": {
        "algorithm": "impala",
        "network": "mlp",
        "total_steps": 160_000,
        "actors": 16,
        "batch_size": 8,
        "micro_batches": [4, 4],
    },
}
PROGRAM = {
    "schema": "capsule/spec/v1",
    "name": "own",
    "code": {"path": "program"},
    "trainer": {"command": ["python", "train.py"]},
}
TRAINERS = {"dqn": DQN, "r2d2": R2D2, "impala": IMPALA}


def merged(document, changes):
    """Return a document with nested changes.

    A section with a suite, a kind, an algorithm or a command replaces the old section as a whole.
    """
    result = dict(document)
    for name, change in changes.items():
        old = result.get(name)
        nested = isinstance(change, dict) and isinstance(old, dict)
        nested = nested and not change.keys() & {"suite", "kind", "algorithm", "command"}
        result[name] = merged(old, change) if nested else change
    return result


def make_spec(document=DQN, **changes):
    """Return the spec of a document with nested changes."""
    return Spec.model_validate_json(json.dumps(merged(document, changes)))


def refusal(document=DQN, **changes):
    """Return what is said of a spec that is not accepted."""
    with pytest.raises(ValidationError) as caught:
        make_spec(document, **changes)
    return str(caught.value)
