"""The hyper-parameters of IMPALA (Espeholt et al. 2018, arXiv:1802.01561)."""

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
    Word,
    added,
    is_given,
    reject_all,
)
from capsule.experiment.trainers.checks import require_micro_batches, require_no_units
from capsule.experiment.trainers.layers import Layers, Module, Named, by_kind
from capsule.experiment.trainers.population import DRAWN_BY_MEMBERS, PopulationSpec

# The limits of a schedule log. The longest training of Espeholt et al. 2018, 10^10 frames with
# every action repeated four times in unrolls of 100 steps, has 25 million unrolls.
MAX_RECORDED_ACTORS = 1 << 16
MAX_RECORDED_LAG = (1 << 16) - 1
MAX_RECORDED_UNROLLS = 1 << 25


class LockstepSchedule(Model):
    """Actors take turns, with a constant policy lag. This is a rule, so nothing is recorded."""

    mode: Literal["lockstep"]
    policy_lag: NonNegativeInt = Field(
        1,
        description="Number of parameter updates by which the behaviour policy of an unroll is "
        "older than the policy that learns from it. With 0, acting and learning alternate.",
    )


class RecordedSchedule(Model):
    """Actors run at full speed. The order of their unrolls and the policy lags are recorded."""

    mode: Literal["recorded"]
    policy_lag: PositiveInt = Field(
        8,
        le=MAX_RECORDED_LAG,
        description="Maximum number of parameter updates by which the behaviour policy of an "
        "unroll may be older than the policy that learns from it. The learner waits for unrolls "
        "that would otherwise exceed it.",
    )


class ActorInference(Model):
    """The processes that play the actors also compute their actions."""

    mode: Literal["actor"]


class ServerInference(Model):
    """Separate processes compute the actors' actions (section 5.1, "dynamic batching").

    Their number is an option of capsule run, because it does not affect the result.
    """

    mode: Literal["server"]
    rows: PositiveInt = Field(
        16,
        le=1024,
        description="Size of a batch. Rows without a request are zeros. The size affects the "
        "result only where the maths libraries compute the layers (see docs/numerics.md).",
    )


class LanguageSpec(Model):
    """The words of instructions, for the language channel (Espeholt et al. 2018, figure 3)."""

    vocabulary: Literal["babyai"] | Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        "babyai",
        description="All words of the instructions, in lower case; 'babyai': the 32 words of "
        "BabyAI.",
    )
    longest: PositiveInt = Field(
        72,
        description="Maximum number of words in an instruction. 72 are enough for every level of "
        "BabyAI.",
    )


class UnrollReplaySpec(Model):
    """Experience replay of section 5.2.2: part of every batch is drawn from earlier unrolls."""

    unrolls: PositiveInt = Field(
        description="Number of unrolls of each batch that are drawn uniformly from the replay "
        "memory; half of the batch in the paper."
    )
    capacity: PositiveInt = Field(
        10_000,
        description="Maximum number of unrolls in the replay memory; the oldest are removed first.",
    )


Truncation = Literal["bootstrap", "terminal"]
Initialization = Literal["uniform", "truncated-normal"]


ImpalaNetworkName = Annotated[Literal["shallow", "nature", "residual", "small-conv", "mlp"], Named]


class ImpalaTrainer(Model):
    """Importance-weighted actor-learner (IMPALA).

    The defaults are those of Espeholt et al. 2018, arXiv:1802.01561: of Table G.1, with total_steps
    of section 5.3.2, rho_bar, c_bar and correction_epsilon of section 5.2.2, and network and
    hidden_units of figure 3. The paper does not give actors for Atari, schedule, truncation,
    initialization or rmsprop_decay.
    """

    algorithm: Literal["impala"]
    total_steps: PositiveInt = Field(50_000_000, description="Agent steps that are trained on.")
    network: Annotated[ImpalaNetworkName | Layers | Module, by_kind] = Field(
        "shallow",
        description="Network before the LSTM or the heads: 'shallow' and 'residual' are the two "
        "networks of figure 3; 'nature' has three convolutions, which section 5.3.2 gives to the "
        "shallow network for Atari. Alternatively, the hidden layers of your own network.",
    )
    recurrent_units: NonNegativeInt = Field(
        0, description="Units of the LSTM, 256 in the paper; 0: no LSTM, as on Atari."
    )
    hidden_units: PositiveInt = Field(
        256,
        description="Units of the dense layer after the convolutions; 'residual' always has 256.",
    )
    initialization: Initialization = added(
        absent="uniform",
        description="Distribution of the initial parameters. 'uniform': weights and biases from "
        "-1/sqrt(fan-in) to 1/sqrt(fan-in). 'truncated-normal': weights with the standard "
        "deviation 1/sqrt(fan-in), none beyond two standard deviations, and biases of 0, as in "
        "the authors' code (except for its LSTM and its embedding of words). For the embedding, "
        "its number of units, 20, is used instead of the fan-in.",
    )
    language: LanguageSpec | None = Field(
        None,
        description="The language channel, which reads environment.instruction; null: there is no "
        "instruction.",
    )
    actors: PositiveInt = Field(
        32,
        description="Number of logical actors. The number of processes that run them does not "
        "affect the result.",
    )
    unroll_length: PositiveInt = Field(20, description="Agent steps in an unroll.")
    batch_size: PositiveInt = Field(32, description="Number of unrolls in a parameter update.")
    replay: UnrollReplaySpec | None = Field(
        None, description="Experience replay; null: every unroll of a batch is new."
    )
    schedule: Annotated[LockstepSchedule | RecordedSchedule, Field(discriminator="mode")] = Field(
        LockstepSchedule(mode="lockstep", policy_lag=1),
        description="Order in which unrolls are trained on, and their policy lag.",
    )
    inference: Annotated[ActorInference | ServerInference, Field(discriminator="mode")] = Field(
        ActorInference(mode="actor"), description="Processes that compute the actors' actions."
    )
    population: PopulationSpec | None = Field(
        None, description="Population-based training; null: a single trainer."
    )
    discount: Probability = Field(0.99, description="Discount factor gamma.")
    truncation: Truncation = Field(
        "bootstrap",
        description="The return of an episode that a time limit ends: 'bootstrap' continues it "
        "with the value of the last frame, which takes one step of the unroll; 'terminal' ends it, "
        "as the authors' code does.",
    )
    correction: Literal["v-trace", "one-step", "epsilon", "none"] = Field(
        "v-trace", description="Off-policy correction (section 5.2.2)."
    )
    rho_bar: PositiveFloat = Field(
        1.0,
        description="Clipping threshold of the importance weights in the temporal differences; it "
        "determines the fixed point of the value function.",
    )
    c_bar: PositiveFloat = Field(
        1.0,
        description="Clipping threshold of the importance weights in the traces; it determines the "
        "speed of convergence.",
    )
    trace_decay: Probability = Field(1.0, description="Parameter lambda of remark 2.")
    correction_epsilon: PositiveFloat = Field(
        1e-6, description="Parameter epsilon of the correction 'epsilon' (section 5.2.2)."
    )
    action_values: Literal["targets", "baseline"] = Field(
        "targets",
        description="Estimate of q_s in the policy gradient: 'targets' is r + gamma v_s+1 (section "
        "4.2), 'baseline' is r + gamma V(x_s+1) (appendix E.3).",
    )
    reward_clipping: Literal["unit", "asymmetric", "none"] = Field(
        "unit",
        description="'unit' clips rewards to [-1, 1]; 'asymmetric' maps them to 0.3 min(tanh r, 0) "
        "+ 5 max(tanh r, 0), as for DMLab (figure D.1).",
    )
    baseline_cost: NonNegativeFloat = Field(0.5, description="Weight of the baseline loss.")
    entropy_cost: NonNegativeFloat = Field(0.01, description="Weight of the entropy bonus.")
    learning_rate: PositiveFloat = Field(0.0006, description="Learning rate.")
    annealing: bool | None = Field(
        None,
        description="Whether the learning rate decreases linearly to 0 over the whole training "
        "(table G.1); null: true without a population, and false with one, because its members "
        "adapt the rate (figure F.1).",
    )
    rmsprop_decay: Probability = Field(0.99, description="Decay rate of the mean squared gradient.")
    rmsprop_momentum: Probability = Field(0.0, description="Momentum of RMSProp.")
    rmsprop_epsilon: PositiveFloat = Field(
        0.01,
        description="Constant that is added to the mean squared gradient under the square root.",
    )
    max_gradient_norm: PositiveFloat | None = Field(
        40.0, description="Maximum norm to which the gradient is clipped; null: no clipping."
    )
    micro_batches: tuple[PositiveInt, ...] = Field(
        (16, 16),
        description="Sizes of the parts of a batch whose gradients are added in this order. They "
        "affect the result; the number of threads that compute them does not.",
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.fresh * self.unroll_length

    @property
    def anneals(self) -> bool:
        """Whether the learning rate falls."""
        return self.population is None if self.annealing is None else self.annealing

    @property
    def fresh(self) -> int:
        """Unrolls of a batch that are new."""
        return self.batch_size - (0 if self.replay is None else self.replay.unrolls)

    @model_validator(mode="after")
    def _consistent(self) -> ImpalaTrainer:
        require_micro_batches(self.micro_batches, self.batch_size)
        require_no_units(self)
        if self.fresh < 1:
            raise ValueError(
                f"replay.unrolls {self.batch_size - self.fresh} leave nothing new in a batch_size "
                f"of {self.batch_size}"
            )
        if self.total_steps % self.interval_steps:
            raise ValueError(
                f"total_steps {self.total_steps} is not a multiple of the {self.fresh} new unrolls "
                f"of a batch times unroll_length {self.unroll_length}"
            )
        if self.actors < self.fresh:
            raise ValueError(
                f"actors {self.actors} cannot fill a batch with {self.fresh} new unrolls: each has "
                "one in it"
            )
        if self.schedule.mode == "recorded":
            self._check_recorded(self.schedule.policy_lag)
        if self.population is not None:
            self._check_population()
        if self.c_bar > self.rho_bar:
            raise ValueError(f"c_bar {self.c_bar} exceeds rho_bar {self.rho_bar} (section 4.1)")
        return self

    def _check_population(self) -> None:
        """Reject what has no place, or no effect, beside a population."""
        if self.schedule.mode == "recorded":
            raise ValueError(
                "schedule.mode 'recorded' is not supported with a population: use 'lockstep'"
            )
        reject_all(
            f"{name} {getattr(self, name)} does not apply: each member of the population draws its "
            "own; remove it"
            for name in DRAWN_BY_MEMBERS
            if is_given(self, name)
        )

    def _check_recorded(self, lag: int) -> None:
        """Reject a schedule that cannot be kept, or not be recorded."""
        # A batch has at most one unroll of each actor, so an actor has a turn every actors / fresh
        # updates.
        if self.actors > self.fresh * lag:
            least = -(-self.actors // self.fresh)
            raise ValueError(
                f"schedule.policy_lag {lag} cannot be kept: {self.actors} actors take turns in "
                f"batches of {self.fresh}, so it needs at least {least}"
            )
        unrolls = self.total_steps // self.unroll_length
        for name, number, most in (
            ("actors", self.actors, MAX_RECORDED_ACTORS),
            ("total_steps / unroll_length", unrolls, MAX_RECORDED_UNROLLS),
        ):
            if number > most:
                raise ValueError(f"{name} {number} exceeds the {most} of a recorded schedule")
