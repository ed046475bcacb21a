"""Version constraints of a spec: of CUDA, cuDNN and the driver.

The lock, the machine that runs and the training code in the image all read them here, so that none
accepts what another rejects.
"""

from __future__ import annotations

import re

RELEASE = r"[0-9]+(\.[0-9]+)*"
# Clauses of PEP 440, and a bare release, which stands for itself and what begins with it.
CLAUSE = rf"((==|!=)?{RELEASE}(\.\*)?|(>=|<=|>|<){RELEASE}|~={RELEASE}\.[0-9]+)"
CONSTRAINT = rf"^{CLAUSE}(, ?{CLAUSE})*$"

_PARTS = re.compile(r"(==|!=|>=|<=|~=|>|<)?([0-9.]+?)(\.\*)?")


def satisfies(version: str, constraint: str) -> bool:
    """Tell whether a version meets every clause of a constraint.

    Clauses mean what they mean in PEP 440: zeros at the end of a release do not matter, and ``.*``
    stands for any end. ``13.0`` without an operator is ``==13.0.*``.

    Args:
        version: It begins with a release, such as ``9.10.2.21``; what follows is ignored. One that
            does not meets no constraint.
        constraint: Constraint of the form :data:`CONSTRAINT`.
    """
    release = re.match(RELEASE, version)
    if release is None:
        return False
    found = _numbers(release[0])
    return all(_meets(found, clause.strip()) for clause in constraint.split(","))


def _meets(found: list[int], clause: str) -> bool:
    parts = _PARTS.fullmatch(clause)
    if parts is None:
        raise ValueError(f"{clause!r} is not a clause of a version constraint")
    operator, bound = parts[1] or "==", _numbers(parts[2])
    if parts[3] or not parts[1]:
        return _begins(found, bound) == (operator == "==")
    length = max(len(found), len(bound))
    left, right = (release + [0] * (length - len(release)) for release in (found, bound))
    if operator == "~=":
        # By PEP 440, '~=13.0.1' means '>=13.0.1, ==13.0.*'.
        return left >= right and _begins(found, bound[:-1])
    comparisons = {
        "==": left == right,
        "!=": left != right,
        ">=": left >= right,
        "<=": left <= right,
        ">": left > right,
        "<": left < right,
    }
    return comparisons[operator]


def _begins(release: list[int], prefix: list[int]) -> bool:
    padded = release + [0] * (len(prefix) - len(release))
    return padded[: len(prefix)] == prefix


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]
