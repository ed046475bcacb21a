"""Reasons for the packages of a lock: the spec, Capsule's recipe, or a dependency.

Packages are code, and a ``.pth`` file in a wheel has it executed at every start of the interpreter.
So a spec says what an experiment is made of only if its lock holds nothing else. :func:`check_pins`
needs the lock alone; :func:`check_packages` needs the packages, which say what they depend on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from capsule.experiment.lock import Lock, LockedWheel
from capsule.experiment.spec import ImageSpec
from capsule.host.errors import CapsuleError
from capsule.image.archives.deb import deb_control
from capsule.image.archives.layers import rejected
from capsule.image.archives.wheel import check_filename, open_wheel, read_contents
from capsule.image.cache import Cache
from capsule.image.distribution import Distribution, distribution_of
from capsule.image.recipe import Recipe
from capsule.image.releases import recipe_of
from capsule.image.resolution.resolve import parse_requirements

# Debian's interpreter has a sitecustomize.py of its own, which imports apport_python_hook.
_CUSTOMIZE = ("sitecustomize", "usercustomize", "apport_python_hook")
_PLUGINS = frozenset({"torch.backends"})  # groups of entry points that importing a library loads
# Suffixes of modules; of two that differ in nothing else, the interpreter imports one.
_MODULE = re.compile(r"(/__init__)?\.(cpython-[0-9]+-x86_64-linux-gnu\.so|abi3\.so|so|py|pyc)$")


@dataclass(frozen=True)
class Packages:
    """Facts about a lock's wheels for the verdict.

    Attributes:
        besides: Name and version of those beyond what Capsule's recipe and default spec bring.
        startup: Those with files that every start of the interpreter executes, and the files; and
            those that torch executes when it is imported.
    """

    besides: tuple[str, ...]
    startup: tuple[str, ...]


def check_pins(lock: Lock) -> None:
    """Check that a lock pins what its spec and recipe ask for, each once, and says so.

    Raises:
        CapsuleError: CAP-I306, CAP-I305.
    """
    recipe = recipe_of(lock)
    requested = _requested(lock)
    wheels = {wheel.name: wheel for wheel in lock.image.wheels}
    if len(wheels) < len(lock.image.wheels):
        raise _contradiction("it pins a Python package twice")
    for wheel in wheels.values():
        check_filename(wheel)
        if wheel.requested != requested.get(wheel.name):
            raise _contradiction(f"it says that the spec asks for {wheel.requested!a}")
    distribution = distribution_of(lock.spec.image)
    for requirement in _roots(lock, recipe):
        if not _applies(requirement, distribution):
            continue
        found = wheels.get(canonicalize_name(requirement.name))
        version = None if found is None else found.version
        # By default packaging rejects a pre-release unless the requirement names one. The resolver
        # has decided whether one is taken.
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            raise _contradiction(f"it pins {version or 'nothing'} for {str(requirement)!a}")
    # What an unknown recipe asks for cannot be compared. An image of such a lock is not built here
    # (CAP-I102).
    if recipe is not None:
        _check_debian_pins(lock, recipe)


def check_packages(lock: Lock, cache: Cache, *, debian: bool) -> Packages:
    """Check that every fetched package was asked for, and look at what runs at every start.

    Args:
        lock: The lock.
        cache: Holds its packages.
        debian: Whether the Debian packages are there, too.

    Raises:
        CapsuleError: CAP-I306 no requirement asks for a package, CAP-I307 a wheel that the spec
            does not name changes how every interpreter starts; CAP-I103 to CAP-I107 a package is
            missing, damaged or malformed.
    """
    # They are there, and have the locked bytes.
    for wheel in lock.image.wheels:
        cache.package(wheel)
    for package in lock.image.debian if debian else ():
        cache.package(package)
    recipe = recipe_of(lock)
    # The lock names its recipe by digest, but it does not show whether this installation has it.
    known = f"{recipe and recipe.digest()} {debian}".encode()
    parts = (lock.image.document(), lock.spec.image.document(), known)
    found = cache.document("packages", parts, lambda: _check(lock, recipe, cache, debian=debian))
    return Packages(**{name: tuple(each) for name, each in json.loads(found).items()})


def _check(lock: Lock, recipe: Recipe | None, cache: Cache, *, debian: bool) -> bytes:
    """Read the packages, and return the fields of :class:`Packages` as JSON."""
    wheels = {wheel.name: wheel for wheel in lock.image.wheels}
    distribution = distribution_of(lock.spec.image)
    startup, requires, modules = [], {}, dict[str, tuple[str, str]]()
    for wheel in wheels.values():
        with open_wheel(cache.path(wheel.sha256), wheel) as archive:
            contents = read_contents(archive, wheel, distribution)
        requires[wheel.name] = contents.requires
        files = [path for path in contents.paths if _runs_at_start(path, distribution.site)]
        _reject_customization(wheel, files)
        _reject_shadows(wheel, contents.paths, distribution.site, modules)
        plugins = sorted(_PLUGINS & contents.entry_points)
        at_start = [path.rpartition("/")[2] for path in files] + plugins
        startup += [f"{wheel.name} {wheel.version}: {what}" for what in at_start]
    asked = _reachable(_roots(lock, recipe), requires, distribution)
    if unasked := sorted(wheels.keys() - asked):
        raise _contradiction(f"no requirement asks for its wheel {wheels[unasked[0]].filename}")
    if debian and recipe is not None:
        _check_debian(lock, recipe, cache)
    by_default = (*ImageSpec().packages, *(recipe.packages if recipe else ()))
    usual = _reachable(map(Requirement, by_default), requires, distribution)
    besides = [f"{each.name} {each.version}" for each in wheels.values() if each.name not in usual]
    return json.dumps(asdict(Packages(tuple(sorted(besides)), tuple(sorted(startup))))).encode()


def _requested(lock: Lock) -> dict[str, str]:
    try:
        return parse_requirements(lock.spec.image.packages)
    except CapsuleError as error:
        raise _contradiction(error.message) from error


def _roots(lock: Lock, recipe: Recipe | None) -> list[Requirement]:
    own = () if recipe is None else recipe.packages
    return [Requirement(text) for text in (*lock.spec.image.packages, *own)]


def _applies(
    requirement: Requirement, distribution: Distribution, extras: Iterable[str] = ("",)
) -> bool:
    """Tell whether a requirement applies with one of the extras; "" stands for none of them."""
    marker = requirement.marker
    if marker is None:
        return True
    try:
        known = distribution.markers
        return any(marker.evaluate({**known, "extra": extra}) for extra in extras)
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion) as error:
        raise _contradiction(f"the marker of {str(requirement)!a} cannot be evaluated") from error


def _reachable(
    roots: Iterable[Requirement],
    requires: dict[str, list[Requirement]],
    distribution: Distribution,
) -> set[str]:
    """Return the names of all that roots need, by the requirements of each package."""
    pending = [root for root in roots if _applies(root, distribution)]
    seen: dict[str, set[str]] = {}
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        # A package is always installed with its own requirements. It is visited again only for
        # further extras, which may have others. Cycles of dependencies end here.
        further = {"", *requirement.extras} - seen.setdefault(name, set())
        seen[name] |= further
        needed = requires.get(name, ()) if further else ()
        pending += [each for each in needed if _applies(each, distribution, further)]
    return set(seen)


def _runs_at_start(path: str, site: str) -> bool:
    """Tell if each start of the image's interpreter executes a file, or if it is an interpreter."""
    folder, _, name = path.rpartition("/")
    # This folder is the first of PATH in every image (images/common.yaml), so a file of such a
    # name would be started in place of Debian's interpreter.
    if folder == "usr/local/bin":
        return name.removeprefix("python").replace(".", "").isdigit() or name == "python"
    if not path.startswith(f"{site}/"):
        return False
    below = path.removeprefix(f"{site}/")
    # A module is found in every form: as a package, a source file or an extension. A .pth file is
    # read only from the folder of packages itself, not from those below it.
    return below.split("/")[0].split(".")[0] in _CUSTOMIZE or bool(
        re.fullmatch(r"[^/]*\.pth", below)
    )


def _reject_customization(wheel: LockedWheel, files: Iterable[str]) -> None:
    """Reject more than a ``.pth`` file, which ordinary packages have, if the spec does not ask."""
    for path in files:
        if not path.endswith(".pth") and wheel.requested is None:
            raise CapsuleError(
                "CAP-I307",
                f"{wheel.filename}, which the spec does not name, contains /{path}: every start of "
                "the interpreter would execute it",
                fix="If you want this package, name it in image.packages. Otherwise do not trust "
                "the package that requires it.",
            )


def _reject_shadows(
    wheel: LockedWheel, paths: Iterable[str], site: str, modules: dict[str, tuple[str, str]]
) -> None:
    """Reject a module that is imported in place of another wheel's, under another file name.

    Args:
        wheel: The next wheel.
        paths: Where its files go.
        site: Path of the packages.
        modules: Name of each module so far, with its file and wheel; those of this one are added.
    """
    for path in paths:
        name = _MODULE.sub("", path)
        if name == path or not path.startswith(f"{site}/"):
            continue
        other, owner = modules.setdefault(name, (path, wheel.filename))
        # Equal paths are left to reject_collisions(). Which of two forms within one wheel is
        # imported is the choice of its author.
        if other != path and owner != wheel.filename:
            raise rejected(
                "CAP-I109",
                f"/{path} from {wheel.filename} and /{other} from {owner} are one module",
                "Remove one of the two from the spec, or pin versions that do not share it.",
            )


def _check_debian_pins(lock: Lock, recipe: Recipe) -> None:
    names = [package.name for package in lock.image.debian]
    roots = {*recipe.debian, *lock.spec.image.debian}
    if len(set(names)) < len(names):
        raise _contradiction("it pins a Debian package twice")
    if missing := sorted(roots - set(names)):
        raise _contradiction(f"it pins nothing for the Debian package {missing[0]}")
    # If the spec adds packages, others may be their dependencies. Only the packages themselves show
    # that, so _check_debian() decides then.
    extra = sorted(set(names) - roots)
    if extra and not lock.spec.image.debian:
        raise _contradiction(f"no requirement asks for its Debian package {extra[0]}")
    for package in lock.image.debian:
        if package.requested != (package.name in roots):
            raise _contradiction(
                f"its field requested of the Debian package {package.name} is wrong"
            )


def _check_debian(lock: Lock, recipe: Recipe, cache: Cache) -> None:
    """Check that what is beyond the recipe is a package of the spec or a dependency of one."""
    base = set(recipe.debian)
    provides: dict[str, set[str]] = {}
    needs: dict[str, set[str]] = {}
    for package in lock.image.debian:
        control = deb_control(cache.path(package.sha256), package)
        # The base is not closed, but a package that needs or breaks one of the base's packages may
        # have replaced it with a newer one, which came with its dependencies.
        breaks = _names(control, "Breaks") | _names(control, "Conflicts")
        depends = _names(control, "Depends") | _names(control, "Pre-Depends")
        needs[package.name] = depends | breaks & base
        for name in {package.name} | _names(control, "Provides"):
            provides.setdefault(name, set()).add(package.name)
    pending, asked = set(lock.spec.image.debian), set[str]()
    while pending:
        name = pending.pop()
        found = provides.get(name, set()) - asked
        asked |= found
        pending |= {needed for each in found for needed in needs[each]}
    if unasked := sorted(needs.keys() - asked - base):
        raise _contradiction(f"no requirement asks for its Debian package {unasked[0]}")


def _names(control: Mapping[str, str], field: str) -> set[str]:
    """Return the packages that a relationship field names, alternatives included."""
    return set(re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]+)", control.get(field, "")))


def _contradiction(what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-I306",
        f"the lock does not pin what its spec and recipe ask for: {what}",
        fix="Do not trust a bundle with this lock. If the lock is your own, delete it and lock the "
        "spec again.",
    )
