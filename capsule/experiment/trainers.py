"""The spec's section ``trainer``: an algorithm and its hyper-parameters, or a command."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from capsule.experiment.fields import (
    Model,
    NonNegativeInt,
    Patterns,
    PositiveInt,
    Probability,
    Word,
)

_FIELDS_OF_THE_OTHER_OPTIMIZER = {
    "centred-rmsprop": ("adam_epsilon", "max_gradient_norm"),
    "adam": ("gradient_momentum", "squared_gradient_momentum", "min_squared_gradient"),
}


class DqnTrainer(Model):
    """Deep Q-learning; the defaults are Mnih et al. 2015, Extended Data Table 1."""

    algorithm: Literal["dqn"]
    total_steps: PositiveInt = Field(20_000_000, description="Agent steps of training.")
    network: Literal["nature", "shallow", "small-conv", "mlp"] = Field(
        "nature",
        description=(
            "Convolutional network; 'shallow' is the smaller one of Mnih et al. 2013, 'nature' "
            "that of Mnih et al. 2015."
        ),
    )
    hidden_units: PositiveInt = Field(512, description="Width of the last hidden layer.")
    batch_size: PositiveInt = Field(32, description="Transitions in a minibatch.")
    replay_capacity: PositiveInt = Field(
        1_000_000, description="Maximum number of transitions in the replay memory."
    )
    replay_start: PositiveInt = Field(
        50_000, description="Agent steps of uniformly random play before learning starts."
    )
    discount: Probability = Field(0.99, description="Discount factor gamma.")
    update_interval: PositiveInt = Field(4, description="Agent steps between parameter updates.")
    updates: PositiveInt = Field(
        1,
        description=(
            "Parameter updates after every update_interval steps; more than 1 requires "
            "concurrent: false."
        ),
    )
    target_interval: PositiveInt = Field(
        10_000, description="Agent steps between copies into the target network."
    )
    optimizer: Literal["centred-rmsprop", "adam"] = Field(
        "centred-rmsprop",
        description=(
            "'centred-rmsprop' minimises the sum of the loss over the minibatch; 'adam' "
            "minimises its mean, with the decay rates 0.9 and 0.999 of Kingma and Ba 2015."
        ),
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(0.00025, description="Learning rate.")
    gradient_momentum: Probability = Field(
        0.95, description="Decay rate of the mean gradient, in centred-rmsprop."
    )
    squared_gradient_momentum: Probability = Field(
        0.95, description="Decay rate of the mean squared gradient, in centred-rmsprop."
    )
    min_squared_gradient: Annotated[float, Field(gt=0)] = Field(
        0.01,
        description="Added to the variance of the gradient under the root, in centred-rmsprop.",
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        1e-8, description="Added to the root in Adam; the default is that of Kingma and Ba 2015."
    )
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Clip the gradient to this norm, in Adam; null: no clipping."
    )
    exploration_initial: Probability = Field(
        1.0,
        description="Probability of a random action when learning starts; before that it is 1.",
    )
    exploration_final: Probability = Field(
        0.1, description="Probability of a random action after exploration_steps."
    )
    exploration_steps: PositiveInt = Field(
        1_000_000,
        description=(
            "Agent steps after replay_start over which the probability of a random action falls "
            "linearly from exploration_initial to exploration_final."
        ),
    )
    micro_batches: tuple[PositiveInt, ...] = Field(
        (20, 12),
        description=(
            "Sizes of the parts of a minibatch whose gradients are added in this order. They "
            "affect the result; the number of threads that compute them does not."
        ),
    )
    concurrent: bool = Field(
        True,
        description=(
            "Draw the minibatch before the steps that precede its update, so that acting and "
            "learning overlap under a fixed schedule."
        ),
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.update_interval

    @model_validator(mode="after")
    def _consistent(self) -> DqnTrainer:
        _check_shards(self.micro_batches, self.batch_size)
        for name in _FIELDS_OF_THE_OTHER_OPTIMIZER[self.optimizer]:
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not used by optimizer '{self.optimizer}': "
                    "leave it out"
                )
        for name in ("total_steps", "replay_start", "target_interval"):
            if getattr(self, name) % self.update_interval:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not a multiple of update_interval "
                    f"{self.update_interval}"
                )
        if self.concurrent and self.updates > 1:
            raise ValueError(
                f"updates {self.updates} need concurrent: false, since only one minibatch can be "
                "drawn before the steps"
            )
        if self.replay_start > self.replay_capacity:
            raise ValueError(
                f"replay_start {self.replay_start} exceeds replay_capacity {self.replay_capacity}"
            )
        if self.replay_start < self.batch_size:
            raise ValueError(
                f"replay_start {self.replay_start} is smaller than batch_size {self.batch_size}"
            )
        if self.exploration_final > self.exploration_initial:
            raise ValueError(
                f"exploration_final {self.exploration_final} exceeds exploration_initial "
                f"{self.exploration_initial}"
            )
        return self


class R2d2Trainer(Model):
    """Recurrent replay distributed DQN; the defaults are Kapturowski et al. 2019, Table 2.

    What that table leaves out follows Ape-X (Horgan et al. 2018), as the paper says.
    """

    algorithm: Literal["r2d2"]
    total_steps: PositiveInt = Field(
        2_500_000_000, description="Agent steps of training, summed over all actors."
    )
    network: Literal["nature", "residual", "small-conv", "mlp"] = Field(
        "nature",
        description="Network before the LSTM; 'residual' is the 15-layer network of R2D2+.",
    )
    recurrent_units: NonNegativeInt = Field(
        512, description="Units of the LSTM; 0: the feed-forward variant."
    )
    hidden_units: PositiveInt = Field(
        512, description="Units in the hidden layer of each dueling head."
    )
    actors: PositiveInt = Field(
        256,
        description=(
            "Number of logical actors. The number of processes that run them does not affect the"
            " result."
        ),
    )
    update_interval: PositiveInt = Field(
        25,
        description=(
            "Steps of each actor between parameter updates. With 256 actors, 25 replays each "
            "step 0.8 times."
        ),
    )
    actor_update_interval: PositiveInt = Field(
        400, description="Steps of each actor between its copies of the parameters."
    )
    burn_in: NonNegativeInt = Field(
        40, description="Steps of a sequence that only warm up the recurrent state."
    )
    sequence_length: PositiveInt = Field(80, description="Learned steps of a sequence.")
    sequence_stride: PositiveInt = Field(
        40, description="Steps from the start of a sequence to the start of the next."
    )
    recurrent_state: Literal["stored", "zero"] = Field(
        "stored", description="Recurrent state at the start of a replayed sequence."
    )
    n_step: PositiveInt = Field(5, description="Length n of n-step returns.")
    discount: Probability = Field(0.997, description="Discount factor gamma.")
    rescaling_epsilon: Annotated[float, Field(ge=0)] | None = Field(
        1e-3, description="Epsilon of the value function rescaling h; null: no rescaling."
    )
    asymmetric_clipping: bool = Field(
        False, description="Map rewards to 0.3 min(tanh r, 0) + 5 max(tanh r, 0), as R2D2+ does."
    )
    life_loss: Literal["roll", "reset"] = Field(
        "roll",
        description=(
            "Whether the recurrent state is kept ('roll') or reset when a lost life ends the "
            "return."
        ),
    )
    replay_capacity: PositiveInt = Field(
        4_000_000, description="Maximum number of observations in the replay memory."
    )
    replay_start: PositiveInt = Field(
        50_000, description="Steps, summed over all actors, before learning starts."
    )
    priority_exponent: Probability = Field(0.9, description="Exponent of the priorities.")
    priority_maximum_share: Probability = Field(
        0.9, description="Eta: weight of the maximum error against the mean error."
    )
    importance_exponent: Probability = Field(
        0.6, description="Exponent of the importance sampling weights."
    )
    batch_size: PositiveInt = Field(64, description="Sequences in a minibatch.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-4, description="Learning rate.")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        1e-3, description="Added to the root in Adam."
    )
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        40.0, description="Clip the gradient to this norm; null: no clipping."
    )
    target_interval: PositiveInt = Field(
        2_500, description="Parameter updates between copies into the target network."
    )
    exploration_base: Probability = Field(
        0.4,
        description=(
            "Actor i acts randomly with probability base ** (1 + exponent * i / (actors - 1))."
        ),
    )
    exploration_exponent: Annotated[float, Field(ge=0)] = Field(
        7.0, description="See exploration_base."
    )
    micro_batches: tuple[PositiveInt, ...] = Field(
        (32, 32),
        description=(
            "Sizes of the parts of a minibatch whose gradients are added in this order. They "
            "affect the result; the number of threads that compute them does not."
        ),
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.actors * self.update_interval

    @model_validator(mode="after")
    def _consistent(self) -> R2d2Trainer:
        _check_shards(self.micro_batches, self.batch_size)
        if self.total_steps % self.interval_steps:
            raise ValueError(
                f"total_steps {self.total_steps} is not a multiple of actors {self.actors} times "
                f"update_interval {self.update_interval}"
            )
        if self.actor_update_interval % self.update_interval:
            raise ValueError(
                f"actor_update_interval {self.actor_update_interval} is not a multiple of "
                f"update_interval {self.update_interval}"
            )
        if self.sequence_length % self.sequence_stride:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not a multiple of sequence_stride "
                f"{self.sequence_stride}: steps would be learned unequally often, or left out"
            )
        for name in ("burn_in", "n_step"):
            if getattr(self, name) > self.sequence_length:
                raise ValueError(
                    f"{name} {getattr(self, name)} exceeds sequence_length {self.sequence_length}"
                )
        if self.replay_start > self.replay_capacity:
            raise ValueError(
                f"replay_start {self.replay_start} exceeds replay_capacity {self.replay_capacity}"
            )
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
                "recurrent_state 'stored' needs an LSTM: without recurrent_units, say 'zero'"
            )
        return self


# What a schedule log has room for. The longest training of Espeholt et al. 2018, 10^10 frames with
# every action repeated four times in unrolls of 100 steps, has 25 million unrolls.
MAX_RECORDED_ACTORS = 1 << 16
MAX_RECORDED_LAG = (1 << 16) - 1
MAX_RECORDED_UNROLLS = 1 << 25


class LockstepSchedule(Model):
    """Actors in turn, with a constant policy lag: a rule, so nothing needs to be recorded."""

    mode: Literal["lockstep"]
    policy_lag: NonNegativeInt = Field(
        1,
        description=(
            "Parameter updates between the policy that acts and the policy that learns from it. "
            "With 0, acting and learning alternate."
        ),
    )


class RecordedSchedule(Model):
    """Actors at full speed; who was learned when, and with which lag, is recorded and replayed."""

    mode: Literal["recorded"]
    policy_lag: PositiveInt = Field(
        8,
        le=MAX_RECORDED_LAG,
        description=(
            "Maximum number of parameter updates between the policy that acts and the policy "
            "that learns from it: the learner waits for unrolls that would become older."
        ),
    )


class ActorInference(Model):
    """The processes that play actors answer them, too."""

    mode: Literal["actor"]


class ServerInference(Model):
    """Other processes answer the actors: section 3.1, "dynamic batching".

    How many there are is an option of ``capsule run``, as it changes no bit.
    """

    mode: Literal["server"]
    rows: PositiveInt = Field(
        16,
        le=1024,
        description=(
            "Size of a batch; rows without a request are zeros. It matters only where the maths "
            "libraries compute the layers (see docs/numerics.md)."
        ),
    )


class LanguageSpec(Model):
    """What instructions are made of: the language channel of Espeholt et al. 2018, figure 3."""

    vocabulary: Literal["babyai"] | Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        "babyai", description="All words, in lower case; 'babyai': the 32 words of BabyAI."
    )
    longest: PositiveInt = Field(
        72,
        description=(
            "Maximum number of words in an instruction. 72 are enough for every level of BabyAI."
        ),
    )


class UnrollReplaySpec(Model):
    """Experience replay of section 5.2.2: part of every batch is drawn from earlier unrolls."""

    unrolls: PositiveInt = Field(
        description=(
            "Unrolls of each batch that are drawn uniformly from the replay memory; half of the "
            "batch in the paper."
        )
    )
    capacity: PositiveInt = Field(
        10_000,
        description="Maximum number of unrolls in the replay memory; the oldest are removed first.",
    )


Truncation = Literal["bootstrap", "terminal"]
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
    """Population-based training; the defaults are Espeholt et al. 2018, appendix F.

    All steps of a spec are those of one member: ``members`` times as many are played. What learns
    is a whole trainer for each member, with actors, seeds and a replay memory of its own.
    """

    members: int = Field(
        24,
        ge=2,
        le=64,
        description=(
            "Number of members. Each draws its own entropy_cost, learning_rate and "
            "rmsprop_epsilon (table D.1), starts with the max_gradient_norm of the spec, and "
            "changes all four as it evolves."
        ),
    )
    burn_in: NonNegativeInt = Field(
        5_000_000,
        description="Agent steps before a member evolves; 20 million frames on Atari.",
    )
    episodes: PositiveInt = Field(
        5_000, description="Episodes, after the burn-in, from one fitness evaluation to the next."
    )
    margin: Annotated[float, Field(ge=0)] = Field(
        0.05,
        description=(
            "A member copies another only if that one's fitness is higher by more than this."
        ),
    )
    probability: Probability = Field(
        0.33, description="Probability that a hyper-parameter changes."
    )
    factor: Annotated[float, Field(gt=1)] = Field(
        1.2, description="A change multiplies or divides by this factor, with equal probability."
    )
    references: dict[Word, ScoreReference] = Field(
        default_factory=dict,
        description=(
            "Reference scores by game or id, for tasks other than those of Atari-57 and "
            "DMLab-30: the fitness is the mean over the tasks of min(1, (return - random) / "
            "(human - random))."
        ),
    )


class ImpalaTrainer(Model):
    """Importance-weighted actor-learner; the defaults are Espeholt et al. 2018, Table G.1."""

    algorithm: Literal["impala"]
    total_steps: PositiveInt = Field(50_000_000, description="Agent steps that are learned from.")
    network: Literal["shallow", "nature", "residual", "small-conv", "mlp"] = Field(
        "shallow",
        description=(
            "'shallow' and 'residual' are the two networks of figure 3; 'nature' has three "
            "convolutions, as section 5.3.2 says of the shallow network of Atari."
        ),
    )
    recurrent_units: NonNegativeInt = Field(
        0, description="Units of the LSTM, 256 in the paper; 0: no LSTM, as on Atari."
    )
    hidden_units: PositiveInt = Field(
        256,
        description="Units of the dense layer after the convolutions; 'residual' always has 256.",
    )
    language: LanguageSpec | None = Field(
        None, description="How environment.instruction is read; null: there is no instruction."
    )
    actors: PositiveInt = Field(
        32,
        description=(
            "Number of logical actors. The number of processes that run them does not affect the"
            " result."
        ),
    )
    unroll_length: PositiveInt = Field(20, description="Agent steps in an unroll.")
    batch_size: PositiveInt = Field(32, description="Unrolls in a parameter update.")
    replay: UnrollReplaySpec | None = Field(
        None, description="Experience replay; null: every unroll of a batch is new."
    )
    schedule: Annotated[LockstepSchedule | RecordedSchedule, Field(discriminator="mode")] = Field(
        LockstepSchedule(mode="lockstep", policy_lag=1),
        description="Which unrolls are learned when, and with which policy lag.",
    )
    inference: Annotated[ActorInference | ServerInference, Field(discriminator="mode")] = Field(
        ActorInference(mode="actor"), description="Which processes compute the actors' actions."
    )
    population: PopulationSpec | None = Field(
        None, description="Population-based training; null: a single trainer."
    )
    discount: Probability = Field(0.99, description="Discount factor gamma.")
    truncation: Truncation = Field(
        "bootstrap",
        description=(
            "When a time limit ends an episode: 'bootstrap' continues the return with the value "
            "of the last frame, which takes one step of the unroll; 'terminal' ends the return, "
            "as the authors' code does."
        ),
    )
    correction: Literal["v-trace", "one-step", "epsilon", "none"] = Field(
        "v-trace", description="Off-policy correction (section 5.2.2)."
    )
    rho_bar: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description=(
            "Clipping threshold of the importance weights in the temporal differences; it "
            "determines what is learned."
        ),
    )
    c_bar: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description=(
            "Clipping threshold of the importance weights in the traces; it determines how fast."
        ),
    )
    trace_decay: Probability = Field(1.0, description="Lambda of remark 2.")
    correction_epsilon: Annotated[float, Field(gt=0)] = Field(
        1e-6, description="Epsilon of the correction 'epsilon'."
    )
    action_values: Literal["targets", "baseline"] = Field(
        "targets",
        description=(
            "Estimate of q_s in the policy gradient: 'targets' is r + gamma v_s+1 (section 4.2),"
            " 'baseline' is r + gamma V(x_s+1) (appendix E.3)."
        ),
    )
    reward_clipping: Literal["unit", "asymmetric", "none"] = Field(
        "unit",
        description=(
            "'unit' clips rewards to [-1, 1]; 'asymmetric' maps them to 0.3 min(tanh r, 0) + 5 "
            "max(tanh r, 0), as for DMLab (figure D.1)."
        ),
    )
    baseline_cost: Annotated[float, Field(ge=0)] = Field(
        0.5, description="Weight of the baseline loss."
    )
    entropy_cost: Annotated[float, Field(ge=0)] = Field(
        0.01, description="Weight of the entropy bonus."
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(0.0006, description="Learning rate.")
    annealing: bool | None = Field(
        None,
        description=(
            "Decrease the learning rate linearly to 0 over the whole training (table G.1). "
            "Default: true; false with a population, because its members adapt the rate (figure "
            "F.1)."
        ),
    )
    rmsprop_decay: Probability = Field(0.99, description="Decay rate of the mean squared gradient.")
    rmsprop_momentum: Probability = Field(0.0, description="Momentum of RMSProp.")
    rmsprop_epsilon: Annotated[float, Field(gt=0)] = Field(
        0.01, description="Added to the mean squared gradient under the root."
    )
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        40.0, description="Clip the gradient to this norm; null: no clipping."
    )
    micro_batches: tuple[PositiveInt, ...] = Field(
        (16, 16),
        description=(
            "Sizes of the parts of a batch whose gradients are added in this order. They affect "
            "the result; the number of threads that compute them does not."
        ),
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
        _check_shards(self.micro_batches, self.batch_size)
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
        """Refuse what has no place, or no effect, beside a population."""
        if self.schedule.mode == "recorded":
            raise ValueError(
                "schedule.mode 'recorded' is not supported with a population: use 'lockstep'"
            )
        for name in DRAWN_BY_MEMBERS:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(
                    f"{name} {value} does not apply: each member of the population draws its own; "
                    "leave it out"
                )

    def _check_recorded(self, lag: int) -> None:
        """Refuse a schedule that cannot be kept, or not be recorded."""
        if self.actors > self.fresh * lag:
            least = -(-self.actors // self.fresh)
            raise ValueError(
                f"schedule.policy_lag {lag} cannot be kept: {self.actors} actors take turns in "
                f"batches of "
                f"{self.fresh}, so it needs {least} at least"
            )
        unrolls = self.total_steps // self.unroll_length
        for name, number, most in (
            ("actors", self.actors, MAX_RECORDED_ACTORS),
            ("total_steps / unroll_length", unrolls, MAX_RECORDED_UNROLLS),
        ):
            if number > most:
                raise ValueError(f"{name} {number} exceeds the {most} of a recorded schedule")


class CommandTrainer(Model):
    """Any program: it runs as it is, in a copy of its source tree, and its outputs are claimed.

    An output is a file that the program wrote into its working folder, by the patterns below.
    """

    command: Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        description=(
            "The program and its arguments, e.g. [python, train.py]. '{seed}' is replaced by "
            "seeds.root."
        )
    )
    outputs: Patterns = Field(
        ("*",),
        description=(
            "Patterns that select which of the written files are claimed. '*' matches any "
            "characters, including '/'; a leading '!' excludes; the last match wins. Example: "
            "['*', '!*.log']."
        ),
    )
    standard_output: bool = Field(
        True,
        description=(
            "Claim what the program prints to standard output. Standard error is kept but never "
            "claimed."
        ),
    )
    resumable: bool = Field(
        False,
        description=(
            "Whether the program can resume, after an interruption, from what it saved in its "
            "state folder. Otherwise it starts from the beginning."
        ),
    )

    @model_validator(mode="after")
    def _consistent(self) -> CommandTrainer:
        if self.resumable and self.standard_output:
            raise ValueError(
                "resumable needs standard_output: false, because a resumed program prints only "
                "the rest"
            )
        return self


def _check_shards(shards: tuple[int, ...], batch_size: int) -> None:
    if sum(shards) != batch_size:
        raise ValueError(
            f"micro_batches {list(shards)} add up to {sum(shards)}, not to batch_size {batch_size}"
        )


AlgorithmTrainer = Annotated[
    DqnTrainer | R2d2Trainer | ImpalaTrainer, Field(discriminator="algorithm")
]


def _trainer_kind(trainer: Any) -> str:
    """Tell the trainers apart: one names an algorithm, the other a command."""
    # What is neither a mapping nor a trainer has no names; the validation says so.
    named = trainer if isinstance(trainer, dict) else getattr(trainer, "__dict__", {})
    return "of a command" if "command" in named else "of an algorithm"


TrainerSpec = Annotated[
    Annotated[AlgorithmTrainer, Tag("of an algorithm")]
    | Annotated[CommandTrainer, Tag("of a command")],
    Discriminator(_trainer_kind),
]
