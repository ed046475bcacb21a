"""Making the trainer that a spec names, or the policy that it evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from capsule.experiment.spec import SeedsSpec, TrainingSpec
from capsule.experiment.trainers import DqnTrainer, R2d2Trainer
from capsule.training.trainer import Trainer, TrainerContext

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from capsule.training.evaluation.protocol import EvaluatedPolicy
    from capsule.training.networks.feedforward import Parameters, Shape


def make_trainer(context: TrainerContext) -> Trainer:
    """Make the trainer that the spec names.

    Raises:
        CapsuleError: As the function of the trainer: :func:`make_dqn`, :func:`make_r2d2`,
            :func:`make_impala` or :func:`make_population`.
    """
    if isinstance(context.spec.trainer, DqnTrainer):
        from capsule.training.dqn.learner import make_dqn

        return make_dqn(context, context.spec.trainer)
    if isinstance(context.spec.trainer, R2d2Trainer):
        from capsule.training.r2d2.factory import make_r2d2

        return make_r2d2(context, context.spec.trainer)
    if context.spec.trainer.population is not None:
        from capsule.training.impala.population_trainer import make_population

        return make_population(context, context.spec.trainer, context.spec.trainer.population)
    from capsule.training.impala.factory import make_impala

    return make_impala(context, context.spec.trainer)


def make_policy(
    spec: TrainingSpec,
    seeds: SeedsSpec,
    device: torch.device,
    arrays: Mapping[str, NDArray[np.float32]],
) -> EvaluatedPolicy:
    """Make the policy that the trainer of a spec evaluates, without the trainer.

    A trainer would reserve its replay memory and start its actors, which an evaluation does not
    need.

    Args:
        spec: The experiment.
        seeds: The spec's ``seeds`` section, with the root seed of the run.
        device: The device of the network.
        arrays: The parameters of the network, by name.

    Raises:
        CapsuleError: CAP-T212 to CAP-T216, the environment is not available; CAP-T241, CAP-T243 or
            CAP-T244, the network cannot be made.
    """
    from capsule.training.environments import make_environment
    from capsule.training.networks.feedforward import Parameters
    from capsule.training.state.streams import make_streams

    def loaded(shapes: Mapping[str, Shape]) -> Parameters:
        parameters = Parameters(shapes, device)
        parameters.load(arrays)
        return parameters

    example = make_environment(spec.environment, make_streams(seeds), training=True)
    if isinstance(spec.trainer, DqnTrainer):
        from capsule.training.dqn import learner as dqn

        q_network = dqn.make_q_network(spec.trainer, example, spec.accelerator)
        return dqn.network_policy(q_network, loaded(q_network.shapes))
    if isinstance(spec.trainer, R2d2Trainer):
        from capsule.training.r2d2 import factory as r2d2
        from capsule.training.r2d2.learner import network_policy as recurrent_policy

        recurrent = r2d2.make_network(spec.trainer, example, spec.accelerator)
        return recurrent_policy(recurrent, loaded(recurrent.shapes), spec.environment)
    from capsule.training.impala import factory as impala
    from capsule.training.impala.learner import network_policy

    network = impala.make_network(spec.trainer, example, spec.accelerator)
    return network_policy(network, loaded(network.shapes), spec.environment, spec.trainer)
