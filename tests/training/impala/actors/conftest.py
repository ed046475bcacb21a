"""IMPALA's actors on small tasks, and what their tests share."""

import torch

from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.actor_worker import ActorRequest, actor_streams
from capsule.training.environments import make_environment
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.layers.backends import FIXED_ORDER
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.state.streams import Stream
from tests.training.conftest import BREAKOUT, CARTPOLE, make_spec
from tests.training.impala import tasks as impala_tasks

CPU = torch.device("cpu")
SEEDS = SeedsSpec(root=3, streams={"no-op": 5})
ENVIRONMENTS = {
    "counting": make_spec(
        CARTPOLE, environment={"id": impala_tasks.NAME, "modules": [impala_tasks.__name__]}
    ).environment,
    "cartpole": make_spec(CARTPOLE, environment={"max_episode_steps": 12}).environment,
    "sticky": make_spec(
        BREAKOUT,
        environment={
            "sticky_action_probability": 0.25,
            "clip_rewards": False,
            "max_episode_frames": 300,
        },
    ).environment,
}


def settings_of(name="counting", length=7, units=5, products=FIXED_ORDER, truncation="bootstrap"):
    """Return what makes actors of a small network; its rows do not fill vector registers evenly."""
    environment = ENVIRONMENTS[name]
    example = make_environment(environment, actor_streams(SEEDS, 0), training=True)
    network = make_actor_critic_network(
        "shallow" if name == "sticky" else "mlp",
        frame_stack=example.frame_stack,
        layout=example.layout,
        actions=example.actions,
        recurrent_units=units,
        hidden_units=6,
        products=products,
    )
    return UnrollSettings((environment,), SEEDS, network, length, truncation=truncation)


def parameters_of(settings, seed=1):
    parameters = Parameters(settings.network.shapes, CPU)
    initialize(parameters, Stream("initialization", seed))
    parameters.flat.mul_(3)  # a policy that prefers something
    return parameters


def play(worker, actors, versions, settings, *, given=None, lag=99):
    """Let ``actors`` unroll with one version after the other; return ``[version][actor]``."""
    given = set() if given is None else given
    made = []
    for version in versions:
        new = {} if version in given else {version: parameters_of(settings, version).flat.numpy()}
        given.add(version)
        made.append(worker.play([ActorRequest(actor, version) for actor in actors], new, lag))
        assert [played.actor for played in made[-1]] == sorted(actors)
    return made
