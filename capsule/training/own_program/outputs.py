"""The working folder of a user program: a copy of the source tree, compared with it at the end.

The lock contains a fact for each path of the source tree: ``file MODE SHA256`` or ``symlink
TARGET``. The same facts are read from the working folder, so outputs are recognised by their
content, and not by the times of files.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path

from capsule.experiment import contract
from capsule.experiment.beneath import (
    FolderEntry,
    UnboundedError,
    clear,
    entries_beneath,
    open_beneath,
)
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.contract import MAX_OUTPUTS, Job, Output, Outputs
from capsule.experiment.errors import CapsuleError
from capsule.experiment.files import open_regular
from capsule.experiment.patterns import chosen
from capsule.experiment.trainers import CommandTrainer
from capsule.training.state.source_tree import project_folder

CHECK_SECONDS = 5.0  # between two checks of the working folder while the program runs
_CHECK_SHARE = 20  # a check may take at most this fraction (1/20) of the time between two


def is_resumed(directory: Path, trainer: CommandTrainer) -> bool:
    """Return whether a program resumes from its state; otherwise it starts, or starts over."""
    state = directory / contract.STATE
    return trainer.resumable and state.is_dir() and any(state.iterdir())


def make_workspace(directory: Path, job: Job, trainer: CommandTrainer) -> bool:
    """Make the working folder and the state folder, or keep them; return whether they were kept.

    Raises:
        CapsuleError: CAP-T305, the source tree in the image is not the locked one.
    """
    workspace, state = directory / contract.WORKSPACE, directory / contract.STATE
    if is_resumed(directory, trainer):
        return True
    # A program that starts over must find the same files as one that was not interrupted.
    for folder in (workspace, state):
        clear(folder)
    state.mkdir()
    if job.spec.code is None:
        workspace.mkdir()
    else:
        # Links are copied as links, as in the locked tree, and are not followed.
        shutil.copytree(project_folder(), workspace, symlinks=True)
    # The copy is checked, and not its source, because the program uses the copy.
    _check_source(workspace, job.tree)
    return False


def collect_outputs(directory: Path, tree: Mapping[str, str], trainer: CommandTrainer) -> Outputs:
    """Return the differences of the working folder from the source tree, by content.

    Args:
        directory: The run directory.
        tree: Path to fact of the source tree, as in the lock.
        trainer: The spec's section ``trainer``, whose ``outputs`` select paths.

    Raises:
        CapsuleError: CAP-T303, a name is not UTF-8, there are more than :data:`MAX_OUTPUTS`, or a
            file cannot be read.
    """
    entries = _entries(directory / contract.WORKSPACE)
    # Checked before any content is read, because hashing everything may take long.
    _check_limits(entries, tree, trainer)
    files, kept = {}, set()
    for entry in entries:
        if not _is_content(entry):
            continue
        kept.add(entry.path)
        if chosen(entry.path, trainer.outputs):
            output = _output(directory / contract.WORKSPACE, entry)
            if output.fact != tree.get(entry.path):
                files[entry.path] = output
    empty_folders = tuple(path for path in _empty_folders(entries) if chosen(path, trainer.outputs))
    # Checked again, now including changed files of the source tree, which only their content shows.
    _check_number(len(files) + len(empty_folders))
    printed = None
    if trainer.standard_output:
        with open_regular(directory / contract.STANDARD_OUTPUT, follow=False) as stream:
            printed = _hashed(stream)
    return Outputs(
        files=files,
        deleted=tuple(
            path for path in sorted(tree) if path not in kept and chosen(path, trainer.outputs)
        ),
        empty_folders=empty_folders,
        standard_output=printed,
    )


class Watch:
    """Checks the working folder from time to time while the program runs.

    Attributes:
        error: The reason why the outputs cannot be claimed; None as long as there is none.
    """

    def __init__(self, directory: Path, tree: Mapping[str, str], trainer: CommandTrainer) -> None:
        """Watch the working folder; the arguments are those of :func:`collect_outputs`."""
        self._workspace = directory / contract.WORKSPACE
        self._tree = tree
        self._trainer = trainer
        self._next = time.monotonic() + CHECK_SECONDS
        self.error: CapsuleError | None = None

    def exceeded(self) -> bool:
        """Return whether the program has written outputs that cannot be claimed."""
        started = time.monotonic()
        if self.error is None and started >= self._next:
            try:
                _check_limits(_entries(self._workspace), self._tree, self._trainer)
            except CapsuleError as error:
                self.error = error
            ended = time.monotonic()
            self._next = ended + max(CHECK_SECONDS, _CHECK_SHARE * (ended - started))
        return self.error is not None


def _check_source(workspace: Path, tree: Mapping[str, str]) -> None:
    """Check that the program starts with the locked source tree."""
    entries = [entry for entry in _entries(workspace) if _is_content(entry)]
    found = {entry.path: _output(workspace, entry).fact for entry in entries}
    for path in sorted({*tree, *found}):
        locked, here = tree.get(path, "missing"), found.get(path, "missing")
        if locked != here:
            raise CapsuleError(
                "CAP-T305",
                f"the source tree is not the locked one: {path!a} is {here}, but in the "
                f"lock it is {locked}",
                fix="Remove the unpacked trees from Capsule's cache, or build the image again.",
            )


def _entries(workspace: Path) -> list[FolderEntry]:
    """Return everything in the working folder, in order of paths."""
    try:
        return sorted(entries_beneath(workspace), key=lambda entry: entry.path)
    except UnboundedError as error:
        raise _unclaimable(f"the working folder cannot be listed: {error}") from error
    except OSError as error:
        raise _unreadable(str(error.filename), error) from error


def _check_limits(
    entries: list[FolderEntry], tree: Mapping[str, str], trainer: CommandTrainer
) -> None:
    """Check the names and the number of new outputs, without reading their content."""
    new = [entry.path for entry in entries if _is_content(entry) and entry.path not in tree]
    new += _empty_folders(entries)
    outputs = [path for path in new if chosen(path, trainer.outputs)]
    for path in outputs:
        _check_utf8(path, f"the program wrote {path!a}")
    _check_number(len(outputs))


def _check_number(outputs: int) -> None:
    if outputs > MAX_OUTPUTS:
        raise _unclaimable(f"the program wrote {outputs:,} files, more than {MAX_OUTPUTS:,}")


def _empty_folders(entries: list[FolderEntry]) -> Iterator[str]:
    """Yield the paths of empty folders."""
    parents = {entry.path.rpartition("/")[0] for entry in entries}
    for entry in entries:
        if stat.S_ISDIR(entry.facts.st_mode) and entry.path not in parents:
            yield entry.path


def _is_content(entry: FolderEntry) -> bool:
    """Return whether an entry is a file or a link: pipes, sockets and devices have no content."""
    return stat.S_ISREG(entry.facts.st_mode) or stat.S_ISLNK(entry.facts.st_mode)


def _output(workspace: Path, entry: FolderEntry) -> Output:
    try:
        if stat.S_ISLNK(entry.facts.st_mode):
            target = str((workspace / entry.path).readlink())
            _check_utf8(target, f"the program wrote a link {entry.path!a} to {target!a}")
            data = target.encode()
            return Output(size=len(data), sha256=sha256_hex(data), target=target)
        executable = bool(entry.facts.st_mode & stat.S_IXUSR)
        with open_beneath(workspace, entry.path) as stream:
            return _hashed(stream, executable=executable)
    except OSError as error:
        raise _unreadable(entry.path, error) from error


def _hashed(stream: BufferedReader, *, executable: bool = False) -> Output:
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Output(size=stream.tell(), sha256=digest, executable=executable)


def _check_utf8(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _unclaimable(f"{what}, which is not UTF-8") from error


def _unreadable(path: str, error: OSError) -> CapsuleError:
    return _unclaimable(f"the program wrote {path!a}, which cannot be read: {error.strerror}")


def _unclaimable(message: str) -> CapsuleError:
    return CapsuleError(
        "CAP-T303",
        message,
        fix='Exclude such files: capsule run --resume DIRECTORY --set \'trainer.outputs=["*", '
        '"!PATTERN"]\'. A program that has ended is not run again. Or write fewer files.',
    )
