"""Evaluation: starts, episodes, and the choice of actions."""
