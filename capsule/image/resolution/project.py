"""The source tree of a user's program: captured when a spec is locked, a layer of its image.

The tree becomes one canonical layer archive (:mod:`capsule.image.archives.layers`), kept in the
cache under its SHA-256, which is also the identity of the layer. What git says about the tree is
recorded beside it; the tree is what runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path, PurePosixPath

from capsule.experiment import contract
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import LockedGit, LockedProject
from capsule.experiment.patterns import chosen
from capsule.experiment.spec import CodeSpec
from capsule.host.encoding import is_utf8
from capsule.host.errors import CapsuleError
from capsule.host.folders import real_path
from capsule.host.owner import HELD
from capsule.host.run_directory import LOCK, STUDY_LOCK
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import (
    TarEntry,
    file_chunks,
    plain_path,
    rejected,
    unchanged_chunks,
    write_tar,
)
from capsule.image.cache import Cache
from capsule.image.resolution.credentials import find_credential, is_credential_name

FOLDER = contract.PROJECT_FOLDER.removeprefix("/")  # a path of the layer
MAX_FILES = 10_000
MAX_BYTES = 256 << 20

_OWNER = "the source tree"
# The first four keep the user's configuration of git from changing the diff.
_DIFF_OPTIONS = (
    *("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames"),
    *("--binary", "--full-index", "--submodule=diff", "--relative"),
    "--irreversible-delete",  # what a deleted file held is no part of the tree
)
_COMMITS = 1_000  # that git is asked for at a time
# What Capsule itself leaves beside a spec must not change the tree's identity.
_OWN_FILES = (
    *("*.capsule.tar", "*.capsule-study.tar", "*.lock.json", "*.receipt.json", "*.sshsig"),
    *("verify-report.json", "events.out.tfevents.*.capsule"),
)
# What is in the first bytes of its files whose names the user chooses, by their suffix.
_OWN_HEADS = {
    ".csv": re.compile(rb"\Arun,metric,step,episode,value,time\n"),
    ".html": re.compile(rb'<meta name="generator" content="Capsule">'),
    ".json": re.compile(rb'\A\{\s*"schema":\s*"capsule/(verify-report|vary-report|divergence)/'),
}
_HEAD = 1024  # bytes
_LEFT_OUT = ("__pycache__", ".git")
# The file that Capsule writes first into a folder, and what is in it.
_OWN_FOLDERS = {
    LOCK: b'"schema":"capsule/lock/v1"',
    STUDY_LOCK: b'"schema":"capsule/study-lock/v1"',
}
# The name of what a killed process left of a file that it was writing (write_atomic).
_REMAINS = re.compile(r"\.(.+)\.[a-z0-9_]{8}")


def capture_project(
    code: CodeSpec, base: Path, cache: Cache, *, leave_out: Collection[Path] = ()
) -> LockedProject:
    """Take a source tree into the cache and describe it.

    In a git work tree its files are those that git tracks or would not ignore; elsewhere all are.
    Compiled Python files, git's own folder, run directories, folders of studies and the files that
    Capsule itself writes (bundles, locks, receipts, reports, exported metrics) never are.

    Args:
        code: Where the tree is, and which files of it.
        base: The folder that ``code.path`` is relative to.
        cache: Keeps the archive, and git's diff.
        leave_out: Files and folders that are no part of the tree, such as the spec itself.

    Raises:
        CapsuleError: CAP-L201 the folder cannot be read, CAP-L202 git cannot be asked, CAP-L203
            the tree is empty, CAP-L204 it is too large, CAP-L205 a file of it cannot be taken,
            CAP-L206 a file of it, or git's diff, seems to hold a credential.
    """
    tree = _Tree(
        root=real_path(base / code.path),
        patterns=code.files,
        leave_out=frozenset(map(real_path, leave_out)),
    )
    try:
        reason = "" if tree.root.is_dir() else "is not a folder"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    if reason:
        raise _rejected("CAP-L201", f"code.path {code.path!r}: {tree.root} {reason}")
    # In a submodule or a linked work tree, .git is a file.
    repository = any((folder / ".git").exists() for folder in (tree.root, *tree.root.parents))
    listed = _git_files(tree.root) if repository else _all_files(tree.root)
    # git lists a file with a merge conflict several times, and tracked files that are gone as well.
    names = [name for name in sorted(set(listed)) if tree.takes(name) and tree.holds(name)]
    if not names:
        raise _rejected("CAP-L203", f"{tree.root} contains no file that code.files selects")
    if len(names) > MAX_FILES:
        raise _too_large(tree, f"{len(names):,} files, more than {MAX_FILES:,}")
    sha256, size = _archive(tree, names, cache)
    # The facts are those of the archive: in the tree, a file may have changed since it was read.
    facts, _ = read_project(cache.trees.path(sha256))
    git = _git_facts(tree, names, cache) if repository else None
    return LockedProject(sha256=sha256, size=size, files=facts, git=git)


def project_archive(project: LockedProject, cache: Cache) -> Path:
    """Return the tree's layer archive.

    Raises:
        CapsuleError: CAP-I112 it is not in the cache, CAP-I110 the lock lists other files.
    """
    if not cache.trees.has(project.sha256):
        raise CapsuleError(
            "CAP-I112",
            f"the source tree {project.sha256} of the lock is not in the cache",
            fix="Build from the spec instead of the lock, with the tree beside it; or verify a "
            "bundle, which carries it.",
        )
    archive = cache.trees.path(project.sha256)
    check_project(project, archive)
    return archive


def check_project(project: LockedProject, archive: Path) -> None:
    """Check that an archive is the locked tree.

    Raises:
        CapsuleError: CAP-I110, it is another; the first file that differs is named.
    """
    facts, digest = read_project(archive)
    paths = sorted({*project.files, *facts})
    for path in paths:
        locked, found = project.files.get(path, "missing"), facts.get(path, "missing")
        if locked != found:
            raise _supplied(f"{path} is {found}, the lock says {locked}")
    if digest != project.sha256:
        raise _supplied(f"its digest is {digest}, the lock says {project.sha256}")


def read_project(archive: Path) -> tuple[dict[str, str], str]:
    """Return the facts of an archive, path to fact as in a lock, and its canonical digest.

    Raises:
        CapsuleError: CAP-I107 or CAP-I110, it is not one of Capsule's own or holds what it may not.
    """
    digest = hashlib.sha256()
    # A path below a link of the same archive ends here: write_tar() rejects it.
    with archive.open("rb") as stream:
        facts = write_tar(read_layer(stream, "the archive of the source tree"), digest.update)
    prefix = f"{FOLDER}/"
    for path, fact in facts.items():
        # The archive is a layer of the image, where such a file could replace the training code.
        if not path.startswith(prefix) and (path, fact) != (FOLDER, "directory"):
            raise _supplied(f"{path!a} is not in the folder {contract.PROJECT_FOLDER}")
    files = {path.removeprefix(prefix): fact for path, fact in facts.items() if fact != "directory"}
    return files, digest.hexdigest()


@dataclass(frozen=True)
class _Tree:
    """Which files are captured.

    Attributes:
        root: The tree's folder.
        patterns: ``code.files``.
        leave_out: Files and folders that are no part of it.
        own: Whether each folder so far is one that Capsule made.
    """

    root: Path
    patterns: tuple[str, ...]
    leave_out: frozenset[Path]
    own: dict[Path, bool] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """Tell whether a path belongs to the tree, if it is there."""
        parts = PurePosixPath(name).parts
        path = self.root / name
        remains = _REMAINS.fullmatch(parts[-1])
        called = remains[1] if remains else parts[-1]
        own = any(part in _LEFT_OUT or part.endswith(HELD) for part in parts)
        own = own or chosen(called, _OWN_FILES)
        own = own or _is_own(path, PurePosixPath(called).suffix)
        left_out = any(each in self.leave_out for each in (path, *path.parents))
        return chosen(name, self.patterns) and not own and not left_out

    def accepts_credentials(self, name: str) -> bool:
        """Tell whether ``code.files`` names a path itself, rather than by a pattern."""
        return name in self.patterns

    def holds(self, name: str) -> bool:
        """Tell whether a path is there and not of a run directory or of the folder of a study."""
        path = self.root / name
        inside = takewhile(lambda folder: folder != self.root, path.parents)
        return os.path.lexists(path) and not any(map(self._made_by_capsule, inside))

    def _made_by_capsule(self, folder: Path) -> bool:
        if folder not in self.own:
            self.own[folder] = any(
                schema in _content(folder / name) for name, schema in _OWN_FOLDERS.items()
            )
        return self.own[folder]


def _content(file: Path, most: int = -1) -> bytes:
    """Return the content of a file, or its first ``most`` bytes; no bytes if it does not exist."""
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as stream:
            return stream.read(most)
    except FileNotFoundError:  # a program removed it meanwhile
        return b""
    except OSError as error:
        raise _not_taken(str(file), f"cannot be read: {error.strerror}") from error


def _is_own(file: Path, suffix: str) -> bool:
    """Tell from its first bytes whether Capsule wrote a file, as a report or an export."""
    expected = _OWN_HEADS.get(suffix)
    return expected is not None and expected.search(_content(file, _HEAD)) is not None


def _archive(tree: _Tree, names: list[str], cache: Cache) -> tuple[str, int]:
    """Write the layer archive into the cache; return its digest and its size."""
    digest = hashlib.sha256()
    with cache.scratch() as scratch:
        path = scratch / "project.tar"
        with path.open("wb") as stream:

            def write(data: bytes) -> None:
                digest.update(data)
                stream.write(data)
                if stream.tell() > MAX_BYTES:
                    raise _too_large(tree, f"more than {MAX_BYTES >> 20} MiB")

            write_tar((_entry(tree, name) for name in names), write)
            size = stream.tell()
        cache.trees.add(path, digest.hexdigest())
    return digest.hexdigest(), size


def _entry(tree: _Tree, name: str) -> TarEntry:
    """Return the entry of one file; what is neither file nor harmless link is rejected."""
    path = tree.root / name
    try:
        place = f"{FOLDER}/{plain_path(name)}"
    except ValueError as error:
        raise CapsuleError(
            "CAP-L205",
            f"the source tree has the unsafe path {name!a}: {error}",
            fix="Rename it, exclude its folder with code.files, or have git ignore it.",
        ) from error
    try:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            return TarEntry(place, _OWNER, "symlink", 0o777, target=_safe_target(tree.root, name))
        if not stat.S_ISREG(facts.st_mode):
            raise _not_taken(name, "is a pipe, socket or device")
        if not tree.accepts_credentials(name):
            _reject_credentials(name, file_chunks(path))
        # As git has it: all other bits depend on the umask with which the tree was checked out.
        mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
        content = partial(unchanged_chunks, path, facts.st_size, partial(_not_taken, name))
        return TarEntry(place, _OWNER, "file", mode, facts.st_size, content)
    except OSError as error:
        raise _not_taken(name, f"cannot be read: {error.strerror}") from error


def _reject_credentials(name: str, content: Iterable[bytes]) -> None:
    if is_credential_name(name):
        raise _credential(name, "has a name that is typical of credentials")
    if kind := find_credential(content):
        raise _credential(name, f"holds {kind}")


def _safe_target(root: Path, name: str) -> str:
    """Return where a symbolic link points, if that is inside the tree."""
    target = str((root / name).readlink())
    # Each link of a chain may stay inside while the chain leads outside, so all are followed.
    lands = Path(os.path.realpath(root / name))
    if target.startswith("/") or not lands.is_relative_to(root):
        raise _not_taken(name, f"is a link to {target!r}, outside of the tree")
    if not is_utf8(target):
        raise _not_taken(name, f"is a link to {target!r}, which is not UTF-8")
    return target


def _all_files(root: Path, below: str = "") -> Iterator[str]:
    """Yield every path below ``root`` that is not a folder."""
    folder = root / below
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if below and isinstance(error, FileNotFoundError):
            return  # a program removed it meanwhile, such as a run in the tree
        raise CapsuleError(
            "CAP-L201",
            f"code.path: {folder} cannot be read: {error.strerror}",
            fix="Change the permissions of this folder, or move it out of the tree.",
        ) from error
    for entry in found:
        name = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _all_files(root, name)
        else:
            yield name


def _git_files(root: Path) -> list[str]:
    """Return what git tracks or would not ignore; in nested repositories likewise."""
    names = []
    for name in _git_names(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"):
        path = root / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository of its own
            nested = _git_files(path) if (path / ".git").exists() else []
            names += [f"{name.rstrip('/')}/{inner}" for inner in nested]
        else:
            names.append(name)
    return names


def _git_facts(tree: _Tree, names: list[str], cache: Cache) -> LockedGit | None:
    """Describe how the tree differs from its last commit; None before its branch has one."""
    # Other branches may have commits. Without the option, this fails for a branch without any.
    if not _git(tree.root, "rev-parse", "--revs-only", "HEAD"):
        return None
    changed = _git_names(tree.root, "diff", "--name-only", "-z", "--relative", "HEAD")
    diff = _git_diff(tree, [name for name in changed if tree.takes(name)])
    if diff:
        with cache.scratch() as scratch:
            (scratch / "diff").write_bytes(diff)
            cache.trees.add(scratch / "diff", sha256_hex(diff))
    tracked = set(_git_names(tree.root, "ls-files", "-z", "--recurse-submodules"))
    untracked = tuple(name for name in names if name not in tracked)
    return LockedGit(
        commit=_last_commit(tree, names),
        dirty=bool(diff or untracked),
        diff=sha256_hex(diff) if diff else None,
        untracked=untracked,
    )


def _git_diff(tree: _Tree, names: list[str]) -> bytes:
    """Return how files differ from the last commit; of those that are gone, only that they are."""
    diffs = []
    # The files are compared one by one: an error names the file, and a file that the spec names may
    # contain what looks like a credential.
    for name in names:
        diff = _git(tree.root, "diff", *_DIFF_OPTIONS, "HEAD", "--", f":(literal){name}")
        if not tree.accepts_credentials(name) and (kind := find_credential([diff])):
            raise _credential(
                name, f"differs from its last commit, and the difference contains {kind}"
            )
        diffs.append(diff)
    return b"".join(diffs)


def _last_commit(tree: _Tree, names: list[str]) -> str:
    """Return the last commit that changed a file of the tree, or a submodule with such a file."""
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    for commit, changed in _commits(tree.root):
        if any(tree.takes(name) or name in folders for name in changed):
            return commit
    return _git(tree.root, "rev-parse", "HEAD").decode().strip()


def _commits(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the commits that changed a folder, newest first, with the paths that each changed."""
    options = ("-z", "--name-only", "--no-renames", "--relative", "--no-show-signature", "-c")
    for skipped in count(0, _COMMITS):
        found: list[tuple[str, list[str]]] = []
        page = (f"--max-count={_COMMITS}", f"--skip={skipped}")
        for word in _git_names(root, "log", *options, "--format=/%H", *page, "--", "."):
            if word.startswith("/"):  # as no path does
                found.append((word[1:], []))
            elif path := word.removeprefix("\n"):  # before the first path, or alone for a merge
                found[-1][1].append(path)
        yield from found
        if len(found) < _COMMITS:
            return


def _git_names(root: Path, *arguments: str) -> list[str]:
    return os.fsdecode(_git(root, *arguments)).split("\0")[:-1]


def _git(root: Path, *arguments: str) -> bytes:
    """Ask git about ``root``; hooks and variables of a surrounding git do not count."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "-c", "core.quotePath=false", *arguments],
            # Without optional locks, git does not rewrite the index of a repository that is in use.
            env={**variables, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise _rejected(
            "CAP-L202", f"{root} is in a git work tree, and git is not installed"
        ) from error
    if done.returncode:
        said = " ".join(os.fsdecode(done.stderr).split())
        raise _rejected("CAP-L202", f"git {arguments[0]} fails in {root}: {said}")
    return done.stdout


def _rejected(code: str, message: str) -> CapsuleError:
    return CapsuleError(code, message, fix=_FIXES[code])


_FIXES = {
    "CAP-L201": "Name the folder of the program in code.path, relative to the spec.",
    "CAP-L202": "Install git and make 'git status' work there, or move the tree out of the "
    "repository.",
    "CAP-L203": "Correct code.path or code.files; files that git ignores are excluded.",
}


def _too_large(tree: _Tree, what: str) -> CapsuleError:
    return CapsuleError(
        "CAP-L204",
        f"the source tree {tree.root} is too large: {what}",
        fix="Exclude data and results with code.files, e.g. ['*', '!data/*'], or have git ignore "
        "them.",
    )


def _not_taken(name: str, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-L205",
        f"{name} of the source tree {reason}",
        fix=f"Exclude it with code.files: ['*', '!{name}'], or have git ignore it.",
    )


def _credential(name: str, reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-L206",
        f"{name} of the source tree {reason}, and bundles would publish it",
        fix=f"Exclude it with code.files: ['*', '!{name}'], or have git ignore it. If it is not "
        f"a secret, name it: code.files: ['*', '{name}'].",
    )


def _supplied(message: str) -> CapsuleError:
    return rejected(
        "CAP-I110",
        f"a supplied source tree was rejected: {message}",
        "Ask for an unmodified bundle, or build from the spec.",
    )
