"""CUDA graphs: when one is made, what its recording on the stand-in device refuses, and a GPU's."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from capsule.training.determinism import cuda_graph
from capsule.training.determinism.cuda_graph import WARM_UP, FixedTensors, Region
from tests.training.conftest import ANY_GPU, BREAKOUT, CARTPOLE, merge
from tests.training.r2d2.test_learner import TASK as R2D2

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
# Each is called as often as the graph of an update, and keeps to the rules or does not.
SCRIPT = """
import torch
from capsule.training.determinism.cuda_graph import FixedTensors, Region
from tests.training.capture_rules import CaptureError, graphs_without_a_gpu
from tests.training.stand_in_device import DEVICE, stand_in_device

inputs = FixedTensors(DEVICE)
total = torch.zeros(2)
update = 0

def sound(x):
    mask = x > 2
    total.add_(torch.where(mask, x, 0.0) @ x.new_ones(2, 2))
    return total * 0.5

def with_a_new_number(x):
    return x * update

def with_other_operators(x):
    return x.exp() if update > 2 else x.sin()

def with_one_operator_more(x):
    return x.exp().sin() if update > 2 else x.exp()

def with_a_new_tensor(x):
    return x + outside

def that_reads_a_number(x):
    return x * 2 if float(x.sum()) > 0 else x

def that_lists(x):
    return x * x.tolist()[0]

def that_finds_places(x):
    return x[x > 1]

def that_copies_out(x):
    return x.cpu()

def that_copies_in(x):
    return x + torch.tensor([1.0, 2.0]).to(x.device)

def that_fills_from_the_host(x):
    return x.copy_(torch.tensor([1.0, 2.0]))

with stand_in_device(), graphs_without_a_gpu():
    for function in [f for name, f in list(globals().items()) if f.__class__ is sound.__class__]:
        if function.__module__ != "__main__":
            continue
        total = torch.zeros(2, device=DEVICE)
        inputs = FixedTensors(DEVICE)
        region = Region(lambda: function(x), DEVICE, graph=True)
        seen = []
        try:
            for update in range(1, 5):
                (x,) = inputs.fill(torch.tensor([1.0, 2.0]) * update)
                outside = x + update
                result = region()
                seen.append(result.cpu().tolist())
            print(function.__name__, "recorded", seen)
        except CaptureError as error:
            print(function.__name__, "refused", error)
"""
REFUSED = {
    "with_a_new_number": "a second update has other operators",
    "with_other_operators": "a second update has other operators",
    "with_one_operator_more": "another number of them",
    "with_a_new_tensor": "a second update has other operators",
    "that_reads_a_number": "_local_scalar_dense.default waits for the device",
    "that_lists": "copies between the host and the device",
    "that_finds_places": "waits for the device",
    "that_copies_out": "copies between the host and the device",
    "that_copies_in": "copies between the host and the device",
    "that_fills_from_the_host": "copies between the host and the device",
}


@pytest.mark.slow
def test_what_cannot_be_captured_is_refused_and_what_can_be_is_repeated():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sound, *refused = done.stdout.splitlines()
    # Of the inputs (u, 2u) those above 2 count: 2u from the second update on, u from the third.
    assert sound == "sound recorded [[0.0, 0.0], [2.0, 2.0], [6.5, 6.5], [12.5, 12.5]]"
    assert {line.split()[0] for line in refused} == set(REFUSED)
    for line in refused:
        name, verdict, reason = line.split(maxsplit=2)
        assert verdict == "refused"
        assert REFUSED[name] in reason


@pytest.fixture
def graphs(monkeypatch):
    stand_in = Mock(return_value=Mock(replay=lambda: "replayed"))
    monkeypatch.setattr(cuda_graph, "Graph", stand_in)
    return stand_in


def test_a_region_is_called_before_it_is_captured_once(graphs):
    region = Region(lambda: "called", CPU, graph=True)
    assert [region() for _ in range(WARM_UP + 2)] == ["called"] * WARM_UP + ["replayed"] * 2
    assert graphs.call_count == 1


def test_without_graphs_a_region_is_called(graphs):
    region = Region(lambda: "called", CPU, graph=False)
    assert {region() for _ in range(WARM_UP + 2)} == {"called"}
    assert not graphs.called


def test_an_instrument_sees_every_operator(graphs):
    region = Region(lambda: "called", CPU, graph=True)
    for _ in range(WARM_UP + 1):
        region()
    with TorchDispatchMode():
        assert region() == "called"
    assert region() == "replayed"


def test_a_region_waits_for_what_was_launched_before_and_the_caller_for_the_region(monkeypatch):
    order, own, callers = [], Mock(), Mock()
    own.wait_stream = lambda other: order.append(("region waits", other is callers))
    callers.wait_stream = lambda other: order.append(("caller waits", other is own))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: callers)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    Region(lambda: order.append("work"), torch.device("cuda"), graph=False)()
    assert order == [("region waits", True), "work", ("caller waits", True)]


def test_on_the_cpu_tensors_are_those_of_the_caller():
    given = torch.ones(2), torch.zeros(3)
    found = FixedTensors(CPU).fill(*given)
    assert all(one is other for one, other in zip(given, found, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (BREAKOUT, {}),
        (CARTPOLE, {"trainer": {"optimizer": "adam", "max_gradient_norm": 10.0}}),
        (R2D2, {}),
    ],
    ids=["dqn", "dqn-adam", "r2d2"],
)
def test_on_a_gpu_graphs_change_no_bit(open_trainer, document, changes):
    heads = []
    for graphs in (False, True):
        accelerator = ANY_GPU | {"cuda_graphs": graphs, "numerics": "native"}
        trainer = open_trainer(merge(document, changes), device="cuda", accelerator=accelerator)
        end = trainer._trainer.replay_start + 300
        while trainer.step < end:
            trainer.train_step()
        assert (trainer._descent._graph is not None) is graphs
        trainer.record(complete=True)
        heads.append(trainer.trace.head)
    assert heads[0] == heads[1]
