"""Canonical documents: RFC 8785 JSON, strict parsing, SHA-256.

Every signed or hashed JSON document of Capsule goes through this module, so that equal facts are
equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import rfc8785

MAX_SAFE_INTEGER = 2**53 - 1
MAX_DOCUMENT_BYTES = 64 << 20  # of a document that a run writes and a bundle contains
MAX_VALUES = 2_000_000  # of a document; each takes up to a hundred bytes of memory


def canonical_json(value: Any) -> bytes:
    """Serialise ``value`` as RFC 8785 canonical JSON (no trailing newline).

    Raises:
        ValueError: The value contains NaN, an infinity, or an integer beyond 2^53 - 1.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as error:
        raise ValueError(f"not canonicalisable: {error}") from error


def count_values(data: bytes) -> int:
    """Return how many values a JSON document has at most, without parsing it."""
    return sum(map(data.count, (b",", b"[", b"{")))  # one of them before every value


def parse_canonical_json(data: bytes) -> Any:
    """Parse bytes that must be exactly the canonical form of their value.

    Re-encoding and comparing rejects duplicate keys, NaN, byte order marks, superfluous white
    space, over-long integers and lone surrogates in one rule.

    Raises:
        ValueError: The bytes are not canonical JSON.
    """
    if count_values(data) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, over-long integers
        raise ValueError(f"not JSON: {error}") from error
    if canonical_json(value) != data:
        raise ValueError("not in canonical form (RFC 8785)")
    return value


def sha256_hex(data: bytes) -> str:
    """Return the lower-case hexadecimal SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the lower-case hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
