"""The spec's section ``environment``: the task, or the tasks, that a trainer learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from capsule.experiment.fields import (
    Model,
    ModuleName,
    NonNegativeInt,
    PositiveInt,
    Probability,
    added,
)
from capsule.experiment.scores import ReferenceScores, reference_of
from capsule.experiment.trainers import PopulationSpec

RomName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


class AtariEnvironment(Model):
    """An Atari 2600 game through the Arcade Learning Environment."""

    suite: Literal["atari"]
    game: RomName = Field(description="ROM name as in ale-py, e.g. 'breakout'.")
    further_games: tuple[RomName, ...] = Field(
        (),
        description="Further games for multi-task training with 'impala': actor N plays game N "
        "modulo the number of games.",
    )
    sticky_action_probability: Probability = Field(
        0.0,
        description="Probability, at each emulator frame, that the previous action is repeated.",
    )
    noop_max: NonNegativeInt = Field(
        30,
        description="Maximum number of no-op actions, of one emulator frame each, at the start of "
        "a training episode. The number is drawn from 1 to this; 0: none.",
    )
    frame_skip: PositiveInt = Field(
        4, description="Number of emulator frames for which an action is repeated."
    )
    frame_stack: PositiveInt = Field(
        4, description="Number of most recent frames in an observation."
    )
    terminal_on_life_loss: bool = Field(
        True,
        description="Whether a lost life ends the return, but not the game, during training.",
    )
    full_action_set: bool = Field(
        False, description="Whether all 18 actions are used instead of the game's minimal set."
    )
    clip_rewards: bool = Field(
        True, description="Whether training rewards are clipped to -1, 0 or 1."
    )
    max_episode_frames: PositiveInt = Field(
        108_000, description="Emulator frames after which an episode is truncated."
    )


class GymnasiumEnvironment(Model):
    """A Gymnasium environment with discrete actions."""

    suite: Literal["gymnasium"]
    id: str = Field(description="Gymnasium id, e.g. 'CartPole-v1'.")
    max_episode_steps: PositiveInt | None = Field(
        None,
        description="Agent steps after which an episode is truncated; null: the limit with which "
        "the id is registered, if any.",
    )
    modules: tuple[ModuleName, ...] = Field(
        (),
        description="Modules that register ids and are imported first, e.g. [popgym], from a "
        "package in image.packages or from the source tree 'code'.",
    )
    observation: str | None = Field(
        None,
        description="The entry of an observation that the agent sees, by its path, e.g. 'image' or "
        "'camera/left'; null: the whole observation, or the entries in 'images'.",
    )
    frames: Literal["flat", "image"] = Field(
        "flat",
        description="'flat': one vector of all numbers, for the network 'mlp' or dense layers; "
        "'image': a Box of uint8 [rows, columns, channels], for convolutional networks.",
    )
    frame_stack: PositiveInt = Field(
        1, description="Number of most recent frames in an observation."
    )
    images: Annotated[tuple[str, ...], Field(min_length=2)] | None = added(
        absent=None,
        description="Entries of an observation that are images, instead of 'observation'. Each "
        "has its own convolutions. Example: [camera/left, camera/right]; null: none.",
    )
    numbers: Annotated[tuple[str, ...], Field(min_length=1)] | None = added(
        absent=None,
        description="Entries of an observation that the agent sees as numbers, in addition to the "
        "images that 'observation' or 'images' names, e.g. [direction]; null: none.",
    )
    instruction: str | None = Field(
        None,
        description="The entry of an observation that is an instruction in words, e.g. 'mission', "
        "which trainer.language reads; null: none.",
    )
    masked_observations: tuple[NonNegativeInt, ...] = Field(
        (),
        description="Indices of a flat observation that the agent does not see. Example: [1, 3] "
        "hides CartPole's velocities.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> GymnasiumEnvironment:
        if self.frames == "image" and self.masked_observations:
            raise ValueError("masked_observations does not apply to frames: image; remove it")
        if self.images is not None:
            self._check_images(self.images)
        if self.numbers is not None:
            self._check_numbers(self.numbers)
        return self

    def _check_images(self, images: tuple[str, ...]) -> None:
        if self.frames != "image":
            raise ValueError("images requires frames: image; a flat observation has every entry")
        if self.observation is not None:
            raise ValueError(
                f"images replaces observation {self.observation!r}: remove one of the two"
            )
        if len({self.instruction, *images}) < len(images) + 1:
            raise ValueError("images names an entry twice, or the entry that is the instruction")

    def _check_numbers(self, numbers: tuple[str, ...]) -> None:
        images = self.images or (self.observation,)
        if self.frames != "image" or None in images:
            raise ValueError(
                "numbers requires frames: image, and either observation or images to name what is "
                "an image; a flat observation contains all numbers already"
            )
        if len({*images, self.instruction, *numbers}) < len(images) + len(numbers) + 1:
            raise ValueError(
                "numbers names an entry twice, or one that is an image or the instruction"
            )


class MinAtarEnvironment(Model):
    """A MinAtar game: 10x10 boolean channels (Young and Tian 2019, arXiv:1903.03176)."""

    suite: Literal["minatar"]
    game: Literal["asterix", "breakout", "freeway", "seaquest", "space_invaders"] = Field(
        description="Name of the game."
    )
    sticky_action_probability: Probability = Field(
        0.1, description="Probability that the previous action is repeated."
    )
    max_episode_steps: PositiveInt = Field(
        5_000, description="Number of agent steps after which an episode is truncated."
    )


EnvironmentSpec = Annotated[
    AtariEnvironment | GymnasiumEnvironment | MinAtarEnvironment, Field(discriminator="suite")
]


def tasks_of(environment: EnvironmentSpec) -> tuple[EnvironmentSpec, ...]:
    """Return the environment of each task. Only ``further_games`` add tasks to the first one."""
    if not isinstance(environment, AtariEnvironment):
        return (environment,)
    games = (environment.game, *environment.further_games)
    return tuple(
        environment.model_copy(update={"game": game, "further_games": ()}) for game in games
    )


def task_name(task: EnvironmentSpec) -> str:
    """Return the game or the Gymnasium id of a task."""
    return task.id if isinstance(task, GymnasiumEnvironment) else task.game


def references_of(
    environment: EnvironmentSpec, population: PopulationSpec
) -> dict[str, ReferenceScores]:
    """Return the scores by which a population normalises returns, by game or id, in task order.

    Raises:
        ValueError: A task has no scores, or some of the given scores are not used.
    """
    names = [task_name(task) for task in tasks_of(environment)]
    # MinAtar's games have the names of Atari's and other scores.
    published = {} if environment.suite == "minatar" else {n: reference_of(n) for n in names}
    known = {name: scores for name, scores in published.items() if scores is not None}
    given = population.references
    for name in given:
        if name not in names:
            raise ValueError(
                f"trainer.population.references: {name!r} is not one of the tasks "
                f"{', '.join(names)}"
            )
        if name in known:
            raise ValueError(
                f"trainer.population.references: {name!r} has published scores; remove it"
            )
    for name in names:
        if name not in known and name not in given:
            raise ValueError(
                f"trainer.population.references lacks {name!r}: no scores of random play and of a "
                f"person are known for it; add {{{name}: {{random: …, human: …}}}}"
            )
    added = {name: ReferenceScores(each.random, each.human) for name, each in given.items()}
    return {name: (known | added)[name] for name in names}
