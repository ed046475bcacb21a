"""User programs, which are run unchanged, and their outputs."""
