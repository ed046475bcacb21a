"""Finding wheels: requirements to one file each, with its digest and its place.

uv resolves for the image's platform, wheels only, and its ``pylock.toml`` (PEP 751) is reduced to
names, versions, file names, digests and addresses.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from capsule.experiment.canonical import sha256_file
from capsule.host.errors import CapsuleError, refusal_of
from capsule.image.cache import Cache
from capsule.image.distribution import Distribution, supported_tags
from capsule.image.resolution.sources import MachineSources, write_index


@dataclass(frozen=True)
class ResolvedWheel:
    """One wheel as the resolver found it: the facts of a lock, and where the file is."""

    name: str
    version: str
    filename: str
    sha256: str
    url: str
    size: int | None = None  # in bytes, if the index states it


@dataclass(frozen=True)
class WheelSearch:
    """How wheels are found and fetched.

    Attributes:
        distribution: The image's.
        sources: Where packages come from.
        cache: Takes what is fetched, and holds uv's own cache of indexes and metadata.
        progress: Told about each file, and when the network fails and cached indexes are used.
    """

    distribution: Distribution
    sources: MachineSources
    cache: Cache
    progress: Callable[[str], None]


def compile_wheels(
    search: WheelSearch, requirements: Sequence[str], options: Sequence[str]
) -> list[ResolvedWheel]:
    """Find wheels of requirements, and of what they require, for the image's platform.

    Args:
        search: How wheels are found.
        requirements: PEP 508 requirements.
        options: Further options of uv.

    Raises:
        CapsuleError: CAP-L103 no solution, CAP-L104 no wheel, CAP-L105 no network, CAP-L106 no
            SHA-256 or no matching wheel in the answer, CAP-X003 a fault of this machine.
    """
    answer = _compiled(search, requirements, ["--only-binary", ":all:", *options])
    return read_pylock(search.distribution, answer)


def newest_versions(
    search: WheelSearch, requirements: Sequence[str], options: Sequence[str]
) -> dict[str, str]:
    """Return the newest version that each requirement allows by itself, by normalised name.

    What it requires is not considered, nor whether it has a wheel.

    Args:
        search: Where versions are found.
        requirements: PEP 508 requirements.
        options: Further options of uv.

    Raises:
        CapsuleError: As :func:`compile_wheels`.
    """
    answer = _compiled(search, requirements, ["--no-deps", *options])
    return {each["name"]: each["version"] for each in tomllib.loads(answer).get("packages", [])}


def _compiled(search: WheelSearch, requirements: Sequence[str], options: Sequence[str]) -> str:
    """Run ``uv pip compile`` for the image's platform; return its answer (PEP 751)."""
    from uv import find_uv_bin

    distribution, sources, cache = search.distribution, search.sources, search.cache
    with cache.scratch() as folder:
        index = folder / "index"
        index.mkdir()
        environment = sources.uv_environment(index)
        write_index(sources.folders(), index, cache.digest, functools.partial(_fits, distribution))
        (folder / "requirements.in").write_text("".join(f"{line}\n" for line in requirements))
        # uv accepts only this name or pylock.NAME.toml for a file of PEP 751.
        answer = folder / "pylock.toml"
        command = [
            find_uv_bin(), "pip", "compile", "--quiet", "--cache-dir", str(cache.folder("uv")),
            "--python", sys.executable, "--python-version", distribution.python,
            "--python-platform", distribution.platform,
            "--format", "pylock.toml", "--no-header", "--no-annotate",
            "--output-file", str(answer), *sources.uv_arguments(), *options,
            str(folder / "requirements.in"),
        ]  # fmt: skip
        messages = _run_uv(command, environment)
        # uv's exit status does not tell a host that cannot be reached from any other failure; this
        # text of its HTTP client does.
        if messages and "error sending request" in messages:
            search.progress(
                "a package index cannot be reached; using the indexes of the last resolution"
            )
            if _run_uv([*command, "--offline"], environment):
                raise CapsuleError(
                    "CAP-L105",
                    "a package index cannot be reached, and there is no cached answer: "
                    f"{_one_line(messages)}",
                    fix="Check the network, pip's configuration and image.sources, then try again.",
                )
        elif messages and (fault := _own_fault(messages)):
            raise fault
        elif messages and (names := re.findall(r"Wheels are required for `([^`]+)`", messages)):
            raise _sdist_only(distribution, sorted(set(names)), _one_line(messages))
        elif messages:
            raise CapsuleError(
                "CAP-L103",
                f"image.packages cannot be resolved: {_one_line(messages)}",
                fix="Correct or loosen the requirements in image.packages; check image.sources.",
            )
        return answer.read_text()


def read_pylock(distribution: Distribution, text: str) -> list[ResolvedWheel]:
    """Read a PEP 751 lock file: one wheel for the image's platform of each package.

    Raises:
        CapsuleError: CAP-L104 a package has no wheel, CAP-L106 no usable wheel or no SHA-256.
    """
    found = []
    for package in tomllib.loads(text).get("packages", []):
        name, wheels = package["name"], package.get("wheels", [])
        if not wheels:
            raise _sdist_only(distribution, [name])
        wheel = choose_wheel(distribution, {_filename(wheel): wheel for wheel in wheels}, name)
        url = wheel.get("url") or Path(wheel["path"]).absolute().as_uri()
        sha256 = wheel.get("hashes", {}).get("sha256") or _hash_local(url, name)
        version, filename, size = package["version"], _filename(wheel), wheel.get("size")
        found.append(ResolvedWheel(name, version, filename, sha256, url, size))
    return found


def choose_wheel(
    distribution: Distribution, wheels: Mapping[str, dict[str, Any]], package: str
) -> dict[str, Any]:
    """Choose the wheel an installer would: most specific tag, then highest build (PEP 425, 427).

    Args:
        distribution: The image's.
        wheels: File name to wheel.
        package: Named in the error.

    Raises:
        CapsuleError: CAP-L106 none fits the image's platform.
    """
    from packaging.utils import parse_wheel_filename

    rank = {tag: -position for position, tag in enumerate(supported_tags(distribution))}
    fitting = []
    for filename, wheel in sorted(wheels.items()):
        _, _, build, tags = parse_wheel_filename(filename)
        if ranks := [rank[tag] for tag in tags if tag in rank]:
            fitting.append((max(ranks), build, filename, wheel))
    if not fitting:
        raise CapsuleError(
            "CAP-L106",
            f"image.packages: no wheel of {package!r} fits {_python_of(distribution)}: "
            f"{', '.join(sorted(wheels))}",
            fix="Pin another version, or build a wheel for that platform.",
        )
    # The last element is a dictionary, which has no order.
    return max(fitting, key=lambda entry: entry[:3])[3]


def _run_uv(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Run uv; return its messages if it failed."""
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return process.stderr.strip() or "uv failed silently" if process.returncode else None


def _own_fault(messages: str) -> CapsuleError | None:
    """Return the error of this machine, such as a full disk, that uv's messages report."""
    found = re.search(r"\(os error ([0-9]+)\)", messages)
    if found is None:
        return None
    return refusal_of(OSError(int(found[1]), f"{_one_line(messages)} (reported by uv)"))


def _fits(distribution: Distribution, filename: str) -> bool:
    """Tell whether a file is a wheel that the image's interpreter takes."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        return not parse_wheel_filename(filename)[3].isdisjoint(supported_tags(distribution))
    except InvalidWheelFilename:
        return False


def _filename(wheel: Mapping[str, Any]) -> str:
    location = wheel.get("name") or wheel.get("path") or unquote(urlsplit(wheel["url"]).path)
    return PurePosixPath(location).name


def _hash_local(url: str, package: str) -> str:
    """Hash a wheel in a local folder, for which an index gave no digest."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return sha256_file(Path(unquote(parts.path)))
    raise CapsuleError(
        "CAP-L106",
        f"image.packages: the source of {package!r} provides no SHA-256 digest for its wheel",
        fix="Use an index that publishes SHA-256 digests, or a local folder.",
    )


def _sdist_only(
    distribution: Distribution, names: Sequence[str], explanation: str = ""
) -> CapsuleError:
    """Return the error of packages without a wheel, with the dependents that uv's text names."""
    named = []
    for name in names:
        pattern = rf"(\S+) depends? on {re.escape(name)}(?![\w-]|\.\w)"
        dependents = sorted(set(re.findall(pattern, explanation)))
        named.append(f"{name} (required by {', '.join(dependents)})" if dependents else name)
    builds = " ".join(_requirement(name, explanation) for name in names)
    return CapsuleError(
        "CAP-L104",
        f"image.packages: no wheel of {', '.join(named)} fits {_python_of(distribution)}, and "
        "source distributions are not accepted",
        fix="Pin a version that has a wheel, or build one ('pip wheel --no-deps --wheel-dir "
        f"../wheels {builds}') and name its folder in image.sources.find_links.",
    )


def _requirement(name: str, explanation: str) -> str:
    """Return the requirement of a package as uv's text states it; only its name if it is unclear.

    Without its version, pip would build the newest one, which may not be the one that is required.
    """
    version = r"(?:[=<>!~]=?[^\s,]+,?)*(?<!,)"
    pattern = rf"(?:depends? on|you require) ({re.escape(name)}{version})(?=,? |$)"
    found = set(re.findall(pattern, explanation))
    requirement = found.pop() if len(found) == 1 else name
    return requirement if requirement == name else f'"{requirement}"'


def _python_of(distribution: Distribution) -> str:
    return f"CPython {distribution.python} on {distribution.title}"


def _one_line(messages: str) -> str:
    return " ".join(messages.split())
