"""Integrity: a bundle that agrees with itself, checked without running anything."""
