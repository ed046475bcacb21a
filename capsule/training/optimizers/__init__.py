"""Optimizers of a flat parameter buffer."""
