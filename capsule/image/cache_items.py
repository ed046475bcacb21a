"""What can be deleted of the cache, by kind, with its size and when it was last used."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from capsule.experiment.beneath import clear
from capsule.host.folders import occupied_bytes
from capsule.image.cache import Cache

Derived = Literal["layers", "environments", "unpacked images", "unpacked source trees", "bytecode"]
Downloaded = Literal["packages", "package indexes", "source trees", "data sets"]
CacheKind = Derived | Downloaded
DERIVED: tuple[Derived, ...] = get_args(Derived)  # can be made again without any download
DOWNLOADED: tuple[Downloaded, ...] = get_args(Downloaded)  # may have gone from where it was

# Names that Capsule gives. CAPSULE_CACHE may be a folder that also has files of the user, even in
# folders of the same names, and those are never deleted.
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD, _OBJECT = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{62}")
_INDEX = re.compile(r"[0-9a-f]{16}\.(InRelease|Packages\.xz)")
_LAYER = (".layer.json", ".layer.tar", ".layer.zst")
_FOLDER = (".state", "")
_UV_TAG = "CACHEDIR.TAG"  # which uv writes into its cache


class CacheItem(NamedTuple):
    """Something in the cache that is deleted as a whole.

    Attributes:
        kind: Its kind.
        paths: Its files and folders; what makes it count comes first.
        bytes: Disk space that these take.
        last_used: When a file of it was last read or written, in seconds since the epoch. A file
            system may note a reading only once a day, or never (mount options relatime and
            noatime).
    """

    kind: CacheKind
    paths: tuple[Path, ...]
    bytes: int
    last_used: float

    def delete(self) -> None:
        """Delete it. The caller has :meth:`Cache.exclusive`.

        Raises:
            OSError: Something of it cannot be deleted.
        """
        # The record of a layer or folder goes first. If this is interrupted, the rest does not
        # count without it and is never used.
        for path in self.paths:
            clear(path)


def cache_items(cache: Cache) -> Iterator[CacheItem]:
    """Yield everything that the cache holds, except locks and notes about data sets."""
    for kind, paths in _places(cache.root):
        with suppress(FileNotFoundError):  # another process deleted it meanwhile
            if present := [path for path in paths if path.exists()]:
                yield _item(kind, present)


def scratch_folders(cache: Cache) -> list[Path]:
    """Return where the cache has temporary folders of processes; they need not exist."""
    return [cache.root / store / "scratch" for store in ("", "trees", "data")]


def _places(root: Path) -> Iterator[tuple[CacheKind, list[Path]]]:
    for paths in _together(root / "derived", _LAYER):
        yield "layers", paths
    # These are findings about packages, and SBOMs (Cache.document). Like layers, they are made
    # again without a download.
    yield "layers", _named(root / "documents", _DIGEST)
    for paths in _together(root / "environments", _FOLDER):
        yield "environments", paths
    for paths in _together(root / "roots", _FOLDER):
        yield "unpacked images", paths
    for paths in _together(root / "projects", _FOLDER):
        yield "unpacked source trees", paths
    for paths in _together(root / "bytecode", _FOLDER):
        yield "bytecode", paths
    yield from _downloaded(root)


def _downloaded(root: Path) -> Iterator[tuple[CacheKind, list[Path]]]:
    for path in _objects(root):
        yield "packages", [path]
    yield "package indexes", _named(root / "debian", _INDEX)
    if (root / "uv" / _UV_TAG).is_file():
        yield "package indexes", [root / "uv"]
    yield "package indexes", _named(root / "digests", _DIGEST)
    for path in _objects(root / "trees"):
        yield "source trees", [path]
    for path in (*_objects(root / "data"), *_named(root / "data" / "unpacked", _DIGEST)):
        yield "data sets", [path]


def chosen(
    items: Iterable[CacheItem],
    kinds: Sequence[CacheKind],
    *,
    before: float | None = None,
    keep: int | None = None,
) -> list[CacheItem]:
    """Return the items to delete.

    Args:
        items: All items of the cache.
        kinds: Only items of these kinds.
        before: Only items that were last used before this time, in seconds since the epoch.
        keep: As few items as leave at most this many bytes of all items, the longest unused first.
    """
    everything = list(items)
    wanted = sorted(
        (item for item in everything if item.kind in kinds), key=lambda item: item.last_used
    )
    if before is not None:
        wanted = [item for item in wanted if item.last_used < before]
    if keep is None:
        return wanted
    left, taken = sum(item.bytes for item in everything), []
    for item in wanted:
        if left <= keep:
            break
        taken.append(item)
        left -= item.bytes
    return taken


def _objects(root: Path) -> Iterator[Path]:
    """Yield the files of a content-addressed store, see :meth:`Cache.path`."""
    for folder in _named(root / "objects", _SHARD):
        yield from _named(folder, _OBJECT)


def _together(folder: Path, suffixes: Sequence[str]) -> Iterator[list[Path]]:
    """Yield the entries of a folder that differ in these suffixes only, the record first.

    A killed process leaves an entry without the record that makes it count.
    """
    endings = "|".join(map(re.escape, suffixes))
    found = _named(folder, re.compile(rf"{_DIGEST.pattern}({endings})"))
    for stem in sorted({path.name.partition(".")[0] for path in found} - {""}):
        yield [folder / f"{stem}{suffix}" for suffix in suffixes]
    yield [path for path in found if path.name.startswith(".")]


def _named(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the entries of a folder with a name of a form, and what a killed process left of them.

    :func:`open_atomic` writes into a file with a point before the name and a suffix.
    """
    form = re.compile(rf"{name.pattern}|\.({name.pattern})\.\w{{8}}")
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [entry for entry in entries if form.fullmatch(entry.name)]


def disk_bytes(path: Path) -> int:
    """Return the disk space that a file or a folder takes; links are not followed."""
    return sum(map(occupied_bytes, _facts(path)))


def _item(kind: CacheKind, paths: Sequence[Path]) -> CacheItem:
    facts = [each for path in paths for each in _facts(path)]
    return CacheItem(
        kind=kind,
        paths=tuple(paths),
        bytes=sum(map(occupied_bytes, facts)),
        last_used=max(map(_last_used, facts)),
    )


def _facts(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a file, or of a folder and of everything in it."""
    yield path.lstat()
    for place, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # it was deleted since it was listed
                yield Path(place, name).lstat()


def _last_used(facts: os.stat_result) -> float:
    # To list a folder, as _facts() does, counts as a reading of it. So only its writing is used.
    if stat.S_ISDIR(facts.st_mode):
        return facts.st_mtime
    return max(facts.st_atime, facts.st_mtime)
