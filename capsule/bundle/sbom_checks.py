"""Checks that a bill of materials is well-formed, and that it says what the lock says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from capsule.bundle.licences import Choice, is_own_form
from capsule.bundle.sbom import Component, image_document
from capsule.experiment.canonical import parse_canonical_json
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError

# Bounds on an untrusted document: the schema check compares all entries of a list pairwise.
MAX_BYTES = 4 << 20
MAX_ENTRIES = 2_000
# The fields of CycloneDX that Capsule writes; see _check_profile.
FIELDS = frozenset(
    (
        *("bomFormat", "specVersion", "serialNumber", "version", "metadata", "component"),
        *("components", "type", "bom-ref", "name", "group", "manufacturer", "purl"),
        *("hashes", "alg", "content", "properties", "value"),
        *("licenses", "license", "id", "expression", "acknowledgement"),
        *("dependencies", "ref", "dependsOn"),
    )
)


def validate_sbom(data: bytes) -> None:
    """Check an untrusted document.

    Beyond the strict CycloneDX 1.6 schema, which the library brings along, the document must be
    canonical JSON that keeps to the fields Capsule writes, every ``bom-ref`` must be unique, every
    dependency must refer to one, and every package URL must parse.

    Raises:
        CapsuleError: CAP-B062.
    """
    if len(data) > MAX_BYTES:
        _reject(f"it is larger than {MAX_BYTES} bytes")
    try:
        document = parse_canonical_json(data)
    except ValueError as error:
        _reject(str(error))
    objects = list(_objects(document))
    # Bounds come before the schema, because the time of that check grows with the document.
    _check_profile(document, objects)
    _check_schema(data)
    if document["specVersion"] != "1.6":  # the schema takes any
        _reject(f"specVersion is {document['specVersion']!r}, not '1.6'")
    references = [each["bom-ref"] for each in objects if "bom-ref" in each]
    if repeated := _repeated(references):
        _reject(f"bom-ref {repeated!r} occurs more than once")
    _check_dependencies(document.get("dependencies", []), set(references))
    for each in objects:
        if "purl" in each:
            _check_purl(each["purl"])


def _check_profile(document: Any, objects: list[dict[str, Any]]) -> None:
    """Reject fields that Capsule never writes, before the schema check spends time on them.

    Some fields of CycloneDX are parsed with grammars whose cost grows steeply with length.
    """
    for each in objects:
        if unknown := sorted(each.keys() - FIELDS):
            _reject(f"field {unknown[0]!r} is not one that Capsule writes")
        # The bound below is one for each list, and components could contain lists of components.
        if "components" in each and each is not document:
            _reject("a component is inside another, which Capsule never writes")
        for field, value in each.items():
            if isinstance(value, list) and len(value) > MAX_ENTRIES:
                _reject(f"{field} has more than {MAX_ENTRIES} entries")


def _check_schema(data: bytes) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode())
    except RecursionError:
        _reject("it is nested too deeply")
    if error is not None:
        place = "/".join(str(step) for step in error.data.absolute_path)
        _reject(f"{place or 'the document'}: {error.data.message[:200]}")


def _check_dependencies(dependencies: list[dict[str, Any]], references: set[str]) -> None:
    if repeated := _repeated([dependency["ref"] for dependency in dependencies]):
        _reject(f"the dependencies of {repeated!r} are given more than once")
    for dependency in dependencies:
        named = [dependency["ref"], *dependency.get("dependsOn", [])]
        for reference in named:
            if reference not in references:
                _reject(f"dependency {reference!r} refers to nothing")


def _check_purl(purl: str) -> None:
    from packageurl import PackageURL

    try:
        PackageURL.from_string(purl)
    except ValueError as error:
        _reject(f"package URL {purl!r}: {error}")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object within ``value``, itself included."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield each
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)


def _repeated(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def _reject(reason: str) -> NoReturn:
    raise CapsuleError(
        "CAP-B062",
        f"the SBOM is not a valid CycloneDX 1.6 document: {reason}",
        fix="Do not trust this bundle; ask its signer for a valid one.",
    )


def sbom_matches_lock(data: bytes, lock: Lock, image_config_digest: str) -> list[str]:
    """Derive an image's SBOM again from its lock and name every difference.

    Licences are not in a lock: they are taken from the document as its author's statement, for
    packages that the lock knows.

    Args:
        data: The document.
        lock: What the image was assembled from.
        image_config_digest: The identity the document must state.

    Returns:
        One sentence per difference; empty if there is none.

    Raises:
        CapsuleError: CAP-B062 the document is not sound.
    """
    validate_sbom(data)
    stated = parse_canonical_json(data)
    derived = image_document(lock, image_config_digest, _stated_licences(stated))
    found = {each["bom-ref"]: each for each in _parts(stated)}
    expected = {each["bom-ref"]: each for each in _parts(derived)}
    differences = [f"{ref} is missing" for ref in sorted(expected.keys() - found.keys())]
    differences += [f"{ref} is not in the lock" for ref in sorted(found.keys() - expected.keys())]
    for ref in sorted(expected.keys() & found.keys()):
        differences += _fields_that_differ(ref, found[ref], expected[ref])
    # These two were compared part by part above.
    rest = {"components", "metadata"}
    differences += [
        f"{field} differs"
        for field in sorted((stated.keys() | derived.keys()) - rest)
        if stated.get(field) != derived.get(field)
    ]
    # The comparison by references says nothing of the order and the place of components.
    if not differences and stated != derived:
        differences.append("components or metadata are arranged differently")
    return differences


def _parts(document: Mapping[str, Any]) -> list[Component]:
    root = document.get("metadata", {}).get("component", {})
    parts = [root, *document.get("components", [])]
    # A component without a reference gets one, so that several of them are not taken for one.
    return [{"bom-ref": f"(unnamed {number})", **part} for number, part in enumerate(parts)]


def _fields_that_differ(ref: str, found: Component, expected: Component) -> list[str]:
    return [
        f"{ref}: {field} is {str(found.get(field))[:100]}, not {str(expected.get(field))[:100]}"
        for field in sorted(found.keys() | expected.keys())
        if found.get(field) != expected.get(field)
    ]


def _stated_licences(document: Mapping[str, Any]) -> dict[str, Choice]:
    """Read the licences of a sound document, in the only forms that Capsule writes."""
    return {
        component["purl"]: choice
        for component in document.get("components", [])
        if (choice := component.get("licenses"))
        and "purl" in component
        and is_own_form(component["purl"], choice)
    }
