"""An image as a folder, for engines that have no store of images.

The folder is what the layers give when they are laid over one another, and nothing else but the
places where an engine mounts something, and ``/etc/hosts``, which container engines bring as well.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from itertools import takewhile
from pathlib import Path, PurePosixPath

from capsule.experiment.canonical import canonical_json, sha256_file, sha256_hex
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Progress
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import EPOCH, TarEntry, rejected
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.making import Layer
from capsule.image.cache import Cache

_LAYOUT = 2  # number of the way in which folders are made and recorded, a part of their keys
_MOUNT_POINTS = ("bytecode", "data", "dev", "out", "proc", "sys", "tmp")
_HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"


def unpacked_root(image: Image, cache: Cache, progress: Progress) -> Path:
    """Return a folder with the files of an image, made once per set of layers and mount points.

    It is written elsewhere and renamed, under a lock, so an interrupted or concurrent unpacking
    leaves nothing that is half there.

    Raises:
        CapsuleError: CAP-E004 a layer is not what its digest says, CAP-I107 it has a whiteout or a
            path that leads through a link, CAP-I110 it is not in canonical form.
    """
    layers = [layer.diff_id for layer in image.layers]
    key = sha256_hex(canonical_json([_LAYOUT, *_MOUNT_POINTS, *layers]))

    def make(root: Path) -> None:
        size = sum(layer.size for layer in image.layers)
        progress(f"unpacking the image ({size >> 20} MiB)")
        unpack(image, root)

    return cache.recorded_folder("roots", key, make)


def unpack(image: Image, root: Path) -> None:
    """Unpack the layers of an image into a new folder. The arguments are :func:`unpacked_root`'s.

    Raises:
        CapsuleError: As :func:`unpacked_root`.
    """
    root.mkdir(mode=0o755)
    folders = {"."}
    for layer in image.layers:
        _check(layer)
        with layer.path.open("rb") as stream:
            for entry in read_layer(stream, f"layer {layer.name}"):
                write_entry(entry, root, folders)
    for name in _MOUNT_POINTS:
        _make_folder(PurePosixPath(name), root, folders, name)
    hosts = root / "etc" / "hosts"
    _make_folder(PurePosixPath("etc"), root, folders, "etc")
    if not os.path.lexists(hosts):
        hosts.write_text(_HOSTS)
    # Writing into a folder changes its time, so the times of folders are set last.
    for name in folders:
        os.utime(root / name, (EPOCH, EPOCH))


def _check(layer: Layer) -> None:
    if (found := f"sha256:{sha256_file(layer.path)}") != layer.diff_id:
        raise CapsuleError(
            "CAP-E004",
            f"layer {layer.name} in {layer.path} has digest {found}, not {layer.diff_id}",
            fix=f"Delete {layer.path} and build again.",
        )


def unpack_layer(archive: Path, owner: str, target: Path, below: str = "") -> None:
    """Write the content of a layer archive, which is in its folder ``below``, into a new folder.

    Raises:
        CapsuleError: CAP-I107 or CAP-I110, it is not a canonical layer without whiteouts.
    """
    target.mkdir(mode=0o755)
    folders = {"."}
    with archive.open("rb") as stream:
        for entry in read_layer(stream, owner):
            path = PurePosixPath(entry.path).relative_to(below)
            write_entry(replace(entry, path=str(path)), target, folders)


def write_entry(entry: TarEntry, root: Path, folders: set[str]) -> None:
    """Write one path. No link is followed, since each folder above it was made here.

    Args:
        entry: The path and its content.
        root: Folder that it is relative to.
        folders: Those below it that were made so far, ``.`` among them; new ones are added.

    Raises:
        CapsuleError: CAP-I107, it leads through a link, is where a folder is, or is too long here.
    """
    try:
        _write_entry(entry, root, folders)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise rejected(
            "CAP-I107",
            f"{entry.owner} has a path of {len(entry.path.encode()):,} bytes, which is too long "
            f"below {root}",
            "Set CAPSULE_CACHE to a folder with a shorter path.",
        ) from error


def _write_entry(entry: TarEntry, root: Path, folders: set[str]) -> None:
    path = PurePosixPath(entry.path)
    if path.name.startswith(".wh."):
        # To engines it means that a lower layer's file is gone. Capsule writes no such layer.
        raise rejected("CAP-I107", f"{entry.owner} has the whiteout {entry.path!r}")
    target = root / path
    if entry.kind == "directory":
        _make_folder(path, root, folders, entry.owner)
        target.chmod(entry.mode)
        return
    _make_folder(path.parent, root, folders, entry.owner)
    if str(path) in folders:
        raise rejected("CAP-I107", f"{entry.owner} has a file where {entry.path!r} is a folder")
    # A file or a link of a lower layer is replaced. Nothing is ever written through a link.
    target.unlink(missing_ok=True)
    if entry.kind == "symlink":
        target.symlink_to(entry.target)
    else:
        with target.open("xb") as stream:
            stream.writelines(entry.content())
        target.chmod(entry.mode)
    os.utime(target, (EPOCH, EPOCH), follow_symlinks=False)


def _make_folder(path: PurePosixPath, root: Path, folders: set[str], owner: str) -> None:
    """Make a folder and those above it, unless this process already has."""
    missing = takewhile(lambda each: str(each) not in folders, (path, *path.parents))
    for each in reversed([*missing]):
        try:
            (root / each).mkdir(mode=0o755)
        except FileExistsError as error:
            raise rejected("CAP-I107", f"{owner} has {each} below a link or a file") from error
        folders.add(str(each))
