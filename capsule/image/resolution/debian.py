"""Debian packages: the shipped base lock, and a private apt root for everything else.

apt runs as any user, against the machine's own mirrors, keys and proxies (or the spec's mirrors),
with its state in Capsule's cache: the system's own apt is neither changed nor consulted about what
is installed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from pydantic import Field

from capsule.experiment.fields import Model
from capsule.experiment.lock import LockedDebianPackage, Sha256
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.recipe import data_file

_RELEASE = "bookworm"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Only Debian's own packages: a third party's repository may carry a package of the same name.
_PREFERENCES = f"""\
Package: *
Pin: release o=Debian,n={_RELEASE}*
Pin-Priority: 500

Package: *
Pin: release *
Pin-Priority: -1
"""


class BaseLock(Model):
    """``images/debian-12.lock.json``: the base that Capsule ships a lock of.

    ``scripts/base_lock.py`` writes it.
    """

    layers: dict[str, Sha256] = Field(description="Recipe to SHA-256 of its base layer.")
    packages: tuple[LockedDebianPackage, ...]


def resolve_debian(
    base: tuple[str, ...],
    extra: tuple[str, ...],
    sources: SourcesSpec,
    cache: Cache,
    *,
    refresh_base: bool,
    progress: Callable[[str], None],
) -> tuple[LockedDebianPackage, ...]:
    """Lock the base packages, and extra packages with what they depend on beyond the base.

    Args:
        base: Packages of the recipe; exactly these, without dependencies.
        extra: Packages of the spec; with dependencies, without recommendations.
        sources: Mirrors, if not the machine's own.
        cache: Holds apt's package indexes between calls, for offline use.
        refresh_base: Take the base from the mirrors as they are now, not from the shipped lock.
        progress: Told about each stage.

    Returns:
        Packages sorted by name. A base package is replaced if an extra one needs a newer one.

    Raises:
        CapsuleError: CAP-L121 no apt, CAP-L122 no package index, CAP-L123 unknown package,
            CAP-L124 apt finds no solution, CAP-L125 the shipped lock does not fit the recipe.
    """
    if not (extra or refresh_base):
        return tuple(_from_shipped(base))
    progress("resolving Debian packages")
    with cache.lock("apt"), cache.scratch() as scratch:
        apt = PrivateApt(scratch, cache.folder("apt"), sources)
        apt.update()
        locked = apt.show(base, requested=frozenset(base)) if refresh_base else _from_shipped(base)
        added = apt.dependencies(extra, locked)
    asked = {*base, *extra}
    merged = {
        each.name: each.model_copy(update={"requested": each.name in asked}) for each in added
    }
    for package in locked:  # apt may name a package again whose version stays
        if package.name not in merged or merged[package.name].version == package.version:
            merged[package.name] = package
    return tuple(merged[name] for name in sorted(merged))


def shipped_base() -> tuple[LockedDebianPackage, ...]:
    """Return the base packages that this version of Capsule ships a lock of."""
    return _shipped().packages


def shipped_layers() -> dict[str, str]:
    """Return recipe to SHA-256 of the base layer that the shipped packages make."""
    return _shipped().layers


@functools.cache
def _shipped() -> BaseLock:
    document = data_file("images", "debian-12.lock.json").read_bytes()
    return BaseLock.model_validate_json(document)


def mirrors(sources: SourcesSpec) -> list[str]:
    """Return the base addresses below which pool paths are looked up, in order.

    They are the spec's, else those of Debian in the machine's own apt configuration.
    """
    if sources.debian:
        return [mirror.rstrip("/") for mirror in sources.debian]
    if shutil.which("apt-get") is None:
        return []
    process = run_apt(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)", "Created-By: Packages"]
    )
    # The origin is unknown until the machine's first 'apt-get update'.
    found = (line.partition("|") for line in process.stdout.splitlines())
    addresses = [uri.rstrip("/") for origin, _, uri in found if origin in ("", "Debian")]
    return list(dict.fromkeys(addresses))


class PrivateApt:
    """apt with its own state: nothing installed but what it is told.

    Args:
        scratch: Empty folder for this object's files.
        state: Folder that keeps the package indexes; locked by the caller.
        sources: Mirrors to use instead of the machine's own configuration.
    """

    def __init__(self, scratch: Path, state: Path, sources: SourcesSpec) -> None:
        if shutil.which("apt-get") is None:
            raise CapsuleError(
                "CAP-L121",
                "image.debian: extra Debian packages need apt, which this machine lacks",
                fix="Lock on Debian, or remove the packages from image.debian.",
            )
        self._status = scratch / "status"
        self._status.touch()
        (scratch / "preferences").write_text(_PREFERENCES)
        for folder in ("lists/partial", "cache/archives/partial"):
            (state / folder).mkdir(parents=True, exist_ok=True)
        options = {
            "Dir::State": state,
            "Dir::State::lists": state / "lists",
            "Dir::State::status": self._status,
            "Dir::State::extended_states": scratch / "extended_states",
            "Dir::Cache": state / "cache",
            "Dir::Etc::preferences": scratch / "preferences",
            "Dir::Etc::preferencesparts": "/dev/null",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            # apt fails if the machine's own setting names a release that these sources do not have.
            "APT::Default-Release": "",
            "APT::Install-Recommends": "false",
            "APT::Install-Suggests": "false",
            "APT::Sandbox::User": "root",  # apt's own user may not enter the cache
            "Acquire::Languages": "none",
        }
        if sources.debian:
            (scratch / "sources.list").write_text(_sources_list(mirrors(sources)))
            options["Dir::Etc::sourcelist"] = scratch / "sources.list"
            options["Dir::Etc::sourceparts"] = "/dev/null"
        self._options = [part for item in options.items() for part in ("-o", "{}={}".format(*item))]

    def update(self) -> None:
        """Bring the package indexes up to date; without a network, the last ones are used.

        Raises:
            CapsuleError: CAP-L122 there is no index of Debian 12 at all.
        """
        # Its status decides nothing: apt may report success although downloads failed, and failure
        # although the indexes of the last time will do.
        update = self._run("apt-get", "-q", "update")
        targets = self._run(
            "apt-get", "indextargets", "--format", "$(CODENAME)|$(FILENAME)",
            "Origin: Debian", "Created-By: Packages",
        )  # fmt: skip
        found = (line.partition("|") for line in targets.stdout.splitlines())
        if not any(name.startswith(_RELEASE) and Path(file).exists() for name, _, file in found):
            raise CapsuleError(
                "CAP-L122",
                f"no package index of Debian 12 could be read: {_reason(update.stderr)}",
                fix="Connect to a mirror of Debian 12, or name one in image.sources.debian.",
            )

    def show(
        self, packages: Iterable[str], *, requested: frozenset[str]
    ) -> list[LockedDebianPackage]:
        """Lock packages, each a name or ``name=version``, without their dependencies.

        Raises:
            CapsuleError: CAP-L123 a package is unknown.
        """
        wanted = list(packages)
        if not wanted:
            return []
        process = self._run("apt-cache", "--no-all-versions", "show", *wanted)
        found = {entry["Package"]: entry for entry in stanzas(process.stdout)}
        if missing := sorted({name.partition("=")[0] for name in wanted} - found.keys()):
            raise _unknown(missing)
        return [_locked(found[name], name in requested) for name in sorted(found)]

    def dependencies(
        self, extra: tuple[str, ...], installed: Iterable[LockedDebianPackage]
    ) -> list[LockedDebianPackage]:
        """Lock ``extra`` and what it needs that is not among ``installed``.

        Raises:
            CapsuleError: CAP-L123 a package is unknown, CAP-L124 apt finds no solution.
        """
        if not extra:
            return []
        self._status.write_text("\n".join(_installed(package) for package in installed))
        process = self._run("apt-get", "-qq", "--print-uris", "install", *extra)
        if process.returncode:
            if names := re.findall(r"Unable to locate package (\S+)", process.stderr):
                raise _unknown(names)
            raise CapsuleError(
                "CAP-L124",
                f"image.debian {list(extra)} cannot be resolved: {_reason(process.stderr)}",
                fix="Change image.debian so that the packages exist in Debian 12 and fit together, "
                "or lock with --refresh-base.",
            )
        # Each line: 'uri' name_version_architecture.deb size hash
        files = [line.split()[1] for line in process.stdout.splitlines() if line.startswith("'")]
        # apt writes the colon of an epoch as %3a in file names.
        pins = ["=".join(file.replace("%3a", ":").split("_")[:2]) for file in files]
        return self.show(pins, requested=frozenset(extra))

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_apt([program, *self._options, *arguments])


def run_apt(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run one of apt's programs, with messages in English; the caller judges the result."""
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """Parse Debian control data (deb822): one dictionary per stanza, first lines of fields only."""
    for block in re.split(r"\n\s*\n", text):
        fields = (
            line.split(":", 1) for line in block.splitlines() if line[:1] not in ("", " ", "\t")
        )
        if entry := {field[0]: field[1].strip() for field in fields if len(field) == 2}:
            yield entry


def _from_shipped(base: tuple[str, ...]) -> list[LockedDebianPackage]:
    shipped = {package.name: package for package in shipped_base()}
    if missing := sorted(set(base) - shipped.keys()):
        raise CapsuleError(
            "CAP-L125",
            f"the recipe names Debian packages that the shipped base lock lacks: {missing}",
            fix="Lock with --refresh-base.",
        )
    return [shipped[name] for name in sorted(base)]


def _locked(entry: dict[str, str], requested: bool) -> LockedDebianPackage:
    return LockedDebianPackage.model_validate(
        {
            "name": entry["Package"],
            "version": entry["Version"],
            "architecture": entry["Architecture"],
            "pool": entry["Filename"],
            "size": int(entry["Size"]),
            "sha256": entry["SHA256"],
            "requested": requested,
        }
    )


def _installed(package: LockedDebianPackage) -> str:
    """Describe a package to apt as installed; without dependencies, since a base is not closed."""
    return (
        f"Package: {package.name}\nStatus: install ok installed\nVersion: {package.version}\n"
        f"Architecture: {package.architecture}\nMaintainer: -\nDescription: -\n"
    )


def _sources_list(addresses: Iterable[str]) -> str:
    """Write one-line-style apt sources; a mirror named ``debian-security`` has its own suite."""
    option = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    lines = []
    for address in addresses:
        security = PurePosixPath(address).name == "debian-security"
        suites = [f"{_RELEASE}-security"] if security else [_RELEASE, f"{_RELEASE}-updates"]
        lines += [f"deb {option}{address} {suite} main\n" for suite in suites]
    return "".join(lines)


def _reason(messages: str) -> str:
    """Return what apt says went wrong, as one line."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:")]
    return "; ".join(errors or lines[-3:])


def _unknown(names: Iterable[str]) -> CapsuleError:
    return CapsuleError(
        "CAP-L123",
        f"image.debian: Debian 12 has no package {', '.join(map(repr, names))}",
        fix="Correct the name. 'apt-cache search' finds packages.",
    )
