"""Small IMPALA trainers in this process, and what is compared of them."""

import json

import torch

from capsule.experiment import contract
from capsule.training.registry import make_trainer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import CARTPOLE, make_spec

SHARDS = [1, 2, 1, 3, 1, 1, 2, 1]
IMPALA = {
    **CARTPOLE,
    "name": "impala",
    "trainer": {
        "algorithm": "impala",
        "network": "mlp",
        "recurrent_units": 8,
        "hidden_units": 16,
        "total_steps": 480,
        "actors": 14,
        "unroll_length": 5,
        "batch_size": sum(SHARDS),
        "micro_batches": SHARDS,
    },
    "evaluation": {**CARTPOLE["evaluation"], "interval": 240},
    "recording": {"trace_interval": 60, "tensor_interval": 60, "checkpoint_interval": 120},
}
NATIVE = {"accelerator": {"kind": "cpu", "numerics": "native"}}  # nothing was pinned here


class Trainers:
    """Makes trainers, and ends them."""

    def __init__(self, directory):
        """Keep what they write in a directory."""
        self._directory, self._begun = directory, []

    def __call__(self, learners=1, workers=1, device="cpu", replicas=1, **changes):
        """Make one, of :data:`IMPALA` with changes."""
        spec = make_spec(IMPALA, **(NATIVE | changes)).training()
        directory = self._directory / str(len(self._begun))
        directory.mkdir()
        trace = Trace(directory / contract.TRACE)
        trace.restore(None)
        streams = make_streams(spec.seeds)
        at = torch.device(device)
        context = TrainerContext(
            directory, spec, spec.seeds, streams, trace, at, workers, learners, replicas
        )
        self._begun.append(trace)
        self._begun.append(make_trainer(context))
        return self._begun[-1]

    def close(self):
        """End all of them."""
        for each in reversed(self._begun):
            each.close()


def digests(trainer, updates):
    """Return what each of some updates left: loss, gradient, parameters, RMSProp's means."""
    found = []
    for _ in range(updates):
        trainer.train_step()
        tensors = [array.tobytes() for _, array in sorted(trainer.tensors().items())]
        found.append((trainer.loss, trainer._gradient.cpu().numpy().tobytes(), *tensors))
    return found


def saved(trainer):
    """Return what :meth:`restore` takes, as it comes back from a disk."""
    return trainer.step, json.loads(json.dumps(trainer.state())), trainer.tensors()
