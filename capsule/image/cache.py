"""The cache: files by their SHA-256, and whatever can be derived from them again.

Layout under the root: ``objects/ab/cdef…`` (verified packages), ``trees`` (the same, of source
trees), ``data`` (of data sets, and where they lie), ``derived/KEY`` (layer blobs), ``digests`` (of
files elsewhere), ``debian`` (the archive's indexes), ``uv`` (what that program keeps for itself),
``environments`` and ``projects`` (of the plain-process engine), ``roots`` (unpacked images, of
bubblewrap and Apptainer), ``bytecode`` (of what runs import). :mod:`capsule.image.cache_items`
lists what is in it.

Deleting any of it is always safe. Derived files are used as they are, so other users must not write
there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from capsule.experiment.canonical import sha256_file, sha256_hex
from capsule.experiment.files import HAVE_OWNERS, LOCK, READ, open_atomic, write_atomic
from capsule.experiment.lock import LockedDebianPackage, LockedWheel
from capsule.host.code import package_digest
from capsule.host.errors import CapsuleError
from capsule.host.folders import existing_folder, user_folder
from capsule.host.locks import lock_open
from capsule.host.owner import remove_abandoned, temporary_folder
from capsule.host.streams import copy

USE = "use"  # an empty file, on which every process that uses the cache has a shared lock
_DENIED = (errno.EACCES, errno.EROFS)
_MODE = 0o755  # of folders; a umask only takes rights away
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HashMismatchError(CapsuleError):
    """CAP-I301: content is not what its SHA-256 says."""


class Cache:
    """Content-addressed store, shared by every Capsule process of a user.

    Files appear complete or not at all (write, rename), so several processes may use it at once.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = default_root() if root is None else root
        self._used = False

    @property
    def trees(self) -> Cache:
        """A store of its own for source trees, and for how they differ from their commits.

        They come from bundles. Among the packages, an untrusted lock could pin one as a package
        that no index has: an archive may be a tree and a wheel at once.
        """
        return Cache(self.folder("trees"))

    @property
    def data(self) -> Cache:
        """A store of its own for data sets, which come from bundles and from addresses, too."""
        return Cache(self.folder("data"))

    def path(self, sha256: str) -> Path:
        """Return where the content with this hexadecimal SHA-256 is or would be.

        Raises:
            ValueError: ``sha256`` is not 64 lower-case hexadecimal digits.
        """
        if not _SHA256.fullmatch(sha256):
            raise ValueError(f"not a SHA-256: {sha256!r}")
        return self.root / "objects" / sha256[:2] / sha256[2:]

    def has(self, sha256: str) -> bool:
        """Tell whether the content is here. It was checked when it came in.

        Only after :meth:`use` does it stay.
        """
        return self.path(sha256).is_file()

    def package(self, package: LockedDebianPackage | LockedWheel) -> Path:
        """Return a fetched package, whose bytes are the locked ones.

        Raises:
            CapsuleError: CAP-I103, it is not here or damaged.
        """
        path = self.path(package.sha256)
        # For its error, if the file is missing.
        self.size(package)
        if (found := sha256_file(path)) != package.sha256:
            raise CapsuleError(
                "CAP-I103",
                f"{package.name} {package.version} in the cache has SHA-256 {found}, not "
                f"{package.sha256}",
                fix=f"Delete {path} and build again.",
            )
        return path

    def size(self, package: LockedDebianPackage | LockedWheel) -> int:
        """Return the size of a fetched package in bytes.

        Raises:
            CapsuleError: CAP-I103, it is not here.
        """
        try:
            return self.path(package.sha256).stat().st_size
        except FileNotFoundError as error:
            raise CapsuleError(
                "CAP-I103",
                f"{package.name} {package.version} (SHA-256 {package.sha256}) is not in the cache",
                fix="Run 'capsule build' first, which fetches the packages of the lock.",
            ) from error

    def add(self, source: Path, sha256: str) -> Path:
        """Copy ``source`` in and return its place, checking its SHA-256 on the way.

        Raises:
            HashMismatchError: CAP-I301; the cache stays as it was.
        """
        target = self.path(sha256)
        self.folder("objects")
        target.parent.mkdir(mode=_MODE, exist_ok=True)
        with source.open("rb") as given, open_atomic(target) as stream:
            found = copy(given, stream).sha256
            if found != sha256:
                raise HashMismatchError(
                    "CAP-I301",
                    f"{source.name} has SHA-256 {found}, expected {sha256}",
                    fix="Remove the file or source it came from, or lock again if it changed on "
                    "purpose.",
                )
        return target

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file outside the cache, remembered by its state.

        A convenience for resolving; whatever enters the cache is hashed by :meth:`add`.
        """
        known = f"{path.absolute()} {file_state(path.resolve())}"
        note = self.folder("digests") / sha256_hex(os.fsencode(known))
        if not note.exists():
            write_atomic(note, sha256_file(path).encode())
        return note.read_text()

    def document(self, name: str, parts: Iterable[bytes], make: Callable[[], bytes]) -> bytes:
        """Return a document about cached content, and make it if it is new.

        Args:
            name: What it says.
            parts: Everything that it depends on, besides Capsule's own code.
            make: Makes it. What it raises is raised, and nothing is kept.
        """
        digests = [name, package_digest(), *map(sha256_hex, parts)]
        place = self.folder("documents") / sha256_hex(" ".join(digests).encode())
        try:
            return place.read_bytes()
        except FileNotFoundError:
            made = make()
            with suppress(OSError):  # a run that has ended must not fail because it is not kept
                write_atomic(place, made)
            return made

    def recorded_folder(self, kind: str, key: str, make: Callable[[Path], None]) -> Path:
        """Return a folder whose files are executed, made once, and again if anything of it changed.

        It is compared each time with what was made: by the inode, size, mode and time of change of
        every file (:func:`folder_state`), and where these differ by content.

        Args:
            kind: The folder of the cache that it is in.
            key: Its name, which depends on everything that it is made of.
            make: Makes it under another name, in an otherwise empty folder that it may use. What
                it raises is raised, and nothing is kept.
        """
        folder = self.folder(kind) / key
        record = folder.with_name(f"{key}.state")
        while True:
            # On NFS, a look at some ten thousand files takes many seconds, and dozens of jobs may
            # start at once. They look at the same time.
            with self.lock(f"{kind}-{key}", shared=True):
                recorded = _text(record)
                state, _, content = recorded.partition(" ")
                if folder.exists() and state == folder_state(folder):
                    return folder
            with self.lock(f"{kind}-{key}"):
                # What another process has made meanwhile is looked at again.
                if _text(record) == recorded:
                    # A copy of the cache or a backup by hard links changes only times and inodes.
                    # Runs that use the folder must not lose it for that.
                    facts = folder_state(folder), folder_content(folder)
                    if not folder.exists() or facts[1] != content:
                        self._make_folder(folder, make)
                        facts = folder_state(folder), folder_content(folder)
                    # After the folder, which does not count without its record.
                    write_atomic(record, " ".join(facts).encode())
                    return folder

    def _make_folder(self, folder: Path, make: Callable[[Path], None]) -> None:
        # If something cannot be removed, the rename fails.
        shutil.rmtree(folder, ignore_errors=True)
        # A rename, so that nothing that is half made gets the name.
        with self.scratch() as scratch:
            make(scratch / "made")
            (scratch / "made").rename(folder)

    def exists(self) -> bool:
        """Tell whether the folder of the cache has been made.

        Raises:
            CapsuleError: CAP-I308, a file is in its place, or above it.
        """
        try:
            next(self.root.iterdir(), None)
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise _file_in_place(self.root) from error
        return True

    def folder(self, name: str) -> Path:
        """Return an existing folder of the cache, in which no other user can write.

        Raises:
            CapsuleError: CAP-I308, another user can, or a file is in its place; CAP-Y020, its file
                system has no locks.
        """
        for path in (self.root, self.root / name):
            try:
                path.mkdir(mode=_MODE, parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise _file_in_place(path) from error
            # The mode is checked at every use, because a folder that exists already may have any.
            reject_shared(path)
        self._use()
        return self.root / name

    def use(self) -> None:
        """Keep :meth:`exclusive` of other processes out for as long as this object lives.

        Raises:
            CapsuleError: As :meth:`folder`.
        """
        self.folder("objects")

    def require_programs(self) -> None:
        """Check that programs in the cache can be executed, as engines without a daemon do.

        Raises:
            CapsuleError: CAP-E020, its file system is mounted with ``noexec``.
        """
        if os.statvfs(existing_folder(self.root)).f_flag & os.ST_NOEXEC:
            raise CapsuleError(
                "CAP-E020",
                f"the cache {str(self.root)!r} is on a file system whose programs cannot be "
                "executed (noexec)",
                fix="Set CAPSULE_CACHE to a folder on another file system, or use a container "
                "engine.",
            )

    def _use(self) -> None:
        if self._used:
            return
        self._used = True
        try:
            descriptor, _ = _open_lock(self.root / USE)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
            return  # a cache that others prepared, from which this user can only read
        # The kernel releases the lock with its descriptor, also if the process is killed.
        weakref.finalize(self, os.close, descriptor)
        lock_open(descriptor, self.root / USE, shared=True)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other process from using the cache, so that parts of it may be deleted.

        Raises:
            CapsuleError: CAP-I309, another process uses the cache; CAP-Y020, its file system has no
                locks.
            OSError: The user can only read the cache, which others prepared.
        """
        descriptor = os.open(self.root / USE, LOCK, 0o644)
        try:
            if not lock_open(descriptor, self.root / USE, wait=False):
                raise CapsuleError(
                    "CAP-I309",
                    f"another Capsule process is using the cache {self.root}",
                    fix="Wait until runs, builds and verifications have ended.",
                )
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def lock(self, name: str, *, shared: bool = False) -> Iterator[None]:
        """Hold the named lock among all processes that use this cache; waits for it.

        Args:
            name: Its name.
            shared: Whether other processes may hold it as shared at the same time.
        """
        # The file stays: if it were removed, a waiting process would get the lock of a file that no
        # later one sees.
        descriptor, for_reading = _open_lock(path := self.folder("locks") / name)
        try:
            # A reader only has to wait for processes that write. On NFS, an exclusive lock needs a
            # file that is open for writing (flock(2)).
            lock_open(descriptor, path, shared=shared or for_reading)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give an empty folder on the cache's file system, removed at the end."""
        place = self.folder("scratch")
        # This removes what killed processes left. Folders of living ones are locked and stay.
        remove_abandoned(place)
        with temporary_folder("", place) as folder:
            yield folder


def _text(file: Path) -> str:
    """Return the text of a file, or an empty text if the file does not exist."""
    return file.read_text() if file.exists() else ""


def file_state(path: str | Path) -> list[int]:
    """Return numbers that change whenever a file does: its inode, size, mode and time of change.

    The kernel sets that time (``st_ctime``); no program chooses it. Links are not followed.
    """
    facts = os.lstat(path)
    return [facts.st_ino, facts.st_size, facts.st_mode, facts.st_ctime_ns]


def folder_state(folder: Path) -> str:
    """Return a digest of every path below a folder and of when it was last changed."""
    digest = hashlib.sha256()
    # An environment has some ten thousand files, and every run asks: no Path for each.
    for place, folders, files in os.walk(folder):
        # os.walk() descends in the order of this list, which must not be the file system's.
        folders.sort()
        below = os.path.relpath(place, folder)
        for name in sorted([*folders, *files]):
            facts = [below, name, *file_state(os.path.join(place, name))]  # noqa: PTH118
            # The names need not be UTF-8, which encode() alone would not take.
            digest.update(ascii(facts).encode())
    return digest.hexdigest()


def folder_content(folder: Path) -> str:
    """Return a digest of every path below a folder, its mode and what is in it."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(place, name)
            mode, content = path.lstat().st_mode, ""
            if stat.S_ISLNK(mode):
                content = str(path.readlink())
            elif stat.S_ISREG(mode):
                # What the user cannot read is the same only if nothing of it has changed.
                readable = mode & stat.S_IRUSR
                content = sha256_file(path) if readable else str(file_state(path))
            digest.update(ascii([os.path.relpath(path, folder), mode, content]).encode())
    return digest.hexdigest()


def _open_lock(path: Path) -> tuple[int, bool]:
    """Open a file that processes lock.

    Returns:
        Its descriptor, and whether it is open for reading only, as in a cache that others prepared.

    Raises:
        OSError: It cannot be opened, or is missing and cannot be made.
    """
    try:
        return os.open(path, LOCK, 0o644), False
    except OSError as error:
        if error.errno not in _DENIED or not path.exists():
            raise
        return os.open(path, READ), True


def default_root() -> Path:
    """Return ``$CAPSULE_CACHE``, else ``$XDG_CACHE_HOME/capsule``, else ``~/.cache/capsule``."""
    return user_folder("CAPSULE_CACHE", "XDG_CACHE_HOME", ".cache")


def _file_in_place(path: Path) -> CapsuleError:
    return CapsuleError(
        "CAP-I308",
        f"the cache folder {path} cannot be made: a file is in its place, or above it",
        fix="Set CAPSULE_CACHE to a folder that belongs to you.",
    )


def reject_shared(path: Path) -> None:
    """Reject a folder whose layers or environments another user could have written.

    Nothing is known of that on Windows, where nothing of the cache is executed.

    Raises:
        CapsuleError: CAP-I308, it belongs to another user, or others may write to it.
    """
    if not HAVE_OWNERS:
        return
    facts = path.stat()
    # A folder of root is accepted, because root could write to any other folder as well.
    whose = f"belongs to uid {facts.st_uid}" if facts.st_uid not in (os.geteuid(), 0) else None
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        whose = f"is writable by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    if whose is not None:
        raise CapsuleError(
            "CAP-I308",
            f"the cache folder {path} {whose}, so its contents may not be Capsule's",
            fix="Delete it, or set CAPSULE_CACHE to a folder that belongs to you and that no one "
            "else can write to.",
        )
