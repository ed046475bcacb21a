"""How a task sees data sets: mounted read-only below one folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from capsule.experiment import contract
from capsule.host.owner import temporary_folder

# What is mounted where, in the order in which it must be.
Mounts = list[tuple[Path, str]]


@contextmanager
def data_mounts(data: Mapping[str, Path]) -> Iterator[Mounts]:
    """Yield what to mount, read-only, for a task to see ``data``; nothing if it has none.

    The first mount is a folder of mount points for the others, which no engine has to make in an
    image that is read-only.

    Args:
        data: Files and folders by their paths below the folder of data sets
            (:class:`capsule.engine.interface.Task`).
    """
    if not data:
        yield []
        return
    with temporary_folder("capsule-data-") as folder:
        for below, source in data.items():
            point = folder / below
            if source.is_dir():
                point.mkdir(parents=True)
            else:
                point.parent.mkdir(parents=True)
                point.touch()
        # The user of a container may be another one than the owner, for whom alone the folder was
        # made.
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o755 if each.is_dir() else 0o644)
        sources = [
            (path.resolve(), f"{contract.DATA_FOLDER}/{name}") for name, path in data.items()
        ]
        yield [(folder, contract.DATA_FOLDER), *sources]


def data_variables(data: Mapping[str, Path]) -> dict[str, str]:
    """Return the variable by which a task with mounts finds its data sets."""
    return {contract.DATA_VARIABLE: contract.DATA_FOLDER} if data else {}


def link_data(data: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Make links to data sets in a folder, for a task that can have no mounts.

    Returns:
        The variable by which the task finds them.
    """
    if not data:
        return {}
    for below, source in data.items():
        link = folder / below
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source.resolve())
    return {contract.DATA_VARIABLE: str(folder)}
