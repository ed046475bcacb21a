"""``ro-crate-metadata.json``: what an unpacked bundle is, for catalogues and archives.

An RO-Crate 1.1 of the profile Process Run Crate 0.5: one ``CreateAction`` with the software that
ran, what it took and what it made. It says nothing that the signed documents do not say. The
digests of files are in ``manifest.json``. Who started the run, and under which licence it is
published, is left out, because a run does not know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from capsule.bundle.claims import Claims, Observations
from capsule.bundle.manifest import CHECKSUMS, ENVELOPE, MANIFEST, MediaType, Role
from capsule.bundle.package_urls import wheel_purl
from capsule.bundle.reproducing import what_ran
from capsule.experiment.canonical import canonical_json
from capsule.experiment.lock import Lock
from capsule.experiment.trainers import CommandTrainer
from capsule.machine.fingerprint import Fingerprint

CRATE = "ro-crate-metadata.json"
CONTEXT = [
    "https://w3id.org/ro/crate/1.1/context",
    "https://w3id.org/ro/terms/workflow-run/context",
]
SPECIFICATION = "https://w3id.org/ro/crate/1.1"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
DOCKER_IMAGE = "https://w3id.org/ro/terms/workflow-run#DockerImage"
COMPLETED = "http://schema.org/CompletedActionStatus"

ROOT, RUN, SOFTWARE, IMAGE, LICENCE = "./", "#run", "#software", "#image", "#licence"

Entity = dict[str, Any]
Files = Mapping[str, tuple[Role, MediaType]]

_MEANING: dict[Role, str] = {
    "claims": "Facts that a re-execution must obtain again",
    "observations": "Facts about this execution, which may differ in another one",
    "guide": "For readers",
    "lock": "The resolved pins of the experiment",
    "job": "What the training process was asked to do",
    "image": "The container image",
    "data": "Data set that the run read, or its listing",
    "sbom": "Bill of materials (CycloneDX 1.6)",
    "profile": "Randomness that the run used",
    "run": "Record of the run",
    "checkpoint": "Learned parameters",
    "state": "State from which training resumes at a checkpoint",
    "output": "What the program wrote",
    "log": "What the process printed",
}
_TAKEN: frozenset[Role] = frozenset({"lock", "job", "data"})
_MADE: frozenset[Role] = frozenset(
    {"claims", "profile", "run", "checkpoint", "state", "output", "log"}
)
_SIGNED = {  # the members in front of those of the manifest: meaning and media type
    MANIFEST: ("Every file of this bundle with its size, SHA-256 and role", "application/json"),
    CHECKSUMS: ("The same digests in the format of sha256sum", "text/plain"),
    ENVELOPE: (
        "Signature over the manifest (DSSE)",
        "application/vnd.dev.sigstore.bundle.v0.3+json",
    ),
}


def run_crate(lock: Lock, claims: Claims, observations: Observations, files: Files) -> bytes:
    """Describe a bundle as RFC 8785 JSON; equal input gives equal bytes.

    Args:
        lock: What was run.
        claims: What it claims.
        observations: When and where it was run.
        files: Role and media type of every file of the manifest but this one, by path.
    """
    graph = [
        _descriptor(),
        _root(lock, claims, observations, files),
        {"@id": PROFILE, "@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"},
        {
            "@id": LICENCE,
            "@type": "CreativeWork",
            "name": "Not stated",
            "description": "The licence of this run is not stated. The licences of its software "
            "are in image/sbom.cdx.json.",
        },
        _run(lock, claims, observations, files),
        *_software(lock, claims),
        *_machine(observations.fingerprint),
        *_image(lock, claims),
        *(
            _file(path, _MEANING[role], media_type)
            for path, (role, media_type) in sorted(files.items())
        ),
        *(_file(path, *facts) for path, facts in _SIGNED.items()),
    ]
    return canonical_json({"@context": CONTEXT, "@graph": graph})


def parts_of(paths: Iterable[str]) -> list[str]:
    """Return what a crate lists in a bundle whose manifest has these paths."""
    return sorted({*paths, *_SIGNED} - {CRATE})


def _descriptor() -> Entity:
    return {
        "@id": CRATE,
        "@type": "CreativeWork",
        "about": _ref(ROOT),
        "conformsTo": _ref(SPECIFICATION),
    }


def _root(lock: Lock, claims: Claims, observations: Observations, files: Files) -> Entity:
    return {
        "@id": ROOT,
        "@type": "Dataset",
        "conformsTo": _ref(PROFILE),
        "datePublished": observations.finished,
        "description": f"One run: {what_ran(lock.spec)}, locked, executed and signed by Capsule.",
        "hasPart": [_ref(path) for path in parts_of(files)],
        "identifier": claims.claim_id(),
        "license": _ref(LICENCE),
        "mentions": _ref(RUN),
        "name": lock.spec.name,
    }


def _run(lock: Lock, claims: Claims, observations: Observations, files: Files) -> Entity:
    taken = [path for path in sorted(files) if files[path][0] in _TAKEN]
    facts = [entity["@id"] for entity in _machine(observations.fingerprint)]
    action = {
        "@id": RUN,
        "@type": "CreateAction",
        "actionStatus": COMPLETED,
        "description": f"Claim id {claims.claim_id()}. Settings are in spec/lock.json.",
        "endTime": observations.finished,
        "instrument": _ref(SOFTWARE),
        "name": what_ran(lock.spec),
        "object": [_ref(each) for each in (*taken, *facts)],
        "result": [_ref(path) for path in sorted(files) if files[path][0] in _MADE],
        "startTime": observations.started,
    }
    return action if claims.image is None else {**action, "containerImage": _ref(IMAGE)}


def _software(lock: Lock, claims: Claims) -> list[Entity]:
    """Describe what ran, Capsule's trainer or the program of its user, and what it loaded."""
    trainer = lock.spec.trainer
    libraries = _libraries(lock, claims)
    if isinstance(trainer, CommandTrainer):
        name = lock.spec.name
        version = None if lock.project is None else f"sha256:{lock.project.sha256}"
    else:
        name, version = f"Capsule's {trainer.algorithm.upper()}", lock.image.code.version
    program = {
        "@id": SOFTWARE,
        "@type": "SoftwareApplication",
        "name": name,
        **({} if version is None else {"softwareVersion": version}),
        "softwareRequirements": [_ref(each["@id"]) for each in libraries],
    }
    return [program, *libraries]


def _libraries(lock: Lock, claims: Claims) -> list[Entity]:
    """Describe the libraries that the run loaded, by package URL where the lock has a wheel."""
    wheels = {wheel.name: wheel_purl(wheel) for wheel in lock.image.wheels}
    return [
        {
            "@id": wheels.get(name, f"#library-{quote(name, safe='')}"),
            "@type": "SoftwareApplication",
            "name": name,
            "softwareVersion": version,
        }
        for name, version in sorted(claims.libraries.items())
    ]


def _machine(machine: Fingerprint) -> list[Entity]:
    """Describe the machine; RO-Crate has no term for a processor or a GPU."""
    facts = [("processor", machine.cpu.name or "unknown"), ("kernel", machine.kernel)]
    facts += [(f"GPU {gpu.index}", gpu.name or "unknown") for gpu in machine.gpus]
    if machine.driver.version is not None:
        facts.append(("NVIDIA driver", machine.driver.version))
    return [
        {
            "@id": f"#machine-{number}",
            "@type": "PropertyValue",
            "name": name,
            "subjectOf": _ref("machine/sbom.cdx.json"),
            "value": value,
        }
        for number, (name, value) in enumerate(facts)
    ]


def _image(lock: Lock, claims: Claims) -> list[Entity]:
    """Describe the image, which comes from no registry: the digest is its whole identity."""
    if claims.image is None:
        return []
    return [
        {
            "@id": IMAGE,
            "@type": "ContainerImage",
            "additionalType": _ref(DOCKER_IMAGE),
            "name": f"capsule-{lock.image.recipe}",
            "sha256": claims.image.config.removeprefix("sha256:"),
        }
    ]


def _file(path: str, meaning: str, media_type: str) -> Entity:
    return {
        "@id": path,
        "@type": "File",
        "description": meaning,
        "encodingFormat": media_type,
        "name": path,
    }


def _ref(identity: str) -> Entity:
    return {"@id": identity}
