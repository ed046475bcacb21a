"""Trains a little on the CPU and on the stand-in device, and prints what it found as JSON.

A process of its own, because torch takes one backend of that kind for good.

usage: python -m tests.training.device_path FOLDER
       python -m tests.training.device_path --page      # writes the operators into docs/gpu.md
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from capsule.experiment import contract
from capsule.training.checkpointer import Checkpointer
from capsule.training.evaluation.protocol import evaluate, evaluation_environments
from capsule.training.registry import make_trainer
from capsule.training.state.streams import make_streams
from capsule.training.state.trace import Trace
from capsule.training.trainer import TrainerContext
from tests.training.conftest import BREAKOUT, CARTPOLE, make_spec, merge
from tests.training.impala.test_language import BABYAI
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
SHORT = merge(
    R2D2, {"trainer": {"burn_in": 2, "sequence_length": 4, "sequence_stride": 2, "n_step": 2}}
)
LAYERS = {
    **{name: value for name, value in CARTPOLE["trainer"].items() if name != "hidden_units"},
    "network": {"dense": [16], "activation": "tanh"},
}
CASES = {
    "dqn": (merge(CARTPOLE, {"trainer": {"total_steps": 240}}), 240),
    "dqn, Adam": (
        merge(CARTPOLE, {"trainer": {"optimizer": "adam", "max_gradient_norm": 10.0}}),
        240,
    ),
    "dqn, Atari": (BREAKOUT, 140),
    "r2d2": (merge(SHORT, {"trainer": {"total_steps": 450}}), 450),
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
    "impala, nature and replay": (
        merge(
            {**CARTPOLE, **ATARI, **SHALLOW, "name": "nature"},
            {"trainer": {"network": "nature", "replay": {"unrolls": 2, "capacity": 8}}},
        ),
        40,
    ),
    "impala, language": (BABYAI, 40),
    "dqn, layers": (
        {**CARTPOLE, "trainer": LAYERS},
        216,
    ),
    "r2d2, module": (
        merge(SHORT, {"trainer": {"network": {"module": f"{__spec__.name}:make_module"}}}),
        360,
    ),
}
GRAPHED = ("dqn", "dqn, Adam", "dqn, Atari", "dqn, layers", "r2d2")
# The run with graphs of these is halted at a step, and resumed.
HALTS = {"dqn": 220, "r2d2": 390}
STARTS = ((), (0, 1))
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
TABLE = "| deterministic on a GPU | operators |\n|---|---|\n"
TITLES = {
    "deterministic": "always",
    "with-flag": "with the flag alone",
    "uninitialized": "only with the flag, which fills their uninitialised results",
}
GPU = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9.10", "driver": ">=580.65"}
GPU["numerics"] = "native"  # nothing was pinned here
GRAPHS = GPU | {"cuda_graphs": True}
CPU = {"kind": "cpu", "numerics": "native"}


def make_module(shape):
    """Return a module of torch, as a user's own."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(*shape[1:], 12), torch.nn.ELU())


def train(document, steps, device, folder, accelerator, halt=None):
    """Return the losses of some steps, the lengths of two episodes, and norms of tensors.

    At the step ``halt`` the run is saved, ended, and resumed.
    """
    state = folder / contract.STATE
    state.mkdir(parents=True)
    spec = make_spec({**document, "accelerator": accelerator}).training()
    losses = []
    for end in (halt, steps) if halt else (steps,):
        streams, trace = make_streams(spec.seeds), Trace(folder / contract.TRACE)
        context = TrainerContext(state, spec, spec.seeds, streams, trace, device, workers=1)
        trainer = make_trainer(context)
        saved = Checkpointer(folder, spec, trainer, streams, trace, keeps_states=False)
        try:
            saved.restore()
            while trainer.step < end:
                trainer.train_step()
                if trainer.loss is not None:
                    losses.append(trainer.loss)
            if end == halt:
                saved.save_state()
                continue
            trainer.record(complete=True)
            makers = evaluation_environments(spec.environment, spec.seeds, len(STARTS))
            policy = trainer.policy(trainer.online.copy())
            played = evaluate(makers, STARTS, spec.evaluation, policy, steps)
            return {
                "losses": losses,
                "lengths": played.lengths,
                "device": str(trainer.online.flat.device),
                "trace": trace.head,
                "norms": {
                    name: float(abs(array).sum()) for name, array in trainer.tensors().items()
                },
            }
        finally:
            trainer.close()
            trace.close()
    raise AssertionError("the last attempt returns")


def trained(case, folder):
    """Train a case at both places; return what is found at each, and the operators of the device.

    Of :data:`GRAPHED` a second run there has graphs.
    An operator's statuses are those that torch documents of its calls, on a GPU.
    """
    from tests.training.capture_rules import graphs_without_a_gpu
    from tests.training.stand_in_device import DEVICE, stand_in_device

    document, steps = CASES[case]
    found = {"cpu": train(document, steps, torch.device("cpu"), folder / "cpu", CPU)}
    with stand_in_device() as used:
        found["elsewhere"] = train(document, steps, DEVICE, folder / "elsewhere", GPU)
    found["operators"] = {name: sorted(statuses) for name, statuses in used.items()}
    if case in GRAPHED:
        with stand_in_device(), graphs_without_a_gpu() as graphs:
            again = train(document, steps, DEVICE, folder / "graphs", GRAPHS, HALTS.get(case))
        found |= {"graphs": again, "captured": len(graphs)}
    return found


def all_trained(folder):
    """Return what was found in each case."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return {case: trained(case, Path(folder, str(n))) for n, case in enumerate(CASES)}


def page(text, found):
    """Return the page with a table of the operators that were used."""
    rows = [TABLE]
    for status, title in TITLES.items():
        names = {
            name.removeprefix("aten::")
            for case in found.values()
            for name, statuses in case["operators"].items()
            if status in statuses
        }
        rows.append(f"| {title} | {', '.join(f'`{name}`' for name in sorted(names))} |\n")
    before, _, after = text.partition(TABLE)
    return before + "".join(rows) + after[after.index("\n\n") + 1 :]


def main(argument):
    """Print what was found in each case, or write the page."""
    if argument != "--page":
        json.dump(all_trained(argument), sys.stdout)
        return
    with TemporaryDirectory() as folder:
        PAGE.write_text(page(PAGE.read_text(), all_trained(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
