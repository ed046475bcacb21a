"""Folders that an export makes: complete, or absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capsule.host.errors import CapsuleError
from capsule.host.outputs import scratch_folder

TAKEN = "CAP-P203"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``path`` when all of it is written.

    Raises:
        CapsuleError: CAP-P203, as :func:`new_folders`.
    """
    with new_folders(path.parent) as make:
        yield make(path)


@contextmanager
def new_folders(parent: Path) -> Iterator[Callable[[Path], Path]]:
    """Yield a function that makes a folder to write into, and returns it.

    All of these folders get the paths that the function was given at the end of the block, or none
    does after an error. Empty folders at these paths are replaced, and missing folders above them
    are made.

    Args:
        parent: An existing or a new folder, which has all of the paths below it.

    Raises:
        CapsuleError: CAP-P203, at one of the paths is a file, or a folder that is not empty.
    """
    made: dict[Path, Path] = {}
    with scratch_folder(parent) as scratch:

        def make(path: Path) -> Path:
            if path in made.values() or not _is_free(path):
                raise _taken(path)
            unfinished = scratch / str(len(made))
            unfinished.mkdir()
            made[unfinished] = path
            return unfinished

        yield make
        for unfinished, path in made.items():
            _rename(unfinished, path)


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _rename(unfinished: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with suppress(FileNotFoundError):  # Windows does not replace a folder, even an empty one
            path.rmdir()
        unfinished.rename(path)
    except OSError as error:
        if _is_free(path):
            raise
        raise _taken(path) from error  # another process made it since it was free


def _taken(path: Path) -> CapsuleError:
    """Return the error of a place where something is already."""
    return CapsuleError(
        TAKEN,
        f"{path} exists already, and an export replaces nothing",
        fix="Name another place with --output, or delete it.",
    )
