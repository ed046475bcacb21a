"""The spec's section ``evaluation``: the starts from which networks play, and how they play."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.fields import Model, NonNegativeInt, PositiveInt

# A fifth is the margin of bioequivalence studies (80 to 125 %). ``docs/grades.md`` gives the reason
# for each bound.
MAX_RELATIVE = 0.2
MAX_ABSOLUTE = 1000.0  # units of the return; larger scores are compared by a share
MAX_ALPHA = 0.1


class ToleranceSpec(Model):
    """The accepted difference of a replica's returns where equal bits are not expected.

    The tolerance is part of the lock: it is declared before the run and signed with it, so it
    cannot be chosen after a result is known. docs/grades.md describes it.
    """

    metric: Literal["iqm", "mean"] = Field(
        "iqm",
        description="Statistic of a network's returns that is compared: interquartile mean, or "
        "mean.",
    )
    relative: Annotated[float, Field(gt=0, le=MAX_RELATIVE)] | None = Field(
        None,
        description="Maximum difference, as a fraction of the absolute value of the recorded "
        "statistic; null: 'absolute' is given instead.",
    )
    absolute: Annotated[float, Field(gt=0, le=MAX_ABSOLUTE)] | None = Field(
        None,
        description="Maximum difference in units of the return; null: 'relative' is given instead. "
        "A fifth of the largest absolute return of the re-execution applies if it is smaller.",
    )
    cliffs_delta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Maximum Cliff's delta, as a further condition, e.g. 0.147, below which an "
        "effect is called negligible; null: no such condition.",
    )
    alpha: Annotated[float, Field(gt=0, le=MAX_ALPHA)] = Field(
        0.05,
        description="Probability of accepting a replica whose difference exceeds the maximum.",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> ToleranceSpec:
        if (self.relative is None) == (self.absolute is None):
            raise ValueError("give either relative or absolute, e.g. relative: 0.05")
        return self


Starts = tuple[tuple[NonNegativeInt, ...], ...]


def digest_of_starts(starts: Starts) -> str:
    """Return the SHA-256 of the canonical JSON of start sequences, hexadecimal.

    Runs with the same digest were scored on the same starts.
    """
    return sha256_hex(canonical_json([list(start) for start in starts]))


class StartSet(Model):
    """Start sequences for several runs, so that all of them are scored on the same starts.

    The command 'capsule starts' takes them from a run that ranked its own candidates.
    """

    schema_id: Literal["capsule/starts/v1"] = Field("capsule/starts/v1", alias="schema")
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="Claim id of the run whose final network ranked the candidates."
    )
    task: str = Field(description="Game, or Gymnasium id.")
    full_action_set: bool = Field(
        description="Whether the action indices are those of all 18 Atari actions."
    )
    candidates: PositiveInt = Field(
        description="Number of random start sequences that were ranked."
    )
    shortlist: PositiveInt = Field(
        description="Number of best-ranked sequences from which the starts were drawn."
    )
    min_actions: NonNegativeInt = Field(
        description="Minimum length of a start sequence, in actions."
    )
    max_actions: NonNegativeInt = Field(
        description="Maximum length of a start sequence, in actions."
    )
    starts: Annotated[Starts, Field(min_length=1)] = Field(
        description="Action indices of each start."
    )


class EvaluationSpec(Model):
    """Evaluation from predetermined starts (Nagarajan et al. 2019, arXiv:1809.05676, supplement).

    Random action sequences are drawn ('candidates'), ranked by the value that the run's final
    network gives their last state (its largest Q-value, or IMPALA's baseline), and the starts are
    drawn from the best of them ('shortlist'). An action of a start is held for one emulator frame.
    """

    interval: PositiveInt = Field(250_000, description="Agent steps between evaluations.")
    initial: bool = Field(
        True, description="Whether the network is also evaluated before training, at step 0."
    )
    starts: PositiveInt = Field(
        100, description="Number of start sequences; each starts one episode."
    )
    start_set: StartSet | None = Field(
        None,
        description="Start sequences that were ranked earlier, so that several runs are scored on "
        "the same ones; null: each run ranks its own. In a spec file: path of a file written by "
        "'capsule starts', relative to the spec file; the lock holds its content.",
    )
    noop_max: NonNegativeInt = Field(
        0,
        description="Maximum number of no-ops (the first action) with which an episode starts, "
        "instead of a ranked random sequence; the number is drawn from 1 to this; 0: random "
        "sequences. 30 is the value of Mnih et al. 2015 (doi:10.1038/nature14236).",
    )
    candidates: PositiveInt = Field(1000, description="Number of random start sequences to rank.")
    shortlist: PositiveInt = Field(
        250, description="Number of best-ranked sequences from which the starts are drawn."
    )
    min_actions: NonNegativeInt = Field(
        55, description="Minimum length of a start sequence, in actions."
    )
    max_actions: NonNegativeInt = Field(
        95, description="Maximum length of a start sequence, in actions."
    )
    max_minutes: Annotated[float, Field(gt=0)] = Field(
        5.0,
        description="Maximum length of play after the start, in minutes at 60 emulator frames per "
        "second; outside Atari, a step counts as one frame. The environment's own limit also ends "
        "an episode; on Atari, the frames of the start count towards this limit "
        "(environment.max_episode_frames).",
    )
    actions: Literal["greedy", "sampled"] = Field(
        "greedy",
        description="Choice of actions: 'greedy' takes the best action; 'sampled' draws actions "
        "from the policy, which is supported with 'impala' only. Each start has its own random "
        "stream, which restarts at every evaluation.",
    )
    action_sweep: bool = Field(
        False,
        description="Whether, after a lost life, each action is taken for one emulator frame, as "
        "in the code of Nagarajan et al.; Atari only.",
    )
    tolerance: ToleranceSpec | None = Field(
        None,
        description="Difference of returns up to which verify reports 'reproduced-statistical' "
        "where equal bits cannot be expected of the two machines; null: no difference is accepted.",
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
        if self.start_set is not None:
            self._check_pinned(self.start_set)
        return self

    def _check_pinned(self, pinned: StartSet) -> None:
        """Reject settings that are not those by which a start set was made."""
        made = {"noop_max": 0, "starts": len(pinned.starts)} | {
            name: getattr(pinned, name)
            for name in ("candidates", "shortlist", "min_actions", "max_actions")
        }
        for name, value in made.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not the {value} of start_set: write "
                    f"{name}: {value}, or make another start set"
                )
