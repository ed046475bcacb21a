"""The sources of packages on this machine: pip's configuration, merged with the spec's.

pip is the one Python tool that machines are configured for (mirrors, wheel folders, certificates).
uv does not read that configuration, so it is translated here. Nothing of it enters a lock.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError

_SECTIONS = ("global", "download", ":env:")  # as pip ranks them, the strongest last


@dataclass(frozen=True)
class MachineSources:
    """Python package sources of this machine and of one spec.

    Attributes:
        index: Main index, or None for the tools' own default.
        extra_indexes: Further indexes. All indexes rank alike, as pip has it.
        find_links: Folders or pages with wheels.
        no_index: Use ``find_links`` alone.
        cert: CA bundle.
        trusted_hosts: Hosts whose certificates are not checked.
        proxy: Proxy for every request.
    """

    index: str | None = None
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxy: str | None = None

    @property
    def configured(self) -> bool:
        """Whether the machine or the spec names any package source at all."""
        return bool(self.index or self.extra_indexes or self.find_links)

    def folders(self) -> list[Path]:
        """Return the local folders among ``find_links``."""
        return [path for link in self.find_links if (path := _local(link)) and path.is_dir()]

    def uv_arguments(self) -> list[str]:
        """Return the options that, with :meth:`uv_environment`, make uv see what pip sees."""
        # Without --no-config, uv would also read the sources in its configuration files.
        arguments = ["--no-config", "--index-strategy", "unsafe-best-match"]  # as pip ranks them
        if self.no_index:
            arguments.append("--no-index")
        for host in self.trusted_hosts:
            arguments += ["--allow-insecure-host", host]
        return arguments

    def uv_environment(self, folder_index: Path | None = None) -> dict[str, str]:
        """Return uv's environment: this process's, with these sources and no others.

        Addresses may contain passwords, and all users of a machine see the arguments of a process.

        Args:
            folder_index: The index that :func:`write_index` made of :meth:`folders`; uv reads it
                instead of the folders themselves.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("UV_") or name.startswith("UV_HTTP_")
        }
        # uv has no indexes then, so it reads the folders themselves.
        if self.no_index:
            folder_index = None
        own = () if folder_index is None else (folder_index.as_uri(),)
        # uv splits the first variable at white space, and the last one at commas.
        if indexes := [*own, *map(_one_word, self.extra_indexes)]:
            environment["UV_INDEX"] = " ".join(indexes)
        if self.index:
            environment["UV_DEFAULT_INDEX"] = self.index
        if links := [
            link.replace(",", "%2C") if path is None else path.absolute().as_uri()
            for link in self.find_links
            if (path := _local(link)) is None or folder_index is None
        ]:
            environment["UV_FIND_LINKS"] = ",".join(links)
        if self.cert:
            environment["SSL_CERT_FILE"] = self.cert
        if self.proxy:
            environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.proxy)
        return environment

    def pip_environment(self) -> dict[str, str]:
        """Return pip's environment: it reads its own configuration, to which the spec's is added.

        Variables replace what files say about the same option, so nothing is asked twice.
        """
        environment = dict(os.environ)
        if self.index:
            environment["PIP_INDEX_URL"] = self.index
        if self.extra_indexes:
            environment["PIP_EXTRA_INDEX_URL"] = " ".join(self.extra_indexes)
        if self.find_links:
            environment["PIP_FIND_LINKS"] = " ".join(_one_word(link) for link in self.find_links)
        return environment


def machine_sources(spec: SourcesSpec) -> MachineSources:
    """Read this machine's pip configuration (files and environment) and add the spec's sources.

    Raises:
        CapsuleError: CAP-L101 pip does not run or its configuration is broken.
    """
    process = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise CapsuleError(
            "CAP-L101",
            f"pip's configuration cannot be read: {process.stderr.strip()}",
            fix="Make 'python -m pip config list' work with Capsule's own Python.",
        )
    return merge_sources(parse_pip_configuration(process.stdout), spec)


def require_folders(spec: SourcesSpec) -> None:
    """Check that the folders that a spec names are there. pip and uv would ignore others.

    Raises:
        CapsuleError: CAP-L105, one is not.
    """
    for link in spec.find_links:
        folder = _local(link)
        if folder is not None and not _is_folder(folder):
            raise CapsuleError(
                "CAP-L105",
                f"image.sources.find_links: {folder} is not a folder that can be read",
                fix="Name a folder with wheels, relative to the spec, or the address of a page.",
            )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # its name is too long, or a folder above it cannot be entered
        return False


def parse_pip_configuration(listing: str) -> dict[str, str]:
    """Parse ``pip config list``: the value of each option as ``pip download`` would see it.

    Args:
        listing: Lines of ``section.option='value'``; other lines are ignored.
    """
    ranked: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if separator and section in ranked:
            # pip prints values as Python literals.
            ranked[section][option] = str(ast.literal_eval(value))
    return {option: value for options in ranked.values() for option, value in options.items()}


def merge_sources(configuration: dict[str, str], spec: SourcesSpec) -> MachineSources:
    """Join a parsed pip configuration and a spec's sources; the spec's main index wins."""

    def words(option: str) -> tuple[str, ...]:
        return tuple(configuration.get(option, "").split())

    return MachineSources(
        index=spec.index or configuration.get("index-url") or None,
        extra_indexes=_unique(words("extra-index-url") + spec.extra_indexes),
        find_links=_unique(words("find-links") + spec.find_links),
        no_index=configuration.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        cert=configuration.get("cert") or None,
        trusted_hosts=words("trusted-host"),
        proxy=configuration.get("proxy") or None,
    )


def write_index(
    folders: Iterable[Path],
    target: Path,
    digest: Callable[[Path], str],
    fits: Callable[[str], bool],
) -> None:
    """Write a package index (PEP 503) of the wheels in local folders, with their digests.

    uv unpacks a whole wheel (700 MB of torch) to hash it when its source gives no digest.

    Args:
        folders: Folders with wheels; the first that holds a file name wins.
        target: Existing folder that becomes the index.
        digest: Gives the hexadecimal SHA-256 of a file.
        fits: Tells by file name whether a wheel is of use; others are not hashed.
    """
    from packaging.utils import canonicalize_name

    files: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.whl")):
            if path.name not in files and fits(path.name):
                files[path.name] = path.absolute()
    for name, path in files.items():
        project = target / canonicalize_name(name.partition("-")[0])
        project.mkdir(exist_ok=True)
        with (project / "index.html").open("a") as page:
            # PEP 503 puts the digest into the fragment of the address.
            link = f"{path.as_uri()}#sha256={digest(path)}"
            page.write(f'<a href="{escape(link)}">{escape(name)}</a><br>\n')


def _unique(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _local(link: str) -> Path | None:
    """Return the path that a find-links entry names, or None for a page on the network."""
    parts = urlsplit(link)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(link).expanduser()


def _one_word(link: str) -> str:
    """Write a path so that pip, which splits at white space, takes it as one."""
    path = _local(link)
    return path.absolute().as_uri() if path and " " in link else link
