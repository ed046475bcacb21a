"""Losses and targets, as pure functions of tensors."""
