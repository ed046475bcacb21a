"""The limits of a re-execution: the bundle's, which the verifier may lower."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from capsule.experiment.spec import LimitsSpec
from capsule.host.errors import CapsuleError


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
            )
        limits[name] = int(number)
    return limits


def lowered(limits: LimitsSpec, wanted: Mapping[str, int]) -> LimitsSpec:
    """Return the bundle's limits, none above what the verifier wants."""
    return limits.model_copy(
        update={name: min(value, getattr(limits, name)) for name, value in wanted.items()}
    )
