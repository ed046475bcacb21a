"""Losses and targets: pure functions of tensors."""
