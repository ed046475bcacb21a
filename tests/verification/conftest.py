"""Fixtures of finished runs."""

from .runs import honest, honest_bundle, key, other_numerics, patched

__all__ = ["honest", "honest_bundle", "key", "other_numerics", "patched"]
