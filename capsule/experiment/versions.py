"""The version constraints of a spec, for CUDA, cuDNN and the driver.

They are checked when a spec is locked, on the machine before a run, and by the training code in
the image. All three use this module, so that none accepts a version that another one rejects.
"""

from __future__ import annotations

import re

RELEASE = r"[0-9]+(\.[0-9]+)*"
# Clauses of PEP 440, and a bare release, which matches every release that begins with it.
CLAUSE = rf"((==|!=)?{RELEASE}(\.\*)?|(>=|<=|>|<){RELEASE}|~={RELEASE}\.[0-9]+)"
CONSTRAINT = rf"^{CLAUSE}(, ?{CLAUSE})*$"

_PARTS = re.compile(r"(==|!=|>=|<=|~=|>|<)?([0-9.]+?)(\.\*)?")


def satisfies(version: str, constraint: str) -> bool:
    """Return whether a version meets every clause of a constraint.

    Clauses have the meaning of PEP 440: zeros at the end of a release do not matter, and ``.*``
    matches any end. ``13.0`` without an operator is ``==13.0.*``.

    Args:
        version: A release, such as ``9.10.2.21``; text after it is ignored. A version that does not
            begin with a release meets no constraint.
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
