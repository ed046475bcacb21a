"""Fixtures of finished runs."""

from tests.verification.runs import honest, honest_bundle, key, other_numerics, patched

__all__ = ["honest", "honest_bundle", "key", "other_numerics", "patched"]
