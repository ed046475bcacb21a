"""Optimizers: one update of a flat parameter buffer."""
