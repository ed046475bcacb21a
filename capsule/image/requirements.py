"""Requirements of packages (PEP 508) in specs, locks and wheels that anyone may have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MAX_PARENTHESES = 100


def read_requirement(text: str) -> Requirement:
    """Parse a requirement.

    Raises:
        ValueError: It is not one, or it has more than :data:`MAX_PARENTHESES`.
    """
    from packaging.requirements import Requirement

    # packaging parses and evaluates a marker's parentheses recursively. Whether that ends in a
    # RecursionError would depend on the caller, and on the version of Python.
    if text.count("(") > MAX_PARENTHESES:
        raise ValueError(f"it has more than {MAX_PARENTHESES} parentheses")
    return Requirement(text)
