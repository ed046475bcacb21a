"""The spec's section ``evaluation``: from which starts networks play, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt

# No more than a fifth: the margin of bioequivalence studies (80 to 125 %). ``docs/grades.md`` says
# why each bound is where it is.
MAX_RELATIVE = 0.2
MAX_ABSOLUTE = 1000.0  # units of the return; larger scores are compared by a share
MAX_ALPHA = 0.1


class ToleranceSpec(Model):
    """How far a replica's returns may be off where bits are not expected to recur.

    Part of the lock, so it is declared before the run and signed with it: nobody can choose it
    after seeing a result. See ``docs/grades.md``.
    """

    metric: Literal["iqm", "mean"] = Field(
        "iqm", description="Of a network's returns: interquartile mean, or mean."
    )
    relative: Annotated[float, Field(gt=0, le=MAX_RELATIVE)] | None = Field(
        None, description="Largest difference, as a share of the recorded metric's size."
    )
    absolute: Annotated[float, Field(gt=0, le=MAX_ABSOLUTE)] | None = Field(
        None,
        description="Largest difference in units of the return, instead of 'relative'. It never "
        "exceeds a fifth of the largest return that the re-execution obtains.",
    )
    cliffs_delta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Largest Cliff's delta, too; 0.147 is the bound of 'negligible'."
    )
    alpha: Annotated[float, Field(gt=0, le=MAX_ALPHA)] = Field(
        0.05, description="Risk of accepting a replica that is off by more than that."
    )

    @model_validator(mode="after")
    def _one_bound(self) -> ToleranceSpec:
        if (self.relative is None) == (self.absolute is None):
            raise ValueError("give either relative or absolute, e.g. relative: 0.05")
        return self


class EvaluationSpec(Model):
    """Evaluation from predetermined starts (Nagarajan et al. 2019, supplement).

    ``candidates`` random action sequences are drawn, ranked by the largest Q-value that the run's
    final network gives their last state, and ``starts`` are drawn from the best ``shortlist``. An
    action of a start is held for one emulator frame.
    """

    interval: PositiveInt = Field(250_000, description="Steps between evaluated networks.")
    initial: bool = Field(True, description="Evaluate the network before training, too: step 0.")
    starts: PositiveInt = Field(100, description="Start sequences, one episode each.")
    noop_max: NonNegativeInt = Field(
        0,
        description="Start with 1 to this many no-ops (the first action) instead of ranked random "
        "sequences; 30 is the protocol of Mnih et al. 2015.",
    )
    candidates: PositiveInt = 1000
    shortlist: PositiveInt = 250
    min_actions: NonNegativeInt = 55
    max_actions: NonNegativeInt = 95
    max_minutes: Annotated[float, Field(gt=0)] = Field(
        5.0,
        description="Longest play after the start, in minutes at 60 emulator frames per second.",
    )
    actions: Literal["greedy", "sampled"] = Field(
        "greedy",
        description="'sampled' draws actions from the policy, which a Q-learning trainer does not "
        "have; each start has a random stream of its own, the same at every evaluation.",
    )
    action_sweep: bool = Field(
        False,
        description="After a lost life, take each action for one emulator frame, as the code of "
        "Nagarajan et al. does; atari only.",
    )
    tolerance: ToleranceSpec | None = Field(
        None,
        description="What verify accepts as statistically reproduced where equal bits cannot be "
        "expected of the machines; null: nothing.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSpec:
        if self.min_actions > self.max_actions:
            raise ValueError(
                f"min_actions {self.min_actions} exceeds max_actions {self.max_actions}"
            )
        if not self.starts <= self.shortlist <= self.candidates:
            raise ValueError(
                f"starts {self.starts} <= shortlist {self.shortlist} <= candidates "
                f"{self.candidates} does not hold"
            )
        return self
