"""Shared by the commands: errors become exit statuses, and specs or lock files are read."""

from __future__ import annotations

import functools
import json
import os
import shlex
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from capsule.host.errors import CapsuleError, ExitCode, refusal_of

if TYPE_CHECKING:
    from capsule.experiment.lock import Lock
    from capsule.experiment.spec import SourcesSpec
    from capsule.image.cache import Cache

Parameters = ParamSpec("Parameters")


def guarded(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Turn exceptions into messages and exit statuses; a traceback only with ``--debug``."""

    # Typer takes the options of a command from its signature, which wraps() passes on.
    @functools.wraps(function)
    def command(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except CapsuleError as error:
            _fail(error, as_json=bool(kwargs.get("as_json")))
        except (KeyboardInterrupt, typer.Abort):
            typer.echo("interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        # Typer's Exit is an Exception, and would be reported as a bug below.
        except typer.Exit:
            raise
        except Exception as error:  # noqa: BLE001 - the last line of defence says it is a bug
            refusal = refusal_of(error) if isinstance(error, OSError | MemoryError) else None
            bug = CapsuleError(
                "CAP-X001",
                f"{type(error).__name__}: {error}",
                fix="This is a bug in Capsule. Run the command again as 'capsule --debug …' and "
                "report the output.",
            )
            _fail(refusal or bug, as_json=bool(kwargs.get("as_json")))

    return command


def engine_option(engines: Iterable[str | None]) -> str:
    """Return the option without which a verification does not use the engine of some runs.

    Args:
        engines: The engine of each run; None where it is not known.
    """
    from capsule.engine.connection import CONTAINER_ENGINES

    # Runs of several engines have none that suits all of them.
    (engine, *others) = {*engines}
    return "" if others or engine in (None, *CONTAINER_ENGINES) else f" --engine {engine}"


def no_effect(option: str, beside: str, fix: str) -> CapsuleError:
    """Return the error of an option that the command would ignore.

    Args:
        option: The option.
        beside: What makes it useless, to be read after "with".
        fix: What else to do, as a further sentence.
    """
    return CapsuleError(
        "CAP-X005",
        f"{option} has no effect with {beside}",
        fix=f"Remove {option}. {fix}",
    )


def shell_word(path: Path) -> str:
    """Return a path as a shell takes it for one word, for the commands that Capsule suggests."""
    return shlex.quote(str(path))


def use_gpu(wanted: str | None) -> None:
    """Have this process see no other NVIDIA GPUs than those that the user names, if any.

    Args:
        wanted: An index or a UUID, or several with commas between them.

    Raises:
        CapsuleError: CAP-M009, this process sees no such GPU, or one is named twice; CAP-M008 of
            :func:`capsule.machine.devices.visible_devices`.
    """
    if wanted is None:
        return
    from capsule.machine.devices import VISIBLE, find_device, read_devices, visible_devices
    from capsule.machine.gpu import load_nvml

    visible = visible_devices(read_devices(load_nvml()), os.environ)
    # The variable gets UUIDs: an index that is counted inside a job is not the engine's.
    named = [find_device(visible, each.strip()).uuid for each in wanted.split(",")]
    if len(set(named)) < len(named):
        raise CapsuleError(
            "CAP-M009",
            f"--gpu {wanted!a} names a GPU twice, and CUDA would show none: {', '.join(named)}",
            fix="Name each GPU once.",
        )
    os.environ[VISIBLE] = ",".join(named)


def _fail(error: CapsuleError, *, as_json: bool) -> None:
    from capsule.cli.error_document import ErrorDocument
    from capsule.report.text import printable

    if os.environ.get("CAPSULE_DEBUG"):
        traceback.print_exc()
    # Each line is cut alone: an error of a spec has a line, and a remedy, for each wrong field.
    for label, text in ((error.code, error.message), ("fix", error.fix)):
        lines = [printable(line) for line in text.strip("\n").split("\n")]
        typer.echo(f"{label}: " + "\n  ".join(lines), err=True)
    if as_json:
        print_json(ErrorDocument.of(error).model_dump(by_alias=True))
    raise typer.Exit(error.exit_code)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object on standard output, in ASCII so that it is safe on a terminal."""
    typer.echo(json.dumps(document, indent=2))


def locked(
    path: Path,
    overrides: list[str] | None,
    cache: Cache,
    *,
    refresh: bool = False,
    refresh_base: bool = False,
    refresh_data: bool = False,
    progress: Callable[[str], None],
) -> tuple[Lock, SourcesSpec]:
    """Return the lock of a spec or lock file, and the sources that its packages may come from.

    The lock file beside a spec is kept up to date, except by overrides.
    """
    from capsule.experiment.spec import SourcesSpec
    from capsule.host.spec_file import load_spec
    from capsule.image.lockfile import lock_path, names_lock, pinned_already, read_lock
    from capsule.image.pinning import obtain_lock

    if names_lock(path):
        if overrides or refresh or refresh_base or refresh_data:
            raise pinned_already(path)
        return read_lock(path), SourcesSpec()
    spec = load_spec(path, overrides or [])
    lock = obtain_lock(
        spec,
        lock_path(path),
        cache,
        write=not overrides,  # a setting of one command is not the spec's
        refresh=refresh,
        refresh_base=refresh_base,
        refresh_data=refresh_data,
        leave_out=[path],
        progress=progress,
    )
    return lock, spec.image.sources
