"""What a verifier refuses to execute, whatever the bundle says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from capsule import __version__
from capsule.engine.containers import ContainerEngine
from capsule.engine.gpu import outdated
from capsule.engine.interface import Engine
from capsule.engine.select import EngineChoice
from capsule.experiment.lock import Lock
from capsule.host.errors import CapsuleError
from capsule.image.code import training_code_digest
from capsule.image.releases import release_of


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
        fix="If you trust the code in the bundle with all permissions of your account, pass "
        "--engine process.",
    )


def check_code(lock: Lock, accepted: Literal["own", "supplied"]) -> bool:
    """Refuse to execute training code that is not Capsule's own, unless the user accepts it.

    Capsule's own is that of this version and that of each version that was released before it,
    by its digest (:mod:`capsule.image.releases`).

    Returns:
        Whether it is Capsule's own.

    Raises:
        CapsuleError: CAP-V014.
    """
    code = lock.image.code.sha256
    own = code == training_code_digest() or release_of(code) is not None
    if not own and accepted == "own":
        raise CapsuleError(
            "CAP-V014",
            f"the training code in the bundle, by its own account of Capsule "
            f"{lock.image.code.version}, is neither that of this Capsule {__version__} nor that of "
            "a release that it knows",
            fix="Verify with the version of Capsule that made the bundle, or with a later release; "
            "or read the code (image/layer-code.tar.zst) and pass --code supplied.",
        )
    return own


def other_code(lock: Lock) -> str:
    """Return what a verdict adds about training code that is not that of this version."""
    code = lock.image.code.sha256
    if code == training_code_digest():
        return ""
    if (version := release_of(code)) is not None:
        return f"; the training code was that of Capsule {version}"
    return "; the training code was the signer's own and not this Capsule's"


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
        )
    for finding in findings:
        note(f"warning: {finding}")
