"""Package URLs (ECMA-427) of what a lock names.

Written here and not by a library, because a verifier compares them years later: the bytes must
not depend on the library's release.
"""

from __future__ import annotations

from urllib.parse import quote

from capsule.experiment.lock import LockedDebianPackage, LockedWheel


def wheel_purl(wheel: LockedWheel) -> str:
    """Return the package URL of a wheel."""
    return package_url("pypi", wheel.name, wheel.version, file_name=wheel.filename)


def debian_purl(package: LockedDebianPackage, distribution: str) -> str:
    """Return the package URL of a package of ``distribution``, e.g. ``debian-12``."""
    vendor = distribution.partition("-")[0]
    return package_url(
        f"deb/{vendor}",
        package.name,
        package.version,
        arch=package.architecture,
        distro=distribution,
    )


def package_url(kind: str, name: str, version: str, **qualifiers: str) -> str:
    """Write a package URL of a type, with its qualifiers sorted by name."""
    coded = "&".join(f"{key}={_coded(value)}" for key, value in sorted(qualifiers.items()))
    return f"pkg:{kind}/{_coded(name)}@{_coded(version)}?{coded}"


def _coded(part: str) -> str:
    return quote(part, safe=":~")
