"""Which trainer a spec names."""

from __future__ import annotations

from capsule.experiment.trainers import DqnTrainer, R2d2Trainer
from capsule.training.trainer import Trainer, TrainerContext


def make_trainer(context: TrainerContext) -> Trainer:
    """Make the trainer that the spec names."""
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
