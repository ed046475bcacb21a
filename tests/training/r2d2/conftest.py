"""R2D2's actors on small tasks, and what their tests share."""

from dataclasses import replace

import numpy as np
import torch

from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.actor_worker import ActorRequest, actor_streams
from capsule.training.environments import make_environment
from capsule.training.layers.backends import FIXED_ORDER
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.networks.recurrent import make_recurrent_network
from capsule.training.r2d2.actor_worker import ActorSettings, EpsilonGreedyActor
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.state.streams import Stream
from tests.training.acting.actor_networks import CountingNetwork
from tests.training.conftest import BREAKOUT, CARTPOLE, make_spec

CPU = torch.device("cpu")
SEEDS = SeedsSpec(root=3, streams={"no-op": 5})
LAYOUT = SequenceLayout(burn_in=4, trained=6, period=3)
ENVIRONMENTS = {
    "cartpole": make_spec(CARTPOLE, environment={"max_episode_steps": 12}).environment,
    "breakout": make_spec(BREAKOUT).environment,
    "sticky": make_spec(
        BREAKOUT,
        environment={
            "sticky_action_probability": 0.25,
            "clip_rewards": False,
            "max_episode_frames": 300,
            "frame_stack": 2,
        },
    ).environment,
}


def settings_of(name="cartpole", actors=5, network=None, **changes):
    """Return settings of actors that play in an environment."""
    environment = ENVIRONMENTS[name]
    example = make_environment(environment, streams_of(0), training=True)
    network = network or CountingNetwork(example.actions)
    settings = ActorSettings(
        tasks=(environment,),
        seeds=SEEDS,
        network=network,
        steps=10,
        layout=LAYOUT,
        actors=actors,
        life_loss="roll",
        exploration_base=0.6,
        exploration_exponent=4.0,
    )
    return replace(settings, **changes)


def recurrent(name, units=20, products=FIXED_ORDER):
    """Return a small network as it is trained; its rows do not fill vector registers evenly."""
    example = make_environment(ENVIRONMENTS[name], streams_of(0), training=True)
    return make_recurrent_network(
        "mlp" if name == "cartpole" else "nature",
        frame_stack=example.frame_stack,
        layout=example.layout,
        actions=example.actions,
        recurrent_units=units,
        hidden_units=12,
        products=products,
    )


def parameters_of(settings, seed=1):
    parameters = Parameters(settings.network.shapes, CPU)
    initialize(parameters, Stream("initialization", seed))
    return parameters


def streams_of(actor):
    return actor_streams(SEEDS, actor, EpsilonGreedyActor.drawn)


def play(settings, steps, parameters, played=None):
    """Return what actors do that one worker plays in this process."""
    played = range(settings.actors) if played is None else played
    worker = replace(settings, steps=steps).make_worker(played)
    requests = [ActorRequest(actor, 0) for actor in played]
    return [each.experience for each in worker.play(requests, {0: parameters.flat.numpy()}, 0)]


def bits(value):
    """Return nested tuples that are equal where two experiences are, bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple((key, bits(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(bits(part) for part in value)
    return value
