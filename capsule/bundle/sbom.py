"""Bills of materials in CycloneDX 1.6 (ECMA-424): what the image holds, and what the machine is.

The documents are written directly, as canonical JSON, and the CycloneDX library only validates
them: its object model drops fields it does not know. They contain no date, no host and no tool
version, so that equal images have equal bytes and a verifier can derive the image's SBOM again
from the lock. Packages are located relative to wherever packages come from: a Debian pool path as
a property, a wheel's file name in its package URL. External references are avoided: they want a
URL, and the library spends tens of milliseconds on the grammar of each.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from capsule.bundle.licences import Choice, expression_choice
from capsule.bundle.package_urls import debian_purl, package_url, wheel_purl
from capsule.experiment.canonical import canonical_json, sha256_hex
from capsule.experiment.lock import (
    Lock,
    LockedCode,
    LockedDebianPackage,
    LockedProject,
    LockedWheel,
)
from capsule.machine.fingerprint import Cpu, Fingerprint
from capsule.machine.gpu import Driver, Gpu

Component = dict[str, Any]

# This value never changes, because verifiers derive the serial numbers of older documents again.
NAMESPACE = uuid.UUID("f3c5cf5a-6b0e-5d0f-8f5c-2c9f6c6b1e57")  # of Capsule's serial numbers
CODE_LICENCE = "Apache-2.0"
_NO_LICENCE = {"name": "capsule:licence", "value": "no assertion"}

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


# --- the image ----------------------------------------------------------------------------------


def image_sbom(
    lock: Lock, image_config_digest: str, licences: Mapping[str, Choice] | None = None
) -> bytes:
    """Describe an image. Equal images give equal bytes.

    Args:
        lock: The lock that the image was assembled from.
        image_config_digest: The image's identity, ``sha256:`` and 64 hexadecimal digits.
        licences: Package URL to choice, as :func:`capsule.bundle.licences.collect_licences`
            returns it. For a package that is missing here, the document asserts no licence.
    """
    return canonical_json(image_document(lock, image_config_digest, licences or {}))


def image_document(
    lock: Lock, image_config_digest: str, licences: Mapping[str, Choice]
) -> dict[str, Any]:
    """Return what :func:`image_sbom` writes."""
    distribution = lock.spec.image.base
    packages = [
        *(_debian_package(package, distribution) for package in lock.image.debian),
        *(_wheel(wheel) for wheel in lock.image.wheels),
    ]
    components = [
        _distribution(distribution),
        *(_licensed(package, licences.get(package["purl"])) for package in packages),
        _code(lock.image.code),
        *([] if lock.project is None else [_source_tree(lock.project)]),
    ]
    image = _image(lock, image_config_digest)
    return _document(image, components, {image["bom-ref"]: _references(components)})


def _licensed(component: Component, choice: Choice | None) -> Component:
    """Add a component's licence, or state that none is known."""
    if choice is not None:
        return {**component, "licenses": choice}
    return {**component, "properties": [*component.get("properties", []), _NO_LICENCE]}


def _image(lock: Lock, digest: str) -> Component:
    name = f"capsule-{lock.image.recipe}"
    purl = package_url("oci", name, digest, arch="amd64")
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
    purl = debian_purl(package, distribution)
    return {
        **_component("library", purl, package.name, package.version),
        "purl": purl,
        "hashes": _sha256(package.sha256),
        "properties": _properties("capsule:debian", {"pool": package.pool}),
    }


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
    # The digest covers a listing of files, not one file, so it is not a 'hash' of CycloneDX.
    return {
        **_component("application", "capsule-code", "capsule-rl", code.version),
        "licenses": expression_choice(CODE_LICENCE),
        "properties": _properties("capsule:code", {"listing-sha256": code.sha256}),
    }


def _source_tree(project: LockedProject) -> Component:
    """Describe a user program. Its digest is that of its layer; its place is not stated."""
    component = _component("application", "source-tree", "source-tree")
    facts = {"bytes": project.size, "files": len(project.files)}
    return _licensed(
        {
            **component,
            "hashes": _sha256(project.sha256),
            "properties": _properties("capsule:source-tree", facts),
        },
        None,
    )


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


def _gpu_reference(gpu: Gpu) -> str:
    return f"gpu:{gpu.index}" + ("" if gpu.part is None else f":{gpu.part.slot}")


def _gpu(gpu: Gpu) -> Component:
    facts = gpu.model_dump(mode="json", exclude={"name", "vbios", "gsp_firmware", "unavailable"})
    rows = facts.pop("remapped_rows") or {}
    facts |= {f"remapped_rows_{kind}": count for kind, count in rows.items()}
    facts["mig_devices"] = " ".join(gpu.mig_devices or ())
    facts |= {f"part_{fact}": value for fact, value in (facts.pop("part", None) or {}).items()}
    return {
        **_component("device", _gpu_reference(gpu), gpu.name or "unknown"),
        "properties": [
            _property("cdx:device:function", "graphics processor"),
            *_properties("capsule:gpu", facts),
        ],
    }


def _firmware(gpu: Gpu) -> list[Component]:
    versions = {"vbios": gpu.vbios, "gsp-firmware": gpu.gsp_firmware}
    return [
        _component("firmware", f"{_gpu_reference(gpu)}:{name}", name, version)
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
        # By their references, so that the bytes do not depend on the order in which parts are
        # listed.
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
