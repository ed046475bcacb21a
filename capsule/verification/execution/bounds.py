"""What a re-execution may do to the verifier's machine, whatever the bundle says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from capsule import __version__
from capsule.engine.containers import ContainerEngine
from capsule.engine.gpu import outdated
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec
from capsule.host.owner import temporary_folder
from capsule.image.code import training_code_digest

_OF_A_RUN = ("CAP-T", "CAP-R")  # codes of what a run leaves, a bundle's or another


def parse_limits(texts: Sequence[str]) -> dict[str, int]:
    """Parse ``FIELD=NUMBER`` with the fields of the spec's section ``limits``.

    Raises:
        CapsuleError: CAP-V056, anything else.
    """
    limits = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in LimitsSpec.model_fields or not re.fullmatch("[1-9][0-9]{0,8}", number):
            raise CapsuleError(
                "CAP-V056",
                f"--limit {text!r} is not FIELD=NUMBER",
                fix=f"FIELD is one of {', '.join(LimitsSpec.model_fields)}; NUMBER a whole one "
                "above zero.",
                exit_code=ExitCode.USAGE,
            )
        limits[name] = int(number)
    return limits


def lowered(limits: LimitsSpec, wanted: Mapping[str, int]) -> LimitsSpec:
    """Return the bundle's limits, none above what the verifier wants."""
    return limits.model_copy(
        update={name: min(value, getattr(limits, name)) for name, value in wanted.items()}
    )


def check_unconfined(choice: EngineChoice, *, image: bool) -> None:
    """Refuse to execute a bundle without a container unless the user chose that by name.

    A trainer's bundle is no exception: its wheels are code, too.

    Args:
        choice: The engine that the user named in this command.
        image: Whether the bundle's run had an image.

    Raises:
        CapsuleError: CAP-V009, the run had none, so it can only be repeated without a container.
    """
    if image or choice == "process":
        return
    raise CapsuleError(
        "CAP-V009",
        "the bundle was made without a container, and can only be executed without one",
        fix="If you trust the code in the bundle with all that your account may do, pass "
        "--engine process.",
        exit_code=ExitCode.INCONCLUSIVE,
    )


def check_code(lock: Lock, accepted: Literal["own", "supplied"]) -> bool:
    """Refuse to execute training code that is not this Capsule's own, unless the user accepts it.

    Returns:
        Whether it is this Capsule's own.

    Raises:
        CapsuleError: CAP-V014.
    """
    own = lock.image.code.sha256 == training_code_digest()
    if not own and accepted == "own":
        raise CapsuleError(
            "CAP-V014",
            f"the training code in the bundle, by its own account of Capsule "
            f"{lock.image.code.version}, is not that of this Capsule {__version__}",
            fix="Verify with the version of Capsule that made the bundle; or read the code "
            "(image/layer-code.tar.zst) and pass --code supplied.",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    return own


def check_embedded(image: Literal["rebuilt", "embedded"], engine: Engine) -> None:
    """Refuse an image where none is used.

    Raises:
        CapsuleError: CAP-V050, the plain-process engine runs no image.
    """
    if image == "embedded" and engine.name == "process":
        raise CapsuleError(
            "CAP-V050",
            "--image embedded: the plain-process engine runs no image",
            fix="Use a container engine, which also confines what the image does.",
            exit_code=ExitCode.USAGE,
        )


def check_gpu_host(
    lock: Lock, engine: Engine, *, strange: bool, note: Callable[[str], None]
) -> None:
    """Warn if what gives containers a GPU here has a known way out of them.

    Args:
        lock: What is going to run.
        engine: Where.
        strange: Whether the image is the signer's own. That is not run then.
        note: Told what is outdated.

    Raises:
        CapsuleError: CAP-V055, an image of a stranger would run with something outdated.
    """
    if lock.spec.accelerator.kind != "cuda" or not isinstance(engine, ContainerEngine):
        return
    findings = outdated(engine.components())
    if findings and strange:
        raise CapsuleError(
            "CAP-V055",
            f"the image is the signer's own, and this machine's {'; '.join(findings)}",
            fix="Update it; or rebuild the image from the lock (--image rebuilt).",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    for finding in findings:
        note(f"warning: {finding}")


@contextmanager
def reexecution_folder(note: Callable[[str], None]) -> Iterator[Path]:
    """Give a place for the run directory of a re-execution; it is removed at the end.

    What a re-execution leaves may be malformed in ways that would convict a bundle. This is another
    program's doing, on this machine: it decides nothing.

    Args:
        note: Told if it cannot be removed.
    """
    # A task may open its folder to all on this machine, and leave a setuid program in it for them;
    # the folder around it is closed.
    try:
        with temporary_folder("capsule-verify-", note=note) as closed:
            yield closed / "run"
    except CapsuleError as error:
        if error.exit_code == ExitCode.TAMPERED and error.code.startswith(_OF_A_RUN):
            message = f"of the re-execution: {error.message}"
            raise CapsuleError(
                error.code, message, fix=error.fix, exit_code=ExitCode.INCONCLUSIVE
            ) from error
        raise
