"""Assembling an image: a pure function of its lock.

Locked Debian packages, locked wheels, Capsule's training code and a program's source tree become
layers, a configuration and a manifest (OCI image specification 1.1), all written here: no engine,
no root, no pip. The digest of the configuration is the identity of the image. Hyper-parameters and
seeds are not in it, so experiments that differ in nothing else share one image; the determinism
variables are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from capsule.experiment.canonical import canonical_json, sha256_file, sha256_hex
from capsule.experiment.lock import Lock, LockedProject, LockedWheel
from capsule.experiment.variables import environment_variables
from capsule.host.outputs import open_file
from capsule.host.reporter import Progress
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import (
    CHUNK,
    TarEntry,
    file_entry,
    padded,
    reject_collisions,
    rejected,
    tar_header,
    write_tar,
)
from capsule.image.archives.wheel import open_wheel, wheel_entries
from capsule.image.assembly.base import check_base, plan_base, supplied_base
from capsule.image.assembly.making import (
    ASSEMBLER_VERSION,
    SUPPLY_FIX,
    Layer,
    Made,
    Plan,
    find_layer,
    layer_key,
    make_layers,
)
from capsule.image.cache import Cache
from capsule.image.code import is_program, training_code, training_code_digest
from capsule.image.distribution import DISTRIBUTIONS, distribution_of
from capsule.image.recipe import Recipe, load_recipe
from capsule.image.releases import recipe_of
from capsule.image.resolution.project import FOLDER, project_archive

# A change of one large wheel leaves the layers of the others as they are, so engines and caches get
# only the new one. The many small wheels share a layer.
OWN_LAYER_BYTES = 32 << 20  # a wheel at least this large is a layer of its own

_MAX_CODE_BYTES = 64 << 20
_CREATED = "2020-01-01T00:00:00Z"  # layers.EPOCH
TASK_USER = 61_183  # uid and gid of tasks: a number that systemd assigns to nothing
_ARCHITECTURE = "amd64"
_MEDIA = "application/vnd.oci.image"
Supplied = Mapping[Literal["base", "code"], Path]


@dataclass(frozen=True)
class Image:
    """An assembled image.

    Attributes:
        config: OCI image configuration, canonical JSON.
        layers: From the bottom up.
        reference: Name that the engine gives the image, spelt the same in Docker and Podman; None
            leaves it without one.
    """

    config: bytes
    layers: tuple[Layer, ...]
    reference: str | None

    @property
    def config_digest(self) -> str:
        """``sha256:…`` of the configuration: the identity of the image."""
        return f"sha256:{sha256_hex(self.config)}"

    @property
    def manifest(self) -> bytes:
        """OCI image manifest over uncompressed layers, canonical JSON."""
        return image_manifest(self.config, [(each.diff_id, each.size) for each in self.layers])

    @property
    def manifest_digest(self) -> str:
        """``sha256:…`` of the manifest; engines with a containerd store use it as id."""
        return f"sha256:{sha256_hex(self.manifest)}"


def assemble(
    lock: Lock,
    cache: Cache,
    *,
    supplied: Supplied = MappingProxyType({}),
    progress: Progress,
) -> Image:
    """Assemble the image of ``lock``.

    Args:
        lock: The lock. Its packages must be in the cache already.
        cache: Holds the packages, and keeps the layers for the next time.
        supplied: Layer archives to use instead of making them. A code layer must hold exactly the
            locked code, a base layer must be in canonical form and have the locked digest.
        progress: Told about each layer that has to be made.

    Raises:
        CapsuleError: CAP-I102 the lock needs another Capsule, CAP-I103 a package is missing or
            damaged, CAP-I104 to CAP-I109 a package is rejected (:mod:`capsule.image.archives`),
            CAP-I110 a supplied layer is rejected, CAP-I111 a layer cannot be written, CAP-I112 the
            source tree is missing, CAP-I113 the base layer is not the locked one.
    """
    recipe = _matching_recipe(lock)
    code = _supplied_code(supplied["code"], lock) if "code" in supplied else None
    base, plans = plan_layers(lock, cache, code)
    top = [_project_layer(lock.project, cache)] if lock.project else []
    if "base" in supplied:
        bottom = [supplied_base(supplied["base"], lock.image)]
    else:
        bottom = []
        plans.insert(0, base)
    made = bottom + make_layers(plans, cache, progress) + top
    # A lock states its base layer by digest, beside the packages. No image is made of a lock in
    # which the two contradict each other.
    check_base(lock.image, made[0][0].diff_id.removeprefix("sha256:"))
    reject_collisions((layer.name, facts) for layer, facts in made)
    return _image(lock, recipe, tuple(layer for layer, _ in made))


def plan_layers(
    lock: Lock, cache: Cache, code: Mapping[str, bytes] | None = None
) -> tuple[Plan, list[Plan]]:
    """Return how the base layer and those on it are made, without that of a source tree.

    Args:
        lock: The lock. Its wheels must be in the cache already.
        cache: Holds the packages.
        code: The files of the training code; this Capsule's by default.

    Raises:
        CapsuleError: CAP-I102 the lock needs another Capsule, CAP-I103 a wheel is not in the cache.
    """
    recipe = _matching_recipe(lock)
    entries = _code_entries(lock, _own_code(lock) if code is None else code)
    inputs = {"code": lock.image.code.sha256, "python": lock.spec.image.python}
    top = Plan("code", layer_key("code", inputs), lambda _: entries)
    base = plan_base(lock.image.debian, recipe, cache)
    # Engines find a layer by the chain of those below it. The training code is above the wheels, so
    # a change of it does not make an engine load them again.
    return base, [*_plan_wheels(lock, recipe, cache), top]


def known_identity(lock: Lock, cache: Cache) -> str | None:
    """Return the identity of a lock's image if every layer of wheels was made before.

    Nothing is written. The identity needs no other layer: the lock has the digest of the base and
    of a source tree, and that of the training code is computed.

    Raises:
        CapsuleError: CAP-I102, the lock needs another Capsule.
    """
    # Whether the lock needs another Capsule must not depend on what is in the cache.
    recipe, own = _matching_recipe(lock), _own_code(lock)
    if not all(cache.has(wheel.sha256) for wheel in lock.image.wheels):
        return None
    _, (*wheels, _) = plan_layers(lock, cache, own)
    made = [layer for plan in wheels if (layer := find_layer(plan, cache)) is not None]
    if len(made) < len(wheels):
        return None
    code = hashlib.sha256()
    write_tar(_code_entries(lock, own), code.update)
    layers = [("base", f"sha256:{lock.image.base}")]
    layers += [(layer.name, layer.diff_id) for layer in made]
    layers.append(("code", f"sha256:{code.hexdigest()}"))
    if lock.project is not None:
        layers.append(("project", f"sha256:{lock.project.sha256}"))
    return f"sha256:{sha256_hex(image_config(lock, recipe, layers))}"


def image_of(lock: Lock, layers: tuple[Layer, ...]) -> Image:
    """Return the image that :func:`assemble` makes of ``lock`` if these are its layers.

    Raises:
        CapsuleError: CAP-I102, the lock needs another Capsule.
    """
    return _image(lock, _matching_recipe(lock), layers)


def check_code_layer(path: Path, lock: Lock) -> None:
    """Check that a layer archive is the one of the locked training code, and nothing else.

    Raises:
        CapsuleError: CAP-I110, it is not.
    """
    digest = hashlib.sha256()
    write_tar(_code_entries(lock, _supplied_code(path, lock)), digest.update)
    # Written again from the accepted files alone, so a link or a folder beside them shows here.
    if digest.hexdigest() != sha256_file(path):
        raise rejected(
            "CAP-I110", "the supplied code layer contains files other than code", SUPPLY_FIX
        )


def write_archive(image: Image, stream: BinaryIO) -> None:
    """Write the image as one archive. See :func:`archive_chunks`."""
    for chunk in archive_chunks(image):  # noqa: FURB122 - zstd has no writelines
        stream.write(chunk)


def save_archive(image: Image, path: Path) -> None:
    """Write the image's archive to a file, which is complete or absent.

    Unlike the archive in a bundle, it has entries for its folders, which Apptainer needs.

    Raises:
        CapsuleError: CAP-X003 or CAP-X004, the file cannot be written.
    """
    with open_file(path) as stream:
        for folder in ("blobs", "blobs/sha256"):
            stream.write(tar_header(TarEntry(folder, "capsule", "directory")))
        write_archive(image, stream)


def archive_chunks(image: Image, *, skip: Collection[str] = ()) -> Iterator[bytes]:
    """Yield the image as one archive: an OCI layout and a docker-archive in the same tar.

    Docker, Podman, skopeo and containerd read it. Layers stay uncompressed, because compressed
    bytes depend on the library that wrote them.

    Args:
        image: The image.
        skip: ``diff_id``s of layers that the engine already has. Engines find layers by chain, so
            only the unbroken run of these from the bottom is left out.
    """
    yield archive_head(image)
    missing = list(image.layers)
    while missing and missing[0].diff_id in skip:
        del missing[0]
    # Equal layers are one blob, and a name must not be in an archive twice.
    for layer in {layer.diff_id: layer for layer in missing}.values():
        yield layer_header(layer)
        with layer.path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
        yield bytes(-layer.size % 512)
    yield bytes(1024)


def archive_head(image: Image) -> bytes:
    """Return what an image's archive begins with: every document of it."""
    blobs = [(image.config_digest, image.config), (image.manifest_digest, image.manifest)]
    documents = {
        "oci-layout": canonical_json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _index(image),
        "manifest.json": _docker_manifest(image),
        **{_blob_path(digest): data for digest, data in blobs},
    }
    return b"".join(
        tar_header(file_entry(name, "capsule", data)) + padded(data)
        for name, data in documents.items()
    )


def layer_header(layer: Layer) -> bytes:
    """Return what stands before a layer in an image's archive."""
    return tar_header(TarEntry(_blob_path(layer.diff_id), "capsule", "file", 0o644, layer.size))


def _matching_recipe(lock: Lock) -> Recipe:
    """Return the lock's recipe, if this Capsule has it and assembles as the one that locked it."""
    image, recipe = lock.image, recipe_of(lock)
    if image.assembler == ASSEMBLER_VERSION and recipe is not None:
        return recipe
    own = load_recipe(image.recipe, lock.spec.image.base)
    differing = [
        f"{what} {locked}, this Capsule has {here}"
        for what, locked, here in (
            ("assembler version", image.assembler, ASSEMBLER_VERSION),
            (f"recipe {own.name}", image.recipe_sha256, own.digest()),
        )
        if locked != here
    ]
    raise rejected(
        "CAP-I102",
        f"the lock needs {differing[0]}",
        f"Use Capsule {image.code.version}, or lock the spec again.",
    )


def _plan_wheels(lock: Lock, recipe: Recipe, cache: Cache) -> Iterator[Plan]:
    """Yield a plan per large wheel, by name, and one for all others."""
    wheels = sorted(lock.image.wheels, key=lambda wheel: wheel.name)
    large = [w for w in wheels if cache.size(w) >= OWN_LAYER_BYTES]
    for wheel in large:
        yield _plan_wheel_layer(wheel.name, [wheel], recipe, cache)
    if small := [wheel for wheel in wheels if wheel not in large]:
        yield _plan_wheel_layer("wheels", small, recipe, cache)


def _plan_wheel_layer(name: str, wheels: list[LockedWheel], recipe: Recipe, cache: Cache) -> Plan:
    distribution = DISTRIBUTIONS[recipe.base]

    def entries(stack: ExitStack) -> Iterator[TarEntry]:
        for wheel in wheels:
            archive = stack.enter_context(open_wheel(cache.package(wheel), wheel))
            patterns = recipe.prune_patterns(wheel.name)
            yield from wheel_entries(archive, wheel, distribution, patterns)

    files = [
        (w.name, w.version, w.filename, w.sha256, recipe.prune_patterns(w.name)) for w in wheels
    ]
    # Of the distribution, only the version of Python affects the paths and the scripts of wheels.
    inputs = {"files": files, "python": distribution.python}
    return Plan(name, layer_key("wheels", inputs), entries)


def _code_entries(lock: Lock, code: Mapping[str, bytes]) -> list[TarEntry]:
    site = distribution_of(lock.spec.image).site
    return [
        file_entry(f"{site}/{name}", "capsule", data, 0o755 if is_program(name) else 0o644)
        for name, data in code.items()
    ]


def _own_code(lock: Lock) -> dict[str, bytes]:
    code, locked = training_code(), lock.image.code
    if (digest := training_code_digest(code)) != locked.sha256:
        raise rejected(
            "CAP-I102",
            f"the training code here has digest {digest}, the lock needs {locked.sha256}",
            f"Use Capsule {locked.version} unchanged, or lock the spec again.",
        )
    return code


def _project_layer(project: LockedProject, cache: Cache) -> Made:
    """Return the source tree's layer, which was made when the spec was locked."""
    path = project_archive(project, cache)
    facts = {f"{FOLDER}/{name}": fact for name, fact in project.files.items()}
    return Layer("project", f"sha256:{project.sha256}", path, project.size), facts


def _supplied_code(path: Path, lock: Lock) -> dict[str, bytes]:
    """Return the files of a code layer, if they are the locked code; the rest is not taken."""
    # The content of every file is held in memory below.
    if path.stat().st_size > _MAX_CODE_BYTES:
        raise rejected("CAP-I110", "the supplied code layer is larger than 64 MiB", SUPPLY_FIX)
    site = distribution_of(lock.spec.image).site
    with path.open("rb") as stream:
        files = {
            entry.path.removeprefix(f"{site}/"): b"".join(entry.content())
            for entry in read_layer(stream, "the supplied code layer")
            if entry.kind == "file"
        }
    code = dict(sorted(files.items()))
    if (digest := training_code_digest(code)) != lock.image.code.sha256:
        raise rejected(
            "CAP-I110",
            f"the supplied code has digest {digest}, the lock needs {lock.image.code.sha256}",
            SUPPLY_FIX,
        )
    return code


def _image(lock: Lock, recipe: Recipe, layers: tuple[Layer, ...]) -> Image:
    config = image_config(lock, recipe, [(layer.name, layer.diff_id) for layer in layers])
    return Image(config, layers, reference_of(recipe.name, f"sha256:{sha256_hex(config)}"))


def reference_of(recipe: str, config_digest: str) -> str:
    """Return the name that engines give an image."""
    # Docker and Podman each complete a name without a registry in their own way.
    return f"localhost/capsule/{recipe}:{config_digest[7:19]}"


def image_manifest(config: bytes, layers: Iterable[tuple[str, int]]) -> bytes:
    """Return the OCI image manifest over a configuration and layers, each a diff id and a size."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor("config.v1+json", f"sha256:{sha256_hex(config)}", len(config)),
            "layers": [_descriptor("layer.v1.tar", diff_id, size) for diff_id, size in layers],
        }
    )


def image_config(lock: Lock, recipe: Recipe, layers: Iterable[tuple[str, str]]) -> bytes:
    """Return the OCI image configuration over layers, each a name and a diff id.

    Nothing in it names the experiment.
    """
    environment = {**recipe.environment, **environment_variables(lock.spec)}
    interpreter = distribution_of(lock.spec.image).interpreter
    names, diff_ids = zip(*layers, strict=True)
    return canonical_json(
        {
            "architecture": _ARCHITECTURE,
            "os": "linux",
            "created": _CREATED,
            "config": {
                "User": f"{TASK_USER}:{TASK_USER}",
                "WorkingDir": "/tmp",  # noqa: S108 -- a path in the image, always a private tmpfs
                # Canonical JSON sorts the keys of objects, but keeps the order of lists.
                "Env": [f"{name}={value}" for name, value in sorted(environment.items())],
                # With -m alone, the interpreter would look for modules in the working folder first,
                # which the task can write to. -P prevents that.
                "Entrypoint": [interpreter, "-P", "-m", "capsule.training"],
                "Cmd": ["/out"],
                "Labels": {
                    "capsule.assembler": str(lock.image.assembler),
                    "capsule.recipe": recipe.name,
                    "capsule.version": lock.image.code.version,
                },
            },
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
            "history": [{"created": _CREATED, "created_by": f"capsule {name}"} for name in names],
        }
    )


def _index(image: Image) -> bytes:
    descriptor = _descriptor("manifest.v1+json", image.manifest_digest, len(image.manifest))
    if image.reference is not None:
        # containerd takes the full name from an annotation of its own; OCI's has the tag only.
        descriptor["annotations"] = {
            "io.containerd.image.name": image.reference,
            "org.opencontainers.image.ref.name": image.reference.rpartition(":")[2],
        }
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.index.v1+json",
            "manifests": [descriptor],
        }
    )


def _docker_manifest(image: Image) -> bytes:
    """Return the ``manifest.json`` of a docker-archive, over the same blobs."""
    return canonical_json(
        [
            {
                "Config": _blob_path(image.config_digest),
                "RepoTags": [] if image.reference is None else [image.reference],
                "Layers": [_blob_path(layer.diff_id) for layer in image.layers],
            }
        ]
    )


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": digest, "size": size}


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
