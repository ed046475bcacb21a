"""The working folder of a user's program: made from the source tree, and read when it has ended."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from capsule.experiment import contract
from capsule.experiment.canonical import open_regular, sha256_hex
from capsule.experiment.contract import MAX_OUTPUTS, Output, Outputs
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.patterns import chosen
from capsule.experiment.spec import Spec
from capsule.experiment.trainers import CommandTrainer

UNTOUCHED_NS = 1_577_836_800 * 10**9  # time of every file of the source tree: 2020-01-01, UTC


def make_workspace(directory: Path, spec: Spec, trainer: CommandTrainer) -> bool:
    """Make the working folder and the state folder, or keep them; tell whether they were kept."""
    workspace, state = directory / contract.WORKSPACE, directory / contract.STATE
    if trainer.resumable and state.is_dir() and any(state.iterdir()):
        return True
    for folder in (workspace, state):
        if folder.exists():
            shutil.rmtree(folder)
    state.mkdir()
    if spec.code is None:
        workspace.mkdir()
        return False
    shutil.copytree(_project(), workspace, symlinks=True)
    for entry in _walk(workspace):
        os.utime(entry.path, ns=(UNTOUCHED_NS, UNTOUCHED_NS), follow_symlinks=False)
    return False


def _project() -> Path:
    """Return where the source tree is: an image holds it at one place, an engine may elsewhere."""
    return Path(os.environ.get(contract.PROJECT_VARIABLE, contract.PROJECT_FOLDER))


def collect_outputs(directory: Path, trainer: CommandTrainer) -> Outputs:
    """Hash what the program wrote into its working folder.

    That is every file that is new or was written to, if ``trainer.outputs`` chooses it; symbolic
    links count as such, sockets and pipes not at all.

    Raises:
        CapsuleError: CAP-T303, a name is not UTF-8, or there are more than :data:`MAX_OUTPUTS`.
    """
    workspace, project = directory / contract.WORKSPACE, _project()
    files: dict[str, Output] = {}
    for entry in _walk(workspace):
        path = Path(entry.path).relative_to(workspace).as_posix()
        if _untouched(entry, project / path) or not chosen(path, trainer.outputs):
            continue
        output = _output(entry)
        if output is not None:
            files[_claimable(path)] = output
    if len(files) > MAX_OUTPUTS:
        raise _unclaimable(f"the program wrote {len(files):,} files, more than {MAX_OUTPUTS:,}")
    printed = _hashed(directory / contract.STANDARD_OUTPUT) if trainer.standard_output else None
    return Outputs(files=files, standard_output=printed)


def _walk(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a folder but folders, in order of names."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        else:
            yield entry


def _untouched(entry: os.DirEntry[str], original: Path) -> bool:
    """Tell whether a file was copied from the source tree and not written to since."""
    if entry.stat(follow_symlinks=False).st_mtime_ns != UNTOUCHED_NS:
        return False
    return os.path.lexists(original)


def _output(entry: os.DirEntry[str]) -> Output | None:
    """Describe one output; None for what has no content."""
    if entry.is_symlink():
        target = _claimable(str(Path(entry.path).readlink()))
        data = target.encode()
        return Output(size=len(data), sha256=sha256_hex(data), target=target)
    return _hashed(Path(entry.path)) if entry.is_file(follow_symlinks=False) else None


def _hashed(path: Path) -> Output:
    with open_regular(path, os.O_NOFOLLOW) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return Output(size=stream.tell(), sha256=digest)


def _claimable(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _unclaimable(f"the program wrote {name!a}, which is not UTF-8") from error
    return name


def _unclaimable(message: str) -> CapsuleError:
    return CapsuleError(
        "CAP-T303",
        message,
        fix="Leave such files out with trainer.outputs, or write fewer.",
        exit_code=ExitCode.TRAINING_FAILED,
    )
