"""Population-based training (Jaderberg et al. 2017, arXiv:1711.09846), as IMPALA has it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from capsule.experiment.fields import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Word,
)

DRAWN_BY_MEMBERS = ("entropy_cost", "learning_rate", "rmsprop_epsilon")  # table D.1


class ScoreReference(Model):
    """Scores of a task by which its returns are normalised."""

    random: float = Field(description="Score of random play; it is normalised to 0.")
    human: float = Field(description="Score of a human player; it is normalised to 1.")

    @model_validator(mode="after")
    def _consistent(self) -> ScoreReference:
        if self.human <= self.random:
            raise ValueError(f"human {self.human} does not exceed random {self.random}")
        return self


class PopulationSpec(Model):
    """Population-based training.

    The defaults are those of Espeholt et al. 2018, arXiv:1802.01561: of appendix F, with members of
    Table G.1.

    All numbers of steps in a spec are those of one member, so a population of N members plays N
    times as many. Each member is a whole trainer with its own actors, seeds and replay memory.
    """

    members: int = Field(
        24,
        ge=2,
        le=64,
        description="Number of members. Each draws its own entropy_cost, learning_rate and "
        "rmsprop_epsilon (table D.1), starts with the max_gradient_norm of the spec, and changes "
        "all four as it evolves. A max_gradient_norm of null is not changed.",
    )
    burn_in: NonNegativeInt = Field(
        5_000_000,
        description="Agent steps at the start during which a member does not evolve. The default "
        "is 20 million frames on Atari.",
    )
    episodes: PositiveInt = Field(
        5_000,
        description="Number of episodes of a member, after the burn-in, from one evaluation of its "
        "fitness to the next.",
    )
    margin: NonNegativeFloat = Field(
        0.05,
        description="Margin of fitness: a member copies another member only if the fitness of that "
        "member is higher by more than this.",
    )
    probability: Probability = Field(
        0.33, description="Probability, each time a member evolves, that a hyper-parameter changes."
    )
    factor: Annotated[float, Field(gt=1)] = Field(
        1.2,
        description="Factor by which a change multiplies or divides a hyper-parameter, with equal "
        "probability.",
    )
    references: dict[Word, ScoreReference] = Field(
        default_factory=dict,
        description="Reference scores by game or id, for tasks other than those of Atari-57 and "
        "DMLab-30: the fitness is the mean over the tasks of min(1, (return - random) / (human - "
        "random)).",
    )
