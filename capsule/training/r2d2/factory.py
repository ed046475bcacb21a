"""R2D2 with its network, actors and replay memory, as a spec describes them."""

from __future__ import annotations

from typing import Any

from capsule.experiment.spec import CpuAccelerator, CudaAccelerator
from capsule.experiment.trainers import R2d2Trainer
from capsule.training.acting.transports import local_transport
from capsule.training.environments import Environment, make_environment
from capsule.training.layers.backends import backend_for
from capsule.training.networks.recurrent import RecurrentNetwork, make_recurrent_network
from capsule.training.r2d2.actor_worker import ActorSettings
from capsule.training.r2d2.actors import Actors
from capsule.training.r2d2.cutting import SequenceLayout
from capsule.training.r2d2.learner import R2D2
from capsule.training.r2d2.replay import Frames, SequenceReplay
from capsule.training.state.streams import make_streams
from capsule.training.trainer import TrainerContext, state_interval


def make_r2d2(context: TrainerContext, trainer: R2d2Trainer) -> R2D2:
    """Make the trainer with its actors and its replay memory.

    Raises:
        CapsuleError: CAP-T212 to CAP-T216, the environment is not available; CAP-T221, there is no
            room for the replay memory; CAP-T243 or CAP-T244, the network does not fit the frames,
            or a user module cannot be used; or a process of actors did not start.
    """
    spec = context.spec
    # The example draws from streams of its own, so that those of the run stay at their beginning.
    example = make_environment(spec.environment, make_streams(context.seeds), training=True)
    network = make_network(trainer, example, spec.accelerator)
    settings = actor_settings(context, trainer, example)
    # A lag of 0, because all actors act with the newest parameters that were published.
    transport = local_transport(
        settings,
        trainer.actors,
        processes=context.actor_processes,
        lag=0,
        numerics=spec.cpu_numerics,
    )
    actors = Actors(settings, transport)
    options = replay_options(context, trainer, example, network)
    replay = SequenceReplay(context.directory / "replay", **options)
    return R2D2(context, trainer, network, actors, replay)


def make_network(
    trainer: R2d2Trainer, example: Environment, accelerator: CpuAccelerator | CudaAccelerator
) -> RecurrentNetwork:
    """Return the network for an environment, with the accelerator's arithmetic."""
    return make_recurrent_network(
        trainer.network,
        frame_stack=example.frame_stack,
        layout=example.layout,
        actions=example.actions,
        recurrent_units=trainer.recurrent_units,
        hidden_units=trainer.hidden_units,
        products=backend_for(accelerator, trainer.network),
    )


def sequence_layout(trainer: R2d2Trainer) -> SequenceLayout:
    """Return how episodes are cut: with room for the full n-step target of every trained step."""
    return SequenceLayout(
        burn_in=trainer.burn_in,
        trained=trainer.sequence_length,
        period=trainer.sequence_stride,
        lookahead=trainer.n_step,
    )


def actor_settings(
    context: TrainerContext, trainer: R2d2Trainer, example: Environment
) -> ActorSettings:
    """Return the settings of the actors, which act on the CPU even if the learner is on a GPU."""
    cpu = CpuAccelerator(numerics=context.spec.cpu_numerics)
    return ActorSettings(
        tasks=(context.spec.environment,),
        seeds=context.seeds,
        network=make_network(trainer, example, cpu),
        steps=trainer.update_interval,
        determinism=context.spec.determinism,
        layout=sequence_layout(trainer),
        actors=trainer.actors,
        life_loss=trainer.life_loss,
        exploration_base=trainer.exploration_base,
        exploration_exponent=trainer.exploration_exponent,
    )


def replay_options(
    context: TrainerContext, trainer: R2d2Trainer, example: Environment, network: RecurrentNetwork
) -> dict[str, Any]:
    """Return the arguments of :class:`SequenceReplay`, without the folder."""
    # A step adds one entry, and a second one where it truncates an episode.
    steps = (state_interval(context.spec) + trainer.interval_steps) // trainer.actors
    return {
        "layout": sequence_layout(trainer),
        "actors": trainer.actors,
        "capacity": trainer.replay_capacity,
        "slack": 2 * steps,
        "frames": Frames(example.frame_shape, example.frame_dtype, example.frame_stack),
        "state_shape": network.state_shape if trainer.recurrent_state == "stored" else (0,),
        "priority_exponent": trainer.priority_exponent,
    }
