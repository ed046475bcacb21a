"""Integrity, environment, re-execution, comparison: a graded verdict."""
