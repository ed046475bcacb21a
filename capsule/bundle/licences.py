"""The licences of what an image holds, as each package itself declares them.

Nothing is guessed: what a package does not say in a form that means one thing is left out. A
*choice* is what CycloneDX 1.6 calls the value of ``licenses``: one SPDX expression, or a list of
licences, each by its SPDX identifier or by a name.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capsule.bundle.debian_copyright import SPDX_IDS, copyright_files, declared_licences
from capsule.bundle.package_urls import debian_purl, wheel_purl
from capsule.experiment.lock import Lock, LockedWheel
from capsule.host.errors import CapsuleError

Choice = list[dict[str, Any]]

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

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")  # PEP 427
_LICENCE_REFERENCE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")


def collect_licences(
    lock: Lock, wheel_path: Callable[[LockedWheel], Path], base_layer: Path | None
) -> dict[str, Choice]:
    """Read what the locked packages declare as their licence.

    Args:
        lock: Names the packages.
        wheel_path: Gives the file of a wheel.
        base_layer: The image's layer of Debian packages; None where no image was made, so that
            none of their licences are known.

    Returns:
        Package URL to choice. A package without a certain declaration is left out.

    Raises:
        CapsuleError: CAP-B061 a wheel cannot be read.
    """
    wheels = {wheel_purl(wheel): _declared(wheel, wheel_path(wheel)) for wheel in lock.image.wheels}
    found = {purl: expression_choice(licence) for purl, licence in wheels.items() if licence}
    return found if base_layer is None else found | _of_debian(lock, base_layer)


def _of_debian(lock: Lock, base_layer: Path) -> dict[str, Choice]:
    files = copyright_files(base_layer, [package.name for package in lock.image.debian])
    found = {}
    for package in lock.image.debian:
        text = files.get(package.name, b"").decode("utf-8", "replace")
        if licences := declared_licences(text):
            found[debian_purl(package, lock.spec.image.base)] = debian_choice(licences)
    return found


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
        ) from error


def is_spdx(expression: str) -> bool:
    """Tell whether ``expression`` is an SPDX licence expression in exact spelling.

    The library's own check takes aliases such as 'GPL' and rejects ``LicenseRef-`` names, which
    SPDX allows.
    """
    from cyclonedx.spdx import is_expression, is_supported_id

    words = set(re.findall(r"[^\s()]+", expression)) - {"AND", "OR", "WITH"}
    named = {word for word in words if not _LICENCE_REFERENCE.fullmatch(word)}
    if not words or not all(map(is_supported_id, named)):
        return False
    return bool(is_expression(_LICENCE_REFERENCE.sub("MIT", expression)))


def expression_choice(expression: str) -> Choice:
    """Return the choice of one SPDX expression.

    Raises:
        CapsuleError: CAP-B060 it is not one.
    """
    from cyclonedx.spdx import is_supported_id

    if not is_spdx(expression):
        raise CapsuleError(
            "CAP-B060",
            f"licence {expression!r} is not an SPDX expression",
            fix="Remove the licence, or name it by its SPDX identifier.",
        )
    if is_supported_id(expression):
        return [{"license": {"id": expression, "acknowledgement": "declared"}}]
    return [{"expression": expression, "acknowledgement": "declared"}]


def debian_choice(licences: tuple[str, ...]) -> Choice:
    """Return the choice of a Debian package: all its licences, by identifier where that is sure.

    Args:
        licences: As :func:`declared_licences` returns them.
    """
    known = [
        (("id", SPDX_IDS[name.lower()]) if name.lower() in SPDX_IDS else ("name", name))
        for name in licences
    ]
    return [
        {"license": {kind: value, "acknowledgement": "declared"}}
        # 'GPL-2' and 'GPL-2.0' have the same identifier, which is listed once.
        for kind, value in dict.fromkeys(known)
    ]


def is_own_form(purl: str, choice: Choice) -> bool:
    """Tell whether a choice of a sound document has the form that Capsule gives such a package."""
    if purl.startswith("pkg:deb/"):
        fields = ({"id", "acknowledgement"}, {"name", "acknowledgement"})
        return all(
            each.keys() == {"license"}
            and each["license"].keys() in fields
            and each["license"]["acknowledgement"] == "declared"
            for each in choice
        )
    expression = choice[0].get("expression") or choice[0].get("license", {}).get("id", "")
    return is_spdx(expression) and choice == expression_choice(expression)
