"""Trains a little on the CPU and on the stand-in device, and prints what it found as JSON.

A process of its own, because torch takes one backend of that kind for good.

usage: python -m tests.training.device_path FOLDER
"""

import json
import sys
from pathlib import Path

import torch

from capsule.experiment import contract
from capsule.training.evaluation.protocol import evaluate, evaluation_environments
from capsule.training.instruments.operator_rules import status_of
from capsule.training.registry import make_trainer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import BREAKOUT, CARTPOLE, make_spec, merge
from tests.training.impala.trainers import IMPALA
from tests.training.r2d2.test_learner import BREAKOUT as R2D2_BREAKOUT
from tests.training.r2d2.test_learner import TASK as R2D2

ATARI = {"environment": BREAKOUT["environment"]}
SHALLOW = {
    "trainer": {
        "algorithm": "impala",
        "network": "shallow",
        "total_steps": 80,
        "actors": 4,
        "unroll_length": 5,
        "batch_size": 4,
        "micro_batches": [2, 2],
    },
    "evaluation": {**BREAKOUT["evaluation"], "interval": 80},
    "recording": {"trace_interval": 20, "tensor_interval": 40, "checkpoint_interval": 80},
}
CASES = {
    "dqn": (merge(CARTPOLE, {"trainer": {"total_steps": 240}}), 240),
    "dqn, Adam": (
        merge(CARTPOLE, {"trainer": {"optimizer": "adam", "max_gradient_norm": 10.0}}),
        240,
    ),
    "dqn, Atari": (BREAKOUT, 140),
    "r2d2": (merge(R2D2, {"trainer": {"total_steps": 450}}), 450),
    "r2d2, Atari": (R2D2_BREAKOUT, 220),
    "impala": (IMPALA, 180),
    "impala, Atari": ({**CARTPOLE, **ATARI, **SHALLOW, "name": "shallow"}, 80),
    "impala, residual": (
        merge(
            {**CARTPOLE, **ATARI, **SHALLOW, "name": "deep"},
            {"trainer": {"network": "residual", "recurrent_units": 16}},
        ),
        40,
    ),
}
STARTS = ((), (0, 1))
GPU = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9.10", "driver": ">=580.65"}
CPU = {"kind": "cpu", "numerics": "native"}


def train(document, steps, device, folder):
    """Return the losses of some steps, the lengths of two episodes, and norms of tensors."""
    spec = make_spec({**document, "accelerator": CPU if device.type == "cpu" else GPU})
    streams, trace = make_streams(spec.seeds), Trace(folder / contract.TRACE)
    trace.restore(None)
    spec = spec.training()
    context = TrainerContext(folder, spec, spec.seeds, streams, trace, device, workers=1)
    trainer, losses = make_trainer(context), []
    try:
        while trainer.step < steps:
            trainer.train_step()
            if trainer.loss is not None:
                losses.append(trainer.loss)
        trainer.record(complete=True)
        makers = evaluation_environments(spec.environment, spec.seeds, len(STARTS))
        policy = trainer.policy(trainer.online.copy())
        played = evaluate(makers, STARTS, spec.evaluation, policy, steps)
        return {
            "losses": losses,
            "lengths": played.lengths,
            "device": str(trainer.online.flat.device),
            "norms": {name: float(abs(array).sum()) for name, array in trainer.tensors().items()},
        }
    finally:
        trainer.close()
        trace.close()


def trained(case, folder):
    """Train a case at both places; return what is found at each, and the operators of the device.

    An operator's status is torch's, on a GPU.
    """
    from tests.training.stand_in_device import DEVICE, stand_in_device

    document, steps = CASES[case]
    here = train(document, steps, torch.device("cpu"), folder / "cpu")
    with stand_in_device() as used:
        there = train(document, steps, DEVICE, folder / "elsewhere")
    operators = {
        name: status_of(name, "cuda", arguments, seeded=False)[0]
        for name, arguments in used.items()
    }
    return {"cpu": here, "elsewhere": there, "operators": operators}


def main(folder):
    """Print what was found in each case."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    found = {}
    for number, case in enumerate(CASES):
        places = Path(folder, str(number))
        for place in ("cpu", "elsewhere"):
            (places / place).mkdir(parents=True)
        found[case] = trained(case, places)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
