"""Capsule: checkable deep-RL results."""

__version__ = "0.1.0"
