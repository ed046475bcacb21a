"""Equivalence: whether runs with other bits are as good as each other."""
