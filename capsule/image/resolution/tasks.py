"""Whether the pinned packages have the task that a spec names: found before an image is built."""

from __future__ import annotations

import difflib
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from capsule.experiment.lock import LockedWheel
from capsule.experiment.scores import ATARI_57
from capsule.experiment.spec import ImageSpec, Spec
from capsule.experiment.spec.environment import AtariEnvironment, GymnasiumEnvironment, tasks_of
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.image.archives.wheel import open_wheel
from capsule.image.cache import Cache
from capsule.image.distribution import distribution_of
from capsule.image.resolution.fetch import fetch_wheels
from capsule.image.resolution.gymnasium_wheel import is_continuous, registered

_MAX_SHOWN = 3
_TRAINERS = ("torch", "numpy", "safetensors")
_SUITES = {"atari": "ale-py", "gymnasium": "gymnasium", "minatar": "minatar"}


def check_packages(spec: Spec, wheels: Sequence[LockedWheel]) -> None:
    """Check that the packages include those that Capsule's trainers import.

    Raises:
        CapsuleError: CAP-L112, one is missing.
    """
    if isinstance(spec.trainer, CommandTrainer):
        return
    needed = (*_TRAINERS, _SUITES[spec.training().environment.suite])
    missing = [name for name in needed if name not in {wheel.name for wheel in wheels}]
    if missing:
        raise CapsuleError(
            "CAP-L112",
            f"the resolved image.packages lack {', '.join(missing)}, which trainer.algorithm "
            f"{spec.training().trainer.algorithm!r} needs",
            fix=f"Add {', '.join(missing)} to image.packages, or remove image.packages.",
        )


def check_tasks(
    spec: Spec, wheels: Sequence[LockedWheel], cache: Cache, progress: Callable[[str], None]
) -> None:
    """Check that ale-py has the games of a spec, and Gymnasium the id, with discrete actions.

    Every ale-py has the games of Atari-57; for others, its wheel is fetched. Ids that modules or
    further packages could register are not checked here.

    Raises:
        CapsuleError: CAP-L110 there is no such game or id, CAP-L111 its actions are continuous,
            CAP-I302 the wheel cannot be fetched.
    """
    if isinstance(spec.trainer, CommandTrainer):
        return
    for task in tasks_of(spec.training().environment):
        if isinstance(task, AtariEnvironment) and task.game not in ATARI_57:
            package = "ale-py"
        elif isinstance(task, GymnasiumEnvironment) and _is_gymnasiums(task, spec):
            package = "gymnasium"
        else:
            continue
        wheel = next((each for each in wheels if each.name == package), None)
        if wheel is None:
            continue
        fetch_wheels(distribution_of(spec.image), [wheel], cache, spec.image.sources, progress)
        with open_wheel(cache.package(wheel), wheel) as opened:
            if isinstance(task, AtariEnvironment):
                _check("environment.game", task.game, wheel, set(_games(opened)))
            elif isinstance(task, GymnasiumEnvironment):
                _check_gymnasium(task, spec, wheel, opened)


def _is_gymnasiums(task: GymnasiumEnvironment, spec: Spec) -> bool:
    """Tell whether only Gymnasium itself can register an id."""
    further = _names(spec.image) - _names(ImageSpec())
    # In an id, a colon follows a module to import, and a slash follows a namespace. Either may be
    # of another package.
    return not (task.modules or further or ":" in task.id or "/" in task.id)


def _names(image: ImageSpec) -> set[str]:
    return {canonicalize_name(Requirement(package).name) for package in image.packages}


def _games(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield the games whose ROMs ale-py brings."""
    for path in map(PurePosixPath, wheel.namelist()):
        if path.parent == PurePosixPath("ale_py/roms") and path.suffix == ".bin":
            yield path.stem


def _check_gymnasium(
    task: GymnasiumEnvironment, spec: Spec, wheel: LockedWheel, opened: zipfile.ZipFile
) -> None:
    """Check that Gymnasium has an id, and that its actions are not continuous."""
    known = {each.id: each for each in registered(opened)}
    _check("environment.id", task.id, wheel, known)
    if is_continuous(opened, known[task.id]):
        raise CapsuleError(
            "CAP-L111",
            f"environment.id {task.id!r} has continuous actions in {wheel.name} {wheel.version}; "
            f"trainer.algorithm {spec.training().trainer.algorithm!r} requires discrete ones",
            fix="Name an environment with discrete actions, or run your own program, which may "
            "use any actions: trainer.command (docs/own-program.md).",
        )


def _check(field: str, name: str, wheel: LockedWheel, known: Collection[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, sorted(known), n=_MAX_SHOWN)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    other = (
        "ROM names are listed in https://ale.farama.org/environments."
        if wheel.name == "ale-py"
        else "If another package registers this id, add the package to image.packages, and its "
        "module to environment.modules."
    )
    raise CapsuleError(
        "CAP-L110",
        f"{field} {name!r}: {wheel.name} {wheel.version} has no such environment",
        fix=f"{hint}{other}",
    )
