"""IMPALA with its network, its actors and their schedule, as a spec describes them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.inference import Inference
from capsule.experiment.schedule_log import ScheduleLog, parse_schedule
from capsule.experiment.spec import CpuAccelerator, CudaAccelerator, TrainingSpec, tasks_of
from capsule.experiment.trainers import ImpalaTrainer
from capsule.training.acting.batching import ROWS
from capsule.training.acting.transports import Processes, Transport, local_transport
from capsule.training.environments import Environment, make_environment
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.impala.actors.replicas import Replicas, require_batch_invariance
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.impala.gradient import ImpalaGradient
from capsule.training.impala.learner import Impala
from capsule.training.impala.replay import UnrollReplay
from capsule.training.impala.schedule.executor import Executor
from capsule.training.impala.schedule.recorder import ScheduleRecorder
from capsule.training.impala.schedule.sources import Live, Lockstep, Recorded, Schedule
from capsule.training.layers.backends import backend_for
from capsule.training.networks.actor_critic import ActorCriticNetwork, make_actor_critic_network
from capsule.training.networks.feedforward import Parameters
from capsule.training.networks.language import make_vocabulary
from capsule.training.sharded_gradient import Learners
from capsule.training.state.streams import make_streams
from capsule.training.trainer import TrainerContext, state_interval

_RECORDING = "schedule"


def make_impala(context: TrainerContext, trainer: ImpalaTrainer) -> Impala:
    """Make the trainer with its actors.

    Raises:
        CapsuleError: CAP-T212 to CAP-T216, the environment is not available; CAP-T221, there is no
            room for the replay memory; CAP-T241, CAP-T243 or CAP-T244, the network cannot be made;
            CAP-T321, a row of the policy's outputs depends on its batch on this machine; CAP-T341
            or CAP-T344, the schedule log to follow is malformed, or of another run.
    """
    spec = context.spec
    # The example draws from streams of its own, so that those of the run stay at their beginning.
    example = make_environment(spec.environment, make_streams(context.seeds), training=True)
    schedule = make_schedule(context, trainer)
    settings = make_settings(context, trainer, example)
    # This tests the machine for processes that choose their actors' actions. Replicas test
    # themselves.
    tested = require_batch_invariance(settings)
    transport = make_transport(context, trainer, settings, schedule.lag)
    executor = Executor(schedule, transport, trainer.actors)
    inference = Inference(
        rows=settings.rows,
        independent=settings.network.products.fixed_order,
        tested_rows=tested,
        replicas=executor.replicas,
    )
    recorder = None
    if trainer.schedule.mode == "recorded":
        path = context.directory / _RECORDING
        recorder = ScheduleRecorder(path, spec.digest(), trainer.actors, trainer.fresh)
    network = make_network(trainer, example, spec.accelerator)
    learners = partial(make_learners, context, network, example.frame_stack)
    blank = Unroll.blank(trainer.unroll_length, example, network)
    replay = make_replay(context, trainer, blank)
    return Impala(context, trainer, network, learners, executor, recorder, replay, inference)


def make_replay(
    context: TrainerContext, trainer: ImpalaTrainer, example: Unroll
) -> UnrollReplay | None:
    """Return the replay memory that the spec asks for, empty; None if it asks for none.

    Args:
        context: The run.
        trainer: The spec's section ``trainer``.
        example: An unroll with the shapes of all unrolls.

    Raises:
        CapsuleError: CAP-T221, there is no room for its files.
    """
    if trainer.replay is None:
        return None
    updates = state_interval(context.spec) // trainer.interval_steps
    return UnrollReplay(
        context.directory / "replay",
        example,
        capacity=trainer.replay.capacity,
        slack=updates * trainer.fresh,
    )


def make_learners(
    context: TrainerContext,
    network: ActorCriticNetwork,
    frame_stack: int,
    trainer: ImpalaTrainer,
    parameters: Parameters,
) -> Learners:
    """Return the threads of this process, and the other processes, that compute gradients."""
    alone = context.learners == 1 and context.device.type == "cpu"
    return Learners(
        parameters,
        partial(ImpalaGradient, trainer, network, frame_stack),
        len(trainer.micro_batches),
        threads=context.workers if alone else 1,
        ranks=context.learners,
        determinism=context.spec.determinism,
        numerics=context.spec.cpu_numerics,
    )


def make_schedule(context: TrainerContext, trainer: ImpalaTrainer) -> Schedule:
    """Return the schedule: the spec's rule, a log to follow, or the order of arrival.

    Raises:
        CapsuleError: CAP-T341 or CAP-T344, the log is malformed, or of another run.
    """
    if trainer.schedule.mode == "lockstep":
        updates = trainer.total_steps // trainer.interval_steps
        return Lockstep(trainer.actors, trainer.fresh, trainer.schedule.policy_lag, updates)
    replay = context.directory.parent / contract.SCHEDULE_REPLAY
    if replay.exists():
        return Recorded(_log_to_follow(replay, context.spec, trainer), trainer.schedule.policy_lag)
    return Live(trainer.actors, trainer.fresh, trainer.schedule.policy_lag)


def make_settings(
    context: TrainerContext, trainer: ImpalaTrainer, example: Environment
) -> UnrollSettings:
    """Return the settings of the actors, which act on the CPU even if the learner is on a GPU."""
    return UnrollSettings(
        tasks=tasks_of(context.spec.environment),
        seeds=context.seeds,
        network=make_network(trainer, example, CpuAccelerator(numerics=context.spec.cpu_numerics)),
        steps=trainer.unroll_length,
        vocabulary=make_vocabulary(trainer.language),
        rows=trainer.inference.rows if trainer.inference.mode == "server" else ROWS,
        determinism=context.spec.determinism,
        truncation=trainer.truncation,
    )


def make_transport(
    context: TrainerContext, trainer: ImpalaTrainer, settings: UnrollSettings, lag: int
) -> Transport:
    """Start the transport that runs the actors: in this process, in others, or on a cluster.

    Raises:
        CapsuleError: CAP-T321, a row of the policy's outputs depends on its batch in a replica;
            or, on a cluster, as :class:`RayTransport`.
    """
    numerics = context.spec.cpu_numerics
    # On a cluster every worker chooses the actions of its own actors, with the bits that replicas
    # would give.
    if cluster := os.environ.get(contract.CLUSTER_VARIABLE):
        from capsule.training.impala.actors.ray.transport import RayTransport, pins_of

        workers = os.environ.get(contract.CLUSTER_HOSTS_VARIABLE)
        return RayTransport(
            settings,
            trainer.actors,
            cluster=cluster,
            workers=int(workers) if workers else None,
            lag=lag,
            pins=pins_of(context.spec, numerics),
        )
    actors, processes = trainer.actors, context.actor_processes
    replicas = context.replicas if trainer.inference.mode == "server" else 0
    # A single replica without actor processes would only answer this process, which computes the
    # same bits itself.
    if replicas == 0 or (replicas == 1 and processes == 0):
        return local_transport(settings, actors, processes=processes, lag=lag, numerics=numerics)
    processes = min(actors, max(1, processes))
    inference = Replicas(settings, actors, processes, replicas, numerics)
    return Processes(
        settings, actors, processes=processes, lag=lag, numerics=numerics, inference=inference
    )


def make_network(
    trainer: ImpalaTrainer, example: Environment, accelerator: CpuAccelerator | CudaAccelerator
) -> ActorCriticNetwork:
    """Return the network for an environment, with the accelerator's arithmetic.

    Raises:
        CapsuleError: CAP-T241, the vocabulary has an entry that is not a word in lower case.
    """
    vocabulary = make_vocabulary(trainer.language)
    return make_actor_critic_network(
        trainer.network,
        frame_stack=example.frame_stack,
        layout=example.layout,
        actions=example.actions,
        recurrent_units=trainer.recurrent_units,
        hidden_units=trainer.hidden_units,
        products=backend_for(accelerator, trainer.network),
        vocabulary=len(vocabulary.words),
        words=vocabulary.longest,
    )


def _log_to_follow(path: Path, spec: TrainingSpec, trainer: ImpalaTrainer) -> ScheduleLog:
    log = parse_schedule(path.read_bytes())
    bound = max(log.lags, default=0)
    # The last element is the lag of the spec, unless the log exceeds it.
    found = log.spec, log.actors, log.batch, max(bound, trainer.schedule.policy_lag)
    wanted = spec.digest(), trainer.actors, trainer.fresh, trainer.schedule.policy_lag
    if found != wanted:
        raise CapsuleError(
            "CAP-T344",
            f"the schedule log is of the spec {log.spec}: {log.actors} actors in batches of "
            f"{log.batch} with a lag up to {bound}; this is {wanted[0]}: {wanted[1]} in batches of "
            f"{wanted[2]}, up to {wanted[3]}",
            fix="Follow a log with the spec that it was recorded with.",
        )
    return log
