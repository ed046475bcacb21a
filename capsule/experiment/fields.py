"""Types that the documents' fields are made of, and the base of every document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.versions import CONSTRAINT

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
# Numbers of canonical JSON are doubles (RFC 8785): larger integers are not all exact.
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
Requirement = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?.*$")
]
# Words become arguments of processes, which end at a NUL character.
Word = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Patterns = Annotated[tuple[Annotated[str, Field(pattern=r"^!?[^!]")], ...], Field(min_length=1)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
DebianName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
VersionConstraint = Annotated[str, Field(pattern=CONSTRAINT)]


# Facts that a run reports as names and values: flags, libraries. A real run has some dozens.
MAX_FACTS = 1_000
Facts = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=4_096)]],
    Field(max_length=MAX_FACTS),
]


# Each thread and task has its own value, because one may read a stored document while another
# makes a new document.
_reading_stored = ContextVar("_reading_stored", default=False)


def added(*, absent: Any, default: Any = ..., description: str | None = None) -> Any:
    """Declare a field that was added to a document after its version 1.

    Older documents do not have the field, and their digests are identities. So a stored document
    omits the field where it has the value ``absent``, and a document without the field has this
    value, which never changes. The default of a new spec may be another value, and may change.

    The values must be scalars of JSON: a default is not validated, and all documents without the
    field would share the same list or dictionary.

    Args:
        absent: Value of the field in documents that omit it, as in JSON.
        default: Value of the field in a new document; by default, ``absent``.
        description: Description in the schema.

    Raises:
        TypeError: A value is not a string, a number, a Boolean or None.
    """
    new = absent if default is ... else default
    for value in (absent, new):
        if value is not None and not isinstance(value, str | int | float):
            raise TypeError(f"not a scalar of JSON: {value!r}")
    return Field(
        default_factory=lambda: absent if _reading_stored.get() else new,
        description=description,
        json_schema_extra={"default": new, "absent": absent},
    )


class Model(BaseModel):
    """Base of every document model: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def document(self) -> bytes:
        """Return the document as it is stored, signed and digested: canonical JSON (RFC 8785)."""
        facts = self.model_dump(mode="json", by_alias=True)
        _leave_out(self, facts)
        return canonical_json(facts)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a stored document.

        Raises:
            ValueError: It is not canonical JSON, or (as pydantic's ``ValidationError``) not a
                document of this model, or it omits a field of version 1. The defaults of these
                fields may change, so a stored document contains all of them.
        """
        # This strict check comes first: pydantic silently takes one of two equal keys.
        parse_canonical_json(data)
        with _stored():
            # Fields that the document omits get their value 'absent' here (added()).
            found = cls.model_validate_json(data)
        if found.document() != data:
            raise ValueError("it omits a field, or contains a field whose value means its absence")
        return found


class DigestedModel(Model):
    """A document that other documents identify by its digest."""

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of :meth:`document`."""
        return sha256_hex(self.document())


def is_given(model: BaseModel, name: str) -> bool:
    """Return whether the value of a field differs from its default."""
    default = type(model).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(model, name) != default)


def reject_all(messages: Iterable[str]) -> None:
    """Reject a document if there are messages about it.

    Raises:
        ValueError: There are messages. The error contains one per line, because pydantic accepts a
            single exception of a validator; readers of specs report the lines one by one.
    """
    if found := [*messages]:
        raise ValueError("\n".join(found))


@contextmanager
def _stored() -> Iterator[None]:
    token = _reading_stored.set(True)
    try:
        yield
    finally:
        _reading_stored.reset(token)


def _leave_out(value: Any, facts: Any) -> None:
    """Remove the fields that stored documents omit from ``facts``, the dump of ``value``.

    Raises:
        TypeError: A dictionary has a key that is not a string, which JSON would convert to one.
    """
    if isinstance(value, Model):
        for name, field in type(value).model_fields.items():
            key, extra = field.alias or name, field.json_schema_extra
            if isinstance(extra, dict) and "absent" in extra and facts[key] == extra["absent"]:
                del facts[key]
            else:
                _leave_out(getattr(value, name), facts[key])
    elif isinstance(value, tuple):
        for each, dumped in zip(value, facts, strict=True):
            _leave_out(each, dumped)
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"not a string, as keys of documents are: {key!r}")
            _leave_out(each, facts[key])
