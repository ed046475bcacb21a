"""Folders that an export makes: complete, or absent."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capsule.host.errors import CapsuleError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``path`` when all of it is written.

    An empty folder at ``path`` is replaced. Missing folders above it are made.

    Raises:
        CapsuleError: CAP-P203, there is a file, or a folder that is not empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CapsuleError(
            "CAP-P203",
            f"{path} exists already, and an export replaces nothing",
            fix="Name another place with --output, or delete it.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # It is made beside its final place, because a rename works within one file system only.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        unfinished.chmod(0o755)  # an export is made to be passed on
        yield unfinished
        with suppress(FileNotFoundError):  # Windows does not replace a folder, even an empty one
            path.rmdir()
        unfinished.replace(path)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
