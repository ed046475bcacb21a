"""Modules of the user's own: what they compute, where they begin, and what is refused."""

import pickle
import threading

import pytest
import torch
from torch import nn

from capsule.experiment.contract import PROJECT_VARIABLE
from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import ModuleSpec
from capsule.training.layers.backends import LIBRARY
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.feedforward import Parameters, initialize, make_network
from capsule.training.networks.own_module import OwnModule
from capsule.training.networks.recurrent import make_recurrent_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

SHAPE = (2, 3, 5, 6)
NETS = """\
import torch
from torch import nn


def make(shape):
    frames, channels, rows, columns = shape
    return nn.Sequential(
        nn.Flatten(1, 2), nn.Conv2d(frames * channels, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.LayerNorm(4 * (rows - 1) * (columns - 1)), nn.LazyLinear(7),
    )


def eager(shape):
    module = make(shape)
    module(torch.zeros(1, *shape))  # which makes the lazy layer
    return module


def nothing(shape):
    return "a module"


def failing(shape):
    raise RuntimeError("out of order")


def normalizing(shape):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(180), nn.Linear(180, 7))


def precise(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(180, 7)).double()


def deep(shape):
    return nn.Flatten(1, 2)


def narrow(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 7))


def counting(shape):
    return Counting()


class Counting(nn.Module):
    def forward(self, seen):
        return seen.flatten(1).long()
"""


@pytest.fixture(autouse=True)
def tree(tmp_path_factory, monkeypatch):
    """The source tree of a run; imported modules stay imported, so all tests have the same one."""
    folder = tmp_path_factory.getbasetemp() / "own-module"
    folder.mkdir(exist_ok=True)
    (folder / "capsule_own_nets.py").write_text(NETS)
    monkeypatch.setenv(PROJECT_VARIABLE, str(folder))


@pytest.fixture
def own():
    return OwnModule("capsule_own_nets:eager", SHAPE)


def parameters_of(own, seed):
    parameters = Parameters(own.shapes(), torch.device("cpu"))
    stream = Stream("initialization", seed)
    initialize(parameters, stream)
    own.initialize(parameters.views, stream)
    return parameters


def test_features_are_those_of_the_module_with_the_runs_parameters(own):
    parameters = parameters_of(own, 0)
    reference = own._new()
    for name, parameter in reference.named_parameters():
        parameter.data.copy_(parameters.views[f"module.{name}"])
    seen = torch.rand(3, *SHAPE)
    assert own.width() == 7
    # Not to the bit: the library chooses its loops by the addresses of the weights, too.
    torch.testing.assert_close(own.features(parameters.views, seen), reference(seen))


def test_gradients_reach_the_runs_parameters(own):
    parameters = parameters_of(own, 0)
    leaves = parameters.leaves()
    own.features(leaves, torch.rand(3, *SHAPE)).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())


def test_it_begins_with_its_own_values_by_the_stream(own):
    first, again, other = (parameters_of(own, seed) for seed in (0, 0, 1))
    assert torch.equal(first.flat, again.flat)
    assert not torch.equal(first.flat, other.flat)
    norms = first.views["module.4.weight"]
    assert torch.equal(norms, torch.ones_like(norms))  # as torch has it


def test_torchs_generator_is_left_as_it_was(own):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    parameters_of(own, 0)
    assert torch.equal(torch.rand(1), expected)


def test_threads_may_use_different_parameters_at_once(own):
    seen = torch.rand(64, *SHAPE)
    sets = [parameters_of(own, seed) for seed in range(4)]
    expected = [own.features(each.views, seen) for each in sets]
    found = [[] for _ in sets]

    def compute(number):
        for _ in range(50):
            found[number].append(own.features(sets[number].views, seen))

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for values, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(each, wanted) for each in values)


def test_it_can_be_sent_to_another_process(own):
    own.shapes()
    assert pickle.loads(pickle.dumps(own)) == own  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("capsule_no_nets:make", "No module named"),
        ("capsule_own_nets:nowhere", "has no attribute 'nowhere'"),
        ("capsule_own_nets:failing", "RuntimeError: out of order"),
        ("capsule_own_nets:nothing", "returns str, not a torch.nn.Module"),
        ("capsule_own_nets:normalizing", "keeps 1.running_mean"),
        ("capsule_own_nets:precise", "0?1?.weight is not torch.float32"),
        ("capsule_own_nets:deep", r"makes \(2, 6, 5, 6\), not \(2, width\)"),
        ("capsule_own_nets:make", r"5.weight has no shape before the first call"),
        ("capsule_own_nets:narrow", r"2 observations \(2, 3, 5, 6\): RuntimeError: mat1 and mat2"),
        ("capsule_own_nets:counting", "makes torch.int64"),
    ],
)
def test_what_a_run_cannot_train_is_refused(source, said):
    with pytest.raises(CapsuleError, match=said) as refused:
        OwnModule(source, SHAPE).width()
    assert refused.value.code == "CAP-T244"
    assert source in refused.value.message


@pytest.mark.parametrize("numbers", [0, 2])
def test_each_trainers_network_reads_it_and_the_numbers_behind(own, numbers):
    layout = FrameLayout(SHAPE[1:], numbers)
    common = {"frame_stack": 2, "layout": layout, "actions": 3, "products": LIBRARY}
    spec = ModuleSpec(module=own.source, dense=(8,))
    wide = 7 + 2 * numbers
    network = make_network(spec, hidden_units=9, **common)
    assert network.shapes["dense1.weight"] == (8, wide)
    assert network.shapes["dense2.weight"] == (3, 8)
    for make in (make_recurrent_network, make_actor_critic_network):
        found = make(spec, recurrent_units=4, hidden_units=9, **common)
        assert found.torso.modules == (own,)
        assert found.shapes["dense1.weight"] == (8, wide)
        assert isinstance(own._module(), nn.Module)
