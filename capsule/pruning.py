"""Freeing disk space: parts of the cache, images in engines, and what killed processes left.

Nothing that is in use is deleted: the cache is held exclusively, images of containers stay, and a
temporary folder belongs to its process for as long as that lives.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capsule.engine.connection import answering_engines
from capsule.engine.images import EngineImage, EngineImages
from capsule.host.owner import abandoned, remove_abandoned
from capsule.image.cache import Cache
from capsule.image.cache_items import CacheItem, disk_bytes, scratch_folders

if TYPE_CHECKING:
    from capsule.engine.containers import ContainerEngine

CONTAINERS = "containers of killed processes in {engine}"
IMAGES = "images in {engine}"
FOLDERS = "folders of killed processes"


class Row(NamedTuple):
    """How much there is of one kind.

    Attributes:
        kind: In words.
        number: How many things.
        bytes: Disk space that their deletion frees.
    """

    kind: str
    number: int
    bytes: int


@dataclass(frozen=True)
class Pruning:
    """The items that are to be deleted.

    Attributes:
        items: Items of the cache.
        images: Images of each engine that answers.
        folders: Temporary folders of processes that were killed, with their sizes.
        containers: How many containers and networks of such processes each engine has.
    """

    items: Sequence[CacheItem] = ()
    images: Sequence[tuple[EngineImages, Sequence[EngineImage]]] = ()
    folders: Sequence[tuple[Path, int]] = ()
    containers: Sequence[tuple[ContainerEngine, int]] = ()

    @property
    def rows(self) -> list[Row]:
        """Number and size of what is to be deleted, by kind; kinds without any are left out."""
        counts: dict[str, list[int]] = {}
        for item in self.items:
            counts.setdefault(item.kind, []).append(item.bytes)
        rows = [Row(kind, len(sizes), sum(sizes)) for kind, sizes in counts.items()]
        rows += [
            Row(IMAGES.format(engine=engine.engine), len(images), engine.freed(images))
            for engine, images in self.images
            if images
        ]
        # Their root is read-only, so they take no disk space worth mentioning.
        rows += [
            Row(CONTAINERS.format(engine=engine.name), number, 0)
            for engine, number in self.containers
        ]
        if self.folders:
            rows.append(Row(FOLDERS, len(self.folders), sum(size for _, size in self.folders)))
        return rows

    def document(self) -> dict[str, Any]:
        """Return the rows as JSON values."""
        return {
            "bytes": sum(row.bytes for row in self.rows),
            "kinds": {row.kind: {"number": row.number, "bytes": row.bytes} for row in self.rows},
        }

    def delete(self, note: Callable[[str], None]) -> None:
        """Delete everything. The caller has the cache exclusively.

        Args:
            note: Told about each image that a container has by now, and each container or network
                of a killed process.

        Raises:
            OSError: A file cannot be deleted.
            CapsuleError: CAP-E006, an engine fails.
        """
        for item in self.items:
            item.delete()
        for container_engine, _ in self.containers:
            container_engine.remove_abandoned(progress=note)
        for engine, images in self.images:
            for image in images:
                if not engine.remove(image):
                    note(f"{engine.engine} keeps {image.id}, which a container uses")
        for place in {folder.parent for folder, _ in self.folders}:
            # All other places are in the cache, which no process of any machine uses now.
            remove_abandoned(place, anywhere=place != Path(tempfile.gettempdir()))


def removable_images() -> Iterator[tuple[EngineImages, list[EngineImage]]]:
    """Yield the engines that answer, each with the images that it could do without."""
    for _, client in answering_engines():
        found = EngineImages(client)
        yield found, found.removable()


def abandoned_containers() -> Iterator[tuple[ContainerEngine, int]]:
    """Yield the engines that have containers or networks of killed processes, and how many."""
    for _, client in answering_engines():
        # Imported only here, because Windows lacks modules that it needs, and has no engines.
        from capsule.engine.containers import ContainerEngine

        engine = ContainerEngine(client)
        if number := engine.count_abandoned():
            yield engine, number


def abandoned_folders(cache: Cache) -> list[tuple[Path, int]]:
    """Return the temporary folders of killed processes, with their sizes in bytes.

    They are in the system's folder for temporary files, and in the cache. Those of other machines
    are among them only in the cache, as no process uses it while it is pruned.
    """
    folders = list(abandoned())
    for place in scratch_folders(cache):
        folders += abandoned(place, anywhere=True)
    found = []
    for folder in folders:
        with suppress(FileNotFoundError):  # another command removed it meanwhile
            found.append((folder, disk_bytes(folder)))
    return found
