"""Types that the documents' fields are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
Requirement = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?.*$")
]
Word = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Patterns = Annotated[tuple[Annotated[str, Field(pattern=r"^!?[^!]")], ...], Field(min_length=1)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
DebianName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
_CONSTRAINT = r"(==|!=|>=|<=|>|<|~=)?[0-9]+(\.[0-9]+)*(\.\*)?"
VersionConstraint = Annotated[str, Field(pattern=rf"^{_CONSTRAINT}(, ?{_CONSTRAINT})*$")]


# What a run says of itself in names and values: flags, libraries. A real one has some dozens.
MAX_FACTS = 1_000
Facts = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=4_096)]],
    Field(max_length=MAX_FACTS),
]


class Model(BaseModel):
    """Base of every document model: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
