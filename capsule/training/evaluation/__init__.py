"""Evaluation: the starts, the episodes, and how an evaluated network chooses actions."""
