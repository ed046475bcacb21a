"""Locks that do not pin what their spec and recipe ask for, or pin more (cases 42, 44)."""

from __future__ import annotations

from collections.abc import Callable

from capsule.bundle import run_bundle
from capsule.bundle.sbom import image_sbom
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import Lock
from tests.hostile.genuine import Change, Files, relock
from tests.hostile.presenting import changed

SPEEDUPS = {
    "name": "numpy-speedups",
    "version": "1.0",
    "filename": "numpy_speedups-1.0-py3-none-any.whl",
    "sha256": sha256_hex(b"numpy-speedups"),
    "requested": None,
}


def relocked(edit: Callable[[dict], object], **image: object) -> Change:
    """Change the lock, and every document that says what is in it."""

    def change(files: Files) -> None:
        relock(files, lambda lock: (lock["image"].update(image), edit(lock)))
        lock = Lock.model_validate_json(files[run_bundle.LOCK])
        config = f"sha256:{sha256_hex(files[run_bundle.IMAGE_CONFIG])}"
        files[run_bundle.IMAGE_SBOM] = image_sbom(lock, config, {})

    return change


def wheels(edit: Callable[[list], object]) -> Change:
    return relocked(lambda lock: edit(lock["image"]["wheels"]))


def debian(edit: Callable[[list], object]) -> Change:
    return relocked(lambda lock: edit(lock["image"]["debian"]))


def asked_for(text: str) -> Change:
    """Have the spec ask for a package, and leave the wheels as they are."""
    return relocked(lambda lock: lock["spec"]["image"].update(packages=[text]))


def extra_debian(packages: list) -> None:
    packages.append(packages[0] | {"name": "evil"})


def shipped_packages(lock: dict) -> None:
    """Lock exactly the packages whose base layer Capsule knows, beside the layer of others."""
    lock["spec"]["image"]["debian"] = []
    lock["image"]["debian"].pop()


LOCKS: dict[str, tuple[int, str, Change]] = {
    "base-layer-that-is-not-the-locked-one": (
        42,
        "CAP-V040",
        lambda files: relock(files, lambda lock: lock["image"].update(base="0" * 64)),
    ),
    "base-layer-that-the-shipped-packages-do-not-make": (
        42,
        "CAP-I113",
        relocked(shipped_packages),
    ),
    "wheel-of-another-version-than-the-recipe-asks-for": (
        44,
        "CAP-I306",
        wheels(lambda found: found[0].update(version="1", filename="pydantic-1-py3-none-any.whl")),
    ),
    "wheel-of-another-version-than-the-spec-asks-for": (44, "CAP-I306", asked_for("xxhash==98")),
    "wheel-missing-that-the-recipe-asks-for": (44, "CAP-I306", wheels(lambda found: found.pop())),
    "requirement-with-a-marker-in-many-parentheses": (
        44,
        "CAP-V010",
        asked_for(f"torch; {'(' * 1_500}os_name == 'posix'{')' * 1_500}"),
    ),
    "wheel-missing-that-the-spec-asks-for": (44, "CAP-I306", asked_for("torch==2.13.0")),
    "wheel-pinned-twice": (44, "CAP-I306", wheels(lambda found: found.append(found[0]))),
    "wheel-said-to-be-requested": (
        44,
        "CAP-I306",
        wheels(lambda found: found.append(SPEEDUPS | {"requested": "numpy-speedups"})),
    ),
    "wheel-called-otherwise-than-its-file": (
        44,
        "CAP-I305",
        wheels(lambda found: found[0].update(filename="numpy_speedups-99-py3-none-any.whl")),
    ),
    "debian-package-that-nothing-asks-for": (44, "CAP-I306", debian(extra_debian)),
    "debian-package-missing": (44, "CAP-I306", debian(lambda found: found.pop())),
    "debian-package-pinned-twice": (44, "CAP-I306", debian(lambda found: found.append(found[0]))),
    "debian-package-said-to-be-a-dependency": (
        44,
        "CAP-I306",
        debian(lambda found: found[0].update(requested=False)),
    ),
}

CASES = [changed(number, name, code, change) for name, (number, code, change) in LOCKS.items()]
