"""What the user says about a deposit: its title, creators, licence and related works."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from capsule.host.errors import CapsuleError
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason

MAX_CITATION_BYTES = 1 << 20
# Relations of a related work that Zenodo's API takes, of those in DataCite's metadata.
RELATIONS = (
    *("isCitedBy", "cites", "isSupplementTo", "isSupplementedBy", "isContinuedBy", "continues"),
    *("hasMetadata", "isMetadataFor", "isNewVersionOf", "isPreviousVersionOf", "isPartOf"),
    *("hasPart", "isReferencedBy", "references", "isDocumentedBy", "documents", "isCompiledBy"),
    *("compiles", "isVariantFormOf", "isIdenticalTo", "isReviewedBy", "reviews"),
    *("isDerivedFrom", "isSourceOf"),
)
_CORRECT_FILE = "Correct the file, or give --creator and --licence instead."
_ONE_LICENCE = "Name one licence with --licence, by its SPDX identifier, e.g. CC-BY-4.0."
_ORCID = re.compile(r"(?:https?://orcid\.org/)?(\d{4}-\d{4}-\d{4}-\d{3}[\dX])")


@dataclass(frozen=True)
class Creator:
    """A person, as "Family, Given", or an organisation."""

    name: str
    affiliation: str | None = None
    orcid: str | None = None


@dataclass(frozen=True)
class Details:
    """The facts about a deposit that a bundle does not contain.

    Attributes:
        title: None for the name of the experiment.
        creators: In the order of the citation.
        licence: SPDX identifier; None if none was given.
        related: Relation and identifier (DOI, URL, …) of related works.
    """

    title: str | None = None
    creators: tuple[Creator, ...] = ()
    licence: str | None = None
    related: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        *,
        title: str | None,
        creators: Sequence[str],
        licence: str | None,
        related: Sequence[str],
        citation: Path | None,
    ) -> Details:
        """Gather the options of a command; what they leave open is taken from a citation file.

        Raises:
            CapsuleError: CAP-P207, one of them is malformed.
        """
        cited = _Citation() if citation is None else _read_citation(citation)
        named = tuple(map(Creator, creators)) or tuple(each.creator for each in cited.authors)
        for number, creator in enumerate(named, 1):
            if not creator.name.strip():
                place = "--creator" if creators else f"--citation {citation}"
                fix = "Name each creator, as --creator 'Family, Given' or in the citation file."
                raise _malformed(place, f"creator {number} has no name", fix)
        place = f"--citation {citation}: license" if licence is None else "--licence"
        return cls(
            title=title,
            creators=named,
            licence=_licence(cited.license if licence is None else licence, place),
            related=tuple(map(_related, related)),
        )

    def require_none(self, form: str) -> None:
        """Check that nothing was said about a deposit where none is made.

        Raises:
            CapsuleError: CAP-P207.
        """
        if self != Details():
            raise CapsuleError(
                "CAP-P207",
                f"--to {form} makes no deposit, so it takes neither --title, --creator, --licence, "
                "--related nor --citation",
                fix="Remove these options, or use --to zenodo or --to huggingface.",
            )


class _Author(BaseModel):
    """A person or an entity of the Citation File Format 1.2."""

    name: str | None = None
    family: Annotated[str | None, Field(alias="family-names")] = None
    particle: Annotated[str | None, Field(alias="name-particle")] = None
    given: Annotated[str | None, Field(alias="given-names")] = None
    affiliation: str | None = None
    orcid: str | None = None

    @property
    def creator(self) -> Creator:
        family = " ".join(filter(None, (self.particle, self.family)))
        name = self.name or ", ".join(filter(None, (family, self.given)))
        match = _ORCID.fullmatch(self.orcid or "")
        return Creator(name, self.affiliation, match and match[1])


def _joined(value: object) -> object:
    """Return the licences of a list, of which users may choose one, as an expression."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return " OR ".join(value)
    return value


class _Citation(BaseModel):
    """The fields of a CITATION.cff that a deposit has a use for."""

    authors: tuple[_Author, ...] = ()
    license: Annotated[str | None, BeforeValidator(_joined)] = None


def _read_citation(path: Path) -> _Citation:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        with path.open("rb") as stream:
            document: Any = YAML(typ="safe").load(read_whole(stream, MAX_CITATION_BYTES))
        return _Citation.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = f"{where}: {first['msg']}, not {first['input']!r}"
        raise _malformed(f"--citation {path}", reason, _CORRECT_FILE) from error
    except (OSError, YAMLError, ValueError) as error:
        raise _malformed(f"--citation {path}", first_reason(error), _CORRECT_FILE) from error


def _licence(text: str | None, place: str) -> str | None:
    """Return an SPDX identifier in its usual spelling."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    if text is None:
        return None
    try:
        licence = canonicalize_license_expression(text)
    except InvalidLicenseExpression as error:
        raise _malformed(
            f"{place} {text!a}", "it is not an SPDX identifier", _ONE_LICENCE
        ) from error
    # In its canonical form, a compound expression has operators between blanks.
    if " " in licence:
        raise _malformed(f"{place} {text!a}", "a deposit has one licence", _ONE_LICENCE)
    return licence


def _related(text: str) -> tuple[str, str]:
    relation, _, identifier = text.partition("=")
    if relation not in RELATIONS or not identifier:
        raise _malformed(
            f"--related {text!a}",
            "it is not RELATION=IDENTIFIER, such as isSupplementTo=10.1/x",
            f"Use one of these relations: {', '.join(RELATIONS)}.",
        )
    return relation, identifier


def _malformed(what: str, reason: str, fix: str) -> CapsuleError:
    return CapsuleError("CAP-P207", f"{what}: {reason}", fix=fix)
