"""Resolving Python packages: the requirements of a spec to the wheels of a lock."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from capsule.experiment.lock import LockedWheel
from capsule.experiment.spec import CpuAccelerator, CudaAccelerator, Spec
from capsule.experiment.versions import satisfies
from capsule.host.cuda import cuda_versions
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.distribution import distribution_of
from capsule.image.requirements import read_requirement
from capsule.image.resolution.sources import MachineSources, machine_sources, require_folders
from capsule.image.resolution.wheels import (
    ResolvedWheel,
    WheelSearch,
    compile_wheels,
    newest_versions,
)


def resolve_wheels(
    spec: Spec, own: Iterable[str], cache: Cache, progress: Callable[[str], None]
) -> tuple[LockedWheel, ...]:
    """Resolve the Python packages of a spec, and Capsule's ``own``, to one wheel each.

    The machine's own sources are asked first, if it has any, then the index that PyTorch keeps for
    the accelerator; the first answer that fits the accelerator is taken.

    Returns:
        Wheels sorted by name.
    """
    requested = parse_requirements(spec.image.packages)
    requirements = [*requested.values(), *own]
    require_folders(spec.image.sources)
    sources = machine_sources(spec.image.sources)
    search = WheelSearch(distribution_of(spec.image), sources, cache, progress)
    failures: list[CapsuleError] = []
    for backend in torch_backends(spec.accelerator, sources):
        progress("resolving Python packages" + (f" with PyTorch's {backend} index" * bool(backend)))
        try:
            found = _compile_for(spec, requirements, backend, search)
            check_accelerator(spec.accelerator, found)
        except CapsuleError as error:
            failures.append(error)
        else:
            _name_older(requested, backend, found, search)
            return tuple(
                LockedWheel(
                    name=wheel.name,
                    version=wheel.version,
                    filename=wheel.filename,
                    sha256=wheel.sha256,
                    requested=requested.get(wheel.name),
                )
                for wheel in sorted(found, key=lambda wheel: wheel.name)
            )
    raise _joined(failures)


def parse_requirements(packages: Sequence[str]) -> dict[str, str]:
    """Check the requirements of a spec: normalised name (PEP 503) to the requirement as written.

    Raises:
        CapsuleError: CAP-L102 not PEP 508, a direct reference, or a package named twice.
    """
    from packaging.utils import canonicalize_name

    requested: dict[str, str] = {}
    for position, text in enumerate(packages):
        try:
            requirement = read_requirement(text)
        except ValueError as error:
            raise _requirement_error(position, text, f"is not a requirement: {error}") from error
        name = canonicalize_name(requirement.name)
        if requirement.url:
            raise _requirement_error(
                position, text, "names a location, which a lock must not contain"
            )
        if name in requested:
            raise _requirement_error(position, text, f"names {name!r} a second time")
        requested[name] = text
    return requested


def torch_backends(
    accelerator: CpuAccelerator | CudaAccelerator, sources: MachineSources
) -> tuple[str | None, ...]:
    """Return what to ask in turn: None for the machine's own sources, else uv's torch backend.

    The main index carries PyTorch's default CUDA build, so CUDA asks it before a special index; a
    CPU build is only expected of a machine that names its own sources.
    """
    if isinstance(accelerator, CpuAccelerator) and accelerator.cuda_build:
        return (None,)
    if isinstance(accelerator, CpuAccelerator):
        return (None, "cpu") if sources.configured else ("cpu",)
    release = re.match(r"(?:==|~=)?([0-9]+)\.([0-9]+)", accelerator.cuda)
    return (None, f"cu{release[1]}{release[2]}") if release else (None,)


def check_accelerator(
    accelerator: CpuAccelerator | CudaAccelerator, wheels: Sequence[ResolvedWheel]
) -> None:
    """Check that the resolved wheels are built for the accelerator.

    Raises:
        CapsuleError: CAP-L107 a CUDA build for a CPU spec, CAP-L108 CUDA or cuDNN is missing or of
            another version than the spec asks for.
    """
    found = cuda_versions((wheel.name, wheel.version) for wheel in wheels)
    local = _torch_local(wheels)
    if isinstance(accelerator, CpuAccelerator):
        if not accelerator.cuda_build and (found or local.startswith("cu")):
            raise CapsuleError(
                "CAP-L107",
                "image.packages: torch resolves to a CUDA build, but accelerator.kind is 'cpu'",
                fix="Make PyTorch's CPU index reachable, or put a CPU wheel of torch into a folder "
                "named by image.sources.find_links. Or set accelerator.cuda_build: true, which "
                "accepts the build for CUDA.",
            )
        return
    for field, library in (("cuda", "CUDA"), ("cudnn", "cuDNN")):
        wanted = getattr(accelerator, field)
        version = found.get(library)
        if version is None or not satisfies(version, wanted):
            raise CapsuleError(
                "CAP-L108",
                f"accelerator.{field} requires {library} {wanted}, but the wheels contain "
                f"{version or 'none'}",
                fix=f"Set accelerator.{field} to that version, or pin a torch in "
                f"image.packages that is built for {library} {wanted}.",
            )


def _compile_for(
    spec: Spec, requirements: Sequence[str], backend: str | None, search: WheelSearch
) -> list[ResolvedWheel]:
    options = _backend_options(backend)
    found = compile_wheels(search, requirements, options)
    if isinstance(spec.accelerator, CudaAccelerator) and _torch_local(found) == "cpu":
        # A CPU build '2.13.0+cpu' in the machine's own sources ranks above the plain '2.13.0'.
        version = next(wheel.version for wheel in found if wheel.name == "torch")
        with search.cache.scratch() as folder:
            constraints = folder / "constraints.txt"
            # A version with a local part is compared exactly (PEP 440), so this excludes no other
            # build.
            constraints.write_text(f"torch!={version}\n")
            options += ["--constraints", str(constraints)]
            found = compile_wheels(search, requirements, options)
    return found


def _name_older(
    requested: Mapping[str, str],
    backend: str | None,
    found: Iterable[ResolvedWheel],
    search: WheelSearch,
) -> None:
    """Say which requested packages are older than the newest version that was asked for.

    Args:
        requested: Normalised name to requirement.
        backend: uv's torch backend of the resolution.
        found: Its result.
        search: Where versions are found.
    """
    from packaging.version import Version

    unpinned = [text for text in requested.values() if not _is_pinned(text)]
    if not unpinned:
        return
    newest = newest_versions(search, unpinned, _backend_options(backend))
    for wheel in found:
        version = newest.get(wheel.name)
        if version is not None and Version(version).release > Version(wheel.version).release:
            search.progress(
                f"image.packages: {requested[wheel.name]} is locked at version {wheel.version}, "
                f"because version {version} or a package that it requires has no wheel, or "
                "because they do not fit the other packages"
            )


def _is_pinned(requirement: str) -> bool:
    """Tell whether a requirement allows one version only."""
    return any(
        each.operator in ("==", "===") and not each.version.endswith(".*")
        for each in read_requirement(requirement).specifier
    )


def _backend_options(backend: str | None) -> list[str]:
    return ["--torch-backend", backend] if backend else []


def _torch_local(wheels: Iterable[ResolvedWheel]) -> str:
    """Return the local part of torch's version (``cpu`` of ``2.13.0+cpu``), or ''."""
    return next((w.version.partition("+")[2] for w in wheels if w.name == "torch"), "")


def _joined(failures: Sequence[CapsuleError]) -> CapsuleError:
    """Join what went wrong with each source: the first one's code and fix, every message."""
    first = failures[0]
    message = "; then: ".join(dict.fromkeys(failure.message for failure in failures))
    return CapsuleError(first.code, message, fix=first.fix)


def _requirement_error(position: int, text: str, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-L102",
        f"image.packages[{position}] {text!r} {reason}",
        fix="Write a name and versions, e.g. 'numpy==2.4.6'; say where packages come from in "
        "image.sources.",
    )
