"""Bills of materials in CycloneDX 1.6 (ECMA-424): what the image holds, and what the machine is.

The documents are written directly, as canonical JSON, and the CycloneDX library only validates
them: its object model drops fields it does not know. They hold no date, no host and no tool
version, so that equal images have equal bytes and a verifier can derive the image's SBOM again
from the lock. Packages are located relative to wherever packages come from: a Debian pool path as
a property, a wheel's file name in its package URL. External references are avoided: they want a
URL, and the library spends tens of milliseconds on the grammar of each.
"""

from __future__ import annotations

import re
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock, LockedCode, LockedDebianPackage, LockedWheel
from capsule.machine.fingerprint import Cpu, Fingerprint
from capsule.machine.gpu import Driver, Gpu

Component = dict[str, Any]

# Bounds on a stranger's document: the schema check compares all entries of a list pairwise.
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
NAMESPACE = uuid.UUID("f3c5cf5a-6b0e-5d0f-8f5c-2c9f6c6b1e57")  # of Capsule's serial numbers
CODE_LICENCE = "Apache-2.0"

# NVIDIA's wheels (without their '-cu12' suffix) to the names people know the libraries by.
CUDA_LIBRARIES = {
    "nvidia-cublas": "cuBLAS",
    "nvidia-cuda-cupti": "CUPTI",
    "nvidia-cuda-nvrtc": "NVRTC",
    "nvidia-cuda-runtime": "CUDA",
    "nvidia-cudnn": "cuDNN",
    "nvidia-cufft": "cuFFT",
    "nvidia-cufile": "cuFile",
    "nvidia-curand": "cuRAND",
    "nvidia-cusolver": "cuSOLVER",
    "nvidia-cusparse": "cuSPARSE",
    "nvidia-cusparselt": "cuSPARSELt",
    "nvidia-nccl": "NCCL",
    "nvidia-nvjitlink": "nvJitLink",
    "nvidia-nvshmem": "NVSHMEM",
    "nvidia-nvtx": "NVTX",
}

# Trove classifiers that name one licence and its version. 'BSD License' and 'Apache Software
# License' do not, so they are not here.
CLASSIFIER_LICENCES = {
    "License :: OSI Approved :: Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "License :: OSI Approved :: GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "License :: OSI Approved :: GNU General Public License v2 or later (GPLv2+)": (
        "GPL-2.0-or-later"
    ),
    "License :: OSI Approved :: GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "License :: OSI Approved :: GNU General Public License v3 or later (GPLv3+)": (
        "GPL-3.0-or-later"
    ),
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: MIT No Attribution License (MIT-0)": "MIT-0",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: The Unlicense (Unlicense)": "Unlicense",
    "License :: OSI Approved :: zlib/libpng License": "Zlib",
}

_IMAGE_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")  # PEP 427
_LICENCE_REFERENCE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")


# --- the image ----------------------------------------------------------------------------------


def image_sbom(
    lock: Lock, image_config_digest: str, licences: Mapping[str, str] | None = None
) -> bytes:
    """Describe an image. Equal images give equal bytes.

    Args:
        lock: The lock that the image was assembled from.
        image_config_digest: The image's identity, ``sha256:`` and 64 hexadecimal digits.
        licences: Package URL to SPDX expression, as :func:`collect_licences` returns it. A
            package that is missing here has no licence in the document.

    Raises:
        CapsuleError: CAP-B060 a licence is not an SPDX expression.
    """
    return canonical_json(_image_document(lock, image_config_digest, licences or {}))


def _image_document(
    lock: Lock, image_config_digest: str, licences: Mapping[str, str]
) -> dict[str, Any]:
    distribution = lock.spec.image.base
    components = [
        _distribution(distribution),
        *(_debian_package(package, distribution) for package in lock.image.debian),
        *(_wheel(wheel) for wheel in lock.image.wheels),
        _code(lock.image.code),
    ]
    for component in components:
        licence = licences.get(component.get("purl", ""))
        if licence is not None:
            component["licenses"] = _licence_choice(licence)
    image = _image(lock, image_config_digest)
    return _document(image, components, {image["bom-ref"]: _references(components)})


def _image(lock: Lock, digest: str) -> Component:
    name = f"capsule-{lock.image.recipe}"
    purl = _purl("oci", name, digest, arch="amd64")
    return {
        **_component("container", purl, name, digest),
        "purl": purl,
        "hashes": _sha256(digest.removeprefix("sha256:")),
        "properties": _properties(
            "capsule:image",
            {
                "assembler": lock.image.assembler,
                "recipe": lock.image.recipe,
                "recipe-sha256": lock.image.recipe_sha256,
            },
        ),
    }


def _distribution(base: str) -> Component:
    name, _, version = base.partition("-")
    return _component("operating-system", f"os:{base}", name, version)


def _debian_package(package: LockedDebianPackage, distribution: str) -> Component:
    purl = _purl(
        "deb/debian", package.name, package.version, arch=package.architecture, distro=distribution
    )
    return {
        **_component("library", purl, package.name, package.version),
        "purl": purl,
        "hashes": _sha256(package.sha256),
        "properties": _properties("capsule:debian", {"pool": package.pool}),
    }


def wheel_purl(wheel: LockedWheel) -> str:
    """Return the package URL of a wheel."""
    return _purl("pypi", wheel.name, wheel.version, file_name=wheel.filename)


def _wheel(wheel: LockedWheel) -> Component:
    purl = wheel_purl(wheel)
    component = {
        **_component("library", purl, wheel.name, wheel.version),
        "purl": purl,
        "hashes": _sha256(wheel.sha256),
    }
    library = CUDA_LIBRARIES.get(re.sub(r"-cu\d+$", "", wheel.name))
    if library is not None:
        component["type"] = "platform" if library == "CUDA" else "library"
        component["group"] = "NVIDIA"
        component["properties"] = _properties("capsule:cuda", {"library": library})
    return component


def _code(code: LockedCode) -> Component:
    # The digest covers a listing of files, not one file, so that it is no 'hash' of CycloneDX.
    return {
        **_component("application", "capsule-code", "capsule-rl", code.version),
        "licenses": _licence_choice(CODE_LICENCE),
        "properties": _properties("capsule:code", {"listing-sha256": code.sha256}),
    }


# --- the machine --------------------------------------------------------------------------------


def machine_sbom(fingerprint: Fingerprint) -> bytes:
    """Describe the machine of a run: processor, GPUs with firmware, driver, system, engine."""
    machine = _component("device", "machine", "machine")
    components = [_processor(fingerprint.cpu), *_system(fingerprint)]
    dependencies: dict[str, list[str]] = {}
    if fingerprint.driver.version is not None:
        components.append(_driver(fingerprint.driver))
    for gpu in fingerprint.gpus:
        parts = [_gpu(gpu), *_firmware(gpu)]
        components += parts
        dependencies[parts[0]["bom-ref"]] = [
            *_references(parts[1:]),
            *([] if fingerprint.driver.version is None else ["driver"]),
        ]
    dependencies["machine"] = _references(components)
    return canonical_json(_document(machine, components, dependencies, fingerprint.document()))


def _processor(cpu: Cpu) -> Component:
    facts = {
        "family": cpu.family,
        "model": cpu.model,
        "stepping": cpu.stepping,
        "flags": " ".join(cpu.flags),
        "logical-cores": cpu.logical_cores,
        **{f"cache-{level}-bytes": size for level, size in cpu.caches.items()},
    }
    return {
        **_component("device", "cpu", cpu.name or "unknown"),
        **({"manufacturer": {"name": cpu.vendor}} if cpu.vendor else {}),
        "properties": [
            _property("cdx:device:function", "processor"),
            *_properties("capsule:cpu", facts),
        ],
    }


def _system(fingerprint: Fingerprint) -> Iterator[Component]:
    yield _component("operating-system", "kernel", "linux", fingerprint.kernel)
    if fingerprint.os.id is not None:
        system = fingerprint.os
        yield _component("operating-system", "os", fingerprint.os.id, system.version_id)
    if fingerprint.libc is not None:
        name, _, version = fingerprint.libc.partition(" ")
        yield _component("library", "libc", name, version)
    if fingerprint.engine is not None:
        engine = fingerprint.engine
        more = {fact: engine[fact] for fact in engine.keys() - {"name", "version"}}
        yield {
            **_component(
                "application", "engine", engine.get("name", "unknown"), engine.get("version")
            ),
            "properties": _properties("capsule:engine", more),
        }


def _driver(driver: Driver) -> Component:
    return {
        **_component("device-driver", "driver", "nvidia", driver.version),
        "properties": _properties("capsule:driver", {"cuda": driver.cuda}),
    }


def _gpu(gpu: Gpu) -> Component:
    facts = gpu.model_dump(mode="json", exclude={"name", "vbios", "gsp_firmware", "unavailable"})
    rows = facts.pop("remapped_rows") or {}
    facts |= {f"remapped_rows_{kind}": count for kind, count in rows.items()}
    facts["mig_devices"] = " ".join(gpu.mig_devices or ())
    return {
        **_component("device", f"gpu:{gpu.index}", gpu.name or "unknown"),
        "properties": [
            _property("cdx:device:function", "graphics processor"),
            *_properties("capsule:gpu", facts),
        ],
    }


def _firmware(gpu: Gpu) -> list[Component]:
    versions = {"vbios": gpu.vbios, "gsp-firmware": gpu.gsp_firmware}
    return [
        _component("firmware", f"gpu:{gpu.index}:{name}", name, version)
        for name, version in versions.items()
        if version is not None
    ]


# --- CycloneDX ----------------------------------------------------------------------------------


def _document(
    root: Component,
    components: list[Component],
    dependencies: Mapping[str, list[str]],
    identity: bytes = b"",
) -> dict[str, Any]:
    """Assemble a document.

    Args:
        root: What the document is about.
        components: Its parts.
        dependencies: bom-ref to the bom-refs it depends on. What is missing here has unknown
            dependencies, as CycloneDX defines it.
        identity: What the serial number derives from, if the root's version does not say all.
    """
    seed = sha256_hex(canonical_json([root["bom-ref"], sha256_hex(identity)]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, seed)}",
        "version": 1,
        "metadata": {"component": root},
        "components": sorted(components, key=lambda component: str(component["bom-ref"])),
        "dependencies": [
            {"ref": reference, "dependsOn": sorted(needed)}
            for reference, needed in sorted(dependencies.items())
        ],
    }


def _component(kind: str, reference: str, name: str, version: str | None = None) -> Component:
    component = {"type": kind, "bom-ref": reference, "name": name}
    return component if version is None else {**component, "version": version}


def _sha256(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


def _references(components: Iterable[Component]) -> list[str]:
    return [component["bom-ref"] for component in components]


def _property(name: str, value: Any) -> dict[str, str]:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return {"name": name, "value": text}


def _properties(namespace: str, facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Turn the facts that are known into properties, sorted by name."""
    return [
        _property(f"{namespace}:{name.replace('_', '-')}", value)
        for name, value in sorted(facts.items())
        if value is not None and value != ""
    ]


def _purl(kind: str, name: str, version: str, **qualifiers: str) -> str:
    """Write a package URL (ECMA-427).

    Written here and not by a library, because a verifier compares it years later: the bytes must
    not depend on the library's release.
    """
    coded = "&".join(f"{key}={_coded(value)}" for key, value in sorted(qualifiers.items()))
    return f"pkg:{kind}/{_coded(name)}@{_coded(version)}?{coded}"


def _coded(part: str) -> str:
    return quote(part, safe=":~")


# --- licences -----------------------------------------------------------------------------------


def collect_licences(lock: Lock, wheel_path: Callable[[LockedWheel], Path]) -> dict[str, str]:
    """Read what the locked wheels declare as their licence.

    Args:
        lock: Names the wheels.
        wheel_path: Gives the file of a wheel.

    Returns:
        Package URL to SPDX expression. A wheel that declares none that is certain is left out.

    Raises:
        CapsuleError: CAP-B061 a wheel cannot be read.
    """
    found = {wheel_purl(wheel): _declared(wheel, wheel_path(wheel)) for wheel in lock.image.wheels}
    return {purl: licence for purl, licence in found.items() if licence is not None}


def _declared(wheel: LockedWheel, path: Path) -> str | None:
    """Take License-Expression (PEP 639), else License if it is SPDX, else one sure classifier."""
    from packaging.metadata import parse_email

    metadata, _ = parse_email(_metadata(wheel, path))
    for stated in (metadata.get("license_expression"), metadata.get("license")):
        if stated is not None and is_spdx(stated):
            return stated
    classified = [name for name in metadata.get("classifiers", ()) if name.startswith("License ::")]
    return CLASSIFIER_LICENCES.get(classified[0]) if len(classified) == 1 else None


def _metadata(wheel: LockedWheel, path: Path) -> bytes:
    # Older wheels spell the folder's name another way than their file's; there is only one.
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = filter(_METADATA.fullmatch, archive.namelist())
            return archive.read(member)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CapsuleError(
            "CAP-B061",
            f"the metadata of wheel {wheel.filename} cannot be read: {error}",
            fix="Delete it from the cache and build again.",
            exit_code=ExitCode.BUILD_FAILED,
        ) from error


def is_spdx(expression: str) -> bool:
    """Tell whether ``expression`` is an SPDX licence expression in exact spelling.

    The library's own check takes aliases such as 'GPL' and refuses ``LicenseRef-`` names, which
    SPDX allows.
    """
    from cyclonedx.spdx import is_expression, is_supported_id

    words = set(re.findall(r"[^\s()]+", expression)) - {"AND", "OR", "WITH"}
    named = {word for word in words if not _LICENCE_REFERENCE.fullmatch(word)}
    if not words or not all(map(is_supported_id, named)):
        return False
    return bool(is_expression(_LICENCE_REFERENCE.sub("MIT", expression)))


def _licence_choice(expression: str) -> list[dict[str, Any]]:
    from cyclonedx.spdx import is_supported_id

    if not is_spdx(expression):
        raise CapsuleError(
            "CAP-B060",
            f"licence {expression!r} is not an SPDX expression",
            fix="Leave out the licence, or name it by its SPDX identifier.",
            exit_code=ExitCode.USAGE,
        )
    if is_supported_id(expression):
        return [{"license": {"id": expression, "acknowledgement": "declared"}}]
    return [{"expression": expression, "acknowledgement": "declared"}]


# --- checks -------------------------------------------------------------------------------------


def validate_sbom(data: bytes) -> None:
    """Check a document that a stranger may have written.

    Beyond the strict CycloneDX 1.6 schema, which the library brings along, the document must be
    canonical JSON that keeps to the fields Capsule writes, every ``bom-ref`` must be unique, every
    dependency must refer to one, and every package URL must parse.

    Raises:
        CapsuleError: CAP-B062.
    """
    if len(data) > MAX_BYTES:
        _refuse(f"it is larger than {MAX_BYTES} bytes")
    try:
        document = parse_canonical_json(data)
    except ValueError as error:
        _refuse(str(error))
    objects = list(_objects(document))
    _check_profile(objects)
    _check_schema(data)
    if document["specVersion"] != "1.6":  # the schema takes any
        _refuse(f"specVersion is {document['specVersion']!r}, not '1.6'")
    references = [each["bom-ref"] for each in objects if "bom-ref" in each]
    if repeated := _repeated(references):
        _refuse(f"bom-ref {repeated!r} occurs more than once")
    _check_dependencies(document.get("dependencies", []), set(references))
    for each in objects:
        if "purl" in each:
            _check_purl(each["purl"])


def _check_profile(objects: list[dict[str, Any]]) -> None:
    """Refuse what Capsule never writes, before the schema check spends time on it.

    Some fields of CycloneDX are parsed with grammars whose cost grows steeply with length.
    """
    for each in objects:
        if unknown := sorted(each.keys() - FIELDS):
            _refuse(f"field {unknown[0]!r} is not one that Capsule writes")
        for field, value in each.items():
            if isinstance(value, list) and len(value) > MAX_ENTRIES:
                _refuse(f"{field} has more than {MAX_ENTRIES} entries")


def _check_schema(data: bytes) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode())
    except RecursionError:
        _refuse("it is nested too deeply")
    if error is not None:
        place = "/".join(str(step) for step in error.data.absolute_path)
        _refuse(f"{place or 'the document'}: {error.data.message[:200]}")


def _check_dependencies(dependencies: list[dict[str, Any]], references: set[str]) -> None:
    if repeated := _repeated([dependency["ref"] for dependency in dependencies]):
        _refuse(f"the dependencies of {repeated!r} are given more than once")
    for dependency in dependencies:
        named = [dependency["ref"], *dependency.get("dependsOn", [])]
        for reference in named:
            if reference not in references:
                _refuse(f"dependency {reference!r} refers to nothing")


def _check_purl(purl: str) -> None:
    from packageurl import PackageURL

    try:
        PackageURL.from_string(purl)
    except ValueError as error:
        _refuse(f"package URL {purl!r}: {error}")


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


def _refuse(reason: str) -> NoReturn:
    raise CapsuleError(
        "CAP-B062",
        f"the SBOM is not a sound CycloneDX 1.6 document: {reason}",
        fix="Do not trust this bundle; ask its signer for a sound one.",
        exit_code=ExitCode.TAMPERED,
    )


def sbom_matches_lock(data: bytes, lock: Lock, image_config_digest: str | None = None) -> list[str]:
    """Derive an image's SBOM again from its lock and name every difference.

    Licences are not in a lock: they are taken from the document as its author's statement, for
    packages that the lock knows.

    Args:
        data: The document.
        lock: What the image was assembled from.
        image_config_digest: The identity the document must state; any if None.

    Returns:
        One sentence per difference; empty if there is none.

    Raises:
        CapsuleError: CAP-B062 the document is not sound.
    """
    validate_sbom(data)
    stated = parse_canonical_json(data)
    digest = image_config_digest or str(_root(stated).get("version"))
    if not _IMAGE_DIGEST.fullmatch(digest):
        return [f"{digest[:100]!r} is not the digest of an image"]
    derived = _image_document(lock, digest, _stated_licences(stated))
    found = {each["bom-ref"]: each for each in _parts(stated)}
    expected = {each["bom-ref"]: each for each in _parts(derived)}
    differences = [f"{ref} is missing" for ref in sorted(expected.keys() - found.keys())]
    differences += [f"{ref} is not in the lock" for ref in sorted(found.keys() - expected.keys())]
    for ref in sorted(expected.keys() & found.keys()):
        differences += _fields_that_differ(ref, found[ref], expected[ref])
    rest = {"components", "metadata"}
    differences += [
        f"{field} differs"
        for field in sorted((stated.keys() | derived.keys()) - rest)
        if stated.get(field) != derived.get(field)
    ]
    if not differences and stated != derived:
        differences.append("components or metadata are arranged differently")
    return differences


def _root(document: Mapping[str, Any]) -> Component:
    component: Component = document.get("metadata", {}).get("component", {})
    return component


def _parts(document: Mapping[str, Any]) -> list[Component]:
    parts = [_root(document), *document.get("components", [])]
    return [{"bom-ref": f"(unnamed {number})", **part} for number, part in enumerate(parts)]


def _fields_that_differ(ref: str, found: Component, expected: Component) -> list[str]:
    return [
        f"{ref}: {field} is {str(found.get(field))[:100]}, not {str(expected.get(field))[:100]}"
        for field in sorted(found.keys() | expected.keys())
        if found.get(field) != expected.get(field)
    ]


def _stated_licences(document: Mapping[str, Any]) -> dict[str, str]:
    """Read the licences of a sound document, in the only two forms that Capsule writes."""
    stated = {}
    for component in document.get("components", []):
        for choice in component.get("licenses", []):
            expression = choice.get("expression") or choice.get("license", {}).get("id")
            if "purl" in component and expression is not None and is_spdx(expression):
                stated[component["purl"]] = expression
    return stated
