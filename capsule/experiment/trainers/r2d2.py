"""The hyper-parameters of R2D2 (Kapturowski et al. 2019, OpenReview r1lyTjAqYX)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from capsule.experiment.fields import (
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
)
from capsule.experiment.trainers.checks import (
    require_at_most,
    require_micro_batches,
    require_multiple,
)
from capsule.experiment.trainers.layers import Layers, Module, Named, by_kind

R2d2NetworkName = Annotated[Literal["nature", "residual", "small-conv", "mlp"], Named]


class R2d2Trainer(Model):
    """Recurrent replay distributed DQN (R2D2).

    The defaults are those of Kapturowski et al. 2019, OpenReview r1lyTjAqYX: of Table 2 and section
    2.3, with burn_in and recurrent_state of section 3, total_steps of Table 1, and network,
    recurrent_units, hidden_units and life_loss of the appendix. The paper adopts replay_start,
    max_gradient_norm and the exploration rates from Ape-X (Horgan et al. 2018, arXiv:1803.00933).
    update_interval gives the paper's replay ratio.
    """

    algorithm: Literal["r2d2"]
    total_steps: PositiveInt = Field(
        2_500_000_000, description="Agent steps of training, summed over all actors."
    )
    network: Annotated[R2d2NetworkName | Layers | Module, by_kind] = Field(
        "nature",
        description="Network before the LSTM: 'residual' is the 15-layer network of R2D2+. "
        "Alternatively, the hidden layers of your own network.",
    )
    recurrent_units: NonNegativeInt = Field(
        512,
        description="Units of the LSTM; 0: the feed-forward variant, with a dense layer of "
        "hidden_units instead.",
    )
    hidden_units: PositiveInt = Field(
        512,
        description="Units in the hidden layer of each dueling head, and in the hidden layer of "
        "'mlp'.",
    )
    actors: PositiveInt = Field(
        256,
        description="Number of logical actors. The number of processes that run them does not "
        "affect the result.",
    )
    update_interval: PositiveInt = Field(
        25,
        description="Agent steps of each actor between parameter updates. With 256 actors and the "
        "value 25, each step is trained on 0.8 times on average, or less often if episodes are "
        "shorter than sequences.",
    )
    actor_update_interval: PositiveInt = Field(
        400, description="Agent steps of each actor between its copies of the parameters."
    )
    burn_in: NonNegativeInt = Field(
        40,
        description="Burn-in: agent steps at the start of a sequence that only update the "
        "recurrent state.",
    )
    sequence_length: PositiveInt = Field(
        80, description="Agent steps of a sequence that are trained on, after the burn-in."
    )
    sequence_stride: PositiveInt = Field(
        40, description="Agent steps from the start of a sequence to the start of the next."
    )
    recurrent_state: Literal["stored", "zero"] = Field(
        "stored",
        description="Recurrent state at the start of a replayed sequence: 'stored' is the one "
        "that the actor had there; 'zero' is all zeros.",
    )
    n_step: PositiveInt = Field(5, description="Length n of n-step returns.")
    discount: Probability = Field(0.997, description="Discount factor gamma.")
    rescaling_epsilon: NonNegativeFloat | None = Field(
        1e-3, description="Parameter epsilon of the value function rescaling h; null: no rescaling."
    )
    asymmetric_clipping: bool = Field(
        False,
        description="Whether rewards are mapped to 0.3 min(tanh r, 0) + 5 max(tanh r, 0), as in "
        "R2D2+.",
    )
    life_loss: Literal["roll", "reset"] = Field(
        "roll",
        description="Whether the recurrent state is kept ('roll') or reset ('reset') when a lost "
        "life ends the return.",
    )
    replay_capacity: PositiveInt = Field(
        4_000_000, description="Maximum number of observations in the replay memory."
    )
    replay_start: PositiveInt = Field(
        50_000, description="Agent steps, summed over all actors, before training starts."
    )
    priority_exponent: Probability = Field(0.9, description="Exponent of the priorities.")
    priority_maximum_share: Probability = Field(
        0.9,
        description="Parameter eta of the priority of a sequence, eta times the maximum absolute "
        "TD error plus (1 - eta) times the mean.",
    )
    importance_exponent: Probability = Field(
        0.6, description="Exponent of the importance sampling weights."
    )
    batch_size: PositiveInt = Field(64, description="Number of sequences in a minibatch.")
    learning_rate: PositiveFloat = Field(1e-4, description="Learning rate.")
    adam_epsilon: PositiveFloat = Field(
        1e-3,
        description="Constant that is added to the square root in the denominator of Adam.",
    )
    max_gradient_norm: PositiveFloat | None = Field(
        40.0, description="Maximum norm to which the gradient is clipped; null: no clipping."
    )
    target_interval: PositiveInt = Field(
        2_500, description="Parameter updates between copies into the target network."
    )
    exploration_base: Probability = Field(
        0.4,
        description="Base of the exploration rates: actor i, counted from 0, acts randomly with "
        "the probability base ** (1 + exponent * i / (actors - 1)); a single actor, with the "
        "probability base.",
    )
    exploration_exponent: NonNegativeFloat = Field(
        7.0, description="Exponent of the exploration rates; see exploration_base."
    )
    micro_batches: tuple[PositiveInt, ...] = Field(
        (32, 32),
        description="Sizes of the parts of a minibatch whose gradients are added in this order. "
        "They affect the result; the number of threads that compute them does not.",
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.actors * self.update_interval

    @model_validator(mode="after")
    def _consistent(self) -> R2d2Trainer:
        require_micro_batches(self.micro_batches, self.batch_size)
        if self.total_steps % self.interval_steps:
            raise ValueError(
                f"total_steps {self.total_steps} is not a multiple of actors {self.actors} times "
                f"update_interval {self.update_interval}"
            )
        require_multiple(self, "actor_update_interval", "update_interval")
        if self.sequence_length % self.sequence_stride:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not a multiple of sequence_stride "
                f"{self.sequence_stride}: some steps would be trained on "
                "more often than others, or never"
            )
        for name in ("burn_in", "n_step"):
            require_at_most(self, name, "sequence_length")
        require_at_most(self, "replay_start", "replay_capacity")
        rows = self.burn_in + self.sequence_length + self.n_step
        for name in ("replay_start", "replay_capacity"):
            share = getattr(self, name) // self.actors
            if share < rows:
                raise ValueError(
                    f"{name} {getattr(self, name)} gives each of {self.actors} actors {share} "
                    f"steps, but a sequence needs {rows}: burn_in + sequence_length + n_step"
                )
        if self.recurrent_units == 0 and self.recurrent_state == "stored":
            raise ValueError(
                "recurrent_state 'stored' requires an LSTM: use 'zero' with recurrent_units 0"
            )
        return self
