"""The study spec: a base spec, and groups of runs that differ from it in named ways.

The groups of Nagarajan et al. 2019 (arXiv:1809.05676) vary one source of randomness each; those of
Espeholt et al. 2018 (arXiv:1802.01561, appendix D) have hyper-parameters that were sampled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from capsule.experiment.fields import Model, Name, PositiveFloat, PositiveInt, Seed, Word, added
from capsule.experiment.spec.randomness import StreamName
from capsule.experiment.spec.recording import MAX_MEBIBYTES, MAX_MINUTES

# kubernetes_job lists all members in one manifest, for which etcd has room for 1.5 MiB.
MAX_MEMBERS = 2_000
# A spec has fewer than 200 fields, besides those of mappings. Each member has its own values, so
# without a limit, a small file with many fields and runs would take all memory.
MAX_FIELDS = 500

FieldName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+(\.[a-z0-9_-]+)*$")]
Settings = Annotated[dict[FieldName, Any], Field(max_length=MAX_FIELDS)]
ScoreSource = Annotated[
    str, StringConstraints(pattern=r"^[^#\x00]+#(/[^\x00]*)?$", max_length=1024)
]
# Control characters, and those that are invisible or change the direction of a text, would steer
# the terminal on which a table is printed. A spreadsheet executes cells that begin with = + - @.
_UNSAFE = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
ScoreName = Annotated[
    str, StringConstraints(pattern=rf"^[^{_UNSAFE}=+@-][^{_UNSAFE}]*$", max_length=100)
]
# The name has no dot, because a dot ends it in the names of members (StudyLock.groups).
GroupName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]


class LogUniformRange(Model):
    """A number whose logarithm is uniform."""

    log_uniform: tuple[PositiveFloat, PositiveFloat] = Field(description="Lower and upper bound.")

    @model_validator(mode="after")
    def _not_empty(self) -> LogUniformRange:
        _check_range("log_uniform", *self.log_uniform)
        return self


class UniformRange(Model):
    """A number that is uniform."""

    uniform: tuple[float, float] = Field(description="Lower and upper bound.")

    @model_validator(mode="after")
    def _not_empty(self) -> UniformRange:
        _check_range("uniform", *self.uniform)
        return self


class ValueChoice(Model):
    """One of several values, each as likely as the others."""

    choice: Annotated[tuple[Any, ...], Field(min_length=1)] = Field(description="The values.")


def _kind_of(distribution: Any) -> str | None:
    """Return the model of a distribution, which is a dictionary in JSON, by its name."""
    if isinstance(distribution, Model):
        return type(distribution).__name__
    given = distribution if isinstance(distribution, dict) else {}
    models = {"log_uniform": "LogUniformRange", "uniform": "UniformRange", "choice": "ValueChoice"}
    return next((model for field, model in models.items() if field in given), None)


Distribution = Annotated[
    Annotated[LogUniformRange, Tag("LogUniformRange")]
    | Annotated[UniformRange, Tag("UniformRange")]
    | Annotated[ValueChoice, Tag("ValueChoice")],
    Discriminator(
        _kind_of,
        custom_error_type="no_distribution",
        custom_error_message="it has neither log_uniform nor uniform nor choice",
    ),
]


def _check_range(name: str, low: float, high: float) -> None:
    # The comparison is negated so that it rejects NaN as well.
    if not low < high:
        raise ValueError(f"{name}: the range from {low} to {high} is empty")


class SampleSpec(Model):
    """Settings whose hyper-parameters are drawn at random.

    Each value follows from the seed, its field and the number of the setting alone, so that a
    larger count or a further field leaves existing settings as they are.
    """

    count: PositiveInt = Field(le=MAX_MEMBERS, description="Number of settings.")
    seed: Seed | None = Field(
        None,
        description="Seed of the draws; null: the seed of the study. Groups with equal seeds and "
        "fields have equal settings.",
    )
    fields: Annotated[dict[FieldName, Distribution], Field(min_length=1, max_length=MAX_FIELDS)] = (
        Field(
            description="Distribution of each field of the spec: log_uniform: [LOW, HIGH], "
            "uniform: [LOW, HIGH] or choice: [VALUE, ...]."
        )
    )


class GroupSpec(Model):
    """Runs that are compared with those of other groups, and summarised together."""

    set: Settings = Field(
        default_factory=dict,
        description="Fields of the spec that differ from the base, as section.field: value.",
    )
    vary: tuple[Literal[StreamName, "root"], ...] = Field(
        (),
        description="Random streams that have a different seed in each run; 'root' varies all of "
        "them. An empty list gives every run the same seeds.",
    )
    runs: PositiveInt | None = Field(
        None,
        le=MAX_MEMBERS,
        description="Number of runs of each setting; null: 'runs' of the study.",
    )
    grid: (
        Annotated[
            dict[FieldName, Annotated[tuple[Any, ...], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_FIELDS),
        ]
        | None
    ) = Field(
        None,
        description="Values of fields; every combination is a setting, named by the positions of "
        "the values, such as 2-1, with the fields in alphabetical order. Values that are appended "
        "do not change existing settings. Null: no grid.",
    )
    settings: Annotated[tuple[Settings, ...], Field(min_length=1)] | None = Field(
        None, description="List of settings, each in the form of 'set'; null: none."
    )
    sample: SampleSpec | None = Field(
        None, description="Settings that are drawn at random; null: none."
    )

    @model_validator(mode="after")
    def _one_source_of_settings(self) -> GroupSpec:
        given = [name for name in ("grid", "settings", "sample") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: make them two groups")
        if len({*self.vary}) < len(self.vary):
            raise ValueError(f"vary names a stream twice: {', '.join(self.vary)}")
        if "root" in self.vary and len(self.vary) > 1:
            raise ValueError("vary: 'root' includes all other streams: name it alone")
        return self


class StartsSpec(Model):
    """The run whose final network ranks the start sequences of all members."""

    set: Settings = Field(
        default_factory=dict,
        description="Fields of the spec of that run that differ from the base, such as "
        "seeds.root: the network that ranks should not be one that is scored.",
    )


class ResourcesSpec(Model):
    """The resources that a scheduler reserves for each member. They do not affect results."""

    cores: PositiveInt = Field(1, le=4096, description="Number of processor cores.")
    memory_mb: PositiveInt | None = Field(
        None,
        le=MAX_MEBIBYTES,
        description="Memory in MiB; null: the largest limits.memory_mb of the members plus 512.",
    )
    gpus: Annotated[int, Field(ge=0, le=1)] = Field(
        0, description="Number of GPUs, of which a run uses at most one."
    )
    minutes: PositiveInt | None = Field(
        None,
        le=MAX_MINUTES,
        description="Time in minutes; null: the largest limits.minutes of the members.",
    )


class StudySpec(Model):
    """A study."""

    schema_id: Literal["capsule/study/v1"] = Field(
        "capsule/study/v1", alias="schema", description="Version of the format."
    )
    name: Name = Field(description="Name of the study; its folder and bundle are named after it.")
    base: Word = Field(description="Path of the spec of every run, relative to the study's file.")
    set: Settings = Field(
        default_factory=dict,
        description="Fields of the spec, as section.field: value, that all members share.",
    )
    seed: Seed = Field(
        0, description="Seed from which the varied seeds and the samples are derived."
    )
    runs: PositiveInt = Field(
        5, le=MAX_MEMBERS, description="Number of runs of each setting of a group."
    )
    starts: StartsSpec | None = Field(
        None,
        description="A further run that ranks the start sequences on which all members are scored "
        "('capsule study starts'); null: each member ranks its own, or the spec pins them.",
    )
    groups: Annotated[dict[GroupName, GroupSpec], Field(min_length=1)] = Field(
        description="The groups, by name."
    )
    scores: Annotated[dict[ScoreName, ScoreSource], Field(min_length=1)] | None = added(
        absent=None,
        description="Places of the scores of your own program, by the names of the scores: "
        "FILE#POINTER, an output in JSON and a JSON pointer (RFC 6901) to a number, or to a list "
        "of numbers with one for each evaluation. A string that contains a hexadecimal "
        "floating-point number counts as a number. A name has at most 100 characters, of which the "
        "first is none of = + - @. Null: none.",
    )
    resources: ResourcesSpec = Field(
        ResourcesSpec(), description="Resources that a scheduler reserves for each member."
    )
