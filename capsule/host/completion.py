"""What a shell offers for ``--set FIELD=VALUE``: the fields of a spec and the values of some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capsule.experiment.scores import ATARI_57
from capsule.host.spec_file import schema_document

GAME = "environment.game"


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin with an incomplete one.

    Fields are offered with their ``=``. For a single field, the values are offered if they can be
    listed: choices, true and false, and games.
    """
    settings = spec_settings()
    field, equals, _ = incomplete.partition("=")
    fields = [field] if equals else [each for each in settings if each.startswith(incomplete)]
    if len(fields) == 1 and (values := settings.get(fields[0])):
        offered = [f"{fields[0]}={value}" for value in values]
    else:
        offered = [f"{each}=" for each in fields]
    return [each for each in offered if each.startswith(incomplete)]


def spec_settings() -> dict[str, tuple[str, ...]]:
    """Return the fields of a spec that can be set, each with its values if these can be listed."""
    schema = schema_document()
    found: dict[str, dict[str, None]] = {}
    # Variants of a section may have the same field with other values, which are offered together.
    for path, values in _fields(schema, schema, ""):
        found.setdefault(path, {}).update(dict.fromkeys(values))
    # For ALE's games the schema has a pattern and no list.
    found[GAME] |= dict.fromkeys(ATARI_57)
    return {path: tuple(values) for path, values in sorted(found.items())}


def _fields(schema: dict[str, Any], node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields below a node of a JSON Schema, each with the values that it lists."""
    for each in _alternatives(schema, node):
        properties = each.get("properties")
        if properties is None:
            if prefix:
                yield prefix, _values(each)
            continue
        for name, field in properties.items():
            if name != "schema":
                yield from _fields(schema, field, f"{prefix}.{name}" if prefix else name)


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of which a value fits one, references resolved."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    choices = node.get("anyOf") or node.get("oneOf")
    if choices is None:
        yield node
        return
    for choice in choices:
        yield from _alternatives(schema, choice)


def _values(node: dict[str, Any]) -> list[str]:
    """Return the values that a schema lists, as YAML has them."""
    if node.get("type") == "boolean":
        return ["true", "false"]
    listed = [node["const"]] if "const" in node else node.get("enum", [])
    return [value for value in listed if isinstance(value, str)]
