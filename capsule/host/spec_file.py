"""Reading a spec file, with the settings of the command line and the files that it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from capsule.experiment.evaluation import StartSet
from capsule.experiment.spec import Spec
from capsule.host.errors import CapsuleError
from capsule.host.folders import user_path
from capsule.host.spec_checks import wrong_settings
from capsule.host.streams import read_whole
from capsule.host.validation import first_reason, rejected, validate
from capsule.host.yaml_document import MAX_BYTES, YamlDocument


def load_spec(path: Path, overrides: Sequence[str] = (), *, for_lock: bool = True) -> Spec:
    """Read a spec from a YAML (or JSON) file.

    Args:
        path: The file.
        overrides: ``section.field=value`` settings applied on top; values are YAML scalars.
        for_lock: Whether it may get a new lock. Otherwise it is the spec of an existing one, which
            may have settings without an effect, and paths and addresses of another machine. These
            are not used.

    Raises:
        CapsuleError: CAP-S001 unreadable file, CAP-S002 not YAML, CAP-S003 a field is wrong,
            CAP-S004 a bad override, CAP-S010 evaluation.start_set does not name a start set.
    """
    document = YamlDocument.load(path, "spec")
    document.override(overrides)
    return spec_of(document, path.parent, for_lock=for_lock)


def parse_spec(data: bytes, name: str, overrides: Sequence[str] = ()) -> Spec:
    """Parse spec ``data`` (YAML or JSON), which may not name files. See :func:`load_spec`."""
    document = YamlDocument(data, name, "spec")
    document.override(overrides)
    return validate(document, Spec)


def spec_of(document: YamlDocument, folder: Path, *, for_lock: bool = True) -> Spec:
    """Return the spec of a document, whose paths are relative to ``folder``; see :func:`load_spec`.

    Returns:
        The spec; for a new lock, the paths of ``image.sources.find_links`` are absolute.

    Raises:
        CapsuleError: CAP-S003, CAP-S010 of :func:`load_spec`.
    """
    _pin_start_set(document.tree, folder)
    spec = validate(document, Spec)
    if not for_lock:
        return spec
    if wrong := list(wrong_settings(spec)):
        raise rejected(document, wrong)
    return _with_absolute_links(spec, folder)


def schema_document() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a spec."""
    schema = Spec.model_json_schema(by_alias=True)
    # In a spec file, the start set is a path, whose content takes its place when the file is read.
    schema["$defs"]["EvaluationSpec"]["properties"]["start_set"]["anyOf"].append({"type": "string"})
    close_patterns(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def close_patterns(node: Any) -> None:
    """Reject, in a JSON Schema, the keys of mappings that have none of the patterns for keys.

    pydantic rejects such keys when it reads a document, but the schemas that it writes allow them.
    """
    if isinstance(node, dict):
        if "patternProperties" in node:
            node["additionalProperties"] = False
        for child in node.values():
            close_patterns(child)
    elif isinstance(node, list):
        for child in node:
            close_patterns(child)


def read_start_set(path: Path, field: str = "start set") -> StartSet:
    """Read a file that ``capsule starts`` wrote.

    Args:
        path: The file.
        field: What messages call it.

    Raises:
        CapsuleError: CAP-S010, it cannot be read, or is not a start set.
    """
    fix = "Name a file that 'capsule starts' wrote."
    try:
        with path.open("rb") as stream:
            return StartSet.model_validate_json(read_whole(stream, MAX_BYTES))
    except (OSError, ValueError) as error:
        message = f"{field}: cannot read {path}: {first_reason(error)}"
        raise CapsuleError("CAP-S010", message, fix=fix) from error


def _pin_start_set(tree: Any, folder: Path) -> None:
    """Put the contents of the file that ``evaluation.start_set`` names in its place."""
    evaluation = tree.get("evaluation")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("start_set"), str):
        found = read_start_set(folder / evaluation["start_set"], "evaluation.start_set")
        evaluation["start_set"] = found.model_dump(mode="json", by_alias=True)


def _with_absolute_links(spec: Spec, folder: Path) -> Spec:
    links = tuple(
        # Relative to the spec, so that the command may be given in any folder.
        link if urlsplit(link).scheme else str((folder / user_path(link)).absolute())
        for link in spec.image.sources.find_links
    )
    sources = spec.image.sources.model_copy(update={"find_links": links})
    image = spec.image.model_copy(update={"sources": sources})
    return spec.model_copy(update={"image": image})
