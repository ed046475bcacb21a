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
    "centred-rmsprop": ("adam_epsilon", "gradient_norm"),
    "adam": ("gradient_momentum", "squared_gradient_momentum", "min_squared_gradient"),
}


class DqnTrainer(Model):
    """Deep Q-learning; the defaults are Mnih et al. 2015, Extended Data Table 1."""

    algorithm: Literal["dqn"]
    total_steps: PositiveInt = Field(20_000_000, description="Agent steps of training.")
    network: Literal["nature", "shallow", "small-conv", "mlp"] = Field(
        "nature", description="'shallow' is the smaller network of Mnih et al. 2013."
    )
    hidden_units: PositiveInt = Field(512, description="Width of the last hidden layer.")
    batch_size: PositiveInt = 32
    replay_capacity: PositiveInt = Field(1_000_000, description="Transitions kept.")
    replay_start: PositiveInt = Field(
        50_000, description="Steps of uniformly random play before learning starts."
    )
    discount: Probability = 0.99
    update_interval: PositiveInt = Field(4, description="Steps between parameter updates.")
    updates: PositiveInt = Field(
        1,
        description="Parameter updates after every update_interval steps; more than 1 need "
        "concurrent: false.",
    )
    target_interval: PositiveInt = Field(
        10_000, description="Steps between copies into the target network."
    )
    optimizer: Literal["centred-rmsprop", "adam"] = Field(
        "centred-rmsprop",
        description="'centred-rmsprop' descends the sum of the loss over the minibatch, 'adam' its "
        "mean, with the decays 0.9 and 0.999 of Kingma and Ba 2015.",
    )
    learning_rate: Annotated[float, Field(gt=0)] = 0.00025
    gradient_momentum: Probability = Field(
        0.95, description="Decay of the mean gradient, of centred-rmsprop."
    )
    squared_gradient_momentum: Probability = Field(0.95, description="Of centred-rmsprop.")
    min_squared_gradient: Annotated[float, Field(gt=0)] = Field(
        0.01, description="Of centred-rmsprop."
    )
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        1e-8, description="Added to Adam's root; the default is that of Kingma and Ba 2015."
    )
    gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Adam shortens longer gradients to this; null: it does not."
    )
    exploration_initial: Probability = Field(
        1.0, description="Chance of a random action where learning starts; before, it is 1."
    )
    exploration_final: Probability = 0.1
    exploration_steps: PositiveInt = Field(
        1_000_000,
        description="Agent steps after replay_start over which exploration falls in a line from "
        "exploration_initial to exploration_final.",
    )
    gradient_shards: tuple[PositiveInt, ...] = Field(
        (20, 12),
        description="Batch split whose gradients are summed in this order. Part of the result; how "
        "many threads compute them is not.",
    )
    concurrent: bool = Field(
        True,
        description="Draw the minibatch before the steps it follows, so that acting and learning "
        "overlap under a fixed schedule.",
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.update_interval

    @model_validator(mode="after")
    def _consistent(self) -> DqnTrainer:
        _check_shards(self.gradient_shards, self.batch_size)
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
        2_500_000_000, description="Agent steps of training, of all actors together."
    )
    network: Literal["nature", "residual", "small-conv", "mlp"] = Field(
        "nature", description="What comes before the LSTM; 'residual' has the 15 layers of R2D2+."
    )
    recurrent_units: NonNegativeInt = Field(
        512, description="Units of the LSTM; 0: the feed-forward variant."
    )
    hidden_units: PositiveInt = Field(512, description="Hidden layer of each dueling head.")
    actors: PositiveInt = Field(
        256, description="Logical actors, played by as many processes as a machine has use for."
    )
    update_interval: PositiveInt = Field(
        25,
        description="Steps of each actor between parameter updates. With 256 actors, 25 replay "
        "each step 0.8 times.",
    )
    actor_update_interval: PositiveInt = Field(
        400, description="Steps of each actor between its copies of the parameters."
    )
    burn_in: NonNegativeInt = Field(40, description="Steps before those that are learned.")
    sequence_length: PositiveInt = Field(80, description="Learned steps of a sequence.")
    sequence_period: PositiveInt = Field(
        40, description="Steps from the start of a sequence to that of the next."
    )
    recurrent_state: Literal["stored", "zero"] = Field(
        "stored", description="Recurrent state at the start of a replayed sequence."
    )
    n_step: PositiveInt = 5
    discount: Probability = 0.997
    rescaling_epsilon: Annotated[float, Field(ge=0)] | None = Field(
        1e-3, description="Of the value function rescaling h; null: no rescaling."
    )
    asymmetric_clipping: bool = Field(
        False, description="Learn from 0.3 min(tanh r, 0) + 5 max(tanh r, 0), as R2D2+."
    )
    life_loss: Literal["roll", "reset"] = Field(
        "roll",
        description="Where environment.terminal_on_life_loss ends returns: whether the "
        "recurrent state rolls on or is reset.",
    )
    replay_capacity: PositiveInt = Field(4_000_000, description="Observations kept.")
    replay_start: PositiveInt = Field(
        50_000, description="Steps of all actors before learning starts."
    )
    priority_exponent: Probability = 0.9
    priority_maximum_share: Probability = Field(
        0.9, description="Eta: weight of the largest error beside the mean one."
    )
    importance_exponent: Probability = 0.6
    batch_size: PositiveInt = Field(64, description="Sequences of a minibatch.")
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-3
    gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        40.0, description="Longer gradients are shortened to this; null: they are not."
    )
    target_interval: PositiveInt = Field(
        2_500, description="Parameter updates between copies into the target network."
    )
    exploration_base: Probability = Field(
        0.4, description="Actor i explores with base ** (1 + exponent * i / (actors - 1))."
    )
    exploration_exponent: Annotated[float, Field(ge=0)] = 7.0
    gradient_shards: tuple[PositiveInt, ...] = Field(
        (32, 32),
        description="Batch split whose gradients are summed in this order. Part of the result; how "
        "many threads compute them is not.",
    )

    @property
    def interval_steps(self) -> int:
        """Agent steps from one parameter update to the next."""
        return self.actors * self.update_interval

    @model_validator(mode="after")
    def _consistent(self) -> R2d2Trainer:
        _check_shards(self.gradient_shards, self.batch_size)
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
        if self.sequence_length % self.sequence_period:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not a multiple of sequence_period "
                f"{self.sequence_period}: steps would be learned unequally often, or left out"
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
    lag: NonNegativeInt = Field(
        1,
        description="Parameter updates from the policy version that acts to the one that learns "
        "from it. 0: nobody acts while the learner learns.",
    )


class RecordedSchedule(Model):
    """Actors at full speed; who was learned when, and with which lag, is recorded and replayed."""

    mode: Literal["recorded"]
    lag: PositiveInt = Field(
        8,
        le=MAX_RECORDED_LAG,
        description="Most of it: the learner waits for what is older.",
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
        description="Of a batch of fixed size; the rows of actors that ask for nothing are zeros. "
        "It matters where layers are computed by the libraries (see docs/numerics.md).",
    )


class LanguageSpec(Model):
    """What instructions are made of: the language channel of Espeholt et al. 2018, figure 3."""

    vocabulary: Literal["babyai"] | Annotated[tuple[Word, ...], Field(min_length=1)] = Field(
        "babyai", description="Every word there is, in small letters; 'babyai': the 32 of BabyAI."
    )
    longest: PositiveInt = Field(
        72, description="Most words of an instruction. 72 are enough for every level of BabyAI."
    )


class UnrollReplaySpec(Model):
    """Experience replay of section 5.2.2: part of every batch is drawn from earlier unrolls."""

    unrolls: PositiveInt = Field(
        description="Of a batch, drawn uniformly from the replay memory; half of it in the paper."
    )
    capacity: PositiveInt = Field(10_000, description="Unrolls kept, the newest.")


Truncation = Literal["bootstrap", "terminal"]
DRAWN_BY_MEMBERS = ("entropy_cost", "learning_rate", "rmsprop_epsilon")  # table D.1


class ScoreReference(Model):
    """Scores of a task by which its returns are normalised."""

    random: float = Field(description="Of random play; it counts 0.")
    human: float = Field(description="Of a person; it counts 1.")

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
        description="Each draws entropy_cost, learning_rate and rmsprop_epsilon (table D.1), begins"
        " with the gradient_norm of the spec, and changes all of them as it evolves.",
    )
    burn_in: NonNegativeInt = Field(
        5_000_000,
        description="Agent steps of a member before which it does not evolve; 20 million frames on "
        "Atari.",
    )
    episodes: PositiveInt = Field(
        5_000, description="Returns of a member, after the burn-in, from one fitness to the next."
    )
    margin: Annotated[float, Field(ge=0)] = Field(
        0.05, description="A fitness higher by no more than this is not copied."
    )
    probability: Probability = Field(0.33, description="Of each hyper-parameter to change.")
    factor: Annotated[float, Field(gt=1)] = Field(
        1.2, description="What a change multiplies by or divides by, each as likely."
    )
    references: dict[Word, ScoreReference] = Field(
        default_factory=dict,
        description="By game or id, for tasks other than those of Atari-57 and DMLab-30: the "
        "fitness is the mean over the tasks of min(1, (return - random) / (human - random)).",
    )


class ImpalaTrainer(Model):
    """Importance-weighted actor-learner; the defaults are Espeholt et al. 2018, Table G.1."""

    algorithm: Literal["impala"]
    total_steps: PositiveInt = Field(50_000_000, description="Agent steps that are learned.")
    network: Literal["shallow", "nature", "residual", "small-conv", "mlp"] = Field(
        "shallow",
        description="'shallow' and 'residual' are the two networks of figure 3; 'nature' has three "
        "convolutions, as section 5.3.2 says of the shallow network of Atari.",
    )
    recurrent_units: NonNegativeInt = Field(
        0, description="Units of the LSTM, 256 in the paper; 0: none, as on Atari."
    )
    hidden_units: PositiveInt = Field(
        256, description="Of the dense layer after the convolutions; 'residual' always has 256."
    )
    language: LanguageSpec | None = Field(
        None, description="How environment.instruction is read; null: there is none."
    )
    actors: PositiveInt = Field(
        32, description="Logical actors, played by as many processes as a machine has use for."
    )
    unroll_length: PositiveInt = Field(20, description="Steps of an unroll.")
    batch_size: PositiveInt = Field(32, description="Unrolls of a parameter update.")
    replay: UnrollReplaySpec | None = Field(None, description="Null: all of a batch are new.")
    schedule: Annotated[LockstepSchedule | RecordedSchedule, Field(discriminator="mode")] = (
        LockstepSchedule(mode="lockstep", lag=1)
    )
    inference: Annotated[ActorInference | ServerInference, Field(discriminator="mode")] = (
        ActorInference(mode="actor")
    )
    population: PopulationSpec | None = Field(
        None, description="Several members, of which the fitter replace others; null: one trainer."
    )
    discount: Probability = 0.99
    truncation: Truncation = Field(
        "bootstrap",
        description="Of an episode that a time limit ends: 'bootstrap' continues its return with "
        "the value of its last frame, which takes a step of the unroll; 'terminal' ends the return,"
        " as the authors' code does.",
    )
    correction: Literal["v-trace", "one-step", "epsilon", "none"] = Field(
        "v-trace", description="What is made of it that an older policy acted (section 5.2.2)."
    )
    rho_bar: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Clipping level of the ratios that decide what is learned."
    )
    c_bar: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Clipping level of the ratios that decide how fast."
    )
    trace_decay: Probability = Field(1.0, description="Lambda of remark 2.")
    correction_epsilon: Annotated[float, Field(gt=0)] = Field(
        1e-6, description="Of the correction 'epsilon'."
    )
    action_values: Literal["targets", "baseline"] = Field(
        "targets",
        description="Estimate of q_s in the policy gradient: 'targets' is r + gamma v_s+1 "
        "(section 4.2), 'baseline' is r + gamma V(x_s+1) (appendix E.3).",
    )
    reward_clipping: Literal["unit", "asymmetric", "none"] = Field(
        "unit",
        description="'unit': to [-1, 1]; 'asymmetric': 0.3 min(tanh r, 0) + 5 max(tanh r, 0), "
        "figure D.1, for DMLab.",
    )
    baseline_cost: Annotated[float, Field(ge=0)] = 0.5
    entropy_cost: Annotated[float, Field(ge=0)] = 0.01
    learning_rate: Annotated[float, Field(gt=0)] = 0.0006
    annealing: bool | None = Field(
        None,
        description="The learning rate falls linearly to 0 over the whole training (table G.1). "
        "Default: true; with a population false, because its members adapt the rate (figure F.1).",
    )
    rmsprop_decay: Probability = 0.99
    rmsprop_momentum: Probability = 0.0
    rmsprop_epsilon: Annotated[float, Field(gt=0)] = 0.01
    gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        40.0, description="Longer gradients are shortened to this; null: they are not."
    )
    gradient_shards: tuple[PositiveInt, ...] = Field(
        (16, 16),
        description="Batch split whose gradients are summed in this order. Part of the result; how "
        "many threads compute them is not.",
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
        _check_shards(self.gradient_shards, self.batch_size)
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
            self._check_recorded(self.schedule.lag)
        if self.population is not None:
            self._check_population()
        if self.c_bar > self.rho_bar:
            raise ValueError(f"c_bar {self.c_bar} exceeds rho_bar {self.rho_bar} (section 4.1)")
        return self

    def _check_population(self) -> None:
        """Refuse what has no place, or no effect, beside a population."""
        if self.schedule.mode == "recorded":
            raise ValueError("schedule.mode 'recorded' cannot be had with population: use lockstep")
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
                f"schedule.lag {lag} cannot be kept: {self.actors} actors take turns in batches of "
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
        description="Program and arguments, e.g. [python, train.py]. '{seed}' stands for "
        "seeds.root."
    )
    outputs: Patterns = Field(
        ("*",),
        description="Which of the written files are claimed. '*' matches any characters, '/' too; "
        "'!' leaves out; the last match wins. E.g. ['*', '!*.log'].",
    )
    standard_output: bool = Field(
        True, description="Claim what the program prints. Standard error is only kept."
    )
    resumable: bool = Field(
        False,
        description="After an interruption the program goes on from what it saved in its state "
        "folder. Otherwise it starts over.",
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
            f"gradient_shards {list(shards)} add up to {sum(shards)}, not to batch_size "
            f"{batch_size}"
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
