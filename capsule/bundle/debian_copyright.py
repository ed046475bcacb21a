"""The copyright files of Debian packages, where they are machine-readable.

Source: Machine-readable ``debian/copyright`` file, version 1.0 (DEP-5). A file describes a source
package, so the licences of a binary package are among those that it names.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from capsule.image.archives.layers import TarEntry, read_tar

MAX_LINKS = 8  # followed for one file, at most

_DOCUMENTATION = "usr/share/doc"
_FORMAT = re.compile(r"https?://www\.debian\.org/doc/packaging-manuals/copyright-format/1\.0/?")

# Section 7.1, names and versions that mean one SPDX identifier; in lower case, since case does not
# count. 'MIT', 'CC0', 'Artistic', 'Python' and 'GFDL' are left out: each may mean several.
SPDX_IDS = {
    "apache-2.0": "Apache-2.0",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "expat": "MIT",
    "isc": "ISC",
    "mpl-1.1": "MPL-1.1",
    "mpl-2.0": "MPL-2.0",
    "zlib": "Zlib",
    **{
        f"{family.lower()}-{number}{later}": f"{family}-{version}-{meaning}"
        for family, versions in (
            ("GPL", {"1": "1.0", "2": "2.0", "3": "3.0"}),
            ("LGPL", {"2": "2.0", "2.1": "2.1", "3": "3.0"}),
        )
        for short, version in versions.items()
        for number in {short, version}
        for later, meaning in (("", "only"), ("+", "or-later"))
    },
}


def declared_licences(text: str) -> tuple[str, ...] | None:
    """Return the licences of a copyright file's ``Files`` paragraphs, in order, each once.

    Returns:
        The first line of each ``License`` field, as it stands: a short name, or several that
        ``and``, ``or`` and ``with`` join. None if the file is not in the format, or if a paragraph
        names no licence.
    """
    try:
        # Paragraphs are lines without an empty one between them.
        blocks = re.split(r"\n(?:[ \t]*\n)+", text.strip("\n"))
        header, *paragraphs = [_fields(block) for block in blocks if block.strip()]
    except ValueError:
        return None
    if not _FORMAT.fullmatch(header.get("format", "")):
        return None
    found = [fields.get("license", "") for fields in paragraphs if "files" in fields]
    return tuple(dict.fromkeys(found)) if found and all(found) else None


def copyright_files(layer: Path, packages: Iterable[str]) -> dict[str, bytes]:
    """Read the copyright files of packages out of a layer archive.

    Args:
        layer: The uncompressed tar archive.
        packages: Names of Debian packages. One whose file is not there is left out.

    Raises:
        CapsuleError: CAP-I104, CAP-I107 or CAP-I108, the archive is malformed.
    """
    with layer.open("rb") as stream:
        entries = {
            entry.path: entry
            for entry in read_tar(stream, layer.name)
            if entry.path.startswith(f"{_DOCUMENTATION}/")
        }
        files = {
            name: _followed(f"{_DOCUMENTATION}/{name}/copyright", entries) for name in packages
        }
        return {name: b"".join(file.content()) for name, file in files.items() if file}


def _followed(path: str, entries: Mapping[str, TarEntry]) -> TarEntry | None:
    """Return the file that a path leads to, through links: packages share a documentation."""
    for _ in range(MAX_LINKS + 1):  # the last step finds the file
        # The file itself may be a link, or any of the folders that it is in.
        steps = [path, *map(str, PurePosixPath(path).parents)]
        links = (step for step in steps if step in entries and entries[step].kind == "symlink")
        link = next(links, None)
        if link is None:
            found = entries.get(path)
            return found if found and found.kind == "file" else None
        # With the slash in front, '..' leads at most to the root of the image.
        target = posixpath.join("/", posixpath.dirname(link), entries[link].target)
        path = posixpath.normpath(target).lstrip("/") + path.removeprefix(link)
    return None


def _fields(paragraph: str) -> dict[str, str]:
    """Return the first line of each field of a paragraph, by its name in lower case.

    Raises:
        ValueError: A line is neither a field nor the continuation of one.
    """
    fields = {}
    for line in paragraph.splitlines():
        if line.startswith(("#", " ", "\t")):
            continue
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"{line!r} is not a field")
        fields[name.lower()] = value.strip()
    return fields
