"""Folders of the user, the disk space that files take, and what is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from capsule.host.errors import CapsuleError

_BLOCK_BYTES = 512  # the unit of st_blocks on Linux, whatever the file system's is


def user_folder(variable: str, base_variable: str, base: str) -> Path:
    """Return a folder of Capsule's for this user; it need not exist.

    Args:
        variable: Variable of the environment that names the folder itself, such as CAPSULE_CACHE.
        base_variable: Variable that names the folder above it (XDG base directory specification).
        base: The folder above it otherwise, relative to the home directory.

    Raises:
        CapsuleError: CAP-X006, the home directory is not known.
    """
    if own := os.environ.get(variable):
        return Path(own).absolute()
    above = Path(os.environ.get(base_variable, ""))
    # The specification has relative values ignored.
    return (above if above.is_absolute() else home_folder(variable) / base) / "capsule"


def files_beside(path: Path, suffix: str) -> tuple[Path, ...]:
    """Return the files ``NAME.*SUFFIX`` in the folder of a file NAME, in order of their names."""
    names = (each for each in path.parent.iterdir() if each.name.endswith(suffix))
    return tuple(sorted(each for each in names if each.name.startswith(f"{path.name}.")))


def home_folder(variable: str) -> Path:
    """Return the home directory of this user.

    Args:
        variable: Variable of the environment that names a folder to use instead.

    Raises:
        CapsuleError: CAP-X006, it is not known.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise CapsuleError(
            "CAP-X006",
            f"the home directory of uid {os.getuid()} is not known: HOME is not set, and the user "
            "has no entry in the password database",
            fix=f"Set HOME or {variable} to a folder that you may write to.",
        ) from error


def user_path(text: str) -> Path:
    """Return a path that the user wrote, which may begin with ``~`` or ``~USER``.

    Raises:
        ValueError: No file has such a path.
    """
    if "\0" in text:
        raise ValueError("the path has a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError("the home directory that it begins with is not known") from error


def real_path(path: Path) -> Path:
    """Return an absolute path without links; what is at it need not exist.

    For a loop of links, ``Path.resolve()`` raises RuntimeError before Python 3.13.
    """
    return Path(os.path.realpath(path))


def occupied_bytes(facts: os.stat_result) -> int:
    """Return the disk space that a file occupies, of which holes in it are no part.

    Windows does not say that, so it is the file's size there.
    """
    return facts.st_blocks * _BLOCK_BYTES if hasattr(facts, "st_blocks") else facts.st_size


def existing_folder(path: Path) -> Path:
    """Return the folder in which a path is or would be made."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def free_bytes(path: Path) -> int:
    """Return the free disk space where a path is or would be made."""
    return shutil.disk_usage(existing_folder(path)).free
