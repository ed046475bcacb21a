"""What a re-execution may do to the verifier's machine, whatever the bundle says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from capsule.engine.containers import ContainerEngine
from capsule.engine.gpu import outdated
from capsule.engine.interface import Engine
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import LimitsSpec


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
