"""Determinism flags, set and read back, in every Python process of a run."""
