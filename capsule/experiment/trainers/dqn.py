"""The hyper-parameters of DQN (Mnih et al. 2015, doi:10.1038/nature14236)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from capsule.experiment.fields import (
    Model,
    PositiveFloat,
    PositiveInt,
    Probability,
    is_given,
    reject_all,
)
from capsule.experiment.trainers.checks import (
    require_at_most,
    require_micro_batches,
    require_multiple,
    require_no_units,
)
from capsule.experiment.trainers.layers import Layers, Module, Named, by_kind

_FIELDS_OF_THE_OTHER_OPTIMIZER = {
    "centred-rmsprop": ("adam_epsilon", "max_gradient_norm"),
    "adam": ("gradient_momentum", "squared_gradient_momentum", "min_squared_gradient"),
}


DqnNetworkName = Annotated[Literal["nature", "shallow", "small-conv", "mlp"], Named]


class DqnTrainer(Model):
    """Deep Q-learning.

    The defaults are those of Mnih et al. 2015, doi:10.1038/nature14236, Extended Data Table 1, with
    these exceptions: target_interval counts agent steps, where the table counts parameter
    updates; exploration_steps and replay_start count agent steps, where the table counts frames;
    total_steps is 20 million; and concurrent is not a setting of the paper.
    """

    algorithm: Literal["dqn"]
    total_steps: PositiveInt = Field(20_000_000, description="Agent steps of training.")
    network: Annotated[DqnNetworkName | Layers | Module, by_kind] = Field(
        "nature",
        description="Network: 'shallow' is the smaller one of Mnih et al. 2013, 'nature' that of "
        "Mnih et al. 2015, 'small-conv' the one for MinAtar, and 'mlp' has two dense hidden layers "
        "for flat observations. Alternatively, the hidden layers of your own network.",
    )
    hidden_units: PositiveInt = Field(
        512, description="Units of the dense hidden layer, or of each of the two layers of 'mlp'."
    )
    batch_size: PositiveInt = Field(32, description="Number of transitions in a minibatch.")
    replay_capacity: PositiveInt = Field(
        1_000_000, description="Maximum number of transitions in the replay memory."
    )
    replay_start: PositiveInt = Field(
        50_000, description="Agent steps of uniformly random play before training starts."
    )
    discount: Probability = Field(0.99, description="Discount factor gamma.")
    update_interval: PositiveInt = Field(4, description="Agent steps between parameter updates.")
    updates: PositiveInt = Field(
        1,
        description="Number of parameter updates after every update_interval steps; more than 1 "
        "requires concurrent: false.",
    )
    target_interval: PositiveInt = Field(
        10_000, description="Agent steps between copies into the target network."
    )
    optimizer: Literal["centred-rmsprop", "adam"] = Field(
        "centred-rmsprop",
        description="'centred-rmsprop' minimises the sum of the loss over the minibatch; 'adam' "
        "minimises its mean, with the decay rates 0.9 and 0.999 of Kingma and Ba 2015.",
    )
    learning_rate: PositiveFloat = Field(0.00025, description="Learning rate.")
    gradient_momentum: Probability = Field(
        0.95, description="Decay rate of the mean gradient, in centred-rmsprop."
    )
    squared_gradient_momentum: Probability = Field(
        0.95, description="Decay rate of the mean squared gradient, in centred-rmsprop."
    )
    min_squared_gradient: PositiveFloat = Field(
        0.01,
        description="Constant that is added to the variance of the gradient under the square root, "
        "in centred-rmsprop.",
    )
    adam_epsilon: PositiveFloat = Field(
        1e-8,
        description="Constant that is added to the square root in the denominator of Adam; the "
        "default is that of Kingma and Ba 2015.",
    )
    max_gradient_norm: PositiveFloat | None = Field(
        None,
        description="Maximum norm to which the gradient is clipped, in Adam; null: no clipping.",
    )
    exploration_initial: Probability = Field(
        1.0,
        description="Probability of a random action when training starts. Before that, every "
        "action is random.",
    )
    exploration_final: Probability = Field(
        0.1,
        description="Probability of a random action from replay_start + exploration_steps on.",
    )
    exploration_steps: PositiveInt = Field(
        1_000_000,
        description="Agent steps after replay_start over which the probability of a random action "
        "falls linearly from exploration_initial to exploration_final.",
    )
    micro_batches: tuple[PositiveInt, ...] = Field(
        (20, 12),
        description="Sizes of the parts of a minibatch whose gradients are added in this order. "
        "They affect the result; the number of threads that compute them does not.",
    )
    concurrent: bool = Field(
        True,
        description="Whether the minibatch of an update is drawn before the update_interval steps "
        "that precede the update, so that acting and learning overlap under a fixed schedule.",
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.update_interval

    @model_validator(mode="after")
    def _consistent(self) -> DqnTrainer:
        require_micro_batches(self.micro_batches, self.batch_size)
        require_no_units(self)
        reject_all(
            f"{name} {getattr(self, name)} is not used by optimizer '{self.optimizer}': remove it"
            for name in _FIELDS_OF_THE_OTHER_OPTIMIZER[self.optimizer]
            if is_given(self, name)
        )
        for name in ("total_steps", "replay_start", "target_interval"):
            require_multiple(self, name, "update_interval")
        if self.concurrent and self.updates > 1:
            raise ValueError(
                f"updates {self.updates} requires concurrent: false, because only one minibatch "
                "can be drawn before the steps"
            )
        require_at_most(self, "replay_start", "replay_capacity")
        if self.replay_start < self.batch_size:
            raise ValueError(
                f"replay_start {self.replay_start} is smaller than batch_size {self.batch_size}"
            )
        require_at_most(self, "exploration_final", "exploration_initial")
        return self
