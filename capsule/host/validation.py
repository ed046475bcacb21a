"""Checking a YAML document against a model: what is wrong, in words, and what to write instead.

Pydantic says which rule a value breaks; its words are for those who wrote the rule.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import ValidationError

from capsule.experiment.fields import Model
from capsule.host.errors import CapsuleError
from capsule.host.wording import counted
from capsule.host.yaml_document import MAX_INTEGER_BITS, FieldPath, YamlDocument, dotted

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_FINDINGS = 20
_ABSENT = object()
_ANY = "*"  # in the name of a field: a key that the user chooses, such as the name of a data set
_M = TypeVar("_M", bound=Model)

# What a file is according to its key 'schema', and which commands take it.
_KINDS = {
    "capsule/spec/v1": ("spec", "Name a study, or use the spec with 'capsule run'."),
    "capsule/study/v1": ("study", "Name a spec, or use the study with 'capsule study run'."),
}
# Names that other libraries have for fields of the spec.
_OTHER_NAMES = {
    "alpha": "learning_rate",
    "batch": "batch_size",
    "buffer_size": "replay_capacity",
    "clip_grad": "max_gradient_norm",
    "device": "accelerator.kind",
    "ent_coef": "entropy_cost",
    "env": "environment",
    "env_id": "environment.id",
    "eps": "adam_epsilon",
    "gamma": "discount",
    "gpu": "accelerator.kind",
    "hidden_size": "hidden_units",
    "learning_starts": "replay_start",
    "lr": "learning_rate",
    "max_grad_norm": "max_gradient_norm",
    "n_envs": "actors",
    "n_steps": "n_step",
    "num_envs": "actors",
    "seed": "seeds.root",
    "steps": "total_steps",
    "target_update_interval": "target_interval",
    "timesteps": "total_steps",
    "total_timesteps": "total_steps",
    "vf_coef": "baseline_cost",
}
FIX_OF_PACKAGES = (
    "Write requirements of Python packages: numpy==2.4.6. Copy the lines of a requirements file "
    "without its options, since no field takes a requirements file; name folders of wheels in "
    "image.sources.find_links."
)
# What the patterns of fields that users write ask for.
_PATTERNS = {
    "name": "Use at most 64 lower-case letters, digits, '.', '_' and '-', and begin and end with a "
    "letter or digit",
    "game": "Write the game's name as ALE has it, in lower case: ms_pacman",
    "further_games": "Write the games' names as ALE has them, in lower case: ms_pacman",
    "debian": "Write names of Debian packages: libgl1",
    "modules": "Write names of Python modules: package.module",
    "packages": FIX_OF_PACKAGES.removesuffix("."),
    "cuda": "Write a version or a range of versions: 13.0, >=12.8",
    "cudnn": "Write a version or a range of versions: 9.20, >=9.10",
    "driver": "Write a version or a range of versions: >=580.65",
    "compute_capability": "Write major and minor version in quotation marks: '9.0'",
    "module": "Write MODULE:FUNCTION: nets:make",
    "sha256": "Write 64 hexadecimal digits, in lower case",
    "url": "Write an address that begins with http:// or https:// and has no spaces",
    "outputs": "Write patterns that are not empty, such as 'results/*' or '!*.log'",
    "files": "Write patterns that are not empty, such as '*.py' or '!data/*'",
    "command": "Write words that are not empty and have no NUL character",
    "groups": "Use at most 32 lower-case letters, digits and '-', and begin and end with a letter "
    "or digit",
    "scores": "Write NAME: PATH#POINTER, such as accuracy: results/metrics.json#/test/accuracy. A "
    "name has no control characters, and does not begin with = + - or @",
}
_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # of YAML 1.1
_OTHER_ALGORITHMS = (
    "Use one of these. A program of any other algorithm runs as your own program: put its command "
    "line into trainer.command (docs/own-program.md)."
)
_INTEGER = re.compile(r"-?[0-9][0-9_]*")
_NUMBER = re.compile(r"-?[0-9][0-9_]*(\.[0-9]+)?([eE]-?[0-9]+)?")
# A name in a message. What is in quotation marks is a value.
_WORD = re.compile(r"(?<![\w'.])[a-z][a-z_0-9]*(?:\.[a-z_0-9]+)*(?![\w'])")


# What selects a variant of a section: a key, and its value unless any value does.
_Owner = tuple[str, str | None]


class Wrong(NamedTuple):
    """One thing that is wrong.

    Attributes:
        path: Where.
        message: What, to be read after the name of the field.
        fix: What to do.
    """

    path: FieldPath
    message: str
    fix: str


def validate(document: YamlDocument, model: type[_M]) -> _M:
    """Return a document as a model.

    Raises:
        CapsuleError: CAP-S003, fields are wrong; the message lists them all.
    """
    try:
        # Through JSON, whose arrays the strict models take for tuples; they would reject lists of
        # Python.
        return model.model_validate_json(json.dumps(document.tree))
    except ValidationError as error:
        schema = document.tree.get("schema")
        if isinstance(schema, str) and schema in _KINDS:
            kind, fix = _KINDS[schema]
            if kind != document.kind:
                wrong = Wrong(("schema",), f": this is a {kind}, not a {document.kind}", fix)
                raise rejected(document, [wrong]) from error
        raise rejected(document, _explain(error, document, model)) from error


def first_reason(error: Exception) -> str:
    """Return in one line what an error says; of pydantic's, the first field that is wrong."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        said = f"{dotted(first['loc']) or 'the document'}: {first['msg']}"
    else:
        # str() of an OSError would add its number and the whole path.
        said = (isinstance(error, OSError) and error.strerror) or str(error)
    return said.partition("\n")[0]


def rejected(document: YamlDocument, findings: Iterable[Wrong]) -> CapsuleError:
    """Return CAP-S003 with all that is wrong in a document."""
    lines, fixes = [], []
    for wrong in findings:
        field = dotted(wrong.path) or f"the {document.kind}"
        lines.append(f"{document.place_of(wrong.path)}: {field}{wrong.message}")
        fixes.append(wrong.fix)
    return CapsuleError("CAP-S003", "\n".join(lines), fix="\n".join(dict.fromkeys(fixes)))


def _explain(error: ValidationError, document: YamlDocument, model: type[Model]) -> Iterator[Wrong]:
    """Yield what pydantic found."""
    # A default that depends on another field is missing only because that one is wrong.
    findings = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
    # Without its wrong items, which are findings of their own, a list may count as too short.
    findings = [
        each
        for each in findings
        if each["type"] != "too_short" or each["ctx"]["actual_length"] == len(each["input"])
    ]
    for finding in findings[:MAX_FINDINGS]:
        # A validator of a whole section, whose messages name the fields that do not fit together.
        if finding["type"] == "value_error" and isinstance(finding["input"], dict):
            path = _path_in_document(finding["loc"], document.tree, missing=False)
            for message in finding["msg"].removeprefix("Value error, ").split("\n"):
                yield _between_fields(path, message, document, model)
        else:
            yield _wrong(finding, document, model)


def _wrong(finding: ErrorDetails, document: YamlDocument, model: type[Model]) -> Wrong:
    """Return what is wrong according to one finding of pydantic's."""
    kind, context = finding["type"], finding.get("ctx", {})
    loc = finding["loc"]
    if kind in ("union_tag_not_found", "union_tag_invalid"):  # which of several models it is
        loc = (*loc, context["discriminator"].strip("'"))
    missing = kind in ("union_tag_not_found", "missing")
    path = _path_in_document(loc, document.tree, missing=missing)
    field = dotted(path)
    if kind == "extra_forbidden":
        return _unknown(path, finding["input"], document, model)
    if missing:
        misspelt = _misspelt(path, document, model)
        fix = f"Write {field} instead of {misspelt}." if misspelt else f"Add {field}."
        return Wrong(path, " is missing", fix)
    if kind == "union_tag_invalid":
        fix = _OTHER_ALGORITHMS if path[-1] == "algorithm" else "Use one of these."
        message = f": must be one of {context['expected_tags']}, not {context['tag']!r}"
        return Wrong(path, message, fix)
    section = str(path[0]) if path else ""
    if loc[-1:] == ("[key]",):  # the name of a data set is of the form of 'name'
        field = {"data": "name", "groups": "groups", "scores": "scores"}.get(section, "")
    else:
        field = "scores" if section == "scores" else _names(path).rpartition(".")[2]
    return Wrong(path, f": {_said_of(finding)}", _instead(path, field, finding))


def _misspelt(path: FieldPath, document: YamlDocument, model: type[Model]) -> str | None:
    """Return the unknown key that most resembles a missing one of the same section, if any."""
    *above, leaf = path
    known = _keys_of([str(part) for part in above], _known_fields(model))
    given = [
        place[-1] for place in document.marks if len(place) == len(path) and place[:-1] == path[:-1]
    ]
    unknown = [key for key in given if isinstance(key, str) and key not in known]
    close = difflib.get_close_matches(str(leaf), unknown, n=1, cutoff=0.6)
    return dotted((*above, *close)) if close else None


def _said_of(finding: ErrorDetails) -> str:
    """Return what is wrong with a value, in the words of a spec."""
    kind, context, given = finding["type"], finding.get("ctx", {}), finding["input"]
    if kind == "too_short":
        return f"must have at least {counted(context['min_length'], 'item')}"
    if kind == "too_long":
        return f"must have at most {counted(context['max_length'], 'item')}"
    message = finding["msg"].removeprefix("Value error, ")
    for said, meant in (
        ("Input should be a valid array", "must be a list"),
        ("Input should be an object", "must be a section"),
        ("Input should be", "must be"),
    ):
        message = message.replace(said, meant)
    if kind == "string_pattern_mismatch":
        message = "has characters or a form that are not allowed"
    # The text of a whole section would hide the message.
    return message + ("" if isinstance(given, dict) else f", not {_as_written(given)}")


def _as_written(given: Any) -> str:
    """Return a value as messages show it: Booleans and null in the words of YAML."""
    return json.dumps(given) if given is None or isinstance(given, bool) else repr(given)


def _instead(path: FieldPath, field: str, finding: ErrorDetails) -> str:
    """Return what to write instead of a value.

    Args:
        path: Where it is.
        field: Its field, whose pattern it may not have.
        finding: What is wrong with it.
    """
    kind, given = finding["type"], finding["input"]
    if kind in ("int_type", "int_from_float") and _is_exact(given):
        return f"Write {int(given):_}, without a decimal point or an exponent."
    if kind in ("int_type", "float_type") and isinstance(given, str) and _is_number(given, kind):
        return f"Write {given} without quotation marks."
    if kind == "string_type" and isinstance(given, bool | int | float):
        what = "a Boolean" if isinstance(given, bool) else "a number"
        return f"Put {dotted(path)} into quotation marks, without which YAML reads {what}."
    if kind == "literal_error" and repr(str(given)) in finding["ctx"]["expected"]:
        return f"Put {dotted(path)} into quotation marks, without which YAML reads a number."
    if kind == "bool_type" and isinstance(given, str) and given.lower() in _BOOLEANS:
        return f"Write {_BOOLEANS[given.lower()]}, since YAML 1.2 has no other word for it."
    if kind in ("list_type", "tuple_type") and isinstance(given, str):
        if field == "packages" and given.endswith(".txt"):
            return FIX_OF_PACKAGES
        try:
            words = shlex.split(given)
        except ValueError:  # an unclosed quotation mark
            words = [given]
        return f"Write {dotted(path)}: [{', '.join(words)}]"
    if kind == "string_pattern_mismatch" and field in _PATTERNS:
        return f"{_PATTERNS[field]}."
    return f"Change {dotted(path) or 'it'}."


def _is_exact(given: Any) -> bool:
    """Tell whether a value is a floating-point number that stands for an integer of a document."""
    exact = isinstance(given, float) and given.is_integer()
    return exact and abs(given) < 1 << MAX_INTEGER_BITS


def _is_number(text: str, kind: str) -> bool:
    """Tell whether YAML would read a number that fits, were it not for the quotation marks."""
    return (_INTEGER if kind == "int_type" else _NUMBER).fullmatch(text) is not None


def _between_fields(
    path: FieldPath, message: str, document: YamlDocument, model: type[Model]
) -> Wrong:
    """Return what is wrong between several fields: the first one that is named and given leads."""
    named = _fields_in(message, path, document, _known_fields(model))
    given = [field for field in named if _given(field, document)]
    if not named:
        return Wrong(path, f": {message}", f"Change {dotted(path) or f'the {document.kind}'}.")
    if " is missing" in message:
        return Wrong(path, f": {message}", f"Add {named[0]}.")
    # The message names a line, and only a field that was given has one.
    first = (given or named)[0]
    # The others have their defaults.
    others = [field for field in named if field not in given]
    fixes = [f"change {' or '.join(given)}"] * bool(given)
    fixes += [f"add {' or '.join(others)}"] * bool(others)
    fix = ", or ".join(fixes)
    fix = f"{fix[0].upper()}{fix[1:]}."
    if "remove it" in message:
        others = [field for field in named if field != first]
        fix = f"Remove {first}" + f", or change {' or '.join(others)}" * bool(others) + "."
    for start in (first, first.rpartition(".")[2]):
        if re.match(rf"{re.escape(start)}\b", message):
            return Wrong(tuple(first.split(".")), message.removeprefix(start), fix)
    return Wrong(tuple(first.split(".")), f": {message}", fix)


def _fields_in(
    message: str, path: FieldPath, document: YamlDocument, known: Sequence[str]
) -> list[str]:
    """Return the fields that a message about a section names, each as a dotted path.

    A message about the whole document names a section only as its first word: the names of the
    others, such as 'code' and 'data', are ordinary words, too.
    """
    words = list(_WORD.finditer(message))
    found = []
    for word in words:
        name = word.group()
        options = [dotted((*path, *name.split(".")))] if path else []
        if "." in name or (not path and word.start() == 0):
            options.append(name)
        found += [each for each in options if each in known or _given(each, document)][:1]
    return list(dict.fromkeys(found))


def _value(field: str, document: YamlDocument) -> Any:
    # Fields of a section that a study sets as a whole have no marks of their own.
    return document.value(tuple(field.split(".")), _ABSENT)


def _given(field: str, document: YamlDocument) -> bool:
    return _value(field, document) is not _ABSENT


def _path_in_document(loc: Sequence[str | int], tree: Any, *, missing: bool) -> FieldPath:
    """Drop the union tags that pydantic puts into a location; keep a key that is missing."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        known = (isinstance(tree, dict) and part in tree) or (
            isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        )
        if known:
            tree = tree[part]
            path.append(part)
        elif last and missing:
            path.append(part)
    return tuple(path)


def _unknown(path: FieldPath, given: Any, document: YamlDocument, model: type[Model]) -> Wrong:
    """Return what is wrong with a key that is not known where it stands."""
    field = _names(path)
    owners = _owners(model).get(field, ())
    if not owners:
        return Wrong(path, " is not a known key", _suggest(path, given, document, model))
    others = _others(field, document, model)
    if others:
        message = f" is not a known key here: it excludes {' and '.join(others)}"
        return Wrong(path, message, f"Remove {' or '.join([field, *others])}.")
    message = f" is not a known key here: it belongs to {_said(owners)}"
    return Wrong(path, message, f"Remove {field}, or use {_said(owners)}.")


def _others(field: str, document: YamlDocument, model: type[Model]) -> list[str]:
    """Return the given keys that select another variant of a section than ``field`` selects."""
    selectors = {key for owners in _owners(model).values() for key, _ in owners}
    section = field.rpartition(".")[0]
    siblings = [key for key in sorted(selectors - {field}) if key.rpartition(".")[0] == section]
    return [key for key in siblings if field in selectors and _given(key, document)]


def _said(owners: Sequence[_Owner]) -> str:
    """Write variants of sections in words: ``environment.suite 'atari' or 'minatar'``."""
    keys = dict.fromkeys(key for key, _ in owners)
    words = {
        key: [repr(value) for other, value in owners if other == key and value] for key in keys
    }
    return " or ".join(f"{key} {' or '.join(values)}".strip() for key, values in words.items())


def _suggest(path: FieldPath, given: Any, document: YamlDocument, model: type[Model]) -> str:
    """Name the known field that an unknown one stands for, or most resembles."""
    owners = _owners(model)
    fields = [
        known
        for known in _known_fields(model)
        if known not in owners or any(_is_chosen(owner, document) for owner in owners[known])
    ]
    field = _names(path)
    *above, leaf = (part for part in path if isinstance(part, str))
    section = dotted(tuple(above))
    if "." in leaf and field in fields:
        inside, _, key = field.rpartition(".")
        return f"Write {key} as a key of the section {inside}, since no key has a dot."
    siblings = [dotted((*above, name)) for name in _keys_of(above, fields)]
    fields = [name for name in fields if _ANY not in name]
    other = leaf if isinstance(given, dict) else _OTHER_NAMES.get(leaf, leaf)
    named = [name for name in (f"{section}.{other}", other) if name in fields]
    # From the surest to the vaguest: the name that another library has for a field, a misspelt key
    # of the same section, the same key of another section, and any similar path.
    close = (
        named
        or [f"{section}.{name}".lstrip(".") for name in _close(leaf, siblings, document)]
        or [name for name in fields if name.rpartition(".")[2] == other]
        or difflib.get_close_matches(field, _outside(path, fields), n=1, cutoff=0.75)
    )
    if close:
        return f"Did you mean {close[0]}?"
    names = ", ".join(name.rpartition(".")[2] for name in siblings)
    return f"Known keys of {section or f'the {document.kind}'}: {names}."


def _keys_of(section: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Return the known keys of a section, which may be in one whose keys the user chooses."""
    found = []
    for field in fields:
        *above, leaf = field.split(".")
        if len(above) == len(section) and all(
            name in (part, _ANY) for part, name in zip(section, above, strict=True)
        ):
            found.append(leaf)
    return found


def _close(leaf: str, siblings: Sequence[str], document: YamlDocument) -> list[str]:
    """Return the key of a section that an unknown one resembles, if it is not given, too."""
    free = [name.rpartition(".")[2] for name in siblings if not _given(name, document)]
    return difflib.get_close_matches(leaf, free, n=1, cutoff=0.6)


def _is_chosen(owner: _Owner, document: YamlDocument) -> bool:
    """Tell whether a document selects this variant of a section, or does not exclude it."""
    key, value = owner
    found = _value(key, document)
    return value is not None if found is _ABSENT else value in (None, found)


def _outside(path: FieldPath, fields: Sequence[str]) -> list[str]:
    """Return the fields but for the sections that a path is in."""
    sections = {dotted(path[:length]) for length in range(len(path) + 1)}
    return [field for field in fields if field not in sections]


def _names(path: FieldPath) -> str:
    """Return a path without the places in lists, as fields of models are named."""
    return dotted(tuple(part for part in path if isinstance(part, str)))


@functools.cache
def _known_fields(model: type[Model]) -> list[str]:
    return sorted({field for field, _ in _fields(model.model_json_schema(by_alias=True))})


@functools.cache
def _owners(model: type[Model]) -> dict[str, list[_Owner]]:
    """Return the variants of sections that have a field, for fields that some variants lack."""
    owners: dict[str, list[_Owner]] = {}
    for field, owner in _fields(model.model_json_schema(by_alias=True)):
        if owner is not None:
            owners.setdefault(field, []).append(owner)
    return owners


def _fields(schema: dict[str, Any]) -> Iterator[tuple[str, _Owner | None]]:
    """Yield every dotted field of a model, and the variant of its section that has it, if any."""

    def resolved(node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        return node

    def walk(
        node: dict[str, Any], prefix: str, owner: _Owner | None
    ) -> Iterator[tuple[str, _Owner | None]]:
        for option in map(resolved, (*node.get("oneOf", ()), *node.get("anyOf", ()))):
            yield from walk(option, prefix, _selector(option, prefix))
        if isinstance(node.get("items"), dict):
            yield from walk(resolved(node["items"]), prefix, None)
        for child in (
            node.get("additionalProperties"),
            *node.get("patternProperties", {}).values(),
        ):
            if isinstance(child, dict):
                yield from walk(resolved(child), f"{prefix}{_ANY}.", None)
        for name, child in node.get("properties", {}).items():
            yield prefix + name, owner
            yield from walk(resolved(child), f"{prefix}{name}.", None)

    yield from walk(schema, "", None)


def _selector(variant: dict[str, Any], prefix: str) -> _Owner | None:
    """Return the key, and its value if there is only one, that select a variant of a section."""
    for name, child in variant.get("properties", {}).items():
        if "const" in child:
            return f"{prefix}{name}", child["const"]
    required = variant.get("required", ())
    return (f"{prefix}{required[0]}", None) if len(required) == 1 else None
