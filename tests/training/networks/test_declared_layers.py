"""Networks that a spec declares layer by layer, in the trainers with a memory."""

import pytest
import torch

from capsule.experiment.errors import CapsuleError
from capsule.experiment.trainers import ConvolutionSpec, LayersSpec
from capsule.host.spec_file import parse_spec
from capsule.training.layers.backends import FIXED_ORDER
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.networks.recurrent import make_recurrent_network
from capsule.training.state.frames import FrameLayout
from capsule.training.state.streams import Stream

LAYERS = LayersSpec(convolutions=(ConvolutionSpec(filters=4, kernel=2),), dense=(6, 5))
COMMON = {
    "frame_stack": 1,
    "layout": FrameLayout((3, 5, 5)),
    "actions": 3,
    "recurrent_units": 8,
    "hidden_units": 7,
    "products": FIXED_ORDER,
}
SPEC = """\
schema: capsule/spec/v1
name: own
environment: {{suite: gymnasium, id: Mine-v0, modules: [mine], frames: {frames}}}
trainer: {{algorithm: {algorithm}, {trainer}}}
"""


@pytest.mark.parametrize("make", [make_recurrent_network, make_actor_critic_network])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_memory_reads_the_last_declared_layer(make, activation):
    network = make(LAYERS.model_copy(update={"activation": activation}), **COMMON)
    assert network.torso.width == 5
    assert network.shapes["dense1.weight"] == (6, 4 * 4 * 4)
    assert network.shapes["lstm.inputs.weight"] == (4 * 8, 5 + 1 + 3)
    parameters = Parameters(network.shapes, torch.device("cpu"))
    initialize(parameters, Stream("initialization", 0))
    frames = torch.randint(0, 256, (9, 1, 3, 5, 5), dtype=torch.uint8)
    together = network.torso.features(parameters.views, frames)
    alone = torch.cat(
        [network.torso.features(parameters.views, frames[at : at + 1]) for at in range(9)]
    )
    assert together.numpy().tobytes() == alone.numpy().tobytes()
    views = {name: view.clone() for name, view in parameters.views.items()}
    act = {"relu": torch.relu, "tanh": torch.tanh}[activation]
    hidden = torch.nn.functional.conv2d(frames[:, 0] / 255, views["conv1.weight"])
    hidden = act(hidden + views["conv1.bias"].view(1, -1, 1, 1)).permute(0, 2, 3, 1).flatten(1)
    for layer in (1, 2):
        hidden = act(hidden @ views[f"dense{layer}.weight"].T + views[f"dense{layer}.bias"])
    torch.testing.assert_close(together, hidden, rtol=1e-4, atol=1e-5)


def parse(frames, trainer, algorithm="dqn"):
    text = SPEC.format(frames=frames, algorithm=algorithm, trainer=trainer)
    return parse_spec(text.encode(), "spec.yaml")


@pytest.mark.parametrize(
    ("frames", "trainer", "message"),
    [
        ("flat", "network: {dense: [4], scaled: false}", "scaled: false does not apply"),
        ("flat", "network: {dense: [0]}", "trainer.network.dense.0: must be greater than 0"),
        ("flat", "network: {dense: [4], activation: gelu}", "must be 'relu' or 'tanh'"),
    ],
)
def test_layers_that_do_not_fit_are_refused_and_named(frames, trainer, message):
    with pytest.raises(CapsuleError) as refused:
        parse(frames, trainer)
    assert refused.value.code == "CAP-S003"
    assert message in refused.value.message


def test_a_misspelt_field_of_a_layer_is_recognised():
    with pytest.raises(CapsuleError) as refused:
        parse("image", "network: {convolutions: [{filter: 4, kernel: 2}]}")
    assert "Did you mean trainer.network.convolutions.filters?" in refused.value.fix
